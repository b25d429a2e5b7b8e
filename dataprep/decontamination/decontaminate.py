"""Stage `decontaminate`: drop documents that contain items of evaluation sets, or cut
the contaminated passages.

1. The index of the evaluation sets' n-grams, built once.
2. scan: per shard, the hits of the index in its documents.
3. Frequent n-grams, which occur in too many documents to be evidence.
4. apply: per shard, the contamination of each document, the edits, the annotation table
   and the matches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.arrays import hex_ids
from gristmill.core.stage_context import Context
from gristmill.dataprep.annotate_batches import (
    JudgedTexts,
    merge_annotations,
    read_judged,
)
from gristmill.dataprep.conservation import Counted, Counts, balance
from gristmill.dataprep.decontamination.contamination import (
    Matches,
    Runs,
    find_matches,
    is_over,
)
from gristmill.dataprep.decontamination.cut_span import widen, words_left
from gristmill.dataprep.decontamination.evaluation_sets import (
    Part,
    SetReport,
    read_parts,
)
from gristmill.dataprep.decontamination.ngram import (
    Hits,
    build_index,
    count_documents,
    find_ngrams,
    read_index,
    write_index,
)
from gristmill.dataprep.documents import ID_BYTES, Inputs, positions, write_table
from gristmill.dataprep.edits import EDITS, cuts_array
from gristmill.dataprep.runners.shuffle import Sending, Sent, run_stream
from gristmill.dataprep.runners.tasks import Done, ShardTask, shard_tasks
from gristmill.dataprep.shuffle_format import (
    columns_of,
    group_starts,
    open_batches,
    sort_rows,
    task_file,
    write_rows,
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
PARTS_SCHEMA = pa.schema(
    [
        ("set", pa.string()),
        ("item", pa.int64()),
        ("field", pa.string()),
        ("text", pa.string()),
    ]
)
ITEM_CHARACTERS = 100
MATCH_CHARACTERS = 500
SHOWN_MATCHES = 20


def match_table(
    texts: JudgedTexts,
    matches: Matches,
    runs: Runs,
    over: np.ndarray,
    parts: pa.Table,
) -> pa.Table:
    """Table of one shard's matches (MATCH_SCHEMA)."""
    order = sort_rows(runs.match, -runs.words, runs.begin)
    longest = order[group_starts(runs.match[order])]
    begins, ends = runs.begin[longest], runs.end[longest]
    passages = [
        texts.passage(*place)[:MATCH_CHARACTERS]
        for place in zip(matches.text.tolist(), begins.tolist(), ends.tolist())
    ]
    documents = texts.documents.select(["id", "source", "locator"]).take(
        texts.good[matches.text]
    )
    items = parts.take(matches.part)
    columns = {
        "set": items["set"],
        "item": items["item"],
        "field": items["field"],
        "item_text": items["text"],
        **dict(zip(documents.column_names, documents.columns, strict=True)),
        "contamination": matches.contamination,
        "words": matches.words,
        "contaminated": over,
        "begin": begins,
        "end": ends,
        "text": pa.array(passages, pa.string()),
    }
    return pa.table(columns).cast(MATCH_SCHEMA)


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
    over = matches.filter(matches["contaminated"])
    contaminated = set(zip(over["set"].to_pylist(), over["item"].to_pylist()))
    num_checked, num_contaminated = (
        Counter(name for name, _ in keys) for keys in (checked, contaminated)
    )
    return {
        name: SetReport(
            total,
            num_checked[name],
            num_contaminated[name],
            num_contaminated[name] / max(num_checked[name], 1),
        )
        for name, total in items.items()
    }


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
        matches: the worst matches: rows of MATCH_SCHEMA.
        ngrams: number of distinct n-grams of the items.
        frequent_ngrams: of these, those in too many documents to be evidence.
        bytes_cut: size of the cut passages.
    """

    counts: Counts
    sets: Mapping[str, SetReport]
    matches: Sequence[Mapping[str, object]]
    ngrams: int
    frequent_ngrams: int
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
    rows = [{**vars(part), "text": part.text[:ITEM_CHARACTERS]} for part in parts]
    parts_file = task_file(plan.work, "index", "parts")
    write_rows(parts_file, pa.Table.from_pylist(rows, PARTS_SCHEMA))
    tasks = shard_tasks(inputs["ingest"])
    _, scanned = run_stream("scan", tasks, partial(scan, plan=plan), context, 1, COUNTS)
    documents = np.zeros(index.num_ngrams, np.int64)
    for counted in map(columns_of, scanned.pieces(0)):
        documents[counted["ngram"]] += counted["documents"]
    frequent = documents > section.max_document_frequency
    frequent_file = task_file(plan.work, "index", "frequent")
    write_rows(frequent_file, pa.table({"frequent": frequent}))
    results, matched = run_stream(
        "apply", tasks, partial(apply, plan=plan), context, 1, MATCHES
    )
    counts = balance(results, section.max_quarantined, context.stage, errors=out)
    matches = MATCH_SCHEMA.empty_table()
    if not matched.is_nothing:
        matches = matched.read(0)
    keys = [(name, "ascending") for name in ("set", "item", "field", "id", "begin")]
    matches = matches.sort_by(keys).combine_chunks()
    write_table(out / MATCHES_FILE, matches)
    # Contaminated ones first, by their share of the item.
    order = [
        *((name, "descending") for name in ("contaminated", "contamination", "words")),
        *((name, "ascending") for name in ("set", "item", "field", "id")),
    ]
    worst = matches.sort_by(order).slice(0, SHOWN_MATCHES)
    shown_ids = hex_ids(worst["id"])
    worst = worst.set_column(MATCH_SCHEMA.get_field_index("id"), "id", shown_ids)
    return DecontaminationSummary(
        counts,
        report_sets(parts, items, index.counted_words, matches),
        worst.to_pylist(),
        index.num_ngrams,
        int(frequent.sum()),
        sum(result["bytes_cut"] for result in results),
    )


def scan(task: ShardTask, plan: DecontaminationPlan) -> Sending:
    """Find the n-grams of the index in one shard."""
    texts = read_judged(plan.inputs, task.name, plan.section.sources)
    hits = find_ngrams(texts.texts, read_index(task_file(plan.work, "index", "ngrams")))
    ngrams, documents = count_documents(hits)
    path = task_file(plan.work, "hits", task.name)
    write_rows(path, pa.table(hits._asdict()))
    yield Sent(COUNTS, pa.table({"ngram": ngrams, "documents": documents}), ngrams)
    return Done([path])


def apply(task: ShardTask, plan: DecontaminationPlan) -> Sending[Cleaned]:
    """Write the annotations and the matches of one shard."""
    section = plan.section
    texts = read_judged(plan.inputs, task.name, section.sources)
    hits = Hits(**_read_columns(task_file(plan.work, "hits", task.name)))
    frequent = _read_columns(task_file(plan.work, "index", "frequent"))["frequent"]
    index = read_index(task_file(plan.work, "index", "ngrams"))
    matches, runs = find_matches(hits, index, frequent, section.certain_coverage)
    parts = open_batches(task_file(plan.work, "index", "parts")).read_all()
    contaminated = is_over(matches, section)
    share = np.zeros(len(texts.good))
    words = np.zeros(len(texts.good), np.int64)
    np.maximum.at(share, matches.text, matches.contamination)
    np.maximum.at(words, matches.text, matches.words)
    best = np.flatnonzero(matches.contamination == share[matches.text])
    # the first of several items with the same share
    matched, first = np.unique(matches.text[best], return_index=True)
    names = pc.binary_join_element_wise(
        parts["set"], parts["item"].cast(pa.string()), "#"
    ).combine_chunks()
    item = names.take(matches.part[best[first]])
    measures = {
        "contamination": pa.array(share),
        "contamination_words": pa.array(words),
        "contaminated_item": item.take(positions(np.arange(len(share)), matched)),
    }
    failed = {
        f"{STAGE}/max_contamination": share > section.max_contamination,
        f"{STAGE}/max_contamination_words": words > section.max_contamination_words,
    }
    bytes_cut = 0
    if section.action == "excise":
        cut_runs = contaminated[runs.match]
        text = matches.text[runs.match[cut_runs]]
        begins, ends = runs.begin[cut_runs], runs.end[cut_runs]
        cuts = widen(texts.texts, text, begins, ends, section.margin_characters)
        bytes_cut = int((cuts[1] - cuts[0]).sum())
        num_words_left = words_left(texts.texts, *cuts)
        is_cut = np.diff(cuts[2]) > 0
        measures |= {
            "left_words": pa.array(num_words_left, mask=~is_cut),
            EDITS: cuts_array(*cuts),
        }
        too_short = is_cut & (num_words_left < section.min_left_words)
        failed = {f"{STAGE}/min_left_words": too_short}
    reasons = first_failures(failed, len(texts.good))
    counts = texts.write_measured(plan.out / task.name, reasons, measures, texts.errors)
    yield Sent(
        MATCHES, match_table(texts, matches, runs, contaminated, parts), matches.text
    )
    return Done([plan.out / task.name], {"counts": counts, "bytes_cut": bytes_cut})


def _read_columns(path: Path) -> dict[str, np.ndarray]:
    return columns_of(open_batches(path).read_all())


def rules(
    stage: str, section: Decontaminate, measured_columns: Collection[str]
) -> Iterator[Rule]:
    """Thresholds for replaying. With `excise` only `min_left_words` can be replayed:
    the others change the cuts.
    """
    if section.action == "drop":
        yield from threshold_rules(section, stage, stage)
    else:
        yield threshold_rule(
            f"{stage}/min_left_words",
            f"{stage}.min_left_words",
            "min",
            "left_words",
            section.min_left_words,
        )
