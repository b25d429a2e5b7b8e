"""Tokens on their way to the shards of rows: on a cluster, and where the token parts lie in a store.

A shard of rows has pieces of nearly every token part. To open them is a request for each pair of the two, and the bytes
of a whole part. Instead the job `place` tells each part which of its tokens go to which shard, and a job over the parts
sends these: one row for each shard, whose tokens follow one another by where they begin in the part, and of one
beginning by how many they are. So whoever has the pieces of a shard knows where in that the tokens of each begin.

A task holds a part, what is wanted of it, and the same tokens once more.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial

import numpy as np
import pyarrow as pa

from gristmill.dataprep.context import Context
from gristmill.dataprep.files import as_path
from gristmill.dataprep.jobs.engine import Done, Task
from gristmill.dataprep.jobs.shuffled import Sent, Shuffled, run_shuffle
from gristmill.dataprep.shuffle import group_starts
from gristmill.dataprep.text.kernels import kernel
from gristmill.tokenize.packed_files import DTYPES, read_tokens

WANTED, SEND_JOB = "wanted", "tokens"
"""What `place` sends to the parts; the job, and what it sends to the shards."""


def wanted_of(placed: pa.Table, shards: np.ndarray) -> Sent:
    """Tell the parts which tokens the shards want.

    Args:
        placed: pieces (`place_pieces.PLACED_SCHEMA`).
        shards: int64 of shape (pieces,), where each goes.
    """
    rows = pa.table({"shard": shards, "first": placed["first"], "text": placed["text"]})
    return Sent(WANTED, rows, placed["part"].to_numpy().astype(np.int64))


def send_tokens(wanted: Shuffled, parts: Sequence[str], dtype: str, shards: int, context: Context) -> Shuffled:
    """Send the tokens of all parts to so many shards.

    Args:
        wanted: see `wanted_of`.
        parts: the files.
        dtype: of all tokens, by name.
    """
    tasks = [Task(f"{number:05d}", {"part": number}) for number in range(len(parts))]
    send = partial(send_part, wanted=wanted, parts=tuple(parts), dtype=dtype)
    return run_shuffle(SEND_JOB, tasks, send, context, {SEND_JOB: shards}, direct=True)[1][SEND_JOB]


def send_part(task: Task, wanted: Shuffled, parts: Sequence[str], dtype: str) -> Generator[Sent, None, Done]:
    """Send the tokens of one part: payload `part`."""
    rows = wanted.read(task.payload["part"])
    shard, first, text = (rows[name].to_numpy().astype(np.int64) for name in ("shard", "first", "text"))
    order = np.lexsort((text, first, shard))
    starts = group_starts(shard[order])
    tokens = np.empty(int(text.sum()), DTYPES[dtype])
    if len(tokens):
        copy_runs(read_tokens(as_path(parts[task.payload["part"]]), tokens.dtype), first[order], text[order], tokens)
    ends = np.concatenate([[0], np.cumsum(text[order])])[[*starts, len(order)]] * tokens.itemsize
    sent = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(starts), [None, pa.py_buffer(ends.astype(np.int64)), pa.py_buffer(tokens)]
    )
    yield Sent(SEND_JOB, pa.table({"tokens": sent}), shard[order][starts])
    return Done()


@kernel
def copy_runs(tokens: np.ndarray, first: np.ndarray, text: np.ndarray, out: np.ndarray) -> None:
    """Copy runs of tokens (int64: first of each, how many) to one after the other."""
    here = 0
    for run in range(len(first)):
        for step in range(text[run]):
            out[here + step] = tokens[first[run] + step]
        here += text[run]


def receive_tokens(sent: Shuffled, shard: int, dtype: np.dtype) -> np.ndarray:
    """All tokens of a shard, flat."""
    rows = sent.read(shard)["tokens"]
    return np.concatenate([np.empty(0, dtype), *(np.frombuffer(row.as_buffer(), dtype) for row in rows)])


def received_places(part: np.ndarray, first: np.ndarray, text: np.ndarray) -> np.ndarray:
    """Where in that the tokens of each piece of the shard begin: int64.

    Args:
        part, first, text: of the pieces, where their tokens lie and how many they are.
    """
    order = np.lexsort((text, first, part))
    places = np.empty(len(order), np.int64)
    places[order] = np.cumsum(text[order]) - text[order]
    return places
