"""Jobs over shards: every planned task comes out once, finished ones are not done again, any runner gives the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gristmill.core.files import atomic_write
from gristmill.core.stage_context import Context
from gristmill.dataprep.jobs import errors, runner, tasks
from gristmill.dataprep.jobs.errors import TaskError
from gristmill.dataprep.jobs.tasks import Done, IncompleteJobError, Task, choose_mode, run_tasks, shard_tasks

PORTABLE = {"job_endpoint": "embed", "environment_type": "LOOPBACK"}
"""Beam's own job server in this process: the whole way through the portable API, as Flink or Spark would go it."""


def context(work: Path, **settings: Any) -> Context:
    return Context(work=work, emit=settings.pop("emit", lambda event: None), **settings)


def square(out: Path, task: Task) -> Done:
    """Writes the square of its number, and a line into a log of calls."""
    with open(out / "calls.log", "a") as log:
        log.write(f"{task.name}\n")
    with atomic_write(out / f"{task.name}.txt") as sink:
        sink.write(str(task.payload["n"] ** 2).encode())
    return Done([out / f"{task.name}.txt"], {"counts": {"read": 1, "kept": 1}, "n": task.payload["n"]})


def calls(out: Path) -> list[str]:
    return (out / "calls.log").read_text().split() if (out / "calls.log").exists() else []


TASKS = [Task(f"t{n}", {"n": n}) for n in range(7)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"workers": 1},
        {"workers": 2},
        {"workers": 2, "mode": "processes"},
        {"workers": 2, "runner": "PortableRunner", "options": PORTABLE},
    ],
    ids=["one worker", "two threads", "two processes", "portable runner"],
)
def test_results_come_in_the_order_of_the_tasks_on_every_runner(tmp_path: Path, settings: Mapping[str, Any]) -> None:
    results = run_tasks("job", TASKS, partial(square, tmp_path), context(tmp_path / "work", **settings))
    assert [result["n"] for result in results] == list(range(7))
    assert [(tmp_path / f"t{n}.txt").read_text() for n in range(7)] == ["0", "1", "4", "9", "16", "25", "36"]
    assert sorted(calls(tmp_path)) == [task.name for task in TASKS]


def test_a_second_attempt_does_only_what_is_missing(tmp_path: Path) -> None:
    run_tasks("job", TASKS[:4], partial(square, tmp_path), context(tmp_path / "work"))
    (tmp_path / "t1.txt").unlink()
    (tmp_path / "t2.txt").write_text("other size")
    (tmp_path / "calls.log").unlink()
    results = run_tasks("job", TASKS, partial(square, tmp_path), context(tmp_path / "work"))
    assert [result["n"] for result in results] == list(range(7))
    assert sorted(calls(tmp_path)) == ["t1", "t2", "t4", "t5", "t6"]


@pytest.mark.parametrize("left", [b"", b'{"files": {"', bytes(40)], ids=["empty", "cut", "zeros"])
def test_a_task_whose_record_a_crash_of_the_machine_damaged_is_done_again(tmp_path: Path, left: bytes) -> None:
    run_tasks("job", TASKS, partial(square, tmp_path), context(tmp_path / "work"))
    (tmp_path / "work/job/t5.json").write_bytes(left)
    (tmp_path / "calls.log").unlink()
    results = run_tasks("job", TASKS, partial(square, tmp_path), context(tmp_path / "work"))
    assert [result["n"] for result in results] == list(range(7))
    assert calls(tmp_path) == ["t5"]


@pytest.mark.parametrize("mode", ["memory", "threads", "processes"])
def test_what_was_done_before_an_error_is_not_done_again(tmp_path: Path, mode: str) -> None:
    tasks = [Task(f"t{n:02d}", {"n": n + 1}, size_bytes=100) for n in range(12)]
    work = context(tmp_path / "work", workers=2, mode=mode)
    with pytest.raises(ValueError, match="t02: ValueError: three is not allowed"):
        run_tasks("job", tasks, partial(fail_on_three, tmp_path), work)
    assert len(calls(tmp_path)) < len(tasks)
    results = run_tasks("job", tasks, partial(square, tmp_path), work)
    assert [result["n"] for result in results] == list(range(1, 13))
    assert sorted(calls(tmp_path)) == [task.name for task in tasks]


def fail_on_three(out: Path, task: Task) -> Done:
    if task.payload["n"] == 3:
        raise ValueError("three is not allowed")
    return square(out, task)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"workers": 1},
        {"workers": 2},
        {"workers": 2, "runner": "PortableRunner", "options": PORTABLE},
    ],
    ids=["one worker", "two threads", "portable runner"],
)
def test_an_error_in_one_task_names_it_and_keeps_what_the_others_finished(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], settings: Mapping[str, Any]
) -> None:
    with pytest.raises(ValueError, match="three") as caught:
        run_tasks("job", TASKS, partial(fail_on_three, tmp_path), context(tmp_path / "work", **settings))
    assert str(caught.value) == "job/t3: ValueError: three is not allowed"
    assert "in fail_on_three" in caught.value.__notes__[0]
    assert "Traceback" not in capfd.readouterr().err
    run_tasks("job", TASKS, partial(square, tmp_path), context(tmp_path / "work"))
    assert sorted(calls(tmp_path)) == [task.name for task in TASKS]


