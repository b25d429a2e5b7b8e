"""Stage `decontaminate`: drop documents that contain items of evaluation sets, or cut
the contaminated passages.

1. The index of the evaluation sets' n-grams, built once.
2. scan: per shard, the hits of the index in its documents.
3. Frequent n-grams, which occur in too many documents to be evidence.
4. apply: per shard, the contamination of each document, the edits, the annotation table
   and the matches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
from gristmill.dataprep.corpus import hex_ids
from gristmill.dataprep.documents import ID_BYTES, Inputs, write_table
from gristmill.dataprep.edits import EDITS, cuts_array
from gristmill.dataprep.jobs.shuffle import Sending, Sent, Shuffled, run_shuffle
from gristmill.dataprep.jobs.tasks import Done, ShardTask, shard_tasks
from gristmill.dataprep.passages.contamination import (
    Matches,
    Runs,
    find_matches,
    is_over,
)
from gristmill.dataprep.passages.cut_span import widen, words_left
from gristmill.dataprep.passages.evaluation_sets import Part, read_parts
from gristmill.dataprep.passages.ngram_index import (
    Hits,
    build_index,
    count_documents,
    find_ngrams,
    read_index,
    write_index,
)
from gristmill.dataprep.shuffle_format import (
    open_batches,
    sort_rows,
    task_file,
    write_partitions,
)
from gristmill.dataprep.thresholds import first_failures
from gristmill.dataprep.whatif_thresholds import Rule, threshold_rule, threshold_rules
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.steps.decontaminate import Decontaminate

MATCHES_FILE = "matches.parquet"
MATCH_SCHEMA = pa.schema(
    [
        ("set", pa.string()),
        ("item", pa.int64()),
        ("field", pa.string()),
        ("item_text", pa.string()),
        ("id", pa.binary(ID_BYTES)),
        ("source", pa.string()),
        ("locator", pa.string()),
        ("contamination", pa.float64()),
        ("words", pa.int64()),
        ("contaminated", pa.bool_()),
        ("begin", pa.int64()),
        ("end", pa.int64()),
        ("text", pa.string()),
    ]
)
"""Columns of the matches, one row per document and item text. `contaminated`: above the
thresholds; `begin`, `end`, `text`: the longest shared run, in bytes of the document as
the stage read it.
"""
ITEM_CHARACTERS = 100
MATCH_CHARACTERS = 500
SHOWN_MATCHES = 20


def write_parts_table(path: Path, parts: Sequence[Part]) -> None:
    """Write the parts for the tasks, in order and with the beginning of each text."""
    table = pa.table(
        {
            "set": pa.array([part.set for part in parts], pa.string()),
            "item": pa.array([part.item for part in parts], pa.int64()),
            "field": pa.array([part.field for part in parts], pa.string()),
            "text": pa.array(
                [part.text[:ITEM_CHARACTERS] for part in parts], pa.string()
            ),
        }
    )
    write_partitions(path, table, np.zeros(len(table), np.int64), 1)


def read_parts_table(path: Path) -> list[Part]:
    """Read the table of `write_parts_table`."""
    return [Part(**row) for row in open_batches(path).read_all().to_pylist()]


def match_table(
    texts: JudgedTexts,
    matches: Matches,
    runs: Runs,
    over: np.ndarray,
    parts: Sequence[Part],
) -> pa.Table:
    """Table of one shard's matches (MATCH_SCHEMA)."""
    longest = _longest_runs(runs)
    documents = (
        texts.documents.select(["id", "source", "locator"])
        .take(pa.array(texts.good[matches.text]))
        .to_pylist()
    )
    rows = []
    for number, document in enumerate(documents):
        part = parts[matches.part[number]]
        run = longest[number]
        begin = int(runs.begin[run])
        end = int(runs.end[run])
        passage = (
            texts.texts[int(matches.text[number])].as_py().encode()[begin:end].decode()
        )
        rows.append(
            {
                "set": part.set,
                "item": part.item,
                "field": part.field,
                "item_text": part.text,
                **document,
                "contamination": float(matches.contamination[number]),
                "words": int(matches.words[number]),
                "contaminated": bool(over[number]),
                "begin": begin,
                "end": end,
                "text": passage[:MATCH_CHARACTERS],
            }
        )
    return pa.Table.from_pylist(rows, MATCH_SCHEMA)


