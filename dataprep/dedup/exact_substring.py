"""Stage `dedup_substrings`: keep one copy of each long passage that repeats in the
corpus.

1. anchors: per shard, its anchors, a sample of its windows (see `ngram_windows.py`), by
   partition.
2. repeated_anchors: per partition, the anchors that repeat in the corpus, by shard.
3. windows: per shard, all windows around repeated anchors, each with its first copy in
   the shard, by partition.
4. repeated_windows: per partition, the repeated windows, with the first copy of each,
   by shard.
5. apply: per shard, the edits and the annotation table.

Guarantees, with n = `min_words` and c = `certain_words` (see `repeated_spans.py` for
collisions of hashes):

- A cut word lies in a passage of at least n words that also occurs elsewhere, in a
  first copy of which no word is cut.
- A passage of at least c words that occurs twice in the corpus is found: any c - n + 1
  consecutive windows of it contain an anchor, the same in both places.
- The result depends only on the documents, not on shards, partitions, workers or order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from gristmill.core.stage_context import Context
from gristmill.dataprep.annotate_batches import JudgedTexts, merge_annotations
from gristmill.dataprep.conservation import Counted, Counts, balance
from gristmill.dataprep.dedup.ngram_windows import (
    cut_copies,
    find_anchors,
    find_windows,
    near,
)
from gristmill.dataprep.dedup.repeated_spans import (
    COPIES,
    EXCERPT_CHARACTERS,
    Numbers,
    RepeatsPlan,
    Rows,
    Spans,
    exchange,
    find_repeated,
    first_document,
    send_spans,
)
from gristmill.dataprep.dedup.repeats import Repeat
from gristmill.dataprep.document_numbers import number_documents, text_bytes
from gristmill.dataprep.documents import Inputs
from gristmill.dataprep.edits import EDITS, cuts_array
from gristmill.dataprep.runners.shuffle import Sending, Shuffled
from gristmill.dataprep.runners.tasks import Done, ShardTask, run_tasks, shard_tasks
from gristmill.dataprep.shuffle_format import count_partitions, group_starts, sort_rows
from gristmill.dataprep.thresholds import first_failures
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.steps.dedup import DedupSubstrings

ANCHORS, WINDOWS = "anchors", "windows"
"""Names of the jobs that send spans, and of their streams."""
EMPTY = "dedup_substrings/empty"
RATIO = "dedup_substrings/max_duplicated_substring_ratio"
LARGEST_REPEATS = 10
SHUFFLED_PER_BYTE = 4
"""Approximate bytes shuffled per byte of text if half of the corpus repeats the other
half.
"""
Plan = RepeatsPlan[DedupSubstrings]


class CutRepeats(Counted):
    """Result of writing a shard's annotations."""

    spans: int
    words_cut: int
    bytes_cut: int
    repeats: list[Repeat]


def run_jobs(
    plan: Plan, context: Context
) -> tuple[Counter[str], Counter[str], list[CutRepeats]]:
    """Run all jobs; return the numbers of anchors and of windows, and the results of
    `apply`.
    """
    anchors, near_repeats = exchange(
        ANCHORS, plan, partial(send_anchors, plan=plan), 2, context
    )
    send = partial(send_windows, plan=plan, anchors=near_repeats)
    windows, first_copies = exchange(WINDOWS, plan, send, 2, context)
    applied = run_tasks(
        "apply",
        shard_tasks(plan.inputs["ingest"]),
        partial(apply, plan=plan, anchors=near_repeats, repeated=first_copies),
        context,
    )
    return anchors, windows, applied


def anchors_of(windows: Spans, section: DedupSubstrings) -> np.ndarray:
    """Mask of the anchors among windows (bool), such that `certain_words` are
    certain.
    """
    return find_anchors(windows.high, windows.offsets, _spread(section))


def _spread(section: DedupSubstrings) -> int:
    """Number of consecutive windows that always include an anchor."""
    return section.certain_words - section.min_words + 1


def send_anchors(task: ShardTask, plan: Plan) -> Sending[Numbers]:
    """Send the distinct anchors of a shard to the partitions of their hashes."""
    texts, numbers = plan.read(task)
    windows, _ = find_windows(texts.texts, plan.section.min_words)
    chosen = np.flatnonzero(anchors_of(windows, plan.section))
    rows = {
        "high": windows.high[chosen],
        "low": windows.low[chosen],
        "document": numbers[windows.text[chosen]],
        "begin": windows.begins[chosen],
    }
    sent = yield from send_spans(ANCHORS, rows, rows, plan.num_partitions)
    return Done([], {"windows": len(windows.high), "sent": sent})


def send_windows(task: ShardTask, plan: Plan, anchors: Shuffled) -> Sending[Numbers]:
    """Send the distinct windows around repeated anchors, each with its first copy in
    the shard.
    """
    texts, numbers = plan.read(task)
    windows, _ = find_windows(texts.texts, plan.section.min_words)
    chosen = windows_near_repeats(windows, task, plan, anchors)
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
    sent = yield from send_spans(WINDOWS, rows, rows, plan.num_partitions)
    return Done([], {"sent": sent})


