"""Stages start as soon as their inputs are made, as many at a time as there are
workers, with one training at a time.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.flows.running.events import (
    RunEvent,
    StageFailed,
    StageProgress,
    to_all,
)
from gristmill.flows.running.run import (
    Runner,
    RunningProcesses,
    RunStoppedError,
    StageFailedError,
)
from gristmill.flows.running.scheduler import (
    Job,
    jobs_of,
    next_jobs,
    run_jobs,
)


def job(name: str, *needs: str, **options: Any) -> Job:
    return Job(name, frozenset(needs), **options)


def started(
    jobs: list[Job],
    running: dict[str, tuple[Job, int]],
    done_names: list[str],
    workers: int,
) -> list[tuple[str, int]]:
    return [
        (next_job.name, workers_taken)
        for next_job, workers_taken in next_jobs(jobs, running, done_names, workers)
    ]


def test_independent_stages_run_together() -> None:
    jobs = [job("evaluate", "rl"), job("export", "rl"), job("rl")]
    assert started(jobs, {}, [], 4) == [("rl", 1)]
    assert started(jobs[:2], {}, ["rl"], 4) == [("evaluate", 1), ("export", 1)]
    assert started(jobs[:2], {}, ["rl"], 1) == [("evaluate", 1)]


def test_parallel_stage_gets_all_free_workers() -> None:
    wide, narrow = job("tokens", workers=4), job("pairs")
    assert started([wide], {}, [], 4) == [("tokens", 4)]
    assert started([wide], {"pairs": (narrow, 1)}, [], 4) == [("tokens", 4)]
    assert started(
        [wide], {"pairs": (narrow, 1), "chats": (job("chats"), 1)}, [], 4
    ) == [("tokens", 3)]


def test_one_single_worker_stage_runs_beside_a_full_schedule() -> None:
    wide, narrow, third = job("tokens", workers=4), job("pairs"), job("chats")
    assert started([narrow, wide, third], {}, [], 4) == [("tokens", 4), ("pairs", 1)]
    assert started([narrow], {"tokens": (wide, 4)}, [], 4) == [("pairs", 1)]
    assert started([third], {"tokens": (wide, 4), "pairs": (narrow, 1)}, [], 4) == []
    assert started([wide], {"pairs": (narrow, 1), "chats": (third, 1)}, [], 1) == []
    assert started([narrow, job("tokens")], {}, [], 1) == [("pairs", 1)]
    assert started([narrow, job("sft", trains=True)], {}, [], 1) == [("pairs", 1)]
    assert started([job("sft", trains=True)], {"tokens": (wide, 4)}, [], 4) == []
    assert started([narrow, third, job("sft", trains=True)], {}, [], 2) == [
        ("sft", 1),
        ("pairs", 1),
        ("chats", 1),
    ]


def test_only_one_training_runs_at_a_time() -> None:
    sft, reward = (
        job("sft", trains=True, workers=2, least=2),
        job("reward", trains=True, workers=2, least=2),
    )
    assert started([sft, reward], {}, [], 8) == [("sft", 2)]
    assert started([reward], {"sft": (sft, 2)}, [], 8) == []
    assert started([sft], {"pairs": (job("pairs"), 1)}, [], 2) == [("sft", 2)]
    assert (
        started([sft], {"pairs": (job("pairs"), 1), "chats": (job("chats"), 1)}, [], 2)
        == []
    )


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Job], int]:
    workers = draw(st.integers(1, 4))
    jobs: list[Job] = []
    for number in range(draw(st.integers(0, 8))):
        needs = (
            draw(
                st.sets(
                    st.sampled_from([earlier_job.name for earlier_job in jobs]),
                    max_size=3,
                )
            )
            if jobs
            else set()
        )
        trains = draw(st.booleans())
        size = draw(st.integers(1, workers))
        jobs.append(
            Job(str(number), frozenset(needs), size, size if trains else 1, trains)
        )
    return jobs, workers


@pytest.mark.slow
@given(graphs())
def test_every_job_runs_once_after_its_dependencies_within_the_workers(
    graph: tuple[list[Job], int],
) -> None:
    jobs, workers = graph
    lock, done_names, now = threading.Lock(), list[str](), dict[str, tuple[Job, int]]()
    by_name = {running_job.name: running_job for running_job in jobs}

    def run(name: str, workers_taken: int) -> str:
        with lock:
            assert by_name[name].needs <= set(done_names)
            now[name] = (by_name[name], workers_taken)
            assert sum(size for _, size in now.values()) <= workers + (workers > 1)
            assert sum(running_job.trains for running_job, _ in now.values()) <= 1
        with lock:
            del now[name]
            done_names.append(name)
        return name

    with ThreadPoolExecutor(workers + 1) as pool:
        run_jobs(jobs, workers, partial(pool.submit, run), lambda: None)
    assert sorted(done_names) == sorted(by_name)


@pytest.mark.parametrize("both_fail", [False, True])
def test_after_a_failure_running_jobs_finish_and_no_other_starts(
    both_fail: bool,
) -> None:
    futures: dict[str, Future[str]] = {}

    def start(name: str, workers: int) -> Future[str]:
        futures[name] = Future()
        if len(futures) == 2:
            futures["bad"].set_exception(StageFailedError("bad: no"))
            if both_fail:
                futures["good"].set_exception(StageFailedError("good: neither"))
            else:
                futures["good"].set_result("made")
        return futures[name]

    jobs = [job("bad"), job("good"), job("behind", "bad"), job("other", "good")]
    with pytest.raises(StageFailedError) as error:
        run_jobs(jobs, 2, start, lambda: None)
    assert ("good: neither" in str(error.value)) == both_fail
    assert "bad: no" in str(error.value)
    assert sorted(futures) == ["bad", "good"]


@pytest.mark.slow
def test_failed_stage_is_reported_while_another_runs(
    toy_runner: Callable[..., Runner],
) -> None:
    runner = toy_runner(waiting={}, failing={})
    runner.session.plan["failing"].inputs.clear()  # type: ignore[attr-defined]
    began = threading.Event()
    runner.emit.on_report = lambda event: (  # type: ignore[attr-defined]
        began.set() if isinstance(event, StageProgress) else None
    )
    states: list[str] = []

    def report(event: RunEvent) -> None:
        if isinstance(event, StageFailed):
            name = event.node.name
            states.append(
                runner.folder("waiting").state() if name == "failing" else name
            )
            runner.processes.stop()

    runner = replace(runner, emit=to_all(runner.emit, report))

    def run(name: str, workers: int) -> Any:
        if name == "failing":
            began.wait(60)
        return runner.run_stage(name)

    jobs = [Job(name, frozenset()) for name in runner.session.plan]
    with pytest.raises(StageFailedError), ThreadPoolExecutor(2) as pool:
        run_jobs(jobs, 2, partial(pool.submit, run), runner.processes.stop)
    assert states == ["unfinished"]


@pytest.mark.slow
def test_interrupt_ends_running_stages_and_waits_for_them(
    toy_runner: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = toy_runner(first={"n": 1}, waiting={})
    jobs = [Job(name, frozenset()) for name in runner.session.plan]

    def press_ctrl_c() -> None:
        raise KeyboardInterrupt  # where it interrupts the main thread

    ready = threading.Event()
    runner.emit.on_report = lambda event: (  # type: ignore[attr-defined]
        ready.set() if event.node.name == "waiting" else None
    )

    def run(name: str, workers: int) -> Any:
        if name == "first":
            ready.wait(60)
        return runner.run_stage(name)

    runner.session.plan["waiting"].inputs.clear()  # type: ignore[attr-defined]

    def start(name: str, workers: int) -> Future[Any]:
        future = pool.submit(run, name, workers)
        if name == "first":
            future.result = press_ctrl_c  # type: ignore[method-assign, assignment]
        return future

    with pytest.raises(KeyboardInterrupt), ThreadPoolExecutor(2) as pool:
        run_jobs(jobs, 2, start, runner.processes.stop)
    assert runner.folder("waiting").state() == "unfinished"
    with pytest.raises(RunStoppedError):
        runner.run_stage("waiting")


class InterruptedAfter(queue.SimpleQueue):  # type: ignore[type-arg]
    """A queue whose first `get` has already taken its item when the signal arrives."""

    fresh = True

    def get(self, *arguments: Any, **options: Any) -> Any:
        item = super().get(*arguments, **options)
        if self.fresh:
            self.fresh = False
            raise KeyboardInterrupt
        return item


@pytest.mark.parametrize(
    "moment", ["a job has been started", "the end of one was taken from the queue"]
)
def test_an_interrupt_at_any_moment_ends_the_wait(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(name: str, workers_taken: int) -> Future[None]:
        if moment.startswith("a job"):
            raise KeyboardInterrupt  # after the call that started it
        future: Future[None] = Future()
        future.set_result(None)
        return future

    if not moment.startswith("a job"):
        monkeypatch.setattr(
            "gristmill.flows.running.scheduler.queue.SimpleQueue", InterruptedAfter
        )
    raised: list[BaseException] = []

    def run() -> None:
        try:
            run_jobs(
                [Job("a", frozenset())],
                1,
                start,
                lambda: None,
            )
        except KeyboardInterrupt as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert len(raised) == 1, "it waits for an ended job"


def test_independent_stages_of_a_plan_run_together_within_the_workers(
    tmp_path: Any,
) -> None:
    """Preparation is sequential: each step reads the documents that earlier steps
    kept.
    """
    from tests.flows.test_fingerprints import planned

    plan, engine = planned(tmp_path, "everything")
    jobs = jobs_of(plan, list(plan), engine)
    waiting, done_names, together = list(jobs), list[str](), list[list[str]]()
    while waiting:  # as if all running jobs ended at once
        startable = [
            plan_job
            for plan_job, _ in next_jobs(waiting, {}, done_names, engine.workers)
        ]
        waiting = [plan_job for plan_job in waiting if plan_job not in startable]
        done_names += [plan_job.name for plan_job in startable]
        together.append([plan_job.name for plan_job in startable])
    assert [names for names in together if len(names) > 1] == [
        ["pretrain", "dpo_data"],
        ["evaluate", "export"],
    ]
    line = [
        plan_job
        for plan_job in jobs
        if plan_job.name == "ingest" or plan[plan_job.name].stage.step is not None
    ]
    assert all(
        previous_job.name in plan_job.needs for previous_job, plan_job in pairwise(line)
    )


def test_jobs_of_a_plan_have_dependencies_and_workers(tmp_path: Any) -> None:
    from tests.flows.test_fingerprints import planned

    plan, engine = planned(tmp_path, "everything")
    jobs = {plan_job.name: plan_job for plan_job in jobs_of(plan, list(plan), engine)}
    assert jobs["filter"].needs == {"ingest", "clean", "langid", "licences"}
    assert jobs["sft_prepare"].needs == frozenset()
    assert "export" not in jobs["evaluate"].needs
    assert "evaluate" not in jobs["export"].needs
    assert (
        jobs["ingest"].workers,
        jobs["sft_data"].workers,
        jobs["pretrain"].trains,
    ) == (3, 1, True)
    assert {
        plan_job.name: plan_job.needs
        for plan_job in jobs_of(plan, ["mix", "pretrain"], engine)
    } == {
        "mix": frozenset(),
        "pretrain": {"mix"},
    }


class Begun:
    """A fake stage process with the parts that `RunningProcesses` uses."""

    def __init__(self) -> None:
        self.stopped = threading.Event()

    def stop(self) -> None:
        self.stopped.set()


def test_stage_starts_while_another_waits_for_its_process() -> None:
    processes, first_waits, second_runs = (
        RunningProcesses(),
        threading.Event(),
        threading.Event(),
    )

    def begin_late() -> Any:
        first_waits.set()
        assert second_runs.wait(30)
        return Begun()

    def begin_first() -> None:
        with processes.start(begin_late):
            return

    first = threading.Thread(target=begin_first)
    first.start()
    assert first_waits.wait(30)
    with processes.start(Begun):  # type: ignore[arg-type]
        second_runs.set()
    first.join(30)
    assert not first.is_alive()


def test_process_started_during_shutdown_is_killed() -> None:
    processes, process = RunningProcesses(), Begun()

    def begin() -> Any:
        processes.stop()
        return process

    with pytest.raises(RunStoppedError), processes.start(begin):
        pytest.fail("it runs")
    assert process.stopped.is_set()
