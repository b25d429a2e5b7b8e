"""Stage `dedup_substrings`: keep one copy of each long passage that repeats in the
corpus.

A shard sends each distinct window once, with its first copy in the shard and the number
of copies, so that a text on a million pages costs no more than any other.

1. anchors: per shard, the hashes of its anchors, a sample of its windows (see
   `ngram_windows.py`), by partition.
2. repeated_anchors: per partition, the anchors that repeat in the corpus, by shard.
3. windows: per shard, all windows around repeated anchors, each with its first copy in
   the shard, by partition.
4. repeated_windows: per partition, the repeated windows, with the first copy of each,
   by shard.
5. apply: per shard, the edits and the annotation table.

Windows are identified by a hash of 128 bits; among m distinct windows about m^2 / 2^129
pairs share one by chance (10^10 windows: 10^-19). Guarantees, with n = `min_words` and
c = `certain_words`:

- A cut word lies in a passage of at least n words that also occurs elsewhere, in a
  first copy of which no word is cut.
- A passage of at least c words that occurs twice in the corpus is found: any c - n + 1
  consecutive windows of it contain an anchor, the same in both places.
- The result depends only on the documents, not on shards, partitions, workers or order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from gristmill.core.stage_context import Context
from gristmill.dataprep.annotate_batches import (
    JudgedTexts,
    merge_annotations,
    read_judged,
)
from gristmill.dataprep.conservation import Counted, Counts, balance
from gristmill.dataprep.dedup.ngram_windows import (
    Windows,
    cut_copies,
    find_anchors,
    find_windows,
    near,
)
from gristmill.dataprep.dedup.repeats import Repeat
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
from gristmill.dataprep.text.kernels import text_buffers
from gristmill.dataprep.text.unicode_tables import code_point_flags
from gristmill.dataprep.thresholds import first_failures
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.steps.dedup import DedupSubstrings


@dataclass(frozen=True)
class SubstringsPlan:
    """Settings shared by all tasks of the stage."""

    inputs: Inputs
    section: DedupSubstrings
    numbering: Numbering
    num_partitions: int
    out: Path

    @property
    def spread(self) -> int:
        """Number of consecutive windows that always include an anchor, which makes
        `certain_words` certain.
        """
        return self.section.certain_words - self.section.min_words + 1

    def read(self, task: ShardTask) -> tuple[JudgedTexts, np.ndarray]:
        """Read the texts of a shard, and the document number of each."""
        texts = read_judged(self.inputs, task.name, self.section.sources)
        return texts, self.numbering.starts[task.payload["shard"]] + texts.good


ANCHORS, REPEATED_ANCHORS, WINDOWS, REPEATED_WINDOWS = (
    "anchors",
    "repeated_anchors",
    "windows",
    "repeated_windows",
)
"""Names of streams and of the jobs that send them."""
CLAIM = ("id_high", "id_low", "document", "begin")
"""Columns that order the copies of a window, by document id and position; the first
copy has the smallest values.
"""


Numbers = dict[str, int]
"""Result of a task that sends rows: numbers of rows and windows by name."""


class CutRepeats(Counted):
    """Result of writing a shard's annotations."""

    spans: int
    words_cut: int
    bytes_cut: int
    repeats: list[Repeat]


def run_jobs(
    plan: SubstringsPlan, context: Context
) -> tuple[list[Numbers], list[Numbers], list[Numbers], list[CutRepeats]]:
    """Run all jobs and return the results of `anchors`, `windows`, `repeated_windows`
    and `apply`.
    """
    shards = shard_tasks(plan.inputs["ingest"])
    partitions = partition_tasks(plan.num_partitions) if shards else []

    anchors, sent_anchors = run_stream(
        ANCHORS, shards, partial(send_anchors, plan=plan), context, plan.num_partitions
    )
    _, near_repeats = run_stream(
        REPEATED_ANCHORS,
        partitions,
        partial(find_repeated_anchors, anchors=sent_anchors),
        context,
        len(shards),
    )
    windows, sent_windows = run_stream(
        WINDOWS,
        shards,
        partial(send_windows, plan=plan, anchors=near_repeats),
        context,
        plan.num_partitions,
    )
    repeated, first_copies = run_stream(
        REPEATED_WINDOWS,
        partitions,
        partial(find_repeated_windows, plan=plan, windows=sent_windows),
        context,
        len(shards),
    )
    applied = run_tasks(
        "apply",
        shards,
        partial(apply, plan=plan, anchors=near_repeats, repeated=first_copies),
        context,
    )
    return anchors, windows, repeated, applied


