"""Stage `dedup_lines`: keep one copy of each distinct line or paragraph in the corpus,
and cut the others.

A unit is a line or paragraph of `spans.find_segments`: stripped, not empty. Its key is
a hash of 128 bits of its code points; among n distinct units about n^2 / 2^129 pairs
share a key by chance (10^10 units: 10^-19). Lower case is code point by code point, as
in `unicode_tables.lower_case`.

1. lines: per shard, its distinct units, each with the smallest id of its documents, by
   partition of the key.
2. repeated: per partition of the keys, the repeated units, each with the document that
   keeps it, by shard.
3. apply: per shard, the edits and the annotation table.

A shard sends each distinct unit once, so that a licence on a million pages costs no
more than any other line. The document that keeps a unit depends only on document ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np
import pyarrow as pa

from gristmill.core.arrays import Column
from gristmill.core.stage_context import Context
from gristmill.dataprep.annotate_batches import (
    JudgedTexts,
    merge_annotations,
    read_judged,
)
from gristmill.dataprep.conservation import Counted, Counts, balance
from gristmill.dataprep.dedup.repeats import RepeatedUnit
from gristmill.dataprep.document_numbers import Numbering, number_documents, text_bytes
from gristmill.dataprep.documents import Inputs
from gristmill.dataprep.edits import EDITS, cuts_array
from gristmill.dataprep.runners.shuffle import (
    Sending,
    Sent,
    Shuffled,
    run_stream,
)
from gristmill.dataprep.runners.tasks import (
    Done,
    PartitionTask,
    ShardTask,
    partition_tasks,
    run_tasks,
    shard_tasks,
)
from gristmill.dataprep.shuffle_format import (
    columns_of,
    count_partitions,
    find_pairs,
    group_starts,
    group_sums,
    hash_partitions,
    sort_rows,
    sorted_columns,
    spread_groups,
)
from gristmill.dataprep.text.hashing import ODD, append_hash, fmix64
from gristmill.dataprep.text.kernels import (
    Bytes,
    Flags,
    Offsets,
    Positions,
    kernel,
    text_buffers,
)
from gristmill.dataprep.text.spans import NEWLINE, find_segments
from gristmill.dataprep.text.unicode_tables import (
    SPACE,
    code_point_flags,
    decode,
    lower_case,
)
from gristmill.dataprep.thresholds import first_failures
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.steps.dedup import DedupLines

NEWLINES = {"line": 1, "paragraph": 2}


class Units(NamedTuple):
    """Units of n texts, concatenated.

    Attributes:
        offsets: int64 of shape (n + 1,); text i has the units from offsets[i] up to
            offsets[i + 1].
        begins: int64, start of the unit's line, after the preceding newline, in bytes
            of its text.
        ends: int64, end of the unit without trailing white space, in bytes of its text.
        high, low: uint64, halves of its key.
        characters: int64, number of code points.
        words: int64, number of words, as from `str.split()`.
    """

    offsets: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    high: np.ndarray
    low: np.ndarray
    characters: np.ndarray
    words: np.ndarray


def find_units(texts: Column, unit: str, lower: bool) -> Units:
    """Find the units of every text.

    Args:
        unit: `line` or `paragraph`.
        lower: ignore case in the key.

    Raises:
        pa.ArrowInvalid: a text is not UTF-8.
    """
    folded = lower_case() if lower else np.empty(0, np.uint32)
    return Units(
        *_find_units(*text_buffers(texts), code_point_flags(), folded, NEWLINES[unit])
    )


def cut_units(texts: Column, units: Units, cut: np.ndarray) -> tuple[np.ndarray, ...]:
    """Byte spans that remove some units, each with the white space up to the next unit.

    Cutting the last unit takes the white space before it instead, unless the text ends
    in a newline.

    Args:
        cut: bool per unit.

    Returns:
        begins, ends, offsets: as `edits.cuts_array` takes them; adjacent spans are
            joined.
    """
    return _cut_units(
        *text_buffers(texts), units.offsets, units.begins, units.ends, cut
    )


@kernel
def _find_units(
    data: Bytes,
    offsets: Offsets,
    flags: Flags,
    lower: np.ndarray,
    newlines: int,
) -> tuple[np.ndarray, ...]:
    texts = len(offsets) - 1
    capacity = texts
    for position in range(offsets[0], offsets[texts]):
        capacity += data[position] == NEWLINE
    begins = np.empty(capacity, np.int64)
    ends = np.empty(capacity, np.int64)
    high = np.empty(capacity, np.uint64)
    low = np.empty(capacity, np.uint64)
    characters = np.empty(capacity, np.int64)
    words = np.empty(capacity, np.int64)
    unit_offsets = np.zeros(texts + 1, np.int64)
    count = 0
    for text in range(texts):
        begin = offsets[text]
        firsts, lasts, lengths = find_segments(
            data, begin, offsets[text + 1], flags, newlines
        )
        for segment in range(len(firsts)):
            start = firsts[segment]
            while start > begin and data[start - 1] != NEWLINE:
                start -= 1
            begins[count], ends[count] = start - begin, lasts[segment] - begin
            characters[count] = lengths[segment]
            high[count], low[count], words[count] = _key(
                data, firsts[segment], lasts[segment], flags, lower
            )
            count += 1
        unit_offsets[text + 1] = count
    return (
        unit_offsets,
        begins[:count],
        ends[:count],
        high[:count],
        low[:count],
        characters[:count],
        words[:count],
    )


@kernel
def _key(
    data: Bytes, begin: int, end: int, flags: Flags, lower: np.ndarray
) -> tuple[int, int, int]:
    """Halves of the key, and the number of words."""
    high = np.uint64(0)
    low = np.uint64(0)
    length = np.uint64(0)
    words = 0
    before = SPACE
    while begin < end:
        code, width = decode(data, begin)
        begin += width
        space = flags[code] & SPACE
        words += before != 0 and space == 0
        before = space
        value = np.uint64(lower[code]) if len(lower) else np.uint64(code)
        high = (high ^ value) * ODD
        high ^= high >> np.uint64(32)
        low = append_hash(low, value)
        length += np.uint64(1)
    return fmix64(high + length), fmix64(low ^ length), words


@kernel
def _cut_units(
    data: Bytes,
    offsets: Offsets,
    unit_offsets: np.ndarray,
    begins: Positions,
    ends: Positions,
    cut: np.ndarray,
) -> tuple[Positions, Positions, Offsets]:
    texts = len(offsets) - 1
    cut_begins = np.empty(len(cut), np.int64)
    cut_ends = np.empty(len(cut), np.int64)
    cut_offsets = np.zeros(texts + 1, np.int64)
    count = 0
    for text in range(texts):
        size = offsets[text + 1] - offsets[text]
        first = unit_offsets[text]
        stop = unit_offsets[text + 1]
        for unit in range(first, stop):
            if not cut[unit]:
                continue
            end = begins[unit + 1] if unit + 1 < stop else size
            if unit > first and cut[unit - 1]:
                cut_ends[count - 1] = end
            else:
                cut_begins[count], cut_ends[count] = begins[unit], end
                count += 1
        ends_open = size > 0 and data[offsets[text] + size - 1] != NEWLINE
        if stop > first and cut[stop - 1] and ends_open:
            kept = stop - 1
            while kept >= first and cut[kept]:
                kept -= 1
            if kept >= first:
                cut_begins[count - 1] = ends[kept]
        cut_offsets[text + 1] = count
    return cut_begins[:count], cut_ends[:count], cut_offsets


UNITS, REPLIES = "units", "replies"
"""Names of streams: units from the shards to the partitions of the keys, and replies
back.
"""
EMPTY, RATIO = "dedup_lines/empty", "dedup_lines/max_removed_line_ratio"
MOST_REPEATED = 10
EXCERPT_CHARACTERS = 200
KEY_HALVES = (slice(16), slice(16, None))
"""Digits of the halves of a key."""


@dataclass(frozen=True)
class LinesPlan:
    """Settings shared by all tasks of the stage."""

    inputs: Inputs
    section: DedupLines
    numbering: Numbering
    num_partitions: int
    out: Path


@dataclass(frozen=True)
class UnitCounts:
    """Numbers of lines or paragraphs.

    Attributes:
        seen: in all documents.
        shuffled: distinct ones of each shard.
        repeated: distinct ones in several documents.
        removed: cut.
        bytes_cut: size of the cut spans.
    """

    seen: int
    shuffled: int
    repeated: int
    removed: int
    bytes_cut: int


@dataclass(frozen=True)
class LinesSummary:
    """Summary of the cuts.

    Attributes:
        counts: documents by outcome.
        units: numbers of units.
        most_repeated: units in the most documents.
    """

    counts: Counts
    units: UnitCounts
    most_repeated: Sequence[RepeatedUnit]


class TopUnit(TypedDict):
    """Repeated unit whose text is still to be read.

    Attributes:
        document: number of the document that keeps it.
        key: 32 hexadecimal digits.
    """

    documents: int
    document: int
    key: str


class Excerpt(TypedDict):
    """Beginning of a unit, and the id of its document."""

    text: str
    document: str


class RepeatedUnits(TypedDict):
    """Result of finding the repeated units of a partition."""

    repeated: int
    top: list[TopUnit]


class CutLines(Counted):
    """Result of writing a shard's annotations."""

    removed: int
    bytes_cut: int
    shown: dict[str, Excerpt]
    """Excerpts by the unit's key."""


