"""Stage `dedup_lines`: keep one copy of each distinct line or paragraph in the corpus,
and cut the others.

A unit is a line or paragraph: stripped, not empty. Its key is a hash of its code points
(see `repeated_spans.py`). Lower case is code point by code point, as in
`unicode_tables.lower_case`.

1. lines: per shard, its distinct units, each with the smallest id of its documents, by
   partition of the key.
2. repeated_lines: per partition of the keys, the repeated units, each with the document
   that keeps it, by shard.
3. apply: per shard, the edits and the annotation table.

The document that keeps a unit depends only on document ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np

from gristmill.core.arrays import Column
from gristmill.core.stage_context import Context
from gristmill.dataprep.annotate_batches import merge_annotations
from gristmill.dataprep.conservation import Counted, Counts, balance
from gristmill.dataprep.dedup.repeated_spans import (
    COPIES,
    EXCERPT_CHARACTERS,
    Numbers,
    RepeatsPlan,
    Spans,
    exchange,
    find_repeated,
    first_document,
    send_spans,
)
from gristmill.dataprep.dedup.repeats import RepeatedUnit
from gristmill.dataprep.document_numbers import number_documents, text_bytes
from gristmill.dataprep.documents import Inputs
from gristmill.dataprep.edits import EDITS, cuts_array, join_spans
from gristmill.dataprep.runners.shuffle import Sending, Shuffled
from gristmill.dataprep.runners.tasks import Done, ShardTask, run_tasks, shard_tasks
from gristmill.dataprep.shuffle_format import count_partitions, group_starts, sort_rows
from gristmill.dataprep.text.hashing import ODD, append_hash, fmix64
from gristmill.dataprep.text.kernels import Bytes, Flags, Offsets, kernel, text_buffers
from gristmill.dataprep.text.spans import NEWLINE, skip_to_newlines, strip
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
"""Newlines that end a unit."""


class Units(NamedTuple):
    """Units of n texts.

    Attributes:
        spans: from the beginning of the unit's line to the end of the unit without
            trailing white space.
        characters: int64, code points of each unit.
        words: int64, words of each unit, as from `str.split()`.
    """

    spans: Spans
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
    return _find_units(*text_buffers(texts), code_point_flags(), folded, NEWLINES[unit])


def cut_units(texts: Column, units: Spans, cut: np.ndarray) -> tuple[np.ndarray, ...]:
    """Byte spans that remove some units, each with the white space up to the next unit.

    Cutting the last unit takes the white space before it instead, unless the text ends
    in a newline.

    Args:
        cut: bool per unit.

    Returns:
        begins, ends, offsets: as `edits.cuts_array` takes them.
    """
    data, offsets = text_buffers(texts)
    text = units.text
    begins = units.begins.copy()
    ends = np.roll(begins, -1)
    last = np.unique(units.offsets[1:]) - 1
    last = last[last >= 0]
    text_end = offsets[text[last] + 1]
    ends[last] = text_end - offsets[text[last]]
    kept = np.maximum.accumulate(np.where(cut, -1, np.arange(len(cut))))[last]
    is_open = cut[last] & (data[text_end - 1] != NEWLINE)
    kept = kept[is_open & (kept >= units.offsets[text[last]])]
    begins[kept + 1] = units.ends[kept]
    return join_spans(text[cut], begins[cut], ends[cut], len(texts))


@kernel
def _find_units(
    data: Bytes, offsets: Offsets, flags: Flags, lower: np.ndarray, newlines: int
) -> Units:
    texts = len(offsets) - 1
    capacity = texts
    for position in range(offsets[0], offsets[texts]):
        capacity += data[position] == NEWLINE
    numbers = np.empty((4, capacity), np.int64)
    hashes = np.empty((2, capacity), np.uint64)
    unit_offsets = np.zeros(texts + 1, np.int64)
    count = 0
    for text in range(texts):
        begin = segment = offsets[text]
        end = offsets[text + 1]
        while segment < end:
            stop = skip_to_newlines(data, segment, end, newlines)
            first, last = strip(data, segment, stop, flags)
            segment = stop + newlines
            if first == last:
                continue
            hashes[0, count], hashes[1, count], characters, words = _key(
                data, first, last, flags, lower
            )
            while first > begin and data[first - 1] != NEWLINE:
                first -= 1
            numbers[0, count], numbers[1, count] = first - begin, last - begin
            numbers[2, count], numbers[3, count] = characters, words
            count += 1
        unit_offsets[text + 1] = count
    spans = Spans(
        unit_offsets,
        numbers[0, :count],
        numbers[1, :count],
        hashes[0, :count],
        hashes[1, :count],
    )
    return Units(spans, numbers[2, :count], numbers[3, :count])


@kernel
def _key(
    data: Bytes, begin: int, end: int, flags: Flags, lower: np.ndarray
) -> tuple[int, int, int, int]:
    """Halves of the key, and the numbers of code points and words."""
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
    return fmix64(high + length), fmix64(low ^ length), int(np.int64(length)), words


LINES = "lines"
"""Name of the job and of the stream of units that it sends."""
EMPTY, RATIO = "dedup_lines/empty", "dedup_lines/max_removed_line_ratio"
MOST_REPEATED = 10


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


class KeptUnit(TypedDict):
    """Repeated unit (see `RepeatedUnit`) with its key, 32 hexadecimal digits."""

    documents: int
    key: str
    text: str
    document: str


class CutLines(Counted):
    """Result of writing a shard's annotations."""

    removed: int
    bytes_cut: int
    repeated: list[KeptUnit]
    """Units of the most documents among those that the shard keeps."""


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
    plan = RepeatsPlan(
        merge_annotations(inputs, context),
        section,
        number_documents(inputs["ingest"]),
        count_partitions(text_bytes(inputs["ingest"])),
        out,
    )
    totals, repeated = exchange(
        LINES, plan, partial(send_units, plan=plan), section.min_documents, context
    )
    results = run_tasks(
        "apply",
        shard_tasks(inputs["ingest"]),
        partial(apply, plan=plan, repeated=repeated),
        context,
    )
    counts = balance(results, section.max_quarantined, context.stage, errors=out)
    kept = [unit for result in results for unit in result["repeated"]]
    kept.sort(key=lambda unit: (-unit["documents"], unit["key"]))
    return LinesSummary(
        counts,
        UnitCounts(
            seen=totals["units"],
            shuffled=totals["sent"],
            repeated=totals["repeated"],
            removed=sum(result["removed"] for result in results),
            bytes_cut=sum(result["bytes_cut"] for result in results),
        ),
        [
            RepeatedUnit(unit["documents"], unit["text"], unit["document"])
            for unit in kept[:MOST_REPEATED]
        ],
    )


