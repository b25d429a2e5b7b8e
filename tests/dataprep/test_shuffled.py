"""Shuffles: rows arrive in the order of their tasks, through files and through Beam's
GroupByKey, after any interruption.
"""

from __future__ import annotations

import os
import random
import signal
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gristmill.core.files import as_path
from gristmill.core.stage_context import Context
from gristmill.dataprep import shuffle_format
from gristmill.dataprep.runners import shuffle
from gristmill.dataprep.runners.shuffle import Sent, Shuffled, run_shuffle
from gristmill.dataprep.runners.tasks import (
    Done,
    IncompleteJobError,
    Task,
    partition_tasks,
    run_tasks,
)
from gristmill.mixtures.schema.engine import BeamEngine
from tests.dataprep.dask_processes import Cluster

IN_MEMORY = {"direct_running_mode": "in_memory"}
FORMS: dict[str, dict[str, Any]] = {
    "files": {"workers": 2},
    "engine": {"runner": "FnApiRunner", "options": IN_MEMORY, "shuffle": "engine"},
}
PARTITIONS = {"words": 5, "numbers": 2}
for_both_forms = pytest.mark.parametrize("form", FORMS)


def context(work: Path, form: str, **fields: Any) -> Context:
    settings = {"workers": 1, **FORMS[form], **fields}
    return Context(work, beam=BeamEngine(**settings), emit=lambda event: None)


def rows_of(task: Task) -> list[tuple[str, list[tuple[int, str]]]]:
    """Rows of each sending of a task, in order: (name, (partition, text) of each
    row).
    """
    rng = random.Random(f"{task.payload['seed']} {task.name}")
    texts = ["", "flour", "Mühle", "粉を挽く", "\N{GRINNING FACE}\u0301", "a\nb"]
    sent = []
    for name in rng.choices(list(PARTITIONS), k=rng.randrange(5)):
        most = rng.choice([1, PARTITIONS[name]])
        sent.append(
            (
                name,
                [
                    (rng.randrange(most), f"{rng.choice(texts)} {task.name} {row}")
                    for row in range(rng.choice([0, 1, 40]))
                ],
            )
        )
    return sent


def send(log: Path | None, task: Task) -> Generator[Sent, None, Done]:
    if log is not None:
        with open(log, "a") as lines:
            lines.write(f"{task.name}\n")
    for name, rows in rows_of(task):
        table = pa.table({"text": pa.array([text for _, text in rows], pa.string())})
        yield Sent(
            name, table, np.array([partition for partition, _ in rows], np.int64)
        )
    return Done([], {"counts": {"read": 1}, "name": task.name})


def shuffled(
    planned: list[Task],
    where: Context,
    log: Path | None = None,
    process: Callable[..., Any] = send,
) -> tuple[list[Any], dict[str, Shuffled]]:
    """Run a job that sends words and numbers, and logs its tasks."""
    return run_shuffle("job", planned, partial(process, log), where, PARTITIONS)


def check(planned: list[Task], where: Context, log: Path | None = None) -> None:
    """Assert that all rows arrive in their order."""
    assert arrived(shuffled(planned, where, log)[1]) == expected(planned)


def tasks(seed: int, number: int = 9) -> list[Task]:
    return [
        Task(f"t{place}", {"seed": seed}, size_bytes=place % 4)
        for place in range(number)
    ]


def expected(planned: list[Task]) -> dict[str, list[list[str]]]:
    texts_by_name = {
        name: [[] for _ in range(number)] for name, number in PARTITIONS.items()
    }
    for task in planned:
        for name, rows in rows_of(task):
            for partition, text in rows:
                texts_by_name[name][partition].append(text)
    return texts_by_name


def arrived(sent: dict[str, Shuffled]) -> dict[str, list[list[str]]]:
    return {
        name: [
            rows.read(partition)["text"].to_pylist() if not rows.is_nothing else []
            for partition in range(rows.num_partitions)
        ]
        for name, rows in sent.items()
    }


