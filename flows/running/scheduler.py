"""Scheduling of stages: each starts once its inputs are made, in parallel as far as
workers allow.

A stage with parallel work takes all free workers, but does not keep them busy all the
time: it plans, merges, waits for the disk. So one single-worker stage runs beside the
others without being counted, in any order of starts. With a single worker nothing runs
in parallel, which keeps a run small.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from gristmill.flows.running.run import StageFailedError
from gristmill.flows.stages.plan import Plan
from gristmill.mixtures.schema.engine import Engine


@dataclass(frozen=True)
class Job:
    """One stage of a run.

    Attributes:
        name: name of the stage.
        needs: stages of the same run that must be done first.
        workers: maximum number of workers that it uses.
        least: minimum number of workers that it needs.
        trains: True for trainings, which run one at a time.
    """

    name: str
    needs: frozenset[str]
    workers: int = 1
    least: int = 1
    trains: bool = False

    @property
    def is_single(self) -> bool:
        """True if it may run beside stages that have taken all workers."""
        return self.workers == 1 and not self.trains


class Pending(Protocol):
    """A started stage: a future of `concurrent.futures`, or of Prefect."""

    def add_done_callback(self, fn: Callable[[Any], Any]) -> None:
        """Call a function with the future when it is done."""

    def result(self) -> Any:
        """Return its result, or raise its error."""


def jobs_of(plan: Plan, stages: Sequence[str], engine: Engine) -> list[Job]:
    """Jobs of a run's stages, in the order of the plan, with their dependencies and
    workers.
    """
    jobs = []
    for name in stages:
        stage = plan[name].stage
        needs = frozenset(plan[name].inputs) & set(stages)
        if stage.torchrun:
            ranks = min(engine.num_ranks, engine.workers)
            jobs.append(Job(name, needs, ranks, ranks, trains=True))
        else:
            jobs.append(
                Job(name, needs, engine.workers if plan[name].uses_workers else 1)
            )
    return jobs


def next_jobs(
    waiting: Iterable[Job],
    running: Mapping[str, tuple[Job, int]],
    done: Iterable[str],
    workers: int,
) -> list[tuple[Job, int]]:
    """Jobs to start now, each with its workers: in order, and last those that may run
    beside others.

    Args:
        waiting: jobs not started yet, in order.
        running: name -> job and its workers.
        done: names of finished jobs.
        workers: number of workers.
    """
    finished = set(done)
    has_single = any(job.is_single for job, _ in running.values())
    free = (
        workers
        - sum(num_workers for _, num_workers in running.values())
        + (workers > 1 and has_single)
    )
    trains = any(job.trains for job, _ in running.values())
    starting = []
    for job in sorted(waiting, key=lambda job: workers > 1 and job.is_single):
        is_beside = workers > 1 and job.is_single and not has_single
        if (
            not job.needs <= finished
            or job.least > free + is_beside
            or (job.trains and trains)
        ):
            continue
        num_workers = max(min(job.workers, free), 1)
        starting.append((job, num_workers))
        has_single = has_single or job.is_single
        trains = trains or job.trains
        if not is_beside:
            free -= num_workers
    return starting


def run_jobs(
    jobs: Sequence[Job],
    workers: int,
    start: Callable[[str, int], Pending],
    stop: Callable[[], None],
) -> None:
    """Run all jobs. After a failure no job is started, and running ones finish before
    its error is raised; errors of several stages become one with all messages.

    Args:
        jobs: in order, without cycles.
        workers: number of workers.
        start: (name, workers) -> the started job's future.
        stop: ends running jobs soon; called if this thread is interrupted.
    """
    waiting = list(jobs)
    done: list[str] = []
    running: dict[str, tuple[Job, int]] = {}
    ended: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    noted: set[str] = set()
    failures: list[Exception] = []

    def note_end(name: str, future: Any) -> None:
        noted.add(name)
        ended.put((name, future))

    def start_ready_jobs() -> None:
        for job, num_workers in next_jobs(waiting, running, done, workers):
            waiting.remove(job)
            start(job.name, num_workers).add_done_callback(partial(note_end, job.name))
            running[job.name] = (job, num_workers)

    try:
        start_ready_jobs()
        while running:
            name, future = ended.get()
            del running[name]
            try:
                future.result()
                done.append(name)
            except Exception as error:  # noqa: BLE001 - it is raised when the running jobs are done
                failures.append(error)
            if not failures:
                start_ready_jobs()
    except BaseException:
        stop()
        # The interrupt may come between any two lines above: a finished job may be off
        # the queue but still count as running, and the pool waits for a job that has
        # just been started.
        while running.keys() - noted:
            ended.get()
        raise
    messages = [str(error) for error in failures if isinstance(error, StageFailedError)]
    if len(messages) > 1 and len(messages) == len(failures):
        raise StageFailedError("\n".join(messages)) from failures[0]
    if failures:
        raise failures[0]
