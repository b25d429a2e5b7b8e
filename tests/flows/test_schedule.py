"""Stages run as soon as what they read is made, as many at a time as there are workers, and one training at a time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.flows.running.run import Runner, RunningProcesses, RunStoppedError, StageFailedError
from gristmill.flows.running.schedule import Job, jobs_of, next_jobs, run_in_threads, run_jobs
from gristmill.flows.stages.plan import Node


def job(name: str, *needs: str, **others: Any) -> Job:
    return Job(name, frozenset(needs), **others)


def started(
    jobs: list[Job], running: dict[str, tuple[Job, int]], done: list[str], workers: int
) -> list[tuple[str, int]]:
    return [(one.name, taken) for one, taken in next_jobs(jobs, running, done, workers)]


def test_what_needs_nothing_of_each_other_runs_together() -> None:
    jobs = [job("evaluate", "rl"), job("export", "rl"), job("rl")]
    assert started(jobs, {}, [], 4) == [("rl", 1)]
    assert started(jobs[:2], {}, ["rl"], 4) == [("evaluate", 1), ("export", 1)]
    assert started(jobs[:2], {}, ["rl"], 1) == [("evaluate", 1)]


def test_a_stage_that_works_in_parallel_gets_what_is_free() -> None:
    wide, narrow = job("tokens", workers=4), job("pairs")
    assert started([wide], {}, [], 4) == [("tokens", 4)]
    assert started([wide], {"pairs": (narrow, 1)}, [], 4) == [("tokens", 4)]
    assert started([wide], {"pairs": (narrow, 1), "chats": (job("chats"), 1)}, [], 4) == [("tokens", 3)]


def test_one_stage_of_a_single_worker_runs_beside_those_that_have_taken_all() -> None:
    wide, narrow, other = job("tokens", workers=4), job("pairs"), job("chats")
    assert started([narrow, wide, other], {}, [], 4) == [("tokens", 4), ("pairs", 1)]
    assert started([narrow], {"tokens": (wide, 4)}, [], 4) == [("pairs", 1)]
    assert started([other], {"tokens": (wide, 4), "pairs": (narrow, 1)}, [], 4) == []
    assert started([wide], {"pairs": (narrow, 1), "chats": (other, 1)}, [], 1) == []
    assert started([narrow, job("tokens")], {}, [], 1) == [("pairs", 1)]
    assert started([narrow, job("sft", trains=True)], {}, [], 1) == [("pairs", 1)]
    assert started([job("sft", trains=True)], {"tokens": (wide, 4)}, [], 4) == []
    assert started([narrow, other, job("sft", trains=True)], {}, [], 2) == [("sft", 1), ("pairs", 1), ("chats", 1)]


def test_one_training_runs_at_a_time_and_begins_with_all_its_ranks() -> None:
    one, other = job("sft", trains=True, workers=2, least=2), job("reward", trains=True, workers=2, least=2)
    assert started([one, other], {}, [], 8) == [("sft", 2)]
    assert started([other], {"sft": (one, 2)}, [], 8) == []
    assert started([one], {"pairs": (job("pairs"), 1)}, [], 2) == [("sft", 2)]
    assert started([one], {"pairs": (job("pairs"), 1), "chats": (job("chats"), 1)}, [], 2) == []


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Job], int]:
    workers = draw(st.integers(1, 4))
    jobs: list[Job] = []
    for number in range(draw(st.integers(0, 8))):
        needs = draw(st.sets(st.sampled_from([one.name for one in jobs]), max_size=3)) if jobs else set()
        trains = draw(st.booleans())
        size = draw(st.integers(1, workers))
        jobs.append(Job(str(number), frozenset(needs), size, size if trains else 1, trains))
    return jobs, workers


@pytest.mark.slow
@given(graphs())
def test_every_job_runs_once_behind_what_it_needs_within_the_workers(graph: tuple[list[Job], int]) -> None:
    jobs, workers = graph
    lock, done, now = threading.Lock(), list[str](), dict[str, tuple[Job, int]]()
    by_name = {one.name: one for one in jobs}

    def run(name: str, taken: int) -> str:
        with lock:
            assert by_name[name].needs <= set(done)
            now[name] = (by_name[name], taken)
            assert sum(size for _, size in now.values()) <= workers + (workers > 1)
            assert sum(one.trains for one, _ in now.values()) <= 1
        with lock:
            del now[name]
            done.append(name)
        return name

    finished: list[str] = []
    run_in_threads(jobs, workers, run, lambda name, _: finished.append(name), lambda: None)
    assert sorted(finished) == sorted(by_name)


def test_where_one_fails_those_that_run_are_finished_and_nothing_else_begins() -> None:
    begun: dict[str, Future[str]] = {}
    finished: list[str] = []

    def start(name: str, workers: int) -> Future[str]:
        begun[name] = Future()
        if len(begun) == 2:
            begun["bad"].set_exception(StageFailedError("bad: no"))
            begun["good"].set_result("made")
        return begun[name]

    def finish(name: str, future: Future[str]) -> None:
        future.result()
        finished.append(name)

    jobs = [job("bad"), job("good"), job("behind", "bad"), job("other", "good")]
    with pytest.raises(StageFailedError, match="bad: no"):
        run_jobs(jobs, 2, start, finish, lambda: None)
    assert (sorted(begun), finished) == (["bad", "good"], ["good"])


@pytest.mark.slow
def test_a_stage_that_failed_is_reported_while_the_one_beside_it_runs(toy_runner: Callable[..., Runner]) -> None:
    runner = toy_runner(waiting={}, failing={})
    runner.plan["failing"].inputs.clear()  # type: ignore[attr-defined]
    began = threading.Event()
    runner.observer.on_event = lambda event: began.set() if event.get("unit") == "steps" else None  # type: ignore[attr-defined]
    states: list[str] = []

    def report(node: Node, message: str) -> None:
        states.append(runner.folder("waiting").state() if node.name == "failing" else node.name)
        runner.processes.stop()

    runner.observer.stage_failed = report  # type: ignore[method-assign]

    def run(name: str, workers: int) -> Any:
        if name == "failing":
            began.wait(60)
        return runner.run_stage(name)

    jobs = [Job(name, frozenset()) for name in runner.plan]
    with pytest.raises(StageFailedError):
        run_in_threads(jobs, 2, run, lambda name, outcome: None, runner.processes.stop)
    assert states == ["unfinished"]


@pytest.mark.slow
def test_an_interrupt_ends_what_runs_and_waits_for_its_end(
    toy_runner: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = toy_runner(first={"n": 1}, waiting={})
    jobs = [Job(name, frozenset()) for name in runner.plan]
    seen: list[str] = []

    def finish(name: str, outcome: Any) -> None:
        seen.append(name)
        raise KeyboardInterrupt  # where Ctrl-C finds the main thread

    ready = threading.Event()
    runner.observer.on_event = lambda event: ready.set() if event.get("unit") == "steps" else None  # type: ignore[attr-defined]

    def run(name: str, workers: int) -> Any:
        if name == "first":
            ready.wait(60)
        return runner.run_stage(name)

    runner.plan["waiting"].inputs.clear()  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        run_in_threads(jobs, 2, run, finish, runner.processes.stop)
    assert seen == ["first"]
    assert runner.folder("waiting").state() == "unfinished"
    with pytest.raises(RunStoppedError):
        runner.run_stage("waiting")


class InterruptedAfter(queue.SimpleQueue):  # type: ignore[type-arg]
    """A queue whose first `get` has taken its item when the signal comes."""

    fresh = True

    def get(self, *arguments: Any, **options: Any) -> Any:
        item = super().get(*arguments, **options)
        if self.fresh:
            self.fresh = False
            raise KeyboardInterrupt
        return item


@pytest.mark.parametrize("moment", ["a job has been started", "the end of one was taken from the queue"])
def test_an_interrupt_at_any_moment_ends_the_wait(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(name: str, taken: int) -> Future[None]:
        if moment.startswith("a job"):
            raise KeyboardInterrupt  # behind what has started it
        future: Future[None] = Future()
        future.set_result(None)
        return future

    if not moment.startswith("a job"):
        monkeypatch.setattr("gristmill.flows.running.schedule.queue.SimpleQueue", InterruptedAfter)
    raised: list[BaseException] = []

    def run() -> None:
        try:
            run_jobs([Job("a", frozenset())], 1, start, lambda name, future: None, lambda: None)
        except KeyboardInterrupt as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert len(raised) == 1, "it waits for what has ended"


def test_of_a_plan_runs_together_what_reads_nothing_of_each_other_and_has_workers(tmp_path: Any) -> None:
    """Documents are prepared in a line: each step reads what those before it have kept."""
    from tests.flows.test_fingerprints import planned

    plan, engine = planned(tmp_path, "everything")
    jobs = jobs_of(plan, list(plan), engine)
    waiting, done, together = list(jobs), list[str](), list[list[str]]()
    while waiting:  # as if all that runs ended at once
        begun = [one for one, _ in next_jobs(waiting, {}, done, engine.workers)]
        waiting = [one for one in waiting if one not in begun]
        done += [one.name for one in begun]
        together.append([one.name for one in begun])
    assert [names for names in together if len(names) > 1] == [["pretrain", "dpo_data"], ["evaluate", "export"]]
    line = [one for one in jobs if one.name == "ingest" or plan[one.name].stage.section is not None]
    assert all(before.name in one.needs for before, one in pairwise(line))


def test_a_plan_says_what_each_stage_needs_and_takes(tmp_path: Any) -> None:
    from tests.flows.test_fingerprints import planned

    plan, engine = planned(tmp_path, "everything")
    jobs = {one.name: one for one in jobs_of(plan, list(plan), engine)}
    assert jobs["filter"].needs == {"ingest", "clean", "langid"}
    assert jobs["sft_prepare"].needs == frozenset()
    assert "export" not in jobs["evaluate"].needs
    assert "evaluate" not in jobs["export"].needs
    assert (jobs["ingest"].workers, jobs["sft_data"].workers, jobs["pretrain"].trains) == (3, 1, True)
    assert {one.name: one.needs for one in jobs_of(plan, ["mix", "pretrain"], engine)} == {
        "mix": frozenset(),
        "pretrain": {"mix"},
    }


class Begun:
    """A stage's process, as far as `RunningProcesses` needs one."""

    def __init__(self) -> None:
        self.stopped = threading.Event()

    def stop(self) -> None:
        self.stopped.set()


def test_a_stage_begins_while_another_one_waits_for_its_process() -> None:
    processes, first_waits, second_runs = RunningProcesses(), threading.Event(), threading.Event()

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


def test_a_process_that_begins_while_its_run_is_stopped_is_ended() -> None:
    processes, process = RunningProcesses(), Begun()

    def begin() -> Any:
        processes.stop()
        return process

    with pytest.raises(RunStoppedError), processes.start(begin):
        pytest.fail("it runs")
    assert process.stopped.is_set()
