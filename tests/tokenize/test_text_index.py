"""The index of training rows: every passage of a text that stands in them is found, as long as it is, at all places."""

from __future__ import annotations

import mmap
import random
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.core.files import read_json, write_json
from gristmill.core.stage_context import Context
from gristmill.dataprep.jobs import shuffle
from gristmill.dataprep.jobs.tasks import run_tasks
from gristmill.tokenize import packed_files, text_index
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_files import DTYPES, PIECES_SCHEMA, train_name
from gristmill.tokenize.packed_writing import write_packed_set, write_rows
from gristmill.tokenize.suffixes import MappedRows, Rows
from gristmill.tokenize.text_index import OpenIndex
from tests.tokenize.test_mix_memory import peak_bytes

LENGTH, SHORTEST = 24, 4


def packed_of(folder: Path, pieces: Sequence[Sequence[Sequence[int]]], shards: int = 1, vocab: int = 1000) -> PackedSet:
    """A set whose rows are lists of document pieces, each a list of tokens; what a row lacks is padding."""
    rows = np.zeros((len(pieces), LENGTH), np.int64)
    table = list[dict[str, Any]]()
    for row, parts in enumerate(pieces):
        start = 0
        for part in parts:
            rows[row, start : start + len(part)] = part
            table.append(
                {
                    "row": row,
                    "start": start,
                    "length": len(part),
                    "id": len(table).to_bytes(16),
                    "source": 0,
                    "copy": 0,
                    "offset": 0,
                }
            )
            start += len(part)
    write_packed_set(folder, rows, {"a": len(rows)}, {"vocab_size": vocab, "eos": 0, "pad": 1, "sha256": ""})
    manifest = read_json(folder / "packed.json")
    entries, cuts = [], np.linspace(0, len(rows), shards + 1).astype(int).tolist()
    for number, (first, last) in enumerate(pairwise(cuts)):
        own = pa.Table.from_pylist([one for one in table if first <= one["row"] < last], schema=PIECES_SCHEMA)
        dtype = DTYPES[manifest["dtype"]]
        entries.append(write_rows(folder / train_name(number), rows[first:last].astype(dtype), own, first))
    manifest["train"]["shards"] = entries
    write_json(folder / "packed.json", manifest)
    return PackedSet(folder)


def index_of(packed: PackedSet, folder: Path, shortest: int = SHORTEST, **where: Any) -> OpenIndex:
    make(packed, folder, shortest, **where)
    return OpenIndex(folder, packed)


def make(packed: PackedSet, folder: Path, shortest: int = SHORTEST, **where: Any) -> dict[str, Any]:
    context = Context(work=folder.with_name(f"{folder.name}.work"), emit=lambda event: None, **where)
    context.work.mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    return text_index.run({"mix": packed.folder}, {"shortest_span": shortest}, folder, context)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def found_by_looking(
    pieces: Sequence[Sequence[Sequence[int]]], text: Sequence[int], shortest: int
) -> list[tuple[int, int, list[int]]]:
    """(begin, tokens, places) of each passage, by comparing the text with every place of every piece."""
    longest: list[tuple[int, list[int]]] = []
    for begin in range(len(text)):
        best, places = 0, list[int]()
        for row, parts in enumerate(pieces):
            start = 0
            for part in parts:
                for at in range(len(part)):
                    same = 0
                    while at + same < len(part) and begin + same < len(text) and part[at + same] == text[begin + same]:
                        same += 1
                    if same > best:
                        best, places = same, []
                    if same == best and best >= shortest:
                        places.append(row * LENGTH + start + at)
                start += len(part)
        longest.append((best if best >= shortest else 0, places))
    return [
        (begin, size, places)
        for begin, (size, places) in enumerate(longest)
        if size and not (begin and longest[begin - 1][0] == size + 1)
    ]


def found_by_index(index: OpenIndex, text: Sequence[int]) -> list[tuple[int, int, list[int]]]:
    return [(one.begin, one.tokens, sorted(one.places.tolist())) for one in index.passages(np.array(text))]


def draw_pieces(rng: random.Random, rows: int, vocab: int) -> list[list[list[int]]]:
    """Rows of few different tokens, so that much comes again; some are not full."""
    made = []
    for _ in range(rows):
        row: list[list[int]] = []
        left = LENGTH - rng.choice([0, 0, 3])
        while left:
            size = rng.randint(1, left)
            row.append([rng.randrange(vocab) for _ in range(size)])
            left -= size
        made.append(row)
    return made


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 5), st.integers(1, 12), st.sampled_from([1000, 70_000]))
def test_every_passage_is_found_as_long_as_it_is_at_all_its_places(
    tmp_path_factory: pytest.TempPathFactory, seed: int, words: int, rows: int, vocab: int
) -> None:
    rng, folder = random.Random(seed), tmp_path_factory.mktemp("set")
    pieces = draw_pieces(rng, rows, words)
    index = index_of(packed_of(folder / "set", pieces, min(rows, 3), vocab), folder / "index")
    for _ in range(4):
        text = [rng.randrange(words) for _ in range(rng.randint(0, 40))]
        assert found_by_index(index, text) == found_by_looking(pieces, text, SHORTEST), f"seed {seed}"


