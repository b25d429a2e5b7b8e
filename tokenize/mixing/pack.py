"""Writing the rows of a packed set: each shard gathers its pieces from the memory-mapped token parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numba import njit

from gristmill.dataprep.files import as_path, atomic_write, is_local
from gristmill.dataprep.jobs.engine import Done, Task
from gristmill.tokenize.mixing.draws import word_ids
from gristmill.tokenize.mixing.exclusion import documents_beside, drop_rows, empty_rows
from gristmill.tokenize.mixing.layouts import Layout
from gristmill.tokenize.mixing.streams import Pieces, Stream, cut_runs
from gristmill.tokenize.order import order_key, permute, stage_parts, unrank
from gristmill.tokenize.packed_files import DTYPES, PIECES_SCHEMA, files_of, read_tokens
from gristmill.tokenize.packed_writing import write_rows
from gristmill.tokenize.streaming.buffers import Buffers

MOST_PART_TOKENS = 2**40
"""Tokens of a part, which is one document shard's, are fewer by far."""


SHARDS = Buffers(most_kept=1)
"""The memory of the shard that a worker has just written serves for its next one."""


@dataclass(frozen=True)
class Documents:
    """Where the tokens of all documents lie, ordered by id.

    Attributes:
        words: uint64 of shape (n, 2), the ids.
        part: int64 of shape (n,), number of the token part.
        offset: int64 of shape (n,), first token within it.
        tokens: int64 of shape (n,), without an end of text.
    """

    words: np.ndarray
    part: np.ndarray
    offset: np.ndarray
    tokens: np.ndarray


@dataclass(frozen=True)
class Plan:
    """All that a worker must know to write a shard; the arrays are files in `folder`, for any machine to read.

    Attributes:
        folder: where `save` put the arrays.
        out: output folder of the stage.
        parts: token files, by number.
        dtype: of all tokens, by name.
        sequence_length: tokens per row.
        eos: id that ends a document.
        pad: id behind the last document of a row that is not full.
        seed: of the order of the rows.
        sources: names, in the order of the source numbers.
        stages: training rows of each source, for every stage in order.
        excluded: ids of the documents whose rows are emptied.
    """

    folder: str
    out: str
    parts: tuple[str, ...]
    dtype: str
    sequence_length: int
    eos: int
    pad: int
    seed: int
    sources: tuple[str, ...]
    stages: tuple[tuple[int, ...], ...]
    excluded: tuple[bytes, ...] = ()


def save(folder: Path, name: str, record: Documents | Stream | Layout) -> None:
    """Write the arrays of a record, each as a file."""
    for field, array in vars(record).items():
        # Every attempt writes its plan anew, so that none has to survive the machine.
        with atomic_write(folder / f"{name}.{field}.npy", durable=False) as sink:
            np.save(sink, array)


def train_stream(source: int) -> str:
    """The saved name of a source's training stream."""
    return f"train-{source}"


def validation_stream(source: int) -> str:
    """The saved name of a source's held-out stream."""
    return f"validation-{source}"


def layout_of(stream: str) -> str:
    """The saved name of the layout of a stream that is saved under some name."""
    return f"{stream}-layout"


def write_shard(task: Task, plan: Plan, token_bytes: str) -> Done:
    """Write a shard of training rows, or of a source's held-out rows: payload `source` is there for these."""
    if "source" in task.payload:
        return write_validation_shard(task, plan, token_bytes)
    return write_train_shard(task, plan)


def write_train_shard(task: Task, plan: Plan) -> Done:
    """Write training rows [first, first + rows): payload `file`, `first`, `rows`."""
    first, rows = task.payload["first"], task.payload["rows"]
    tokens = SHARDS.array((rows, plan.sequence_length), DTYPES[plan.dtype])
    sources, drawn = _rows_of_places(plan, np.arange(first, first + rows))
    documents, tables = Documents(**_load(plan.folder, "documents", Documents)), []
    for source in np.unique(sources).tolist():
        places = np.flatnonzero(sources == source)
        tables.append(_write_source(plan, documents, train_stream(source), source, drawn[places], places, first,
                                    tokens))
    pieces = pa.concat_tables(tables).sort_by([("row", "ascending"), ("start", "ascending")])
    filled = np.bincount(pieces["row"].to_numpy() - first, pieces["length"].to_numpy(), rows).astype(np.int64)
    pad_rows(tokens, filled, plan.pad)
    pieces, emptied = empty_rows(tokens, pieces, first, plan.excluded, plan.pad)
    path = as_path(plan.out) / task.payload["file"]
    return Done(files_of(path), {**write_rows(path, tokens, pieces, first), **emptied})