def send_anchors(task: ShardTask, plan: SubstringsPlan) -> Sending[Numbers]:
    """Send the distinct anchors of a shard to the partitions of their hashes."""
    texts, _ = plan.read(task)
    windows = find_windows(texts.texts, plan.section.min_words)
    anchors, copies = np.unique(
        windows.high[find_anchors(windows.high, windows.offsets, plan.spread)],
        return_counts=True,
    )
    shard = np.full(len(anchors), task.payload["shard"])
    rows = pa.table({"hash": anchors, "copies": copies, "shard": shard})
    yield Sent(ANCHORS, rows, hash_partitions(anchors, plan.num_partitions))
    return Done([], {"windows": len(windows.high), "sent": len(anchors)})


def find_repeated_anchors(task: PartitionTask, anchors: Shuffled) -> Sending:
    """Send the repeated anchors of one partition to their shards."""
    rows = columns_of(anchors.read(task.payload["partition"]))
    rows = sorted_columns(rows, ["hash"])
    starts = group_starts(rows["hash"])
    repeated = group_sums(rows["copies"], starts) >= 2
    chosen = repeated[spread_groups(starts, len(rows["hash"]))]
    hashes = pa.table({"hash": rows["hash"][chosen]})
    yield Sent(REPEATED_ANCHORS, hashes, rows["shard"][chosen])
    return Done()


def send_windows(
    task: ShardTask, plan: SubstringsPlan, anchors: Shuffled
) -> Sending[Numbers]:
    """Send the distinct windows around repeated anchors, each with its first copy in
    the shard.
    """
    texts, numbers = plan.read(task)
    windows, chosen = windows_near_repeats(texts.texts, task, plan, anchors)
    text = windows.text[chosen]
    high, low = texts.ids()
    rows = {
        "high": windows.high[chosen],
        "low": windows.low[chosen],
        "id_high": high[text],
        "id_low": low[text],
        "document": numbers[text],
        "begin": windows.begins[chosen],
    }
    rows = sorted_columns(rows, rows)
    starts = group_starts(rows["high"], rows["low"])
    table = {name: values[starts] for name, values in rows.items()}
    table["copies"] = np.diff(np.append(starts, len(chosen)))
    yield Sent(
        WINDOWS, pa.table(table), hash_partitions(table["high"], plan.num_partitions)
    )
    return Done([], {"sent": len(starts)})


def windows_near_repeats(
    texts: pa.Array, task: ShardTask, plan: SubstringsPlan, repeated: Shuffled
) -> tuple[Windows, np.ndarray]:
    """Windows of a shard's texts, and positions (int64, ascending) of those that may
    lie in a repeated passage.

    Args:
        repeated: repeated anchors by shard.
    """
    windows = find_windows(texts, plan.section.min_words)
    anchors = find_anchors(windows.high, windows.offsets, plan.spread)
    hashes = columns_of(repeated.read(task.payload["shard"]))["hash"]
    marked = anchors & np.isin(windows.high, hashes)
    return windows, np.flatnonzero(near(windows.offsets, marked, plan.spread - 1))


