"""Jobs over shards: each task yields one result, finished tasks are reused, and all
runners agree.
"""

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
from gristmill.dataprep.runners import errors, runner, tasks
from gristmill.dataprep.runners.errors import TaskError
from gristmill.dataprep.runners.tasks import (
    Done,
    IncompleteJobError,
    Task,
    choose_mode,
    run_tasks,
    shard_tasks,
)
from gristmill.mixtures.schema.engine import BeamEngine

PORTABLE = {"job_endpoint": "embed", "environment_type": "LOOPBACK"}
"""Beam's own job server in this process: the portable API as Flink or Spark use it."""


def context(
    work: Path,
    stage: str = "stage",
    emit: Callable[[dict[str, Any]], None] = lambda event: None,
    **settings: Any,
) -> Context:
    return Context(work, stage, BeamEngine(**{"workers": 1, **settings}), emit=emit)


def square(out: Path, task: Task) -> Done:
    """Write the square of a number, and a line into a log of calls."""
    with open(out / "calls.log", "a") as log:
        log.write(f"{task.name}\n")
    with atomic_write(out / f"{task.name}.txt") as sink:
        sink.write(str(task.payload["n"] ** 2).encode())
    return Done(
        [out / f"{task.name}.txt"],
        {"counts": {"read": 1, "kept": 1}, "n": task.payload["n"]},
    )


def calls(out: Path) -> list[str]:
    return (
        (out / "calls.log").read_text().split() if (out / "calls.log").exists() else []
    )