def send_units(task: ShardTask, plan: RepeatsPlan[DedupLines]) -> Sending[Numbers]:
    """Send every distinct unit of a shard to the partition of its key, with the
    document of smallest id that has it.
    """
    texts, numbers = plan.read(task)
    units, compared = _compared_units(texts.texts, plan.section)
    text = units.spans.text[compared]
    id_high, id_low = texts.ids()
    rows = {
        "high": units.spans.high[compared],
        "low": units.spans.low[compared],
        "id_high": id_high[text],
        "id_low": id_low[text],
        "document": numbers[text],
    }
    counted = ("high", "low", "document")
    sent = yield from send_spans(LINES, rows, counted, plan.num_partitions)
    return Done([], {"units": len(text), "sent": sent})


def apply(
    task: ShardTask, plan: RepeatsPlan[DedupLines], repeated: Shuffled
) -> Done[CutLines]:
    """Write the annotations of one shard."""
    section = plan.section
    texts, numbers = plan.read(task)
    (units, characters, _), compared = _compared_units(texts.texts, section)
    text = units.text
    rows, places = find_repeated(repeated, task, units.high, units.low)
    keeper = np.append(rows["first_document"], -1)[places]  # -1: not repeated
    is_keeper = keeper == numbers[text]
    order = sort_rows(text, units.high, units.low)
    is_first = np.zeros(len(order), bool)
    columns = (values[order] for values in (text, units.high, units.low))
    is_first[order[group_starts(*columns)]] = True
    elsewhere = (keeper >= 0) & (~is_keeper | (section.action == "cut_all"))
    again = ~is_first & ((keeper >= 0) | section.within_documents)
    cut = (elsewhere | again) & compared
    removed = np.bincount(text[cut], minlength=len(numbers))
    ratio = np.bincount(text[cut], characters[cut], len(numbers)) / np.maximum(
        np.bincount(text, characters, len(numbers)), 1
    )
    begins, ends, offsets = cut_units(texts.texts, units, cut)
    failed = {EMPTY: ratio == 1.0, RATIO: ratio > section.max_removed_line_ratio}
    counts = texts.write_measured(
        plan.out / task.name,
        first_failures(failed, len(ratio)),
        {
            "lines_removed": removed.astype(np.int64),
            "removed_line_ratio": ratio,
            EDITS: cuts_array(begins, ends, offsets),
        },
        texts.errors,
    )
    kept = np.flatnonzero(is_first & is_keeper)
    documents = rows[COPIES][places[kept]]
    most = kept[sort_rows(-documents, units.high[kept], units.low[kept])]
    kept_units = []
    for unit in most[:MOST_REPEATED].tolist():
        passage = texts.passage(int(text[unit]), units.begins[unit], units.ends[unit])
        kept_units.append(
            KeptUnit(
                documents=int(rows[COPIES][places[unit]]),
                key=f"{units.high[unit]:016x}{units.low[unit]:016x}",
                text=passage.strip()[:EXCERPT_CHARACTERS],
                document=first_document(rows, places[unit]),
            )
        )
    return Done(
        [plan.out / task.name],
        {
            "counts": counts,
            "removed": int(cut.sum()),
            "bytes_cut": int((ends - begins).sum()),
            "repeated": kept_units,
        },
    )


def _compared_units(texts: Column, section: DedupLines) -> tuple[Units, np.ndarray]:
    """Units of some texts, and the mask of those that are long enough to be compared
    (bool).
    """
    units = find_units(texts, section.unit, section.normalise == "strip_lower")
    return units, (units.words >= section.min_words) & (
        units.characters >= section.min_characters
    )
