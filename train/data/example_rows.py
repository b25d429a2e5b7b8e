"""Conversations, and replayed pre-training documents, as rows of a packed set with a
loss mask.

`best_fit` packs conversations into rows as pre-training packs documents
(`tokenize/packing/best_fit.py`); rows never cut a conversation. Attention and positions
separate the conversations of a row, so each has the loss that it would have alone. A
row holds examples of one set, and the sets' rows are merged like a mixture's sources,
so every prefix of the order has their proportions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from gristmill.core.arrays import offsets_of
from gristmill.core.files import write_json
from gristmill.core.seeds import seeded_bytes
from gristmill.tokenize.loss_masks import mask_name, write_mask
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_files import (
    DTYPES,
    FORMAT,
    FORMAT_WITH_PHASES,
    MANIFEST,
    PIECES_SCHEMA,
    PackedManifest,
    ShardEntry,
    TokenizerEntry,
    dtype_name,
    train_name,
)
from gristmill.tokenize.packed_writing import write_rows
from gristmill.tokenize.packing.best_fit import best_fit_rows
from gristmill.tokenize.shuffle import sources_of_rows
from gristmill.train.data.conversation_tokens import Conversation
from gristmill.train.loop.rows_read import RowsRead

SHARD_BYTES = 64 << 20
"""Most bytes of tokens in a shard."""


Row = Sequence[Conversation]
"""Conversations, or replayed documents, that share a row."""


@dataclass(frozen=True)
class WrittenRows:
    """Written packed set.

    Attributes:
        rows: number of rows.
        rows_per_set: likewise of each set.
        tokens: of the pieces.
        fill: share of the rows' positions that are not padding.
    """

    rows: int
    rows_per_set: Mapping[str, int]
    tokens: int
    fill: float


def packed_rows(
    pieces: Sequence[Conversation], length: int, best_fit: bool
) -> list[Row]:
    """Rows of at most `length` tokens that hold every piece once: packed, or one piece
    per row.
    """
    if not best_fit or not pieces:
        return [[piece] for piece in pieces]
    rows = best_fit_rows(np.array([len(piece.ids) for piece in pieces]), length)
    return [[pieces[place] for place in row] for row in rows]


def replayed_rows(trained: RowsRead, count: int) -> list[Row]:
    """First rows read by the pre-training, in its order; starts over if there are
    fewer.

    The first token of a piece has no loss, as no token of its document precedes it.
    """
    packed = trained.packed
    rows = trained.first(count)
    ids_of_row = piece_ids(packed, np.unique(rows))
    pieces_per_row: list[Row] = []
    for row, tokens, positions in zip(
        rows.tolist(), packed.read(rows), packed.positions(rows), strict=True
    ):
        starts = np.flatnonzero(positions == 0)
        ends = [*starts[1:], int((positions >= 0).sum())]
        ids = ids_of_row.get(row, [bytes(16)] * len(starts))
        pieces_per_row.append(
            [
                Conversation(
                    tokens[start:end],
                    positions[start:end] > 0,
                    False,
                    piece_id.hex(),
                )
                for piece_id, start, end in zip(ids, starts, ends, strict=True)
            ]
        )
    return pieces_per_row


def piece_ids(packed: PackedSet, rows: np.ndarray) -> dict[int, list[bytes]]:
    """Ids of the documents of each row that has any, in their order."""
    groups = packed.pieces(rows).group_by("row", use_threads=False)
    ids = groups.aggregate([("id", "list")])
    return dict(zip(ids["row"].to_pylist(), ids["id_list"].to_pylist(), strict=True))


def replay_count(tokens: int, length: int, share: float) -> int:
    """Number of full pre-training rows that make up `share` of all tokens, beside
    `tokens` tokens of conversations.
    """
    return round(share / (1.0 - share) * tokens / length)


def write_example_rows(
    folder: Path,
    sets: dict[str, list[Row]],
    length: int,
    tokenizer: TokenizerEntry,
    pad: int,
) -> WrittenRows:
    """Write the rows of all sets as one packed set with loss masks.

    Args:
        folder: output folder.
        sets: name -> its rows, at least one.
        length: tokens per row.
        tokenizer: vocab_size, eos, pad, sha256.
        pad: padding id.
    """
    counts = [len(rows) for rows in sets.values()]
    waiting = [iter(rows) for rows in sets.values()]
    ordered = [next(waiting[source]) for source in merged_order(counts).tolist()]
    return write_ordered_rows(
        folder, list(sets), ordered, [counts], length, tokenizer, pad
    )


def merged_order(*phases: Sequence[int]) -> np.ndarray:
    """Number of the set (int64) of each row of phases with some rows of each set."""
    return sources_of_rows(phases, np.arange(sum(map(sum, phases)), dtype=np.int64))


def write_ordered_rows(
    folder: Path,
    sets: Sequence[str],
    rows: Sequence[Row],
    phases: Sequence[Sequence[int]],
    length: int,
    tokenizer: TokenizerEntry,
    pad: int,
) -> WrittenRows:
    """Write rows in their order.

    Args:
        folder: output folder.
        sets: the names of the sets.
        rows: all rows, phase by phase, each phase in the merged order of its sets.
        phases: rows of each set, for each phase.
        length: tokens per row.
        tokenizer: vocab_size, eos, pad, sha256.
        pad: padding id.
    """
    dtype = dtype_name(tokenizer["vocab_size"])
    counts = [sum(column) for column in zip(*phases, strict=True)]
    source_of = merged_order(*phases)
    step = max(1, SHARD_BYTES // (length * DTYPES[dtype].itemsize))
    shards = [
        _write_shard(
            folder / train_name(number),
            rows[start : start + step],
            source_of[start : start + step],
            start,
            length,
            dtype,
            pad,
        )
        for number, start in enumerate(range(0, len(rows), step))
    ]
    manifest: PackedManifest = {
        "format": FORMAT,
        "dtype": dtype,
        "sequence_length": length,
        "sources": list(sets),
        "tokenizer": tokenizer,
        "validation": {},
        "train": {"rows": len(rows), "rows_per_source": counts, "shards": shards},
    }
    if len(phases) > 1:
        manifest["format"] = FORMAT_WITH_PHASES
        manifest["train"]["stages"] = [list(phase) for phase in phases]
    write_json(folder / MANIFEST, manifest)
    tokens = sum(len(piece.ids) for row in rows for piece in row)
    return WrittenRows(
        len(rows),
        dict(zip(sets, counts, strict=True)),
        tokens,
        tokens / (len(rows) * length),
    )


def _write_shard(
    path: Path,
    rows: Sequence[Row],
    sources: np.ndarray,
    first: int,
    length: int,
    dtype: str,
    pad: int,
) -> ShardEntry:
    tokens = np.full((len(rows), length), pad, DTYPES[dtype])
    trained = np.zeros((len(rows), length), bool)
    table = []
    for place, (row, source) in enumerate(zip(rows, sources.tolist(), strict=True)):
        start = 0
        for piece in row:
            size = len(piece.ids)
            tokens[place, start : start + size] = piece.ids
            trained[place, start : start + size] = piece.trained
            table.append(
                (first + place, start, size, bytes.fromhex(piece.example), source, 0, 0)
            )
            start += size
    columns = zip(*table, strict=True) if table else [[]] * len(PIECES_SCHEMA)
    pieces = pa.table(
        [
            pa.array(column, field.type)
            for column, field in zip(columns, PIECES_SCHEMA, strict=True)
        ],
        schema=PIECES_SCHEMA,
    )
    entry = write_rows(path, tokens, pieces, first)
    mask = path.with_name(mask_name(path.name))
    entry["beside"][mask.name] = write_mask(mask, trained)
    return entry


def quotas(trained_tokens: Sequence[int], weights: Sequence[float]) -> list[float]:
    """Trained tokens to draw from each set: proportional to the weights, every set at
    least once.

    The largest set relative to its weight is drawn exactly once, all others more often.

    Args:
        trained_tokens: of each set, positive.
        weights: of each set, positive.
    """
    scale = max(
        tokens / weight for tokens, weight in zip(trained_tokens, weights, strict=True)
    )
    return [scale * weight for weight in weights]


def copies(
    trained_tokens: np.ndarray, ids: Sequence[str], quota: float, seed: int
) -> np.ndarray:
    """Number of copies of each example (int64, shape (n,)): full passes, then the first
    examples by a hash of seed and id.

    The drawn tokens differ from the quota by at most half of the longest example, and
    the copies of two examples by at most one.

    Args:
        trained_tokens: (n,) of each example, positive.
        ids: of each example.
        quota: trained tokens to draw.
        seed: of the hash.
    """
    total = int(trained_tokens.sum())
    passes, remainder = divmod(quota, total)
    keys = [seeded_bytes(seed, example_id, size=16) for example_id in ids]
    order = sorted(range(len(keys)), key=lambda place: (keys[place], place))
    reached = offsets_of(trained_tokens[order])
    repeats = np.full(len(keys), int(passes), np.int64)
    repeats[order[: int(np.abs(reached - remainder).argmin())]] += 1
    return repeats