def _rows_of_places(plan: Plan, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which source is at each place of the files, and which of the rows that it was laid out in; both int64."""
    ends = np.cumsum([sum(counts) for counts in plan.stages])
    stages = np.searchsorted(ends, places, side="right")
    sources, drawn = np.empty_like(places), np.empty_like(places)
    for stage in np.unique(stages).tolist():
        counts, chosen = plan.stages[stage], np.flatnonzero(stages == stage)
        sources[chosen], ranked = unrank(counts, places[chosen] - (ends[stage] - sum(counts)))
        for source in np.unique(sources[chosen]).tolist():
            own = sources[chosen] == source
            key = order_key(plan.seed, "mix", "rows", *stage_parts(stage), plan.sources[source])
            before = sum(earlier[source] for earlier in plan.stages[:stage])
            drawn[chosen[own]] = before + permute(ranked[own], counts[source], key, inverse=True)
    return sources, drawn


def write_validation_shard(task: Task, plan: Plan, token_bytes: str) -> Done:
    """Write all held-out rows of a source: payload `file`, `source`, `rows`; also counts the text that they hold."""
    source, rows = task.payload["source"], task.payload["rows"]
    tokens = np.full((rows, plan.sequence_length), plan.pad, dtype=DTYPES[plan.dtype])
    order = np.arange(rows)
    documents = Documents(**_load(plan.folder, "documents", Documents))
    pieces = _write_source(plan, documents, validation_stream(source), source, order, order, 0, tokens)
    touched = documents_beside(pieces, plan.excluded)
    tokens, pieces = drop_rows(tokens, pieces, plan.excluded)
    path = as_path(plan.out) / task.payload["file"]
    entry = {**write_rows(path, tokens, pieces), **touched}
    with as_path(token_bytes).open("rb") as stream:
        sizes = np.load(stream)
    text_bytes = int(sizes[tokens].sum(dtype=np.int64))
    return Done(files_of(path), {**entry, "bytes": text_bytes})


def _write_source(
    plan: Plan, documents: Documents, name: str, source: int, rows: np.ndarray, places: np.ndarray, first: int,
    tokens: np.ndarray,
) -> pa.Table:
    """Fill `tokens[places]` with rows of a stream; returns their pieces as PIECES_SCHEMA."""
    stream = Stream(**_load(plan.folder, name, Stream))
    pieces = _pieces(stream, Layout(**_load(plan.folder, layout_of(name), Layout)), rows)
    document = stream.document[pieces.entry]
    _gather_parts(plan, documents, document, pieces, places, tokens)
    return pa.table({
        "row": first + places[pieces.place], "start": pieces.start.astype(np.int32),
        "length": pieces.length.astype(np.int32), "id": word_ids(documents.words[document]),
        "source": np.full(len(document), source, dtype=np.int32), "copy": stream.copy[pieces.entry],
        "offset": pieces.offset,
    }, schema=PIECES_SCHEMA)


def _pieces(stream: Stream, layout: Layout, rows: np.ndarray) -> Pieces:
    """The pieces of rows (int64 of shape (n,)), in the order asked for."""
    first = layout.first[rows]
    counts = layout.first[rows + 1] - first
    before = np.cumsum(counts) - counts
    run = np.arange(counts.sum()) + np.repeat(first - before, counts)
    length = layout.length[run].astype(np.int64)
    passed = np.concatenate([[0], np.cumsum(length)])
    start = passed[:-1] - np.repeat(passed[before], counts)
    return cut_runs(stream, np.repeat(np.arange(len(rows)), counts), start, layout.at[run], length)


def _gather_parts(
    plan: Plan, documents: Documents, document: np.ndarray, pieces: Pieces, places: np.ndarray, tokens: np.ndarray
) -> None:
    """Copy every piece from its token part: part by part, each read from front to back."""
    target = places[pieces.place] * plan.sequence_length + pieces.start
    origin = documents.offset[document] + pieces.offset
    length = documents.tokens[document]
    text = np.minimum(pieces.length, length - pieces.offset)
    flat = tokens.reshape(-1)
    flat[(target + text)[text < pieces.length]] = plan.eos
    part = documents.part[document]
    # No part is so large that its tokens cannot be numbered beside the parts' numbers in 64 bits.
    order = np.argsort(part * MOST_PART_TOKENS + origin, kind="stable")
    bounds = np.searchsorted(part[order], np.arange(len(plan.parts) + 1))
    for number in np.unique(part).tolist():
        chosen = order[bounds[number] : bounds[number + 1]]
        source = np.asarray(read_tokens(as_path(plan.parts[number]), DTYPES[plan.dtype]))
        gather(source, origin[chosen], target[chosen], text[chosen], flat)


@njit(nogil=True, cache=True)
def gather(source: np.ndarray, origin: np.ndarray, target: np.ndarray, length: np.ndarray, out: np.ndarray) -> None:
    """Copy runs: `out[target[i]:target[i] + length[i]] = source[origin[i]:origin[i] + length[i]]` for all i.

    Args:
        source: tokens, flat.
        origin: int64 of shape (n,).
        target: int64 of shape (n,).
        length: int64 of shape (n,).
        out: tokens, flat, of the dtype of `source`.
    """
    for i in range(len(origin)):
        out[target[i] : target[i] + length[i]] = source[origin[i] : origin[i] + length[i]]


@njit(nogil=True, cache=True)
def pad_rows(tokens: np.ndarray, filled: np.ndarray, pad: int) -> None:
    """Set the tokens (n, L) of each row behind its first `filled` (int64, shape (n,)) to the padding."""
    for row in range(len(tokens)):
        tokens[row, filled[row] :] = pad


def _load(folder: str, name: str, kind: type[Documents] | type[Stream] | type[Layout]) -> dict[str, Any]:
    arrays = {}
    for field in kind.__dataclass_fields__:
        path = as_path(folder) / f"{name}.{field}.npy"
        if is_local(path):
            # The plain view: indexing through `memmap` itself costs more than small arrays do.
            arrays[field] = np.asarray(np.load(path, mmap_mode="r"))
            continue
        with path.open("rb") as stream:
            arrays[field] = np.load(stream)
    return arrays