def _longest_runs(runs: Runs) -> np.ndarray:
    """Position of the longest run of each match; the first of equally long runs."""
    order = sort_rows(runs.match, -runs.words, runs.begin)
    first = np.searchsorted(runs.match[order], np.unique(runs.match))
    result: np.ndarray = order[first]
    return result


def write_matches(path: Path, found: Shuffled) -> pa.Table:
    """Write and return the matches of all shards, sorted by set, item, field and
    document.
    """
    table = MATCH_SCHEMA.empty_table() if found.is_nothing else found.read(0)
    keys = [(name, "ascending") for name in ("set", "item", "field", "id", "begin")]
    table = table.sort_by(keys).combine_chunks()
    write_table(path, table)
    return table


@dataclass(frozen=True)
class SetReport:
    """Items of an evaluation set.

    Attributes:
        items: number of items.
        checked: items with counted n-grams.
        too_short: items without.
        contaminated: items of documents above the thresholds.
        contaminated_share: of the checked items.
    """

    items: int
    checked: int
    too_short: int
    contaminated: int
    contaminated_share: float


class ShownMatch(TypedDict):
    """Row of MATCH_SCHEMA, with the id in hexadecimal digits."""

    set: str
    item: int
    field: str
    item_text: str
    id: str
    source: str
    locator: str
    contamination: float
    words: int
    contaminated: bool
    begin: int
    end: int
    text: str


def report_sets(
    parts: Sequence[Part],
    items: Mapping[str, int],
    counted_words: np.ndarray,
    matches: pa.Table,
) -> dict[str, SetReport]:
    """Report per evaluation set."""
    checked = {
        (part.set, part.item)
        for part, words in zip(parts, counted_words, strict=True)
        if words
    }
    contaminated_rows = (
        matches.filter(matches["contaminated"]).select(["set", "item"]).to_pylist()
    )
    contaminated = {(row["set"], row["item"]) for row in contaminated_rows}
    report = {}
    for name, total in items.items():
        num_checked = sum(key[0] == name for key in checked)
        num_contaminated = sum(key[0] == name for key in contaminated)
        report[name] = SetReport(
            total,
            num_checked,
            total - num_checked,
            num_contaminated,
            num_contaminated / num_checked if num_checked else 0.0,
        )
    return report


def shown_matches(matches: pa.Table) -> list[ShownMatch]:
    """Matches for the summary: contaminated ones first, by their share of the item."""
    order = [
        ("contaminated", "descending"),
        ("contamination", "descending"),
        ("words", "descending"),
        ("set", "ascending"),
        ("item", "ascending"),
        ("field", "ascending"),
        ("id", "ascending"),
    ]
    worst = matches.sort_by(order).slice(0, SHOWN_MATCHES)
    rows: list[ShownMatch] = worst.set_column(
        MATCH_SCHEMA.get_field_index("id"), "id", hex_ids(worst["id"])
    ).to_pylist()
    return rows


STAGE = "decontaminate"
COUNTS, MATCHES = "counts", "matches"
"""Names of streams from the shards to a single partition: document counts of n-grams,
and rows of MATCH_SCHEMA.
"""


@dataclass(frozen=True)
class DecontaminationPlan:
    """Settings shared by all tasks of the stage."""

    inputs: Inputs
    section: Decontaminate
    work: Path
    out: Path