def run(inputs: Inputs, config: Recipe, out: Path, context: Context) -> LinesSummary:
    """Cut repeated units out of the documents kept so far, all but one copy of each (or
    all).

    Writes one annotation table per document shard, with `edits`, `lines_removed` (units
    cut) and `removed_line_ratio` (their share of the code points of all units; 0
    without units). A document that loses all its units (`dedup_lines/empty`) or more
    than allowed (`dedup_lines/max_removed_line_ratio`) is dropped; units whose only
    copy it kept are then lost from the corpus, as in C4.

    Args:
        inputs: `ingest`, and the earlier annotating stages.
        config: the manifest's `dedup_lines` section
            (`mixtures.steps.dedup.DedupLines`).

    Raises:
        ConservationError: the counts do not balance.
        QuarantineError: more documents than allowed raised an error.
    """
    section = DedupLines.model_validate(config)
    numbering = number_documents(inputs["ingest"])
    num_partitions = count_partitions(text_bytes(inputs["ingest"]))
    plan = LinesPlan(
        merge_annotations(inputs, context), section, numbering, num_partitions, out
    )
    shards = shard_tasks(inputs["ingest"])
    sent_results, units = run_stream(
        "lines",
        shards,
        partial(send_units, plan=plan),
        context,
        num_partitions,
        UNITS,
    )
    partitions = partition_tasks(num_partitions) if shards else []
    repeated, replies = run_stream(
        "repeated",
        partitions,
        partial(find_repeated, plan=plan, units=units),
        context,
        len(shards),
        REPLIES,
    )
    top = sorted(
        (row for result in repeated for row in result["top"]),
        key=lambda row: (-row["documents"], row["key"]),
    )[:MOST_REPEATED]
    results = run_tasks(
        "apply",
        shards,
        partial(apply, plan=plan, replies=replies, top=top),
        context,
    )
    counts = balance(results, section.max_quarantined, context.stage, errors=out)
    excerpts: dict[str, Excerpt] = {}
    for result in results:
        excerpts |= result["shown"]
    return LinesSummary(
        counts,
        UnitCounts(
            seen=sum(result["units"] for result in sent_results),
            shuffled=sum(result["shuffled"] for result in sent_results),
            repeated=sum(result["repeated"] for result in repeated),
            removed=sum(result["removed"] for result in results),
            bytes_cut=sum(result["bytes_cut"] for result in results),
        ),
        [RepeatedUnit(row["documents"], **excerpts[row["key"]]) for row in top],
    )


