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
5. lend: per shard, the texts with first copies.
6. apply: per shard, copies are compared with their first copies byte by byte, cut and
   recorded.

Guarantees, with n = `min_words` and c = `certain_words`:

- A cut word lies in a passage of at least n words whose bytes also occur elsewhere, in
  a first copy of which no word is cut.
- A passage of at least c words that occurs twice in the corpus is found: any c - n + 1
  consecutive windows of it contain an anchor, the same in both places. Two different
  windows that share a hash of 64 bits could hide each other: about m^2 / 2^65 pairs
  among m windows. A shared hash never cuts a word.
- The result depends only on the documents, not on shards, partitions, workers or order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypedDict

import numpy as np
import pyarrow as pa

from gristmill.core.stage_context import Context
from gristmill.dataprep.annotate_batches import (
    JudgedTexts,
    merge_annotations,
    read_judged,
)
from gristmill.dataprep.conservation import Counted, Counts, balance
from gristmill.dataprep.document_numbers import Numbering, number_documents, text_bytes
from gristmill.dataprep.documents import Inputs, write_table
from gristmill.dataprep.edits import EDITS, cuts_array
from gristmill.dataprep.jobs.shuffle import Sender, Sending, Sent, Shuffled, run_shuffle
from gristmill.dataprep.jobs.tasks import (
    Done,
    Given,
    PartitionTask,
    Result,
    ShardTask,
    Task,
    partition_tasks,
    run_tasks,
    shard_tasks,
)
from gristmill.dataprep.passages.ngram_windows import (
    Windows,
    are_copies,
    cut_copies,
    find_anchors,
    find_windows,
    near,
)
from gristmill.dataprep.shuffle_format import (
    count_partitions,
    group_starts,
    open_batches,
    sort_rows,
    spread_groups,
    task_file,
    write_partitions,
)
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.steps.dedup import DedupSubstrings


@dataclass(frozen=True)
class SubstringsPlan:
    """Settings shared by all tasks of the stage."""

    inputs: Inputs
    section: DedupSubstrings
    numbering: Numbering
    num_partitions: int
    work: Path
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

    def partitions_of(self, hashes: np.ndarray) -> np.ndarray:
        """Partition of each hash: int64."""
        return (hashes >> np.uint64(32)).astype(np.int64) % self.num_partitions