def test_a_passage_ends_where_its_document_or_its_row_does(tmp_path: Path) -> None:
    first, second = list(range(100, 124)), list(range(124, 148))  # one document, cut by the end of a row
    other, behind = list(range(200, 212)), list(range(212, 222))  # two documents in a row, and padding
    pieces = [[first], [second], [other, behind]]
    index = index_of(packed_of(tmp_path / "set", pieces), tmp_path / "index", 8)
    assert found_by_index(index, [*first, *second]) == [(0, 24, [0]), (24, 24, [24])]
    assert found_by_index(index, [*other, *behind, 0, 0]) == [(0, 12, [48]), (12, 10, [60])]
    assert found_by_index(index, first[-8:]) == [(0, 8, [16])]
    assert found_by_index(index, first[-7:]) == []
    assert found_by_index(index, [0] * 9) == []


def test_every_span_of_eight_tokens_that_is_cut_out_of_a_document_is_found(tmp_path: Path) -> None:
    rng = random.Random(5)
    pieces = draw_pieces(rng, 60, 300)
    index = index_of(packed_of(tmp_path / "set", pieces, 4), tmp_path / "index", 8)
    planted = 0
    for row, parts in enumerate(pieces):
        start = 0
        for part in parts:
            for begin in range(len(part) - 7):
                size = rng.randint(8, len(part) - begin)
                text = [400, 401, *part[begin : begin + size], 402]
                (span,) = found_by_index(index, text)
                assert (span[0], span[1]) == (2, size)
                assert row * LENGTH + start + begin in span[2]
                planted += 1
            start += len(part)
    assert planted > 300


def test_what_comes_again_many_times_is_counted_whole(tmp_path: Path) -> None:
    pieces = [[[7] * LENGTH] for _ in range(50)]
    index = index_of(packed_of(tmp_path / "set", pieces), tmp_path / "index", 8)
    (span,) = index.passages(np.full(10, 7))
    assert (span.begin, span.tokens, len(span.places)) == (0, 10, 50 * (LENGTH - 9))
    (whole,) = [one for one in index.passages(np.full(30, 7)) if one.begin == 0]
    assert (whole.tokens, sorted(whole.places.tolist())) == (LENGTH, [row * LENGTH for row in range(50)])


def test_withheld_rows_are_not_in_it(tmp_path: Path) -> None:
    packed = packed_of(tmp_path / "set", [[list(range(100, 124))], [list(range(200, 224))]])
    manifest = read_json(packed.folder / "packed.json")
    manifest["train"]["shards"][0]["withheld"] = [1]
    write_json(packed.folder / "packed.json", manifest)
    index = index_of(PackedSet(packed.folder), tmp_path / "index")
    assert found_by_index(index, range(100, 124)) == [(0, 24, [0])]
    assert found_by_index(index, range(200, 224)) == []


def test_the_same_bytes_come_of_other_workers_and_shuffles_and_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = packed_of(tmp_path / "set", draw_pieces(random.Random(1), 90, 3), 3)
    make(packed, tmp_path / "one")
    make(packed, tmp_path / "three", workers=3)
    monkeypatch.setattr(text_index, "CHUNK_TOKENS", 5 * LENGTH)
    make(packed, tmp_path / "chunks")
    make(packed, tmp_path / "engine", runner="FnApiRunner", options={"direct_running_mode": "in_memory"})
    expected = files(tmp_path / "one")
    assert len(expected) == 25
    for name in ("three", "chunks", "engine"):
        assert files(tmp_path / name) == expected, name