TASKS = [Task(f"t{n}", {"n": n}) for n in range(7)]


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run small jobs in pipelines too."""
    monkeypatch.setattr(tasks, "FEW_BYTES", 0)


@pytest.mark.usefixtures("piped")
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
def test_results_keep_the_order_of_tasks_on_every_runner(
    tmp_path: Path, settings: Mapping[str, Any]
) -> None:
    results = run_tasks(
        "job", TASKS, partial(square, tmp_path), context(tmp_path / "work", **settings)
    )
    assert [result["n"] for result in results] == list(range(7))
    assert [(tmp_path / f"t{n}.txt").read_text() for n in range(7)] == [
        "0",
        "1",
        "4",
        "9",
        "16",
        "25",
        "36",
    ]
    assert sorted(calls(tmp_path)) == [task.name for task in TASKS]


def test_second_attempt_runs_only_missing_tasks(tmp_path: Path) -> None:
    run_tasks("job", TASKS[:4], partial(square, tmp_path), context(tmp_path / "work"))
    (tmp_path / "t1.txt").unlink()
    (tmp_path / "t2.txt").write_text("other size")
    (tmp_path / "calls.log").unlink()
    results = run_tasks(
        "job", TASKS, partial(square, tmp_path), context(tmp_path / "work")
    )
    assert [result["n"] for result in results] == list(range(7))
    assert sorted(calls(tmp_path)) == ["t1", "t2", "t4", "t5", "t6"]


@pytest.mark.parametrize(
    "record", [b"", b'{"files": {"', bytes(40)], ids=["empty", "cut", "zeros"]
)
def test_task_with_a_damaged_record_is_repeated(tmp_path: Path, record: bytes) -> None:
    run_tasks("job", TASKS, partial(square, tmp_path), context(tmp_path / "work"))
    (tmp_path / "work/job/t5.json").write_bytes(record)
    (tmp_path / "calls.log").unlink()
    results = run_tasks(
        "job", TASKS, partial(square, tmp_path), context(tmp_path / "work")
    )
    assert [result["n"] for result in results] == list(range(7))
    assert calls(tmp_path) == ["t5"]


@pytest.mark.parametrize("mode", ["memory", "threads", "processes"])
def test_tasks_finished_before_an_error_are_reused(tmp_path: Path, mode: str) -> None:
    tasks = [Task(f"t{n:02d}", {"n": n + 1}, size_bytes=100) for n in range(12)]
    work = context(tmp_path / "work", workers=2, mode=mode)
    with pytest.raises(ValueError, match="t02: ValueError: three"):
        run_tasks("job", tasks, partial(fail_on_three, tmp_path), work)
    assert len(calls(tmp_path)) < len(tasks)
    results = run_tasks("job", tasks, partial(square, tmp_path), work)
    assert [result["n"] for result in results] == list(range(1, 13))
    assert sorted(calls(tmp_path)) == [task.name for task in tasks]


def fail_on_three(out: Path, task: Task) -> Done:
    if task.payload["n"] == 3:
        raise ValueError("three is not allowed")
    return square(out, task)


@pytest.mark.usefixtures("piped")
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
def test_error_names_its_task_and_keeps_finished_ones(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], settings: Mapping[str, Any]
) -> None:
    with pytest.raises(ValueError, match="three") as caught:
        run_tasks(
            "job",
            TASKS,
            partial(fail_on_three, tmp_path),
            context(tmp_path / "work", **settings),
        )
    assert str(caught.value) == "job/t3: ValueError: three is not allowed"
    assert "in fail_on_three" in caught.value.__notes__[0]
    assert "Traceback" not in capfd.readouterr().err
    run_tasks("job", TASKS, partial(square, tmp_path), context(tmp_path / "work"))
    assert sorted(calls(tmp_path)) == [task.name for task in TASKS]


def test_no_task_starts_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        run_tasks(
            "job", TASKS, partial(fail_on_three, tmp_path), context(tmp_path / "work")
        )
    assert calls(tmp_path) == ["t0", "t1", "t2"]


def test_direct_calls_equal_a_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results, files, records and errors agree; a pipeline is made only if workers
    share many tasks, or large ones.
    """
    outcomes: dict[str, Any] = {}
    for name, direct in (("called", True), ("piped", False)):
        out = tmp_path / name
        work = context(out / "work")
        with pytest.MonkeyPatch.context() as patch:
            if direct:
                patch.setattr(runner, "make_pipeline", no_pipeline)
            else:
                patch.setattr(tasks, "FEW_BYTES", 0)
            with pytest.raises(ValueError, match="three") as caught:
                run_tasks("job", TASKS, partial(fail_on_three, out), work)
            started = calls(out)
            results = run_tasks("job", TASKS, partial(square, out), work)
        records = {
            path.name: path.read_text().replace(str(out), "")
            for path in (out / "work/job").iterdir()
        }
        outcomes[name] = (
            str(caught.value),
            "in fail_on_three" in caught.value.__notes__[0],
            started,
            results,
            records,
        )
    assert outcomes["called"] == outcomes["piped"]
    assert outcomes["called"][2] == ["t0", "t1", "t2"]
    monkeypatch.setattr(runner, "make_pipeline", no_pipeline)
    few = run_tasks(
        "job", TASKS, partial(square, tmp_path), context(tmp_path / "few", workers=2)
    )
    assert len(few) == len(TASKS)
    many = [Task(f"t{n}", {"n": n}) for n in range(tasks.FEW_TASKS + 1)]
    for piped_tasks in (many, BIG):
        with pytest.raises(TaskError, match="a pipeline is made"):
            run_tasks(
                "job",
                piped_tasks,
                partial(square, tmp_path),
                context(tmp_path / "work", workers=2),
            )


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
        (
            lambda: OSError(28, "No space left on device"),
            OSError,
            "OSError: [Errno 28] No space left on device",
        ),
        (
            lambda: IncompleteJobError("half"),
            IncompleteJobError,
            "IncompleteJobError: half",
        ),
    ],
)
def test_error_keeps_its_type_if_that_takes_one_message(
    tmp_path: Path, raised: Callable[[], Exception], kind: type[Exception], message: str
) -> None:
    def fail(task: Task) -> Done:
        raise raised()

    with pytest.raises(kind) as caught:
        run_tasks("job", TASKS[:1], fail, context(tmp_path / "work"))
    assert type(caught.value) is kind
    assert str(caught.value) == f"job/t0: {message}"


