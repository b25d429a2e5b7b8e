"""Spans that repeat in the corpus: lines and paragraphs (`lines.py`), or windows of words
(`exact_substring.py`).

A shard sends each distinct span once, with its first copy in the shard, so that a text
on a million pages costs no more than any other. The partition of its key replies with
the first copy in the corpus. Spans are identified by a hash of 128 bits: among n
distinct spans about n^2 / 2^129 pairs share one by chance (10^10 spans: 10^-19).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from gristmill.core.stage_context import Context
from gristmill.dataprep.annotate_batches import JudgedTexts, read_judged
from gristmill.dataprep.conservation import add_counts
from gristmill.dataprep.document_numbers import Numbering
from gristmill.dataprep.documents import Inputs
from gristmill.dataprep.runners.shuffle import (
    Sender,
    Sending,
    Sent,
    Shuffled,
    run_stream,
)
from gristmill.dataprep.runners.tasks import (
    Done,
    OfShard,
    PartitionTask,
    ShardTask,
    partition_tasks,
    shard_tasks,
)
from gristmill.dataprep.shuffle_format import (
    columns_of,
    find_pairs,
    group_starts,
    group_sums,
    hash_partitions,
    sorted_columns,
    spread_groups,
)
from gristmill.mixtures.steps.dedup import DedupLines, DedupSubstrings

KEY = ("high", "low")
"""Columns of a span's hash."""
COPIES = "copies"
EXCERPT_CHARACTERS = 200
Section = TypeVar("Section", DedupLines, DedupSubstrings)
Rows = Mapping[str, np.ndarray]
"""Columns by name."""
Numbers = dict[str, int]
"""Result of a task that sends spans: numbers of spans by name."""


class Spans(NamedTuple):
    """Spans of n texts, concatenated.

    Attributes:
        offsets: int64 of shape (n + 1,); text i has the spans from offsets[i] up to
            offsets[i + 1].
        begins, ends: int64, bytes of the text.
        high, low: uint64, halves of the hash.
    """

    offsets: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    high: np.ndarray
    low: np.ndarray

    @property
    def text(self) -> np.ndarray:
        """Position of each span's text."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))


@dataclass(frozen=True)
class RepeatsPlan(Generic[Section]):
    """Settings shared by all tasks of the stage."""

    inputs: Inputs
    section: Section
    numbering: Numbering
    num_partitions: int
    out: Path

    def read(self, task: ShardTask) -> tuple[JudgedTexts, np.ndarray]:
        """Read the texts of a shard, and the document number of each."""
        texts = read_judged(self.inputs, task.name, self.section.sources)
        return texts, self.numbering.starts[task.payload["shard"]] + texts.good


def exchange(
    job: str,
    plan: RepeatsPlan[Section],
    send: Sender[OfShard, Numbers],
    least_copies: int,
    context: Context,
) -> tuple[Counter[str], Shuffled]:
    """Run a job that sends spans of the shards (`send_spans`), and one that replies
    with the repeated ones.

    Returns:
        totals of the tasks' numbers, with the number of `repeated` spans; and the
        repeated spans by shard (see `send_repeated`).
    """
    shards = shard_tasks(plan.inputs["ingest"])
    partitions = partition_tasks(plan.num_partitions) if shards else []
    sent: list[Numbers]
    repeated: list[Numbers]
    sent, spans = run_stream(job, shards, send, context, plan.num_partitions)
    reply = f"repeated_{job}"
    repeated, replies = run_stream(
        reply,
        partitions,
        partial(
            send_repeated,
            stream=reply,
            spans=spans,
            numbering=plan.numbering,
            least_copies=least_copies,
        ),
        context,
        len(shards),
    )
    return Counter(add_counts([*sent, *repeated])), replies


def send_spans(
    stream: str, rows: Rows, counted: Iterable[str], num_partitions: int
) -> Generator[Sent, None, int]:
    """Send the first copy of every distinct span of a shard to the partition of its
    key, with the number of copies; return the number of sent spans.

    Args:
        rows: KEY, `document`, and other columns that order the copies: the first copy
            has the smallest values.
        counted: columns by which copies are distinguished; equal rows count once.
    """
    rows = sorted_columns(rows, rows)
    starts = group_starts(*(rows[name] for name in KEY))
    is_copy = np.zeros(len(rows["high"]), np.int64)
    is_copy[group_starts(*(rows[name] for name in counted))] = 1
    table = {name: values[starts] for name, values in rows.items()}
    table[COPIES] = group_sums(is_copy, starts)
    partitions = hash_partitions(table["high"], num_partitions)
    yield Sent(stream, pa.table(table), partitions)
    return len(starts)


def send_repeated(
    task: PartitionTask,
    stream: str,
    spans: Shuffled,
    numbering: Numbering,
    least_copies: int,
) -> Sending[Numbers]:
    """Send the repeated spans of one partition to the shards that have them: KEY, the
    number of COPIES in the corpus, and the other columns of the first copy as
    `first_...`.
    """
    rows = columns_of(spans.read(task.payload["partition"]))
    ordering = [name for name in rows if name != COPIES]
    rows = sorted_columns(rows, ordering)
    starts = group_starts(*(rows[name] for name in KEY))
    copies = group_sums(rows[COPIES], starts)
    group = spread_groups(starts, len(rows[COPIES]))
    chosen = np.flatnonzero((copies >= least_copies)[group])
    first = starts[group[chosen]]
    reply = {name: rows[name][chosen] for name in KEY}
    reply[COPIES] = copies[group[chosen]]
    reply |= {f"first_{name}": rows[name][first] for name in ordering[len(KEY) :]}
    shards = numbering.shards_of(rows["document"][chosen])
    yield Sent(stream, pa.table(reply), shards)
    return Done([], {"repeated": int((copies >= least_copies).sum())})


def find_repeated(
    repeated: Shuffled, task: ShardTask, high: np.ndarray, low: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Repeated spans of a shard (see `send_repeated`), and the position among them of
    each given span: int64, -1 for a span that is not repeated.
    """
    rows = sorted_columns(columns_of(repeated.read(task.payload["shard"])), KEY)
    return rows, find_pairs(rows["high"], rows["low"], high, low)


def first_document(rows: Rows, row: int) -> str:
    """Id of the document with the first copy of a repeated span, in hexadecimal
    digits.
    """
    halves = (rows[name][row] for name in ("first_id_high", "first_id_low"))
    return "".join(f"{half:016x}" for half in halves)