def find_repeated_windows(
    task: PartitionTask, plan: SubstringsPlan, windows: Shuffled
) -> Sending[Numbers]:
    """Send the repeated windows of one partition to their shards, each with its first
    copy.
    """
    rows = columns_of(windows.read(task.payload["partition"]))
    rows = sorted_columns(rows, ("high", "low", *CLAIM))
    starts = group_starts(rows["high"], rows["low"])
    copies = group_sums(rows["copies"], starts)
    group = spread_groups(starts, len(rows["high"]))
    chosen = np.flatnonzero((copies >= 2)[group])
    first = starts[group[chosen]]
    reply = {name: rows[name][chosen] for name in ("high", "low")}
    reply["copies"] = copies[group[chosen]]
    reply |= {f"first_{name}": rows[name][first] for name in CLAIM}
    shards = plan.numbering.shards_of(rows["document"][chosen])
    yield Sent(REPEATED_WINDOWS, pa.table(reply), shards)
    return Done([], {"repeated": int((copies >= 2).sum())})


EMPTY = "dedup_substrings/empty"
RATIO = "dedup_substrings/max_duplicated_substring_ratio"
LARGEST_REPEATS = 10
EXCERPT_CHARACTERS = 200
SHUFFLED_PER_BYTE = 4
"""Approximate bytes shuffled per byte of text if half of the corpus repeats the other
half.
"""


@dataclass(frozen=True)
class WindowCounts:
    """Numbers of windows.

    Attributes:
        seen: in all documents.
        anchors_shuffled: anchors sent between shards.
        shuffled: windows sent between shards.
        repeated: distinct ones that occur more than once.
    """

    seen: int
    anchors_shuffled: int
    shuffled: int
    repeated: int


@dataclass(frozen=True)
class SubstringsSummary:
    """Summary of the repeated passages.

    Attributes:
        counts: documents by outcome.
        windows: numbers of windows.
        spans, words_cut, bytes_cut: of copies, with the action `cut`.
        largest_repeats: the longest repeated passages.
    """

    counts: Counts
    windows: WindowCounts
    spans: int
    words_cut: int
    bytes_cut: int
    largest_repeats: Sequence[Repeat]


def run(
    inputs: Inputs, config: Recipe, out: Path, context: Context
) -> SubstringsSummary:
    """Cut repeated passages out of the documents kept so far, all but the first copy of
    each.

    Writes one annotation table per document shard, with `duplicated_substring_words`
    (words in copies of passages, without first copies), `duplicated_substring_ratio`
    (their share of all words; 0 without words) and, with the action `cut`, `edits`.
    Documents without a remaining word are then dropped (`dedup_substrings/empty`), as
    are documents above the limit (`dedup_substrings/max_duplicated_substring_ratio`).

    Args:
        inputs: `ingest`, and the earlier annotating stages.
        config: the manifest's `dedup_substrings` section
            (`mixtures.steps.dedup.DedupSubstrings`).

    Raises:
        ConservationError: the counts do not balance.
        QuarantineError: more documents than allowed raised an error.
    """
    section = DedupSubstrings.model_validate(config)
    numbering = number_documents(inputs["ingest"])
    num_partitions = count_partitions(SHUFFLED_PER_BYTE * text_bytes(inputs["ingest"]))
    plan = SubstringsPlan(
        merge_annotations(inputs, context),
        section,
        numbering,
        num_partitions,
        out,
    )
    anchors, windows, repeated, results = run_jobs(plan, context)
    longest: dict[tuple[str, int], Repeat] = {}
    for repeat in sorted(
        (repeat for result in results for repeat in result["repeats"]),
        key=lambda row: (-row["words"], -row["copies"], row["document"], row["begin"]),
    ):
        longest.setdefault((repeat["document"], repeat["begin"]), repeat)
    counts = balance(results, section.max_quarantined, context.stage, errors=out)
    return SubstringsSummary(
        counts,
        WindowCounts(
            seen=sum(result["windows"] for result in anchors),
            anchors_shuffled=sum(result["sent"] for result in anchors),
            shuffled=sum(result["sent"] for result in windows),
            repeated=sum(result["repeated"] for result in repeated),
        ),
        spans=sum(result["spans"] for result in results),
        words_cut=sum(result["words_cut"] for result in results),
        bytes_cut=sum(result["bytes_cut"] for result in results),
        largest_repeats=list(longest.values())[:LARGEST_REPEATS],
    )