def find_hashes(sorted_hashes: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Positions of hashes in sorted distinct hashes: int64, -1 for a missing hash."""
    if not len(sorted_hashes):
        return np.full(len(wanted), -1, np.int64)
    places = np.minimum(np.searchsorted(sorted_hashes, wanted), len(sorted_hashes) - 1)
    matches: np.ndarray = np.where(sorted_hashes[places] == wanted, places, -1)
    return matches


def _table(rows: dict[str, np.ndarray]) -> pa.Table:
    return pa.table({name: pa.array(values) for name, values in rows.items()})


def _columns(table: pa.Table) -> dict[str, np.ndarray]:
    return {name: table[name].to_numpy() for name in table.column_names}


def _by_hash(replies: Shuffled, shard: int) -> dict[str, np.ndarray]:
    """Replies of all partitions to a shard, sorted by hash."""
    rows = _columns(replies.read(shard))
    order = np.argsort(rows["hash"], kind="stable")
    return {name: values[order] for name, values in rows.items()}


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


class Repeat(TypedDict):
    """Repeated passage.

    Attributes:
        text: its beginning.
        document: id of the document with the first copy, in hexadecimal digits.
        begin: first byte in that document.
    """

    words: int
    copies: int
    text: str
    document: str
    begin: int


class CutRepeats(Counted):
    """Result of writing a shard's annotations."""

    spans: int
    words_cut: int
    bytes_cut: int
    repeats: list[Repeat]


def run_jobs(
    plan: SubstringsPlan, context: Context, direct: bool = False
) -> tuple[list[Numbers], list[Numbers], list[Numbers], list[CutRepeats]]:
    """Run all jobs and return the results of `anchors`, `windows`, `repeated_windows`
    and `apply`.

    Args:
        direct: see `engine.run_tasks`.
    """
    shards = shard_tasks(plan.inputs["ingest"])
    partitions = partition_tasks(plan.num_partitions) if shards else []

    def shuffle(
        job: str,
        tasks: Sequence[Task[Given]],
        sender: Sender[Given, Result],
        number: int,
    ) -> tuple[list[Result], Shuffled]:
        results, sent = run_shuffle(
            job, tasks, sender, context, {job: number}, direct=direct
        )
        return results, sent[job]

    anchors, sent_anchors = shuffle(
        ANCHORS, shards, partial(send_anchors, plan=plan), plan.num_partitions
    )
    _, near_repeats = shuffle(
        REPEATED_ANCHORS,
        partitions,
        partial(find_repeated_anchors, anchors=sent_anchors),
        len(shards),
    )
    send_near_windows = partial(send_windows, plan=plan, anchors=near_repeats)
    windows, sent_windows = shuffle(
        WINDOWS, shards, send_near_windows, plan.num_partitions
    )
    repeated, first_copies = shuffle(
        REPEATED_WINDOWS,
        partitions,
        partial(find_repeated_windows, plan=plan, windows=sent_windows),
        len(shards),
    )
    run_tasks(
        "lend",
        shards,
        partial(lend, plan=plan, repeated=first_copies),
        context,
        direct=direct,
    )
    cut_repeats = partial(apply, plan=plan, anchors=near_repeats, repeated=first_copies)
    applied = run_tasks("apply", shards, cut_repeats, context, direct=direct)
    return anchors, windows, repeated, applied


def send_anchors(task: ShardTask, plan: SubstringsPlan) -> Sending[Numbers]:
    """Send the distinct anchors of a shard to the partitions of their hashes."""
    texts, _ = plan.read(task)
    windows = find_windows(texts.texts, plan.section.min_words)
    anchors, copies = np.unique(
        windows.hashes[find_anchors(windows, plan.spread)], return_counts=True
    )
    shard = np.full(len(anchors), task.payload["shard"])
    rows = _table({"hash": anchors, "copies": copies, "shard": shard})
    yield Sent(ANCHORS, rows, plan.partitions_of(anchors))
    return Done([], {"windows": len(windows.hashes), "sent": len(anchors)})


def find_repeated_anchors(task: PartitionTask, anchors: Shuffled) -> Sending:
    """Send the repeated anchors of one partition to their shards."""
    rows = _columns(anchors.read(task.payload["partition"]))
    order = sort_rows(rows["hash"])
    starts = group_starts(rows["hash"][order])
    repeated = _sums(rows["copies"][order], starts) >= 2
    chosen = order[repeated[spread_groups(starts, len(order))]] if len(order) else order
    yield Sent(
        REPEATED_ANCHORS, _table({"hash": rows["hash"][chosen]}), rows["shard"][chosen]
    )
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
        "hash": windows.hashes[chosen],
        "id_high": high[text],
        "id_low": low[text],
        "document": numbers[text],
        "begin": windows.begins[chosen],
    }
    order = sort_rows(*rows.values())
    rows = {name: values[order] for name, values in rows.items()}
    starts = group_starts(rows["hash"])
    table = {name: values[starts] for name, values in rows.items()}
    table["copies"] = np.diff(np.append(starts, len(order)))
    yield Sent(WINDOWS, _table(table), plan.partitions_of(table["hash"]))
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
    anchors = np.flatnonzero(find_anchors(windows, plan.spread))
    repeated_hashes = _by_hash(repeated, task.payload["shard"])["hash"]
    marked = np.zeros(len(windows.hashes), bool)
    marked[anchors[find_hashes(repeated_hashes, windows.hashes[anchors]) >= 0]] = True
    return windows, np.flatnonzero(near(windows, marked, plan.spread - 1))