@dataclass(frozen=True)
class DecontaminationSummary:
    """Summary of a decontamination.

    Attributes:
        counts: documents by outcome.
        sets: report of each evaluation set.
        matches: the worst matches.
        ngrams: number of distinct n-grams of the items.
        frequent_ngrams: of these, those in too many documents to be evidence.
        template_ngrams: of these, those in too many items.
        bytes_cut: size of the cut passages.
    """

    counts: Counts
    sets: Mapping[str, SetReport]
    matches: Sequence[ShownMatch]
    ngrams: int
    frequent_ngrams: int
    template_ngrams: int
    bytes_cut: int


class Cleaned(Counted):
    """Result of writing a shard's annotations."""

    bytes_cut: int


def run(
    inputs: Inputs, config: Recipe, out: Path, context: Context
) -> DecontaminationSummary:
    """Find evaluation items in the documents kept so far.

    Writes one annotation table per document shard, with `contamination` (largest share
    of an item's words in the document, 0 to 1), `contamination_words` (longest run of
    an item's words in it) and `contaminated_item` (`set#number` of the item with the
    largest share; null without a match). With `excise` also `edits` and `left_words`
    (words outside the cuts; null if nothing is cut). Also writes `matches.parquet`, one
    row per document and item text that share counted n-grams.

    Args:
        inputs: `ingest`, and the earlier annotating stages.
        config: the manifest's `decontaminate` section
            (`mixtures.steps.decontaminate.Decontaminate`).

    Raises:
        EvaluationSetError: an evaluation set cannot be read.
        ConservationError: the counts do not balance.
        QuarantineError: more documents than allowed raised an error.
    """
    section = Decontaminate.model_validate(config)
    plan = DecontaminationPlan(
        merge_annotations(inputs, context), section, context.work, out
    )
    parts, items = read_parts(section.against)
    index = build_index(
        pa.array([part.text for part in parts], pa.large_string()),
        section.ngram,
        section.min_words,
    )
    write_index(task_file(plan.work, "index", "ngrams"), index)
    write_parts_table(task_file(plan.work, "index", "parts"), parts)
    tasks = shard_tasks(inputs["ingest"])
    _, scanned = run_shuffle(
        "scan", tasks, partial(scan, plan=plan), context, {COUNTS: 1}
    )
    frequent = (
        count_documents_with(scanned[COUNTS].pieces(0), index.num_ngrams)
        > section.max_document_frequency
    )
    _write_columns(task_file(plan.work, "index", "frequent"), {"frequent": frequent})
    results, matched = run_shuffle(
        "apply", tasks, partial(apply, plan=plan), context, {MATCHES: 1}
    )
    counts = balance(results, section.max_quarantined, context.stage, errors=out)
    matches = write_matches(out / MATCHES_FILE, matched[MATCHES])
    return DecontaminationSummary(
        counts,
        report_sets(parts, items, index.counted_words, matches),
        shown_matches(matches),
        index.num_ngrams,
        int(frequent.sum()),
        index.num_templates(),
        sum(result["bytes_cut"] for result in results),
    )


def scan(task: ShardTask, plan: DecontaminationPlan) -> Sending:
    """Find the n-grams of the index in one shard."""
    texts = read_judged(plan.inputs, task.name, plan.section.sources)
    hits = find_ngrams(texts.texts, read_index(task_file(plan.work, "index", "ngrams")))
    ngrams, documents = count_documents(hits)
    path = task_file(plan.work, "hits", task.name)
    _write_columns(path, hits._asdict())
    yield Sent(COUNTS, pa.table({"ngram": ngrams, "documents": documents}), ngrams)
    return Done([path])


def count_documents_with(counts: Iterable[pa.Table], num_ngrams: int) -> np.ndarray:
    """Number of documents with each n-gram of the index: int64 of shape
    (num_ngrams,).
    """
    documents = np.zeros(num_ngrams, np.int64)
    for table in counts:
        documents[table["ngram"].to_numpy()] += table["documents"].to_numpy()
    return documents