def send_units(task: ShardTask, plan: LinesPlan) -> Sending[dict[str, int]]:
    """Send every distinct unit of a shard to the partition of its key, with the
    document of smallest id that has it.
    """
    texts = read_judged(plan.inputs, task.name, plan.section.sources)
    units, document = _units(texts, plan.section)
    eligible = _take_part(units, plan.section)
    document = document[eligible]
    number = plan.numbering.starts[task.payload["shard"]] + texts.good
    id_high, id_low = texts.ids()
    rows = {
        "high": units.high[eligible],
        "low": units.low[eligible],
        "id_high": id_high[document],
        "id_low": id_low[document],
        "document": number[document],
    }
    rows = sorted_columns(rows, rows)
    starts = group_starts(rows["high"], rows["low"])
    is_new_document = np.zeros(len(document), np.int64)
    is_new_document[group_starts(rows["high"], rows["low"], rows["document"])] = 1
    first = {name: values[starts] for name, values in rows.items()}
    first["documents"] = group_sums(is_new_document, starts)
    yield Sent(
        UNITS, pa.table(first), hash_partitions(first["high"], plan.num_partitions)
    )
    return Done([], {"units": len(document), "shuffled": len(starts)})


def find_repeated(
    task: PartitionTask, plan: LinesPlan, units: Shuffled
) -> Sending[RepeatedUnits]:
    """Send the repeated units of one partition to their shards, each with the document
    that keeps it.
    """
    rows = columns_of(units.read(task.payload["partition"]))
    rows = sorted_columns(rows, ("high", "low", "id_high", "id_low", "document"))
    starts = group_starts(rows["high"], rows["low"])
    first = {name: values[starts] for name, values in rows.items()}
    documents = group_sums(rows["documents"], starts)
    group = spread_groups(starts, len(rows["high"]))
    repeated = documents >= plan.section.min_documents
    chosen = np.flatnonzero(repeated[group])
    reply = {
        "high": rows["high"][chosen],
        "low": rows["low"][chosen],
        "keeper": first["document"][group[chosen]],
    }
    shards = plan.numbering.shards_of(rows["document"][chosen])
    yield Sent(REPLIES, pa.table(reply), shards)
    largest = np.flatnonzero(repeated)
    largest = largest[sort_rows(-documents[largest], first["high"][largest])]
    top = [
        TopUnit(
            documents=int(documents[unit]),
            document=int(first["document"][unit]),
            key=f"{first['high'][unit]:016x}{first['low'][unit]:016x}",
        )
        for unit in largest[:MOST_REPEATED]
    ]
    return Done([], {"repeated": len(largest), "top": top})


