"""Jobs over shards: every planned task comes out once, finished ones are not done again, any runner gives the same."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gristmill.dataprep import engine
from gristmill.dataprep.context import Context
from gristmill.dataprep.engine import Done, IncompleteJobError, Task, run_tasks
from gristmill.dataprep.files import atomic_write

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


@pytest.mark.parametrize("settings", [
    {"workers": 1}, {"workers": 2}, {"workers": 2, "runner": "PortableRunner", "options": PORTABLE},
], ids=["one worker", "two workers", "portable runner"])
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


def test_an_error_in_one_task_keeps_what_the_others_finished(tmp_path: Path) -> None:
    def fail_on_three(task: Task) -> Done:
        if task.payload["n"] == 3:
            raise ValueError("three is not allowed")
        return square(tmp_path, task)

    with pytest.raises(Exception, match="three is not allowed"):
        run_tasks("job", TASKS, fail_on_three, context(tmp_path / "work"))
    done = set(calls(tmp_path))
    run_tasks("job", TASKS, partial(square, tmp_path), context(tmp_path / "work"))
    assert len(calls(tmp_path)) == len(TASKS)
    assert done.isdisjoint({"t3"})


def test_a_runner_that_loses_tasks_without_an_error_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loses_the_last(job: str, tasks: list[Task], *arguments: Any) -> None:
        for task in tasks[:-1]:
            engine.finish_task(task, arguments[0], arguments[2])

    monkeypatch.setattr(engine, "_run_pipeline", loses_the_last)
    with pytest.raises(IncompleteJobError, match="1 of 7 planned tasks did not come out, first: t6"):
        run_tasks("job", TASKS, partial(square, tmp_path), context(tmp_path / "work"))


def test_progress_counts_finished_tasks_of_earlier_attempts_too(tmp_path: Path) -> None:
    run_tasks("job", TASKS[:4], partial(square, tmp_path), context(tmp_path / "work"))
    events: list[dict[str, Any]] = []
    run_tasks("job", TASKS, partial(square, tmp_path), context(tmp_path / "work", emit=events.append))
    assert (events[0]["done"], events[0]["total"], events[0]["unit"]) == (4, 7, "shards")
    assert events[-1]["done"] == 7


def listening_addresses() -> set[str]:
    """Local addresses (hexadecimal) of the TCP sockets that this process listens on."""
    mine = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            mine |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(f"/proc/self/fd/{name}")))
        except FileNotFoundError:
            continue
    found = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in mine:
                found.add(fields[1].partition(":")[0])
    return found


def look(task: Task) -> Done:
    return Done([], {"addresses": sorted(listening_addresses())})


def test_the_local_runner_listens_on_the_loopback_address_only(tmp_path: Path) -> None:
    results = run_tasks("job", TASKS, look, context(tmp_path / "work", workers=2))
    seen = {address for result in results for address in result["addresses"]}
    # 127.0.0.1, and its form within IPv6, in the byte order of /proc.
    assert seen
    assert seen <= {"0100007F", "0000000000000000FFFF00000100007F"}