def apply(task: ShardTask, plan: DecontaminationPlan) -> Sending[Cleaned]:
    """Write the annotations and the matches of one shard."""
    texts = read_judged(plan.inputs, task.name, plan.section.sources)
    hits = Hits(**_read_columns(task_file(plan.work, "hits", task.name)))
    frequent = _read_columns(task_file(plan.work, "index", "frequent"))["frequent"]
    index = read_index(task_file(plan.work, "index", "ngrams"))
    matches, runs = find_matches(hits, index, frequent, plan.section.certain_coverage)
    parts = read_parts_table(task_file(plan.work, "index", "parts"))
    contaminated = is_over(matches, plan.section)
    measures = _measure(matches, len(texts.good), parts)
    failed = {
        f"{STAGE}/max_contamination": measures["contamination"].to_numpy()
        > plan.section.max_contamination,
        f"{STAGE}/max_contamination_words": measures["contamination_words"].to_numpy()
        > plan.section.max_contamination_words,
    }
    bytes_cut = 0
    if plan.section.action == "excise":
        cuts = _cuts(texts, matches, runs, contaminated, plan.section.margin_characters)
        bytes_cut = int((cuts[1] - cuts[0]).sum())
        num_words_left = words_left(texts.texts, *cuts)
        uncut = np.diff(cuts[2]) == 0
        measures |= {
            "left_words": pa.array(num_words_left, mask=uncut),
            EDITS: cuts_array(*cuts),
        }
        failed = {
            f"{STAGE}/min_left_words": ~uncut
            & (num_words_left < plan.section.min_left_words)
        }
    table, counts = texts.annotate(first_failures(failed, len(texts.good)), measures)
    write_table(plan.out / task.name, table)
    yield Sent(
        MATCHES, match_table(texts, matches, runs, contaminated, parts), matches.text
    )
    return Done([plan.out / task.name], {"counts": counts, "bytes_cut": bytes_cut})


def _measure(
    matches: Matches, texts: int, parts: Sequence[Part]
) -> dict[str, pa.Array]:
    """Measured columns of n texts."""
    share = np.zeros(texts)
    words = np.zeros(texts, np.int64)
    np.maximum.at(share, matches.text, matches.contamination)
    np.maximum.at(words, matches.text, matches.words)
    item: list[str | None] = [None] * texts
    best = matches.contamination == share[matches.text]
    # Iterate backwards, so that the first of several items with the same share remains.
    for text, part in zip(
        matches.text[best][::-1].tolist(),
        matches.part[best][::-1].tolist(),
        strict=True,
    ):
        item[text] = f"{parts[part].set}#{parts[part].item}"
    return {
        "contamination": pa.array(share),
        "contamination_words": pa.array(words),
        "contaminated_item": pa.array(item, pa.string()),
    }


def _cuts(
    texts: JudgedTexts,
    matches: Matches,
    runs: Runs,
    contaminated: np.ndarray,
    margin: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    cut_runs = contaminated[runs.match]
    text = matches.text[runs.match[cut_runs]]
    return widen(texts.texts, text, runs.begin[cut_runs], runs.end[cut_runs], margin)


def _write_columns(path: Path, columns: Mapping[str, np.ndarray]) -> None:
    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    write_partitions(path, table, np.zeros(len(table), np.int64), 1)


def _read_columns(path: Path) -> dict[str, np.ndarray]:
    table = open_batches(path).read_all()
    return {name: table[name].to_numpy() for name in table.column_names}


def rules(
    stage: str, section: Decontaminate, measured_columns: Collection[str]
) -> Iterator[Rule]:
    """Thresholds for replaying. With `excise` only `min_left_words` can be replayed:
    the others change the cuts.
    """
    if section.action == "drop":
        yield from threshold_rules(section, stage, stage)
    else:
        name = "min_left_words"
        yield threshold_rule(
            f"{stage}/{name}",
            f"{stage}.{name}",
            "min",
            "left_words",
            section.min_left_words,
        )