def apply(
    task: ShardTask, plan: LinesPlan, replies: Shuffled, top: Sequence[TopUnit]
) -> Done[CutLines]:
    """Write the annotations of one shard, and read the texts of the top units whose
    documents it has.
    """
    texts = read_judged(plan.inputs, task.name, plan.section.sources)
    units, document = _units(texts, plan.section)
    reply = columns_of(replies.read(task.payload["shard"]))
    reply = sorted_columns(reply, ("high", "low"))
    places = find_pairs(reply["high"], reply["low"], units.high, units.low)
    keeper = np.append(reply["keeper"], -1)[places]  # -1 for a unit without repetition
    order = sort_rows(document, units.high, units.low)
    first = np.zeros(len(order), bool)
    first[order[group_starts(document[order], units.high[order], units.low[order])]] = (
        True
    )
    number = plan.numbering.starts[task.payload["shard"]] + texts.good
    elsewhere = (keeper >= 0) & (
        (keeper != number[document]) | (plan.section.action == "cut_all")
    )
    again = ~first & ((keeper >= 0) | plan.section.within_documents)
    cut = (elsewhere | again) & _take_part(units, plan.section)
    removed = np.bincount(document[cut], minlength=len(texts.good))
    characters = np.bincount(document, units.characters, len(texts.good))
    removed_characters = np.bincount(
        document[cut], units.characters[cut], len(texts.good)
    )
    ratio = removed_characters / np.maximum(characters, 1)
    begins, ends, offsets = cut_units(texts.texts, units, cut)
    limit = plan.section.max_removed_line_ratio
    reasons = first_failures({EMPTY: ratio == 1.0, RATIO: ratio > limit}, len(ratio))
    counts = texts.write_measured(
        plan.out / task.name,
        reasons,
        {
            "lines_removed": removed.astype(np.int64),
            "removed_line_ratio": ratio,
            EDITS: cuts_array(begins, ends, offsets),
        },
        texts.errors,
    )
    return Done(
        [plan.out / task.name],
        {
            "counts": counts,
            "removed": int(cut.sum()),
            "bytes_cut": int((ends - begins).sum()),
            "shown": _excerpts(top, number, texts, units),
        },
    )


def _units(texts: JudgedTexts, section: DedupLines) -> tuple[Units, np.ndarray]:
    """Units of a shard, and the position of each unit's text among the readable
    texts.
    """
    units = find_units(texts.texts, section.unit, section.normalise == "strip_lower")
    return units, np.repeat(np.arange(len(texts.good)), np.diff(units.offsets))


def _take_part(units: Units, section: DedupLines) -> np.ndarray:
    return (units.words >= section.min_words) & (
        units.characters >= section.min_characters
    )


def _excerpts(
    repeated_units: Sequence[TopUnit],
    number: np.ndarray,
    texts: JudgedTexts,
    units: Units,
) -> dict[str, Excerpt]:
    """Beginning of each unit and id of its document by key, for units whose keeping
    document is in this shard.
    """
    excerpts: dict[str, Excerpt] = {}
    for row in repeated_units:
        text = int(np.searchsorted(number, row["document"]))
        if text == len(number) or number[text] != row["document"]:
            continue
        high, low = (np.uint64(int(row["key"][half], 16)) for half in KEY_HALVES)
        here = slice(*units.offsets[text : text + 2])
        is_unit = (units.high[here] == high) & (units.low[here] == low)
        unit = units.offsets[text] + is_unit.argmax()
        passage = texts.passage(text, units.begins[unit], units.ends[unit])
        excerpts[row["key"]] = {
            "text": passage.strip()[:EXCERPT_CHARACTERS],
            "document": texts.documents["id"][int(texts.good[text])].as_py().hex(),
        }
    return excerpts
