"""Writing the rows of a packed set: each shard gathers its pieces from the memory-mapped token parts."""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.files import as_path
from gristmill.dataprep.jobs.engine import Done, Task
from gristmill.tokenize.mixing.contents import content_of, in_order
from gristmill.tokenize.mixing.exclusion import Emptied, documents_beside, drop_rows
from gristmill.tokenize.mixing.gathering import blocks_of
from gristmill.tokenize.mixing.plan import Documents, Plan, load_record, train_stream, validation_stream
from gristmill.tokenize.order import half_bits_of, order_key, round_keys, stage_parts
from gristmill.tokenize.order_kernels import permute_all, unrank_all
from gristmill.tokenize.packed_files import files_of
from gristmill.tokenize.packed_writing import write_blocks, write_rows


def write_shard(task: Task, plan: Plan, token_bytes: str) -> Done:
    """Write a shard of training rows, or of a source's held-out rows: payload `source` is there for these."""
    if "source" in task.payload:
        return write_validation_shard(task, plan, token_bytes)
    return write_train_shard(task, plan)


def write_train_shard(task: Task, plan: Plan) -> Done:
    """Write training rows [first, first + rows): payload `file`, `first`, `rows`."""
    first, rows = task.payload["first"], task.payload["rows"]
    sources, drawn = _rows_of_places(plan, np.arange(first, first + rows))
    chosen = {source: np.flatnonzero(sources == source) for source in np.unique(sources).tolist()}
    contents = in_order([content_of(plan, train_stream(source), source, drawn[places], places)
                         for source, places in chosen.items()], rows)
    documents = load_record(plan.folder, "documents", Documents)
    emptied = Emptied(contents.table(documents, first), first, plan.excluded, plan.pad)
    path = as_path(plan.out) / task.payload["file"]
    blocks = emptied.blocks(blocks_of(plan, documents, contents, rows))
    return Done(files_of(path), {**write_blocks(path, blocks, emptied.pieces, first), **emptied.entry()})


def _rows_of_places(plan: Plan, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which source is at each place of the files, and which of the rows that it was laid out in; both int64."""
    ends = np.cumsum([sum(counts) for counts in plan.stages])
    stages = np.searchsorted(ends, places, side="right")
    sources, drawn = np.empty_like(places), np.empty_like(places)
    for stage in np.unique(stages).tolist():
        counts, chosen = np.array(plan.stages[stage], dtype=np.int64), np.flatnonzero(stages == stage)
        own, ranked = np.empty_like(chosen), np.empty_like(chosen)
        unrank_all(counts, places[chosen] - (ends[stage] - counts.sum()), own, ranked)
        keys = np.array([round_keys(order_key(plan.seed, "mix", "rows", *stage_parts(stage), name))[::-1]
                         for name in plan.sources])
        permute_all(own, ranked, counts, np.array([half_bits_of(count) for count in counts.tolist()]), keys, True)
        before = np.array(plan.stages[:stage], dtype=np.int64).reshape(stage, len(counts)).sum(axis=0)
        sources[chosen], drawn[chosen] = own, before[own] + ranked
    return sources, drawn


def write_validation_shard(task: Task, plan: Plan, token_bytes: str) -> Done:
    """Write all held-out rows of a source: payload `file`, `source`, `rows`; also counts the text that they hold."""
    source, rows = task.payload["source"], task.payload["rows"]
    order = np.arange(rows)
    documents = load_record(plan.folder, "documents", Documents)
    contents = content_of(plan, validation_stream(source), source, order, order)
    tokens = next(blocks_of(plan, documents, contents, rows, block_rows=rows))
    pieces = contents.table(documents, 0)
    touched = documents_beside(pieces, plan.excluded)
    tokens, pieces = drop_rows(tokens, pieces, plan.excluded)
    path = as_path(plan.out) / task.payload["file"]
    entry = {**write_rows(path, tokens, pieces), **touched}
    with as_path(token_bytes).open("rb") as stream:
        sizes = np.load(stream)
    text_bytes = int(sizes[tokens].sum(dtype=np.int64))
    return Done(files_of(path), {**entry, "bytes": text_bytes})