def find_repeated_windows(
    task: PartitionTask, plan: SubstringsPlan, windows: Shuffled
) -> Sending[Numbers]:
    """Send the repeated windows of one partition to their shards, each with its first
    copy.
    """
    rows = _columns(windows.read(task.payload["partition"]))
    order = sort_rows(rows["hash"], *(rows[name] for name in CLAIM))
    rows = {name: values[order] for name, values in rows.items()}
    starts = group_starts(rows["hash"])
    copies = _sums(rows["copies"], starts)
    group = spread_groups(starts, len(order))
    chosen = np.flatnonzero((copies >= 2)[group]) if len(order) else order
    first = starts[group[chosen]]
    reply = {"hash": rows["hash"][chosen], "copies": copies[group[chosen]]}
    reply |= {f"first_{name}": rows[name][first] for name in CLAIM}
    shards = (
        np.searchsorted(plan.numbering.starts, rows["document"][chosen], side="right")
        - 1
    )
    yield Sent(REPEATED_WINDOWS, _table(reply), shards)
    return Done([], {"repeated": int((copies >= 2).sum())})


def lend(task: ShardTask, plan: SubstringsPlan, repeated: Shuffled) -> Done:
    """Write the texts of a shard that contain first copies of repeated windows, for
    shards with later copies.
    """
    texts, numbers = plan.read(task)
    first = _by_hash(repeated, task.payload["shard"])["first_document"]
    lenders = np.flatnonzero(np.isin(numbers, first))
    table = pa.table(
        {
            "document": pa.array(numbers[lenders]),
            "text": texts.texts.take(pa.array(lenders)),
        }
    )
    path = task_file(plan.work, "lent", task.name)
    write_partitions(path, table, np.zeros(len(table), np.int64), 1)
    return Done([path])


def borrow(
    plan: SubstringsPlan, shard: int, documents: np.ndarray
) -> tuple[pa.Array, np.ndarray]:
    """Read texts that a shard has written in `lend`.

    Args:
        documents: int64 of shape (n,), in any order, duplicates allowed.

    Returns:
        the distinct texts; and the position of each document's text among them.
    """
    batch = open_batches(
        task_file(plan.work, "lent", plan.numbering.shards[shard])
    ).get_batch(0)
    distinct, place = np.unique(documents, return_inverse=True)
    rows = np.searchsorted(batch["document"].to_numpy(), distinct)
    return batch["text"].take(pa.array(rows)), place


def _sums(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    sums: np.ndarray = (
        np.add.reduceat(values, starts) if len(starts) else np.empty(0, np.int64)
    )
    return sums


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
        context.work,
        out,
    )
    anchors, windows, repeated, results = run_jobs(plan, context)
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
        largest_repeats=_largest(
            repeat for result in results for repeat in result["repeats"]
        ),
    )


def apply(
    task: ShardTask, plan: SubstringsPlan, anchors: Shuffled, repeated: Shuffled
) -> Done[CutRepeats]:
    """Write the annotations of one shard."""
    texts, numbers = plan.read(task)
    windows, chosen = windows_near_repeats(texts.texts, task, plan, anchors)
    reply = _by_hash(repeated, task.payload["shard"])
    places = find_hashes(reply["hash"], windows.hashes[chosen])
    chosen = chosen[places >= 0]
    places = places[places >= 0]
    text = windows.text[chosen]
    begins = windows.begins[chosen]
    ends = windows.ends[chosen]
    first = {name: values[places] for name, values in reply.items()}
    is_first = (first["first_document"] == numbers[text]) & (
        first["first_begin"] == begins
    )
    copy = _verify(plan, texts.texts, text, begins, ends, first, is_first)
    verified = copy | is_first  # other windows only share a hash
    cuts = cut_copies(
        texts.texts, text[verified], begins[verified], ends[verified], copy[verified]
    )
    ratio = cuts.words / np.maximum(windows.words, 1)
    cutting = plan.section.action == "cut"
    limit = plan.section.max_duplicated_substring_ratio
    reasons: list[str | None] = [
        EMPTY if cutting and share == 1.0 else RATIO if share > limit else None
        for share in ratio.tolist()
    ]
    measures = {
        "duplicated_substring_words": pa.array(cuts.words),
        "duplicated_substring_ratio": pa.array(ratio),
    }
    if cutting:
        measures[EDITS] = cuts_array(cuts.begins, cuts.ends, cuts.offsets)
    table, counts = texts.annotate(reasons, measures)
    write_table(plan.out / task.name, table)
    columns = {name: values[copy] for name, values in first.items()}
    return Done(
        [plan.out / task.name],
        {
            "counts": counts,
            "spans": len(cuts.begins) if cutting else 0,
            "words_cut": int(cuts.words.sum()) if cutting else 0,
            "bytes_cut": int((cuts.ends - cuts.begins).sum()) if cutting else 0,
            "repeats": _repeats(
                plan,
                texts.texts,
                chosen[copy],
                text[copy],
                begins[copy],
                ends[copy],
                columns,
            ),
        },
    )