@pytest.mark.slow
@for_both_forms
@pytest.mark.parametrize("seed", range(6))
def test_rows_arrive_in_the_order_of_tasks_and_sendings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, seed: int
) -> None:
    monkeypatch.setattr(shuffle, "BATCH_BYTES", 300)
    planned = tasks(seed)
    results, sent = shuffled(planned, context(tmp_path, form))
    assert results == [{"counts": {"read": 1}, "name": task.name} for task in planned]
    assert arrived(sent) == expected(planned), f"seed {seed}"
    for name, rows in sent.items():
        sizes = [rows.count(partition) for partition in range(rows.num_partitions)]
        assert sizes == [len(texts) for texts in expected(planned)[name]]
        chosen = (
            rows.read(0, lambda piece: piece.slice(0, 1))
            if not rows.is_nothing
            else pa.table({"text": []})
        )
        assert len(chosen) == sum(len(piece) > 0 for piece in rows.pieces(0))


@for_both_forms
def test_empty_shuffles_are_read(tmp_path: Path, form: str) -> None:
    def empty(task: Task) -> Generator[Sent, None, Done]:
        if task.payload["sends"]:
            yield Sent(
                "words",
                pa.table({"text": pa.array([], pa.string())}),
                np.empty(0, np.int64),
            )
        return Done()

    for sends, number in ((False, 0), (False, 2), (True, 2)):
        planned = [Task(f"t{place}", {"sends": sends}) for place in range(number)]
        work = tmp_path / f"{sends}-{number}"
        for _ in range(2):
            _, sent = run_shuffle(
                "job", planned, empty, context(work, form), PARTITIONS
            )
            assert (sent["words"].is_nothing, sent["numbers"].is_nothing) == (
                not sends,
                True,
            )
            assert [len(piece) for piece in sent["words"].pieces(4)] == [
                0
            ] * 2 * sends * (form == "files")
        if sends:
            assert sent["words"].read(3).schema == pa.schema({"text": pa.string()})


@for_both_forms
def test_single_and_skewed_partitions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(shuffle, "BATCH_BYTES", 100)

    def skewed(task: Task) -> Generator[Sent, None, Done]:
        rows = pa.table({"number": np.arange(500) + 1000 * task.payload["n"]})
        yield Sent("one", rows, np.empty(0, np.int64))
        yield Sent("many", rows, np.full(500, 3))
        return Done()

    planned = [Task(f"t{n}", {"n": n}) for n in range(3)]
    _, sent = run_shuffle(
        "job", planned, skewed, context(tmp_path, form), {"one": 1, "many": 7}
    )
    numbers = [1000 * n + row for n in range(3) for row in range(500)]
    assert sent["one"].read(0)["number"].to_pylist() == numbers
    assert [sent["many"].read(place)["number"].to_pylist() for place in range(7)] == [
        numbers if place == 3 else [] for place in range(7)
    ]


def fail_at_last(log: Path, task: Task) -> Generator[Sent, None, Done]:
    result = yield from send(log, task)
    if task.name == "t8":
        raise LookupError("killed here")
    return result


def calls(log: Path) -> list[str]:
    names = sorted(log.read_text().split()) if log.exists() else []
    log.unlink(missing_ok=True)
    return names


@for_both_forms
def test_failed_task_is_named_and_its_job_resumes(tmp_path: Path, form: str) -> None:
    planned, log = tasks(3), tmp_path / "calls"
    with pytest.raises(LookupError, match=r"^job/t8: LookupError: killed here"):
        shuffled(planned, context(tmp_path, form), log, fail_at_last)
    # incomplete rows must not count, though t8 came last
    assert not list(tmp_path.glob("*-arrived/*"))
    started = calls(log)
    finished = {name for name in started if name != "t8"} if form == "files" else set()
    check(planned, context(tmp_path, form), log)
    # An engine groups nothing until all rows are there: those sent before are lost.
    assert calls(log) == sorted({*expected_names(planned)} - finished)


def expected_names(planned: list[Task]) -> list[str]:
    return sorted(task.name for task in planned)


