"""The index of training rows: every passage of a text is found at its full length and
at all places.
"""

from __future__ import annotations

import mmap
import random
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.core.files import read_json, write_json
from gristmill.core.stage_context import Context
from gristmill.dataprep.runners import shuffle
from gristmill.dataprep.runners.tasks import run_tasks
from gristmill.mixtures.schema.engine import BeamEngine
from gristmill.tokenize import packed_files, text_index
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.suffixes import MappedRows, Rows
from gristmill.tokenize.text_index import OpenIndex
from tests.packed_sets import piece_table, write_packed_set
from tests.tokenize.test_mix_memory import peak_bytes

LENGTH, SHORTEST = 24, 4


def packed_of(
    folder: Path,
    pieces: Sequence[Sequence[Sequence[int]]],
    shards: int = 1,
    vocab: int = 1000,
) -> PackedSet:
    """Write a set whose rows are lists of document pieces, each a list of tokens, with
    padding at the end.
    """
    rows = np.zeros((len(pieces), LENGTH), np.int64)
    places = list[tuple[int, int, int]]()
    for row, parts in enumerate(pieces):
        start = 0
        for part in parts:
            rows[row, start : start + len(part)] = part
            places.append((row, start, len(part)))
            start += len(part)
    row_numbers, starts, lengths = zip(*places, strict=True)
    write_packed_set(
        folder,
        rows,
        {"a": len(rows)},
        {"vocab_size": vocab, "eos": 0, "pad": 1, "sha256": ""},
        pieces=piece_table(
            row=row_numbers,
            start=starts,
            length=lengths,
            id=[number.to_bytes(16) for number in range(len(places))],
        ),
        shard_rows=-(-len(rows) // shards),
    )
    return PackedSet(folder)


def index_of(
    folder: Path,
    pieces: Sequence[Sequence[Sequence[int]]],
    shortest: int = SHORTEST,
    **options: int,
) -> OpenIndex:
    """Write a set and its index; options as of `packed_of`."""
    packed = packed_of(folder / "set", pieces, **options)
    build_index(packed, folder / "index", shortest)
    return OpenIndex(folder / "index", packed)


def build_index(
    packed: PackedSet, folder: Path, shortest: int = SHORTEST, **options: Any
) -> text_index.IndexSummary:
    context = Context(
        folder.with_name(f"{folder.name}.work"),
        beam=BeamEngine(**{"workers": 1, **options}),
        emit=lambda event: None,
    )
    context.work.mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    return text_index.run(
        {"mix": packed.folder}, {"shortest_span": shortest}, folder, context
    )


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def brute_force_passages(
    pieces: Sequence[Sequence[Sequence[int]]], text: Sequence[int], shortest: int
) -> list[tuple[int, int, list[int]]]:
    """Return (begin, tokens, places) of each passage, by comparing the text with every
    place of every piece.
    """
    longest: list[tuple[int, list[int]]] = []
    for begin in range(len(text)):
        longest_match, places = 0, list[int]()
        for row, parts in enumerate(pieces):
            start = 0
            for part in parts:
                for offset in range(len(part)):
                    same = 0
                    while (
                        offset + same < len(part)
                        and begin + same < len(text)
                        and part[offset + same] == text[begin + same]
                    ):
                        same += 1
                    if same > longest_match:
                        longest_match, places = same, []
                    if same == longest_match and longest_match >= shortest:
                        places.append(row * LENGTH + start + offset)
                start += len(part)
        longest.append((longest_match if longest_match >= shortest else 0, places))
    return [
        (begin, size, places)
        for begin, (size, places) in enumerate(longest)
        if size and not (begin and longest[begin - 1][0] == size + 1)
    ]


def indexed_passages(
    index: OpenIndex, text: Sequence[int]
) -> list[tuple[int, int, list[int]]]:
    return [
        (passage.begin, passage.tokens, sorted(passage.places.tolist()))
        for passage in index.passages(np.array(text))
    ]


def draw_pieces(rng: random.Random, rows: int, vocab: int) -> list[list[list[int]]]:
    """Draw rows of few distinct tokens, so that passages recur; some rows are not
    full.
    """
    pieces = []
    for _ in range(rows):
        row: list[list[int]] = []
        num_remaining = LENGTH - rng.choice([0, 0, 3])
        while num_remaining:
            size = rng.randint(1, num_remaining)
            row.append([rng.randrange(vocab) for _ in range(size)])
            num_remaining -= size
        pieces.append(row)
    return pieces


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(2, 5),
    st.integers(1, 12),
    st.sampled_from([1000, 70_000]),
)
def test_every_passage_is_found_at_full_length_and_all_places(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    words: int,
    rows: int,
    vocab: int,
) -> None:
    rng, folder = random.Random(seed), tmp_path_factory.mktemp("set")
    pieces = draw_pieces(rng, rows, words)
    index = index_of(folder, pieces, shards=min(rows, 3), vocab=vocab)
    for _ in range(4):
        text = [rng.randrange(words) for _ in range(rng.randint(0, 40))]
        assert indexed_passages(index, text) == brute_force_passages(
            pieces, text, SHORTEST
        ), f"seed {seed}"


