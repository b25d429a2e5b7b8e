"""Plans and tokens that workers of a mixture receive as files."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from functools import partial
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pytest

from gristmill.core.files import as_path
from gristmill.core.stage_context import Context
from gristmill.dataprep.runners.shuffle import Sent, Shuffled, run_shuffle
from gristmill.dataprep.runners.tasks import Done, Task
from gristmill.mixtures.schema.engine import BeamEngine
from gristmill.tokenize.mixing.send_tokens import (
    WANTED,
    receive_tokens,
    received_places,
    send_tokens,
    wanted_of,
)
from gristmill.tokenize.mixing.streams import Segment
from gristmill.tokenize.packing.array_files import ALIGNMENT, load_record, save
from gristmill.tokenize.packing.write_shards import Contents, RowPlan, blocks_of


@pytest.mark.parametrize("number", [0, 1, 3, 500])
@pytest.mark.parametrize("remote", [False, True])
def test_record_round_trips_locally_and_remotely(
    tmp_path: Path, number: int, remote: bool
) -> None:
    folder = as_path(f"memory://plan/{number}") if remote else tmp_path
    rng = np.random.default_rng(number)
    words = rng.integers(0, 2**64, (number, 2), dtype=np.uint64)
    segment = Segment(
        np.array([0, number]),
        words,
        np.arange(number, dtype=np.int32),
        rng.integers(0, 2**31, number).astype(np.int32),
        *rng.integers(0, 2**62, (2, number)),
    )
    assert save(folder, "segment", segment).exists()
    loaded = load_record(folder, "segment", Segment)
    for field, array in vars(segment).items():
        loaded_array = getattr(loaded, field)
        assert (loaded_array.dtype, loaded_array.shape, loaded_array.tolist()) == (
            array.dtype,
            array.shape,
            array.tolist(),
        )
        assert remote or loaded_array.ctypes.data % ALIGNMENT == 0
    fsspec.filesystem("memory").rm("/", recursive=True)


EOS, PAD, LENGTH, ROWS = 9001, 9002, 16, 23
PART_TOKENS = [[5, 0, 40], [], [1, 30, 7, 0], [3]]
"""Tokens of the documents of each part: some documents have only an end of text, one
part has no document.
"""


def parts_and_documents(
    folder: str,
) -> tuple[tuple[str, ...], list[tuple[int, int, int]], list[list[int]]]:
    """Write token parts, and return their paths, (part, first token, tokens) of each
    document, and its tokens.
    """
    rng, paths, places, texts = np.random.default_rng(1), [], [], []
    for number, sizes in enumerate(PART_TOKENS):
        flat = rng.integers(0, 9000, sum(sizes), dtype=np.uint16)
        paths.append(f"{folder}/part-{number}.bin")
        with fsspec.open(paths[-1], "wb") as sink:
            sink.write(flat.tobytes())
        for first, size in zip(np.cumsum(sizes) - sizes, sizes, strict=True):
            places.append((number, int(first), size))
            texts.append([*flat[first : first + size].tolist(), EOS])
    return tuple(paths), places, texts


def rows_and_contents(
    texts: list[list[int]], places: list[tuple[int, int, int]], document: np.ndarray
) -> tuple[list[list[int]], Contents]:
    """Fill rows with documents in turn, cut where a row is full; every third row is
    padded.
    """
    rows: list[list[int]] = [[]]
    pieces = []
    for number in document.tolist():
        offset = 0
        while offset < len(texts[number]):
            room = (LENGTH if len(rows) % 3 else LENGTH // 2) - len(rows[-1])
            if not room:
                rows.append([])
                continue
            chunk = texts[number][offset : offset + room]
            part, first, tokens = places[number]
            pieces.append(
                (
                    len(rows) - 1,
                    len(rows[-1]),
                    len(chunk),
                    0,
                    0,
                    0,
                    offset,
                    part,
                    first + offset,
                    min(len(chunk), tokens - offset),
                )
            )
            rows[-1] += chunk
            offset += len(chunk)
    pieces = [piece for piece in pieces if piece[0] < ROWS]
    padded = [row + [PAD] * (LENGTH - len(row)) for row in rows[:ROWS]]
    return padded, Contents(*np.array(pieces, dtype=np.int64).T)


def test_blocks_of_any_size_have_the_tokens_of_the_pieces(tmp_path: Path) -> None:
    parts, places, texts = parts_and_documents(str(tmp_path))
    expected, contents = rows_and_contents(
        texts, places, np.random.default_rng(2).integers(0, len(texts), 400)
    )
    plan = RowPlan(Shuffled(tmp_path, 0), "", parts, "uint16", LENGTH, EOS, PAD)
    for block_rows in (1, 4, ROWS, None):
        blocks = [
            block.tolist() for block in blocks_of(plan, contents, ROWS, block_rows)
        ]
        assert len(blocks) == (1 if block_rows is None else -(-ROWS // block_rows))
        assert [row for block in blocks for row in block] == expected
    no_pieces = Contents(
        *(column[:0] for column in vars(contents).values() if column is not None)
    )
    assert [block.shape for block in blocks_of(plan, no_pieces, 0)] == [(0, LENGTH)]


@pytest.mark.parametrize("form", ["files", "engine"])
def test_sent_tokens_make_the_same_rows_without_the_parts(
    tmp_path: Path, form: str
) -> None:
    """Documents repeat in the rows, and some pieces are only an end of text."""
    parts, places, texts = parts_and_documents(str(tmp_path))
    expected, contents = rows_and_contents(
        texts, places, np.random.default_rng(2).integers(0, len(texts), 400)
    )
    engine = (
        {"runner": "FnApiRunner", "options": {"direct_running_mode": "in_memory"}}
        if form == "engine"
        else {}
    )
    context = Context(
        tmp_path / "work",
        "mix",
        BeamEngine(workers=1, shuffle=form, **engine),  # type: ignore[arg-type]
        emit=lambda event: None,
    )
    placed = pa.table(
        {name: getattr(contents, name) for name in ("part", "first", "text")}
    )
    # Another shard requests the first pieces, and the last shard requests nothing.
    shards = np.concatenate([np.full(len(placed), 1), np.zeros(5, np.int64)])
    tell = partial(
        tell_parts, placed=pa.concat_tables([placed, placed.slice(0, 5)]), shards=shards
    )
    requested = run_shuffle("place", [Task("0")], tell, context, {WANTED: len(parts)})[
        1
    ][WANTED]
    sent = send_tokens(requested, parts, "uint16", 3, context)
    tokens = [receive_tokens(sent, shard, np.dtype(np.uint16)) for shard in range(3)]
    assert [len(shard_tokens) for shard_tokens in tokens] == [
        int(contents.text[:5].sum()),
        int(contents.text.sum()),
        0,
    ]
    begins = received_places(contents.part, contents.first, contents.text)
    received = replace(
        contents, part=np.zeros_like(contents.part), first=begins, sent=tokens[1]
    )
    plan = RowPlan(Shuffled(tmp_path, 0), "", ("nowhere",), "uint16", LENGTH, EOS, PAD)
    assert [
        row for block in blocks_of(plan, received, ROWS, 4) for row in block.tolist()
    ] == expected


def tell_parts(
    task: Task, placed: pa.Table, shards: np.ndarray
) -> Generator[Sent, None, Done]:
    yield wanted_of(placed, shards)
    return Done()


def test_ids_beyond_16_bits_are_copied_unchanged(tmp_path: Path) -> None:
    flat = np.arange(70_000, 70_040, dtype=np.uint32)
    flat.tofile(tmp_path / "part.bin")
    column_of = [np.array([number], dtype=np.int64) for number in range(41)]
    contents = Contents(
        column_of[0],
        column_of[0],
        column_of[12],
        np.zeros((1, 2), np.uint64),
        column_of[0],
        column_of[0],
        column_of[6],
        column_of[0],
        column_of[10],
        column_of[12],
    )
    plan = RowPlan(
        Shuffled(tmp_path, 0),
        "",
        (str(tmp_path / "part.bin"),),
        "uint32",
        LENGTH,
        EOS,
        PAD,
    )
    (block,) = blocks_of(plan, contents, 1)
    assert block[0, :12].tolist() == list(range(70_010, 70_022))