@for_both_forms
def test_committed_work_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Through files a finished task, by an engine an arrived partition; at the end,
    everything.
    """
    planned, log = tasks(3), tmp_path / "calls"
    written: list[str] = []
    if form == "engine":
        original = shuffle.atomic_write

        def fail_at_third(path: Path) -> Any:
            if path.suffix == ".arrow":
                if len(written) == 2:
                    raise OSError(28, "No space left on device")
                written.append(path.name)
            return original(path)

        with monkeypatch.context() as patch:
            patch.setattr(shuffle, "atomic_write", fail_at_third)
            with pytest.raises(
                OSError, match=r"^job/(words|numbers) \d: OSError: .*No space left"
            ):
                shuffled(planned, context(tmp_path, form), log)
        stamps = {
            path: path.stat().st_mtime_ns for path in tmp_path.glob("*-arrived/*")
        }
        assert len(stamps) == 4  # two partitions, and their marks
        assert calls(log) == expected_names(planned)
    check(planned, context(tmp_path, form), log)
    assert calls(log) == expected_names(planned)
    if form == "engine":
        assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    results, sent = shuffled(planned, context(tmp_path, form), log, fail_at_last)
    assert arrived(sent) == expected(planned)
    assert [result["name"] for result in results] == expected_names(planned)
    assert calls(log) == []


def kill_at_the_third(form: str, work: Path, log: Path) -> None:
    """Run a job in this process, which is killed at the third file of a shuffle."""
    name = {"files": "write_batches", "engine": "atomic_write"}[form]
    original, written = getattr(shuffle, name), list[Path]()

    def kill(path: Path, *rows: Any) -> Any:
        if path.suffix == ".arrow":
            written.append(path)
        if len(written) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(path, *rows)

    setattr(shuffle, name, kill)
    shuffled(tasks(3), context(work, form, workers=1), log)


@pytest.mark.slow
@for_both_forms
def test_killed_job_does_not_repeat_committed_work(tmp_path: Path, form: str) -> None:
    process = get_context("spawn").Process(
        target=kill_at_the_third, args=(form, tmp_path, tmp_path / "calls")
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.arrow")}
    assert len(before) == 2
    check(tasks(3), context(tmp_path, form))
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.arrow")}
    # of its task only one of two files was there
    unfinished = 1 if form == "files" else 0
    assert sum(after[path] != stamp for path, stamp in before.items()) <= unfinished


def test_only_missing_partitions_are_sent(tmp_path: Path) -> None:
    rows = pa.table({"number": np.arange(20)})
    is_missing = np.array([False, True, False, True, False])
    numbers = defaultdict(list)
    for partition, batch in shuffle.cut_batches(
        rows, np.arange(20) % 5, is_missing, (0, 0)
    ):
        numbers[partition] += pa.ipc.open_stream(batch).read_all()["number"].to_pylist()
    assert numbers == {1: [1, 6, 11, 16], 3: [3, 8, 13, 18]}
    assert (
        list(shuffle.cut_batches(rows.slice(0, 0), np.arange(0), is_missing, (0, 0)))
        == []
    )


def test_batches_are_copies_of_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffle, "BATCH_BYTES", 8_000)
    rows = pa.table({"number": np.arange(100_000)}).slice(50_000, 5_000)
    batches = [
        batch
        for _, batch in shuffle.cut_batches(
            rows, np.zeros(5_000, int), np.ones(1, bool), (0, 0)
        )
    ]
    assert len(batches) == 5
    assert max(map(len, batches)) < 9_000


def test_batches_can_arrive_in_any_order_and_repeatedly(tmp_path: Path) -> None:
    rows = pa.table({"number": np.arange(3)})
    batches = [
        batch
        for place in range(12)
        for _, batch in shuffle.cut_batches(
            rows, np.zeros(3, int), np.ones(1, bool), (place, 11 - place)
        )
    ]
    random.Random(1).shuffle(batches)
    for _ in range(2):  # a bundle that is tried again
        shuffle.receive_partition(
            {"rows": str(tmp_path)},
            str(tmp_path / "job"),
            0,
            [*batches, *batches[:5]],
        )
    sent = Shuffled(tmp_path, 1, arrived=shuffle.find_arrived(tmp_path))
    assert sent.arrived == {0: 36}
    assert sent.read(0)["number"].to_pylist() == [0, 1, 2] * 12


def test_lost_rows_are_reported_and_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, original = tasks(3), shuffle.receive_partition

    def loses_one(*arguments: Any) -> None:
        *leading_arguments, batches = arguments
        original(*leading_arguments, list(batches)[1:])

    with monkeypatch.context() as patch:
        patch.setattr(shuffle, "receive_partition", loses_one)
        with pytest.raises(IncompleteJobError, match="words, numbers"):
            shuffled(planned, context(tmp_path, "engine"))
    check(planned, context(tmp_path, "engine"))


def add_up(words: Shuffled, task: Task) -> Done:
    return Done(
        [],
        {
            "characters": sum(
                map(len, words.read(task.payload["partition"])["text"].to_pylist())
            )
        },
    )


@pytest.fixture
def store() -> Iterator[Path]:
    """A store without a file system."""
    folder = as_path("memory://shuffled")
    yield folder
    folder.fs.rm("/shuffled", recursive=True)  # type: ignore[attr-defined]


@for_both_forms
def test_object_store_shuffles(store: Path, form: str) -> None:
    planned = tasks(5)
    for _ in range(2):
        _, sent = shuffled(planned, context(store, form))
        assert arrived(sent) == expected(planned)
    results = run_tasks(
        "sum", partition_tasks(5), partial(add_up, sent["words"]), context(store, form)
    )
    characters = [sum(map(len, texts)) for texts in expected(planned)["words"]]
    assert [result["characters"] for result in results] == characters


def test_local_runner_can_shuffle_like_an_engine(tmp_path: Path) -> None:
    here = context(tmp_path, "files", shuffle="engine")
    _, sent = shuffled(tasks(2), here)
    assert sent["words"].arrived is not None
    assert arrived(sent) == expected(tasks(2))


@pytest.mark.parametrize(
    ("fields", "few", "many", "in_a_store"),
    [
        ({}, "files", "files", "files"),
        ({"runner": "FlinkRunner"}, "files", "engine", "engine"),
        ({"runner": "FlinkRunner", "shuffle": "files"}, "files", "files", "files"),
        ({"shuffle": "engine"}, "engine", "engine", "engine"),
    ],
)
def test_form_of_the_shuffle_follows_from_runner_parts_and_store(
    tmp_path: Path, fields: dict[str, str], few: str, many: str, in_a_store: str
) -> None:
    here, there = (
        Context(folder, beam=BeamEngine.model_validate(fields))
        for folder in (tmp_path, as_path("memory://shuffled"))
    )
    assert shuffle.form_of(here, shuffle.FEW_PARTS) == few
    assert shuffle.form_of(here, shuffle.FEW_PARTS + 1) == many
    assert shuffle.form_of(there, 1) == in_a_store


@pytest.mark.slow
def test_dask_cluster_shuffles(tmp_path: Path, cluster: Cluster) -> None:
    on_cluster = Context(
        tmp_path,
        beam=BeamEngine(runner="dask", address=cluster.address, shuffle="engine"),
        emit=lambda event: None,
    )
    check(tasks(4, 40), on_cluster)


def test_grouped_tasks_have_their_own_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gristmill.dataprep.runners import tasks as jobs_tasks

    monkeypatch.setattr(jobs_tasks, "MOST_ELEMENTS", 4)
    planned, log = tasks(1, 30), tmp_path / "calls"
    assert [len(group) for group in jobs_tasks.in_groups(planned)] == [8, 8, 7, 7]
    check(planned, context(tmp_path, "engine"), log)
    assert calls(log) == expected_names(planned)
    assert len(list((tmp_path / "job-engine").glob("*.json"))) == 30


@pytest.mark.parametrize("files", [1, 7, 8, 9, 40])
def test_number_of_mapped_files_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    names, numbers = [f"{number}.arrow" for number in range(files)], []
    for number, name in enumerate(names):
        rows = pa.table(
            {
                "number": np.arange(20) + 100 * number,
                "text": [f"{number}-{row}" for row in range(20)],
            }
        )
        shuffle_format.write_batches(
            tmp_path / name, *shuffle_format.by_partition(rows, np.arange(20) % 3, 3)
        )
        numbers += [100 * number + row for row in range(1, 20, 3)]
    mapped_counts: list[int] = []
    opened = shuffle.open_batches

    def watch(path: Path) -> Any:
        mapped_counts.append(mapped_files(tmp_path))
        return opened(path)

    monkeypatch.setattr(shuffle, "open_batches", watch)
    monkeypatch.setattr(shuffle, "MOST_MAPPED", 8)
    table = Shuffled(tmp_path, 3, names).read(1)
    assert table["number"].to_pylist() == numbers
    assert table["text"].to_pylist() == [
        f"{number // 100}-{number % 100}" for number in numbers
    ]
    assert max(mapped_counts) <= 8
    # A group of one file needs no copy.
    assert mapped_files(tmp_path) <= (files if files <= 8 else files % 8 == 1)


def mapped_files(folder: Path) -> int:
    with open("/proc/self/maps") as maps:
        return sum(str(folder) in line for line in maps)
