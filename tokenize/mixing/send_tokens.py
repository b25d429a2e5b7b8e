"""Transfer of tokens to the shards of rows: on a cluster, with token parts in an object
store, or with more parts than a process can map.

A shard of rows has pieces of nearly every token part. Opening the parts would cost one
request per pair of shard and part, and the bytes of whole parts. Instead the job
`place` sends each part the ranges that every shard needs, and a job over the parts
sends the tokens: one row per shard, its ranges ordered by first token, then by length.
The pieces of a shard thus determine the location of their tokens in it.

A task holds one part, its requests, and the requested tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pyarrow as pa

from gristmill.core.arrays import offsets_of
from gristmill.core.files import as_path
from gristmill.core.stage_context import Context
from gristmill.dataprep.runners.shuffle import Sending, Sent, Shuffled, run_shuffle
from gristmill.dataprep.runners.tasks import Done, Task
from gristmill.dataprep.shuffle_format import group_starts
from gristmill.dataprep.text.kernels import kernel
from gristmill.tokenize.packed_files import DTYPES, read_tokens

WANTED, SEND_JOB = "wanted", "tokens"
"""Requests from `place` to the parts; name of the job, and of its output to the
shards.
"""


def wanted_of(placed: pa.Table, shards: np.ndarray) -> Sent:
    """Requests of the shards for tokens of the parts.

    Args:
        placed: pieces (`row_layout.PLACED_SCHEMA`).
        shards: int64 of shape (pieces,), target of each piece.
    """
    rows = pa.table({"shard": shards, "first": placed["first"], "text": placed["text"]})
    return Sent(WANTED, rows, placed["part"].to_numpy().astype(np.int64))


def send_tokens(
    wanted: Shuffled, parts: Sequence[str], dtype: str, shards: int, context: Context
) -> Shuffled:
    """Send the tokens of all parts to `shards` shards.

    Args:
        wanted: see `wanted_of`.
        parts: the files.
        dtype: of all tokens, by name.
    """
    tasks = [Task(f"{number:05d}", {"part": number}) for number in range(len(parts))]
    send = partial(send_part, wanted=wanted, parts=tuple(parts), dtype=dtype)
    return run_shuffle(SEND_JOB, tasks, send, context, {SEND_JOB: shards})[1][SEND_JOB]


def send_part(
    task: Task, wanted: Shuffled, parts: Sequence[str], dtype: str
) -> Sending:
    """Send the tokens of one part: payload `part`."""
    rows = wanted.read(task.payload["part"])
    shard, first, text = (
        rows[name].to_numpy().astype(np.int64) for name in ("shard", "first", "text")
    )
    order = np.lexsort((text, first, shard))
    starts = group_starts(shard[order])
    tokens = np.empty(int(text.sum()), DTYPES[dtype])
    if len(tokens):
        copy_runs(
            read_tokens(as_path(parts[task.payload["part"]]), tokens.dtype),
            first[order],
            text[order],
            tokens,
        )
    ends = offsets_of(text[order])[[*starts, len(order)]] * tokens.itemsize
    sent = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(),
        len(starts),
        [None, pa.py_buffer(ends.astype(np.int64)), pa.py_buffer(tokens)],
    )
    yield Sent(SEND_JOB, pa.table({"tokens": sent}), shard[order][starts])
    return Done()


@kernel
def copy_runs(
    tokens: np.ndarray, first: np.ndarray, text: np.ndarray, out: np.ndarray
) -> None:
    """Copy runs of tokens (int64: first of each, how many) to one after the other."""
    here = 0
    for run in range(len(first)):
        for step in range(text[run]):
            out[here + step] = tokens[first[run] + step]
        here += text[run]


def receive_tokens(sent: Shuffled, shard: int, dtype: np.dtype) -> np.ndarray:
    """All tokens of a shard, flat."""
    rows = sent.read(shard)["tokens"]
    return np.concatenate(
        [np.empty(0, dtype), *(np.frombuffer(row.as_buffer(), dtype) for row in rows)]
    )


def received_places(
    part: np.ndarray, first: np.ndarray, text: np.ndarray
) -> np.ndarray:
    """First token (int64) of each piece among the tokens received by its shard."""
    order = np.lexsort((text, first, part))
    places = np.empty(len(order), np.int64)
    places[order] = np.cumsum(text[order]) - text[order]
    return places