def test_rows_stay_mapped_as_long_as_a_kernel_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are given addresses, which keep nothing: memory that was let go of would be read all the same."""
    mapped, read = dict[int, weakref.ref[MappedRows]](), list[str]()

    def map_rows(packed: PackedSet) -> MappedRows:
        made = text_index.MappedRows(packed.open_training(compare=False), packed.sequence_length, packed.dtype)
        mapped[int(made.rows.tokens.ctypes.data)] = weakref.ref(made)
        return made

    def watched(name: str) -> Callable[..., Any]:
        kernel = getattr(text_index, name)

        def call(*arguments: Any) -> Any:
            rows = next(one for one in arguments if isinstance(one, Rows))
            assert mapped[int(rows.tokens.ctypes.data)]() is not None, f"{name} reads rows that nobody holds"
            read.append(name)
            return kernel(*arguments)

        return call

    monkeypatch.setattr(text_index, "map_rows", map_rows)
    for name in ("list_places", "sort_buckets", "find_longest"):
        monkeypatch.setattr(text_index, name, watched(name))
    piece = list(range(2, 2 + LENGTH))
    index = index_of(packed_of(tmp_path / "set", [[piece], [piece]]), tmp_path / "index")
    assert [len(one.places) for one in index.passages(np.array(piece))] == [2]
    assert {*read} == {"list_places", "sort_buckets", "find_longest"}


def test_prints_leave_out_what_is_not_there_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(11)
    pieces = draw_pieces(rng, 400, 300)
    index = index_of(packed_of(tmp_path / "set", pieces, 3), tmp_path / "index")
    left: list[int] = []
    search = text_index.find_longest
    monkeypatch.setattr(
        text_index,
        "find_longest",
        lambda text, size, begins, *rest: left.append(len(begins)) or search(text, size, begins, *rest),
    )
    elsewhere = [rng.randrange(300, 900) for _ in range(1000)]
    assert found_by_index(index, elsewhere) == []
    assert sum(left) < 0.1 * len(elsewhere)
    there = [token for row in rng.sample(pieces, 20) for part in row for token in part]
    found = found_by_index(index, there)
    monkeypatch.setattr(text_index, "MOST_PRINTS", -1)
    monkeypatch.setattr(text_index, "MOST_ROWS", 0)
    assert found_by_index(index, there) == found
    assert len(found) > 20


def test_pages_are_asked_for_before_they_are_read_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, page, asked = np.random.default_rng(12), mmap.PAGESIZE // 4, list[tuple[int, int]]()

    class Mapping:
        def madvise(self, option: int, start: int, length: int) -> None:
            assert option == mmap.MADV_WILLNEED
            assert start % mmap.PAGESIZE == 0
            asked.append((start // mmap.PAGESIZE, length // mmap.PAGESIZE))

    monkeypatch.setattr(packed_files, "_mapping", lambda tokens: Mapping())
    firsts = rng.integers(0, 200 * page, 80)
    lasts = firsts + rng.integers(1, 3 * page, 80)
    packed_files.read_ahead(np.zeros(203 * page, np.uint32), firsts, lasts)
    pages = [number for begin, length in asked for number in range(begin, begin + length)]
    assert len(pages) == len({*pages})
    assert {*pages} == {
        place // page
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)
        for place in range(first, last)
    }
    assert len(asked) < 80


@pytest.mark.parametrize("interrupted", ["write_batches", "sort_buckets"])
def test_an_interrupted_attempt_ends_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    packed = packed_of(tmp_path / "set", draw_pieces(random.Random(2), 40, 3), 2)
    make(packed, tmp_path / "whole")
    module: Any = shuffle if interrupted == "write_batches" else text_index
    original, calls = getattr(module, interrupted), list[int]()

    def interrupt(*given: Any) -> Any:
        calls.append(1)
        if len(calls) % 2 == 0:
            raise InterruptedError("for the test")
        return original(*given)

    monkeypatch.setattr(module, interrupted, interrupt)
    attempts = 0
    while attempts < 20:
        attempts += 1
        try:
            make(packed, tmp_path / "again")
            break
        except InterruptedError:
            continue
    assert 1 < attempts < 20
    assert files(tmp_path / "again") == files(tmp_path / "whole")


def test_sorting_a_partition_takes_at_most_eight_bytes_for_each_of_its_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.random.default_rng(3).integers(0, 900, (20_000, LENGTH)).tolist()
    packed = packed_of(tmp_path / "set", [[row] for row in rows])
    sorting = list[Any]()
    monkeypatch.setattr(text_index, "CHUNK_TOKENS", 10_000)
    monkeypatch.setattr(text_index, "count_partitions", lambda size: 1)
    monkeypatch.setattr(
        text_index,
        "run_tasks",
        lambda job, tasks, process, context: (
            sorting.append(partial(process, tasks[0])) or run_tasks(job, tasks, process, context)
        ),
    )
    summary = make(packed, tmp_path / "index")
    buckets = len(files(tmp_path / "index")["buckets-00000.bin"]) // 4
    assert summary == {"places": 20_000 * (LENGTH - SHORTEST + 1), "partitions": 1}
    assert peak_bytes(sorting[0]) < 8 * summary["places"] + 32 * buckets