def test_after_an_error_no_further_task_is_begun(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        run_tasks("job", TASKS, partial(fail_on_three, tmp_path), context(tmp_path / "work"))
    assert calls(tmp_path) == ["t0", "t1", "t2"]


def test_tasks_that_are_called_directly_leave_what_a_pipeline_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results, files, records and errors; no pipeline is made, unless there are workers to share the tasks."""
    left: dict[str, Any] = {}
    for name, direct in (("called", True), ("piped", False)):
        out = tmp_path / name
        work = context(out / "work")
        with pytest.MonkeyPatch.context() as patch:
            if direct:
                patch.setattr(runner, "make_pipeline", no_pipeline)
            with pytest.raises(ValueError, match="three") as caught:
                run_tasks("job", TASKS, partial(fail_on_three, out), work, direct=direct)
            begun = calls(out)
            results = run_tasks("job", TASKS, partial(square, out), work, direct=direct)
        records = {path.name: path.read_text().replace(str(out), "") for path in (out / "work/job").iterdir()}
        left[name] = str(caught.value), "in fail_on_three" in caught.value.__notes__[0], begun, results, records
    assert left["called"] == left["piped"]
    assert left["called"][2] == ["t0", "t1", "t2"]
    monkeypatch.setattr(runner, "make_pipeline", no_pipeline)
    alone = run_tasks("job", TASKS[:1], partial(square, tmp_path), context(tmp_path / "alone", workers=2))
    assert len(alone) == 1, "a single task is called, too"
    with pytest.raises(TaskError, match="a pipeline is made"):
        run_tasks("job", TASKS, partial(square, tmp_path), context(tmp_path / "work", workers=2), direct=True)


def no_pipeline(*arguments: object) -> None:
    raise RuntimeError("a pipeline is made")


class OddError(Exception):
    def __init__(self, number: int, word: str) -> None:
        super().__init__(f"{number} {word}s")


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (lambda: OddError(3, "egg"), TaskError, "OddError: 3 eggs"),
        (lambda: KeyError("name"), TaskError, "KeyError: 'name'"),
        (lambda: OSError(28, "No space left on device"), OSError, "OSError: [Errno 28] No space left on device"),
        (lambda: IncompleteJobError("half"), IncompleteJobError, "IncompleteJobError: half"),
    ],
)
def test_an_error_keeps_its_type_where_that_can_carry_the_message(
    tmp_path: Path, raised: Callable[[], Exception], kind: type[Exception], message: str
) -> None:
    def fail(task: Task) -> Done:
        raise raised()

    with pytest.raises(kind) as caught:
        run_tasks("job", TASKS[:1], fail, context(tmp_path / "work"))
    assert type(caught.value) is kind
    assert str(caught.value) == f"job/t0: {message}"


def test_an_error_that_cannot_be_written_down_comes_through_the_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(path: Path, value: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(errors, "write_json", no_space)
    with pytest.raises(TaskError, match=r"^job: ValueError: three is not allowed$"):
        run_tasks("job", TASKS, partial(fail_on_three, tmp_path), context(tmp_path / "work"))


BIG = [Task(f"t{n}", size_bytes=tasks.PROCESS_BYTES // 2) for n in range(2)]


@pytest.mark.parametrize(
    ("mode", "workers", "tasks", "holds_gil", "chosen"),
    [
        ("auto", 1, BIG, True, "memory"),
        ("auto", 2, BIG[:1], True, "memory"),
        ("auto", 2, BIG, True, "processes"),
        ("auto", 2, BIG, False, "threads"),
        ("auto", 2, TASKS, True, "threads"),
        ("threads", 1, BIG, True, "threads"),
        ("memory", 2, BIG, True, "memory"),
        ("processes", 2, TASKS, False, "processes"),
    ],
)
def test_processes_are_for_jobs_that_hold_the_gil_and_are_large(
    mode: str, workers: int, tasks: list[Task], holds_gil: bool, chosen: str
) -> None:
    assert choose_mode(mode, workers, tasks, holds_gil) == chosen


def test_the_tasks_of_shards_know_their_numbers_and_sizes(tmp_path: Path) -> None:
    for name, size in (("part-00001-000", 7), ("part-00000-000", 5), ("other", 9)):
        (tmp_path / f"{name}.parquet").write_bytes(b"x" * size)
    assert shard_tasks(tmp_path) == [
        Task("part-00000-000.parquet", {"shard": 0}, 5),
        Task("part-00001-000.parquet", {"shard": 1}, 7),
    ]


def test_the_largest_tasks_go_first(tmp_path: Path) -> None:
    tasks = [Task(name, {"n": 1}, size) for name, size in (("a", 1), ("b", 3), ("c", 2))]
    run_tasks("job", tasks, partial(square, tmp_path), context(tmp_path / "work"))
    assert calls(tmp_path) == ["b", "c", "a"]


def test_many_tasks_are_few_elements_of_which_a_second_try_does_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "MOST_ELEMENTS", 3)
    groups = tasks.in_groups(TASKS)
    assert [[name for name, _ in group] for group in groups] == [["t0", "t3", "t6"], ["t1", "t4"], ["t2", "t5"]]
    work = context(tmp_path / "work", runner="FnApiRunner", options={"direct_running_mode": "in_memory"})
    results = run_tasks("job", TASKS, partial(square, tmp_path), work)
    assert [result["n"] for result in results] == list(range(7))
    (tmp_path / "t3.txt").unlink()
    (tmp_path / "work" / "job" / "t6.json").unlink()
    (tmp_path / "calls.log").unlink()
    counted = list(tasks.do_group(partial(square, tmp_path), str(tmp_path / "work" / "job"), groups[0]))
    assert counted == [{"read": 1, "kept": 1}] * 3
    assert calls(tmp_path) == ["t3", "t6"]


def test_a_runner_that_loses_tasks_without_an_error_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loses_the_last(job: str, stage: str, pool: Any, work: Any, elements: Any) -> None:
        for element in elements[:-1]:
            work(*element)

    monkeypatch.setattr(tasks, "run_here", loses_the_last)
    with pytest.raises(IncompleteJobError, match="1 of 7 planned tasks gave no result, first: t6"):
        run_tasks("job", TASKS, partial(square, tmp_path), context(tmp_path / "work"))


def test_progress_counts_finished_tasks_of_earlier_attempts_too(tmp_path: Path) -> None:
    run_tasks("job", TASKS[:4], partial(square, tmp_path), context(tmp_path / "work"))
    events: list[dict[str, Any]] = []
    run_tasks("job", TASKS, partial(square, tmp_path), context(tmp_path / "work", emit=events.append))
    assert (events[0]["done"], events[0]["total"], events[0]["unit"]) == (4, 7, "shards")
    assert events[-1]["done"] == 7


def listening(pid: int) -> dict[str, str]:
    """The TCP sockets that a process listens on: inode -> local address (hexadecimal)."""
    mine = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            mine |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{name}")))
        except FileNotFoundError:
            continue
    found = {}
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in mine:
                found[fields[9]] = fields[1].partition(":")[0]
    return found


def look(pid: int, task: Task) -> Done:
    return Done([], {"sockets": listening(pid)})


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}
"""127.0.0.1, and its form within IPv6, in the byte order of /proc."""


@pytest.mark.slow
def test_the_local_runner_listens_on_nothing_and_a_trial_of_the_portable_one_on_the_loopback_address_alone(
    tmp_path: Path,
) -> None:
    seen, before = {}, listening(os.getpid())  # such as Dask's cluster, or a server that this process was given
    for name, settings in {
        "threads": {"mode": "threads"},
        "processes": {"mode": "processes"},
        "portable": {"runner": "PortableRunner", "options": PORTABLE},
    }.items():
        results = run_tasks("job", TASKS, partial(look, os.getpid()), context(tmp_path / name, workers=2, **settings))
        seen[name] = {
            address for result in results for inode, address in result["sockets"].items() if inode not in before
        }
    assert not seen["threads"] | seen["processes"]
    assert seen["portable"]
    assert seen["portable"] <= LOOPBACK


BOTH = threading.Barrier(2, timeout=60)


def meet(task: Task) -> Done:
    """Returns once another task has begun; without one, the barrier breaks."""
    BOTH.wait()
    return Done([], {"thread": threading.get_ident()})


def test_as_many_tasks_run_at_once_as_there_are_threads(tmp_path: Path) -> None:
    results = run_tasks("job", TASKS[:6], meet, context(tmp_path, workers=2, mode="threads"))
    assert len({result["thread"] for result in results}) == 2


@pytest.mark.parametrize("mode", ["memory", "threads", "processes"])
def test_beam_counts_what_all_workers_decided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(runner, "wait_for", ended.append)
    work = context(tmp_path / "work", workers=2, mode=mode, stage="toy")
    run_tasks("job", TASKS, partial(square, tmp_path), work)
    counters = {
        (found.key.metric.namespace, found.key.metric.name): found.result
        for result in ended
        for found in result.metrics().query()["counters"]
    }
    assert counters == {("toy", "read"): 7, ("toy", "kept"): 7, ("toy", "quarantined"): 0}


@pytest.mark.slow
def test_beam_is_imported_without_a_word() -> None:
    code = "from gristmill.dataprep.jobs.runner import import_beam; import_beam()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