def test_passage_ends_with_its_document_or_row(tmp_path: Path) -> None:
    # one document, cut by the end of a row
    first, second = list(range(100, 124)), list(range(124, 148))
    # two documents in a row, and padding
    third, fourth = list(range(200, 212)), list(range(212, 222))
    pieces = [[first], [second], [third, fourth]]
    index = index_of(tmp_path, pieces, 8)
    assert indexed_passages(index, [*first, *second]) == [(0, 24, [0]), (24, 24, [24])]
    assert indexed_passages(index, [*third, *fourth, 0, 0]) == [
        (0, 12, [48]),
        (12, 10, [60]),
    ]
    assert indexed_passages(index, first[-8:]) == [(0, 8, [16])]
    assert indexed_passages(index, first[-7:]) == []
    assert indexed_passages(index, [0] * 9) == []


def test_every_long_enough_span_of_a_document_is_found(tmp_path: Path) -> None:
    rng = random.Random(5)
    pieces = draw_pieces(rng, 60, 300)
    index = index_of(tmp_path, pieces, 8, shards=4)
    planted = 0
    for row, parts in enumerate(pieces):
        start = 0
        for part in parts:
            for begin in range(len(part) - 7):
                size = rng.randint(8, len(part) - begin)
                text = [400, 401, *part[begin : begin + size], 402]
                (span,) = indexed_passages(index, text)
                assert (span[0], span[1]) == (2, size)
                assert row * LENGTH + start + begin in span[2]
                planted += 1
            start += len(part)
    assert planted > 300


def test_all_repetitions_of_a_passage_are_counted(tmp_path: Path) -> None:
    pieces = [[[7] * LENGTH] for _ in range(50)]
    index = index_of(tmp_path, pieces, 8)
    (span,) = index.passages(np.full(10, 7))
    assert (span.begin, span.tokens, len(span.places)) == (0, 10, 50 * (LENGTH - 9))
    (full_row,) = [
        passage for passage in index.passages(np.full(30, 7)) if passage.begin == 0
    ]
    assert (full_row.tokens, sorted(full_row.places.tolist())) == (
        LENGTH,
        [row * LENGTH for row in range(50)],
    )


def test_withheld_rows_are_not_indexed(tmp_path: Path) -> None:
    packed = packed_of(
        tmp_path / "set", [[list(range(100, 124))], [list(range(200, 224))]]
    )
    manifest = read_json(packed.folder / "packed.json")
    manifest["train"]["shards"][0]["withheld"] = [1]
    write_json(packed.folder / "packed.json", manifest)
    packed = PackedSet(packed.folder)
    build_index(packed, tmp_path / "index")
    index = OpenIndex(tmp_path / "index", packed)
    assert indexed_passages(index, range(100, 124)) == [(0, 24, [0])]
    assert indexed_passages(index, range(200, 224)) == []


@pytest.mark.slow
def test_bytes_do_not_depend_on_workers_engine_or_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = packed_of(tmp_path / "set", draw_pieces(random.Random(1), 90, 3), 3)
    build_index(packed, tmp_path / "one")
    build_index(packed, tmp_path / "three", workers=3)
    monkeypatch.setattr(text_index, "CHUNK_TOKENS", 5 * LENGTH)
    build_index(packed, tmp_path / "chunks")
    build_index(
        packed,
        tmp_path / "engine",
        runner="FnApiRunner",
        options={"direct_running_mode": "in_memory"},
    )
    expected = files(tmp_path / "one")
    assert len(expected) == 25
    for name in ("three", "chunks", "engine"):
        assert files(tmp_path / name) == expected, name


