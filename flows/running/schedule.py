"""Which stages run when: each as soon as what it reads is made, as many at a time as there are workers for.

A stage that shares its work out takes all workers that are free, and does not keep all of them busy all the time: it
plans, merges, waits for the disk. So one stage of a single worker runs beside the others and is not counted, whichever
of them began first. Where there is one worker only, nothing runs beside anything: that is how a run is kept small.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from gristmill.flows.stages.plan import Plan
from gristmill.mixtures.manifest import Engine


@dataclass(frozen=True)
class Job:
    """One stage of a run.

    Attributes:
        name: of the stage.
        needs: the stages of the same run that must be done before.
        workers: how many it takes at the most; with fewer it takes longer.
        least: how many it needs to begin.
        trains: whether it is a training, of which one runs at a time.
    """

    name: str
    needs: frozenset[str]
    workers: int = 1
    least: int = 1
    trains: bool = False

    @property
    def is_single(self) -> bool:
        """Whether it may run beside those that have taken all workers."""
        return self.workers == 1 and not self.trains


class Pending(Protocol):
    """A stage that has been started: a future of `concurrent.futures`, or of Prefect."""

    def add_done_callback(self, fn: Callable[[Any], Any]) -> None:
        """Call a function with the future when it is done."""


def jobs_of(plan: Plan, stages: Sequence[str], engine: Engine) -> list[Job]:
    """The stages of a run, in the order of the plan; what the others need of them, and how many workers each takes."""
    found = []
    for name in stages:
        stage, needs = plan[name].stage, frozenset(plan[name].inputs) & set(stages)
        if stage.trains:
            ranks = min(engine.num_ranks, engine.workers)
            found.append(Job(name, needs, ranks, ranks, trains=True))
        else:
            found.append(Job(name, needs, engine.workers if plan[name].uses_workers else 1))
    return found


def next_jobs(
    waiting: Iterable[Job], running: Mapping[str, tuple[Job, int]], done: Iterable[str], workers: int
) -> list[tuple[Job, int]]:
    """The jobs to start now, each with the workers that it gets: earlier ones first, and last those that may run beside
    others.

    Args:
        waiting: jobs that have not been started, in their order.
        running: name -> job and its workers.
        done: names of the finished ones.
        workers: how many there are.
    """
    finished = set(done)
    has_single = any(job.is_single for job, _ in running.values())
    free = workers - sum(taken for _, taken in running.values()) + (workers > 1 and has_single)
    trains = any(job.trains for job, _ in running.values())
    found = []
    for job in sorted(waiting, key=lambda job: workers > 1 and job.is_single):
        is_beside = workers > 1 and job.is_single and not has_single
        if not job.needs <= finished or job.least > free + is_beside or (job.trains and trains):
            continue
        taken = max(min(job.workers, free), 1)
        found.append((job, taken))
        has_single, free, trains = has_single or job.is_single, free - taken * (not is_beside), trains or job.trains
    return found


def run_jobs(
    jobs: Sequence[Job],
    workers: int,
    start: Callable[[str, int], Pending],
    finish: Callable[[str, Any], None],
    stop: Callable[[], None],
) -> None:
    """Run all jobs. Where one fails no other is started, and those that run are finished before its error is raised.

    Args:
        jobs: in their order, without circles.
        workers: how many there are.
        start: (name, workers) -> the started job.
        finish: given the name and the future of a job that is done, here in this thread; raises what it raised.
        stop: ends what runs, soon; called where this thread is interrupted.
    """
    waiting, done = list(jobs), list[str]()
    running: dict[str, tuple[Job, int]] = {}
    ended: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    noted: set[str] = set()
    failure: BaseException | None = None

    def note(name: str, future: Any) -> None:
        noted.add(name)
        ended.put((name, future))

    def begin() -> None:
        for job, taken in next_jobs(waiting, running, done, workers):
            waiting.remove(job)
            start(job.name, taken).add_done_callback(partial(note, job.name))
            running[job.name] = (job, taken)

    try:
        begin()
        while running:
            name, future = ended.get()
            del running[name]
            try:
                finish(name, future)
                done.append(name)
            except Exception as error:  # noqa: BLE001 - it is raised when those that run are done
                failure = failure or error
            if failure is None:
                begin()
    except BaseException:
        stop()
        # The interrupt may have come between any two lines above: one that has ended may be taken from the queue and
        # still be called running, and one that has just been started is waited for by the pool that runs it.
        while running.keys() - noted:
            ended.get()
        raise
    if failure is not None:
        raise failure


def run_in_threads(
    jobs: Sequence[Job],
    workers: int,
    run: Callable[[str, int], Any],
    finish: Callable[[str, Any], None],
    stop: Callable[[], None],
) -> None:
    """Run all jobs, each in a thread of its own; see `run_jobs`.

    Args:
        run: (name, workers) -> outcome.
        finish: given the name and the outcome.
    """
    with ThreadPoolExecutor(max_workers=workers + 1, thread_name_prefix="stage") as pool:
        run_jobs(
            jobs,
            workers,
            lambda name, taken: pool.submit(run, name, taken),
            lambda name, future: finish(name, future.result()),
            stop,
        )