def windows_near_repeats(
    windows: Spans, task: ShardTask, plan: Plan, anchors: Shuffled
) -> np.ndarray:
    """Positions (int64, ascending) of the windows of a shard that may lie in a repeated
    passage.

    Args:
        anchors: repeated anchors by shard.
    """
    chosen = np.flatnonzero(anchors_of(windows, plan.section))
    _, places = find_repeated(anchors, task, windows.high[chosen], windows.low[chosen])
    return near(windows.offsets, chosen[places >= 0], _spread(plan.section) - 1)


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
    plan = RepeatsPlan(
        merge_annotations(inputs, context),
        section,
        number_documents(inputs["ingest"]),
        count_partitions(SHUFFLED_PER_BYTE * text_bytes(inputs["ingest"])),
        out,
    )
    anchors, windows, results = run_jobs(plan, context)
    longest: dict[tuple[str, int], Repeat] = {}
    for repeat in sorted(
        (repeat for result in results for repeat in result["repeats"]),
        key=lambda row: (-row["words"], -row["copies"], row["document"], row["begin"]),
    ):
        longest.setdefault((repeat["document"], repeat["begin"]), repeat)
    return SubstringsSummary(
        balance(results, section.max_quarantined, context.stage, errors=out),
        WindowCounts(
            seen=anchors["windows"],
            anchors_shuffled=anchors["sent"],
            shuffled=windows["sent"],
            repeated=windows["repeated"],
        ),
        spans=sum(result["spans"] for result in results),
        words_cut=sum(result["words_cut"] for result in results),
        bytes_cut=sum(result["bytes_cut"] for result in results),
        largest_repeats=list(longest.values())[:LARGEST_REPEATS],
    )


def apply(
    task: ShardTask, plan: Plan, anchors: Shuffled, repeated: Shuffled
) -> Done[CutRepeats]:
    """Write the annotations of one shard."""
    texts, numbers = plan.read(task)
    windows, num_words = find_windows(texts.texts, plan.section.min_words)
    chosen = windows_near_repeats(windows, task, plan, anchors)
    rows, places = find_repeated(
        repeated, task, windows.high[chosen], windows.low[chosen]
    )
    chosen = chosen[places >= 0]
    first = {name: values[places[places >= 0]] for name, values in rows.items()}
    text, begins, ends = (
        windows.text[chosen],
        windows.begins[chosen],
        windows.ends[chosen],
    )
    is_copy = (first["first_document"] != numbers[text]) | (
        first["first_begin"] != begins
    )
    begins_cut, ends_cut, offsets_cut, words_cut = cut_copies(
        texts.texts, text, begins, ends, is_copy
    )
    ratio = words_cut / np.maximum(num_words, 1)
    measures = {
        "duplicated_substring_words": words_cut,
        "duplicated_substring_ratio": ratio,
    }
    cutting = plan.section.action == "cut"
    if cutting:
        measures[EDITS] = cuts_array(begins_cut, ends_cut, offsets_cut)
    failed = {
        EMPTY: cutting & (ratio == 1.0),
        RATIO: ratio > plan.section.max_duplicated_substring_ratio,
    }
    reasons = first_failures(failed, len(ratio))
    counts = texts.write_measured(plan.out / task.name, reasons, measures, texts.errors)
    copied = {"window": chosen, "text": text, "begin": begins, "end": ends, **first}
    copied = {name: values[is_copy] for name, values in copied.items()}
    return Done(
        [plan.out / task.name],
        {
            "counts": counts,
            "spans": cutting * len(begins_cut),
            "words_cut": cutting * int(words_cut.sum()),
            "bytes_cut": cutting * int((ends_cut - begins_cut).sum()),
            "repeats": _repeats(plan.section.min_words, texts, copied),
        },
    )


def _repeats(min_words: int, texts: JudgedTexts, copied: Rows) -> list[Repeat]:
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
    words = lasts - starts + min_words
    copies = np.maximum.reduceat(copied[COPIES], starts)
    first = {name: values[starts] for name, values in copied.items()}
    place = (first[name] for name in ("first_id_high", "first_id_low", "first_begin"))
    longest: dict[tuple[str, int], Repeat] = {}
    for run in sort_rows(-words, -copies, *place):
        key = first_document(first, run), int(first["first_begin"][run])
        if key in longest:
            continue
        if len(longest) == LARGEST_REPEATS:
            break
        passage = texts.passage(
            int(first["text"][run]), first["begin"][run], copied["end"][lasts[run]]
        )
        longest[key] = {
            "words": int(words[run]),
            "copies": int(copies[run]),
            "text": passage[:EXCERPT_CHARACTERS],
            "document": key[0],
            "begin": key[1],
        }
    return list(longest.values())