def test_rows_stay_mapped_while_a_kernel_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels get bare addresses, which keep no memory alive."""
    mapped, read = dict[int, weakref.ref[MappedRows]](), list[str]()

    def map_rows(packed: PackedSet) -> MappedRows:
        mapped_rows = text_index.MappedRows(
            packed.open_training(compare=False), packed.sequence_length, packed.dtype
        )
        mapped[int(mapped_rows.rows.tokens.ctypes.data)] = weakref.ref(mapped_rows)
        return mapped_rows

    def watched(name: str) -> Callable[..., Any]:
        kernel = getattr(text_index, name)

        def call(*arguments: Any) -> Any:
            rows = next(
                argument for argument in arguments if isinstance(argument, Rows)
            )
            assert mapped[int(rows.tokens.ctypes.data)]() is not None, (
                f"{name} reads unmapped rows"
            )
            read.append(name)
            return kernel(*arguments)

        return call

    monkeypatch.setattr(text_index, "map_rows", map_rows)
    for name in ("list_places", "sort_buckets", "find_longest"):
        monkeypatch.setattr(text_index, name, watched(name))
    piece = list(range(2, 2 + LENGTH))
    index = index_of(tmp_path, [[piece], [piece]])
    assert [len(passage.places) for passage in index.passages(np.array(piece))] == [2]
    assert {*read} == {"list_places", "sort_buckets", "find_longest"}


def test_prints_skip_only_absent_passages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(11)
    pieces = draw_pieces(rng, 400, 300)
    index = index_of(tmp_path, pieces, shards=3)
    searched: list[int] = []
    search = text_index.find_longest
    monkeypatch.setattr(
        text_index,
        "find_longest",
        lambda text, size, begins, *arguments: (
            searched.append(len(begins)) or search(text, size, begins, *arguments)
        ),
    )
    unindexed_tokens = [rng.randrange(300, 900) for _ in range(1000)]
    assert indexed_passages(index, unindexed_tokens) == []
    assert sum(searched) < 0.1 * len(unindexed_tokens)
    indexed_tokens = [
        token for row in rng.sample(pieces, 20) for part in row for token in part
    ]
    passages = indexed_passages(index, indexed_tokens)
    monkeypatch.setattr(text_index, "MOST_PRINTS", -1)
    monkeypatch.setattr(text_index, "MOST_ROWS", 0)
    assert indexed_passages(index, indexed_tokens) == passages
    assert len(passages) > 20


def test_pages_are_prefetched_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, page, requests = (
        np.random.default_rng(12),
        mmap.PAGESIZE // 4,
        list[tuple[int, int]](),
    )

    class Mapping:
        def madvise(self, option: int, start: int, length: int) -> None:
            assert option == mmap.MADV_WILLNEED
            assert start % mmap.PAGESIZE == 0
            requests.append((start // mmap.PAGESIZE, length // mmap.PAGESIZE))

    monkeypatch.setattr(packed_files, "_mapping", lambda tokens: Mapping())
    firsts = rng.integers(0, 200 * page, 80)
    lasts = firsts + rng.integers(1, 3 * page, 80)
    packed_files.read_ahead(np.zeros(203 * page, np.uint32), firsts, lasts)
    pages = [
        number for begin, length in requests for number in range(begin, begin + length)
    ]
    assert len(pages) == len({*pages})
    assert {*pages} == {
        place // page
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)
        for place in range(first, last)
    }
    assert len(requests) < 80


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", ["write_batches", "sort_buckets"])
def test_resumed_index_has_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    packed = packed_of(tmp_path / "set", draw_pieces(random.Random(2), 40, 3), 2)
    build_index(packed, tmp_path / "whole")
    module: Any = shuffle if interrupted == "write_batches" else text_index
    original, calls = getattr(module, interrupted), list[int]()

    def interrupt(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) % 2 == 0:
            raise InterruptedError("for the test")
        return original(*arguments)

    monkeypatch.setattr(module, interrupted, interrupt)
    attempts = 0
    while attempts < 20:
        attempts += 1
        try:
            build_index(packed, tmp_path / "again")
            break
        except InterruptedError:
            continue
    assert 1 < attempts < 20
    assert files(tmp_path / "again") == files(tmp_path / "whole")


@pytest.mark.slow
def test_sorting_a_partition_takes_at_most_eight_bytes_per_place(
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
            sorting.append(partial(process, tasks[0]))
            or run_tasks(job, tasks, process, context)
        ),
    )
    summary = build_index(packed, tmp_path / "index")
    buckets = len(files(tmp_path / "index")["buckets-00000.bin"]) // 4
    assert summary == text_index.IndexSummary(20_000 * (LENGTH - SHORTEST + 1), 1)
    assert peak_bytes(sorting[0]) < 8 * summary.places + 32 * buckets