def apply(
    task: ShardTask, plan: SubstringsPlan, anchors: Shuffled, repeated: Shuffled
) -> Done[CutRepeats]:
    """Write the annotations of one shard."""
    texts, numbers = plan.read(task)
    windows, chosen = windows_near_repeats(texts.texts, task, plan, anchors)
    reply = columns_of(repeated.read(task.payload["shard"]))
    reply = sorted_columns(reply, ("high", "low"))
    places = find_pairs(
        reply["high"], reply["low"], windows.high[chosen], windows.low[chosen]
    )
    chosen = chosen[places >= 0]
    places = places[places >= 0]
    text = windows.text[chosen]
    begins = windows.begins[chosen]
    ends = windows.ends[chosen]
    first = {name: values[places] for name, values in reply.items()}
    copy = (first["first_document"] != numbers[text]) | (first["first_begin"] != begins)
    cut_begins, cut_ends, cut_offsets, words_cut = cut_copies(
        *text_buffers(texts.texts), code_point_flags(), text, begins, ends, copy
    )
    ratio = words_cut / np.maximum(windows.words, 1)
    cutting = plan.section.action == "cut"
    limit = plan.section.max_duplicated_substring_ratio
    failed = {EMPTY: cutting & (ratio == 1.0), RATIO: ratio > limit}
    reasons = first_failures(failed, len(ratio))
    measures = {
        "duplicated_substring_words": words_cut,
        "duplicated_substring_ratio": ratio,
    }
    if cutting:
        measures[EDITS] = cuts_array(cut_begins, cut_ends, cut_offsets)
    counts = texts.write_measured(plan.out / task.name, reasons, measures, texts.errors)
    copied = {"window": chosen, "text": text, "begin": begins, "end": ends, **first}
    copied = {name: values[copy] for name, values in copied.items()}
    return Done(
        [plan.out / task.name],
        {
            "counts": counts,
            "spans": len(cut_begins) if cutting else 0,
            "words_cut": int(words_cut.sum()) if cutting else 0,
            "bytes_cut": int((cut_ends - cut_begins).sum()) if cutting else 0,
            "repeats": _repeats(plan, texts, copied),
        },
    )


def _repeats(
    plan: SubstringsPlan, texts: JudgedTexts, copied: Mapping[str, np.ndarray]
) -> list[Repeat]:
    """Longest copied passages of a shard: windows that are consecutive both here and in
    the first copy.
    """
    window, text, begins = (copied[name] for name in ("window", "text", "begin"))
    starts = group_starts(
        window - np.arange(len(window)),
        text,
        copied["first_begin"] - begins,
        copied["first_document"],
    )
    if not len(starts):
        return []
    lasts = np.append(starts[1:], len(window)) - 1
    words = lasts - starts + plan.section.min_words
    copies = np.maximum.reduceat(copied["copies"], starts)
    places = np.stack(
        [copied[name][starts] for name in ("first_id_high", "first_id_low")]
    )
    first_begins = copied["first_begin"][starts]
    longest: dict[tuple[str, int], Repeat] = {}
    for run in sort_rows(-words, -copies, *places, first_begins):
        key = "".join(f"{half:016x}" for half in places[:, run]), int(first_begins[run])
        if key in longest:
            continue
        if len(longest) == LARGEST_REPEATS:
            break
        start = starts[run]
        passage = texts.passage(
            int(text[start]), begins[start], copied["end"][lasts[run]]
        )
        longest[key] = {
            "words": int(words[run]),
            "copies": int(copies[run]),
            "text": passage[:EXCERPT_CHARACTERS],
            "document": key[0],
            "begin": key[1],
        }
    return list(longest.values())