def _verify(
    plan: SubstringsPlan,
    texts: pa.Array,
    text: np.ndarray,
    begins: np.ndarray,
    ends: np.ndarray,
    first: Mapping[str, np.ndarray],
    is_first: np.ndarray,
) -> np.ndarray:
    """Mask of windows with the bytes of their first copy, first copies excluded
    (bool).
    """
    shard_of = (
        np.searchsorted(plan.numbering.starts, first["first_document"], side="right")
        - 1
    )
    copies = np.zeros(len(text), bool)
    for shard in np.unique(shard_of[~is_first]):
        rows = np.flatnonzero(~is_first & (shard_of == shard))
        lent_texts, text_of_row = borrow(
            plan, int(shard), first["first_document"][rows]
        )
        copies[rows] = are_copies(
            texts,
            text[rows],
            begins[rows],
            ends[rows],
            lent_texts,
            text_of_row,
            first["first_begin"][rows],
        )
    return copies


def _repeats(
    plan: SubstringsPlan,
    texts: pa.Array,
    window: np.ndarray,
    text: np.ndarray,
    begins: np.ndarray,
    ends: np.ndarray,
    first: Mapping[str, np.ndarray],
) -> list[Repeat]:
    """Longest copied passages of a shard: windows that are consecutive both here and in
    the first copy.
    """
    if not len(window):
        return []
    shift = first["first_begin"] - begins
    new = np.ones(len(window), bool)
    new[1:] = (
        (window[1:] != window[:-1] + 1)
        | (text[1:] != text[:-1])
        | (shift[1:] != shift[:-1])
        | (first["first_document"][1:] != first["first_document"][:-1])
    )
    starts = np.flatnonzero(new)
    lasts = np.append(starts[1:], len(window)) - 1
    words = lasts - starts + plan.section.min_words
    copies = np.maximum.reduceat(first["copies"], starts)
    first_positions = [
        first[name][starts] for name in ("first_id_high", "first_id_low", "first_begin")
    ]
    longest: dict[tuple[int, int, int], Repeat] = {}
    for run in sort_rows(-words, -copies, *first_positions):
        key = (
            int(first_positions[0][run]),
            int(first_positions[1][run]),
            int(first_positions[2][run]),
        )
        if key in longest:
            continue
        if len(longest) == LARGEST_REPEATS:
            break
        passage = (
            texts[int(text[starts[run]])]
            .as_py()
            .encode()[begins[starts[run]] : ends[lasts[run]]]
        )
        longest[key] = {
            "words": int(words[run]),
            "copies": int(copies[run]),
            "text": passage.decode()[:EXCERPT_CHARACTERS],
            "document": f"{key[0]:016x}{key[1]:016x}",
            "begin": key[2],
        }
    return list(longest.values())


def _largest(repeats: Iterable[Repeat]) -> list[Repeat]:
    """Select the longest repeats, one per start of a first copy."""
    ordered = sorted(
        repeats,
        key=lambda row: (-row["words"], -row["copies"], row["document"], row["begin"]),
    )
    longest: dict[tuple[str, int], Repeat] = {}
    for repeat in ordered:
        longest.setdefault((repeat["document"], repeat["begin"]), repeat)
    return list(longest.values())[:LARGEST_REPEATS]