@pytest.mark.usefixtures("piped")
def test_error_that_cannot_be_recorded_comes_through_the_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(path: Path, value: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(errors, "write_json", no_space)
    with pytest.raises(TaskError, match=r"^job: ValueError: three is not allowed$"):
        run_tasks(
            "job", TASKS, partial(fail_on_three, tmp_path), context(tmp_path / "work")
        )


BIG = [Task(f"t{n}", size_bytes=tasks.FEW_BYTES // 2) for n in range(2)]


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
def test_processes_run_large_jobs_that_hold_the_gil(
    mode: str, workers: int, tasks: list[Task], holds_gil: bool, chosen: str
) -> None:
    assert choose_mode(mode, workers, tasks, holds_gil) == chosen


def test_shard_tasks_have_numbers_and_sizes(tmp_path: Path) -> None:
    for name, size in (("part-00001-000", 7), ("part-00000-000", 5), ("other", 9)):
        (tmp_path / f"{name}.parquet").write_bytes(b"x" * size)
    assert shard_tasks(tmp_path) == [
        Task("part-00000-000.parquet", {"shard": 0}, 5),
        Task("part-00001-000.parquet", {"shard": 1}, 7),
    ]


def test_largest_tasks_start_first(tmp_path: Path) -> None:
    tasks = [
        Task(name, {"n": 1}, size) for name, size in (("a", 1), ("b", 3), ("c", 2))
    ]
    run_tasks("job", tasks, partial(square, tmp_path), context(tmp_path / "work"))
    assert calls(tmp_path) == ["b", "c", "a"]


def test_many_tasks_are_grouped_and_a_retry_runs_only_missing_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "MOST_ELEMENTS", 3)
    groups = tasks.in_groups(TASKS)
    assert [[name for name, _ in group] for group in groups] == [
        ["t0", "t3", "t6"],
        ["t1", "t4"],
        ["t2", "t5"],
    ]
    work = context(
        tmp_path / "work",
        runner="FnApiRunner",
        options={"direct_running_mode": "in_memory"},
    )
    results = run_tasks("job", TASKS, partial(square, tmp_path), work)
    assert [result["n"] for result in results] == list(range(7))
    (tmp_path / "t3.txt").unlink()
    (tmp_path / "work" / "job" / "t6.json").unlink()
    (tmp_path / "calls.log").unlink()
    tasks.do_group(partial(square, tmp_path), str(tmp_path / "work" / "job"), groups[0])
    assert calls(tmp_path) == ["t3", "t6"]


@pytest.mark.usefixtures("piped")
def test_silently_lost_tasks_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loses_the_last(job: str, pool: Any, work: Any, elements: Any) -> None:
        for element in elements[:-1]:
            work(*element)

    monkeypatch.setattr(tasks, "run_here", loses_the_last)
    with pytest.raises(IncompleteJobError, match=r"1 of 7 .*t6"):
        run_tasks("job", TASKS, partial(square, tmp_path), context(tmp_path / "work"))


def test_progress_counts_tasks_of_earlier_attempts(tmp_path: Path) -> None:
    run_tasks("job", TASKS[:4], partial(square, tmp_path), context(tmp_path / "work"))
    events: list[dict[str, Any]] = []
    run_tasks(
        "job",
        TASKS,
        partial(square, tmp_path),
        context(tmp_path / "work", emit=events.append),
    )
    assert (events[0]["done"], events[0]["total"], events[0]["unit"]) == (
        4,
        7,
        "shards",
    )
    assert events[-1]["done"] == 7


def listening(pid: int) -> dict[str, str]:
    """Map the inode of each TCP socket that a process listens on to its local address
    (hexadecimal).
    """
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            inodes |= set(
                re.findall(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{name}"))
            )
        except FileNotFoundError:
            continue
    addresses = {}
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                addresses[fields[9]] = fields[1].partition(":")[0]
    return addresses


def look(pid: int, task: Task) -> Done:
    return Done([], {"sockets": listening(pid)})


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}
"""127.0.0.1 and its IPv6 form, in the byte order of /proc."""


@pytest.mark.slow
def test_local_runner_opens_no_port_and_portable_trial_only_loopback(
    tmp_path: Path,
) -> None:
    addresses = {}
    before = listening(os.getpid())  # such as a Dask cluster's
    for name, settings in {
        "threads": {"mode": "threads"},
        "processes": {"mode": "processes"},
        "portable": {"runner": "PortableRunner", "options": PORTABLE},
    }.items():
        results = run_tasks(
            "job",
            TASKS,
            partial(look, os.getpid()),
            context(tmp_path / name, workers=2, **settings),
        )
        addresses[name] = set()
        for result in results:
            addresses[name] |= {
                address
                for inode, address in result["sockets"].items()
                if inode not in before
            }
    assert not addresses["threads"] | addresses["processes"]
    assert addresses["portable"]
    assert addresses["portable"] <= LOOPBACK


BARRIER = threading.Barrier(2, timeout=60)


def meet(task: Task) -> Done:
    """Return once another task has started; alone, the barrier breaks."""
    BARRIER.wait()
    return Done([], {"thread": threading.get_ident()})


def test_threads_run_tasks_concurrently(tmp_path: Path) -> None:
    results = run_tasks(
        "job", TASKS[:6], meet, context(tmp_path, workers=2, mode="threads")
    )
    assert len({result["thread"] for result in results}) == 2


@pytest.mark.slow
def test_beam_import_prints_nothing() -> None:
    code = "from gristmill.dataprep.runners.runner import import_beam; import_beam()"
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    )
    assert (completed.returncode, completed.stderr) == (0, "")
