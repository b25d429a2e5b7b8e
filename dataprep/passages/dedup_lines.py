"""The stage `dedup_lines`: of each distinct line or paragraph one copy stays in the corpus; the others are cut.

1. lines: per shard, its distinct units, each with the smallest id of a document that has it, by partition of the key.
2. repeated: per partition of the keys, the units that are repeated, with the document that keeps each, by shard.
3. apply: per shard, the edits and the annotation table.

A shard sends each distinct unit once, however many of its documents have it, so that a licence on a million pages
is no more work than any other line. Which document keeps a unit is decided by document ids alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.dataprep.context import Context
from gristmill.dataprep.counts import balance
from gristmill.dataprep.documents import write_table
from gristmill.dataprep.duplicates.numbering import Numbering, number_documents
from gristmill.dataprep.edits import EDITS, cuts_array
from gristmill.dataprep.groups import find_pairs, group_starts, sort_rows, spread_groups
from gristmill.dataprep.jobs.engine import Done, Task, run_tasks, shard_tasks
from gristmill.dataprep.judged_texts import JudgedTexts, read_judged
from gristmill.dataprep.passages.lines import Units, cut_units, find_units
from gristmill.dataprep.shuffle import count_partitions, read_partition, write_partitions
from gristmill.dataprep.text_sizes import text_bytes
from gristmill.mixtures.dedup import DedupLines

EMPTY, RATIO = "dedup_lines/empty", "dedup_lines/max_removed_line_ratio"
MOST_REPEATED = 10
EXCERPT_CHARACTERS = 200
KEY = ("high", "low")
CLAIM = ("id_high", "id_low", "document")


@dataclass(frozen=True)
class Plan:
    """What the tasks of the stage have in common."""

    inputs: Mapping[str, Path]
    section: DedupLines
    numbering: Numbering
    num_partitions: int
    work: Path
    out: Path

    def path(self, job: str, name: str) -> Path:
        """The Arrow file that a task of a job leaves in the work folder."""
        return self.work / job / f"{name}.arrow"


def run(inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context) -> dict[str, Any]:
    """Cut repeated units out of the documents kept so far, all but one copy of each (or all).

    Writes one annotation table per document shard, with `edits`, `lines_removed` (units cut) and
    `removed_line_ratio` (their share of the code points of all units; 0 where there are none). A document that
    loses everything is dropped (`dedup_lines/empty`), one that loses more than allowed too
    (`dedup_lines/max_removed_line_ratio`); a unit whose one copy was there is then gone from the corpus, as in C4.

    Args:
        inputs: `ingest`, and the annotating stages that ran before.
        config: the manifest's `dedup_lines` section (`mixtures.dedup_lines.DedupLines`).

    Returns:
        `counts`; `units` (`seen`, `shuffled` between shards, `repeated` distinct ones, `removed`, `bytes_cut`);
        `most_repeated`: the units in most documents with `documents`, `text` (its beginning) and `document`, the
        id of the one that keeps it or would.

    Raises:
        ConservationError: the counts do not balance.
        QuarantineError: more documents than allowed raised an error.
    """
    section = DedupLines.model_validate(config)
    numbering = number_documents(inputs["ingest"])
    plan = Plan(dict(inputs), section, numbering, count_partitions(text_bytes(inputs["ingest"])), context.work, out)
    shards = shard_tasks(inputs["ingest"])
    sent = run_tasks("lines", shards, partial(send_units, plan=plan), context)
    partitions = [Task(f"{number:05d}", {"partition": number}) for number in range(plan.num_partitions)]
    found = run_tasks("repeated", partitions, partial(find_repeated, plan=plan), context)
    top = sorted((row for result in found for row in result["top"]), key=lambda row: (-row["documents"], row["key"]))
    applying = [replace(task, payload={**task.payload, "show": top[:MOST_REPEATED]}) for task in shards]
    done = run_tasks("apply", applying, partial(apply, plan=plan), context)
    counts = balance(done, section.max_quarantined, context.stage, errors=out)
    shown = {key: value for result in done for key, value in result["shown"].items()}
    return {
        "counts": counts,
        "units": {
            "seen": sum(result["units"] for result in sent),
            "shuffled": sum(result["shuffled"] for result in sent),
            "repeated": sum(result["repeated"] for result in found),
            "removed": sum(result["removed"] for result in done),
            "bytes_cut": sum(result["bytes_cut"] for result in done),
        },
        "most_repeated": [{"documents": row["documents"], **shown[row["key"]]} for row in top[:MOST_REPEATED]],
    }


def send_units(task: Task, plan: Plan) -> Done:
    """Send every distinct unit of a shard to the partition of its key, with the shard's best claim to it."""
    texts = read_judged(plan.inputs, task.name, plan.section.sources)
    units, document = _units(texts, plan.section)
    long_enough = _take_part(units, plan.section)
    document = document[long_enough]
    number = plan.numbering.starts[task.payload["shard"]] + texts.good
    columns = {
        "high": units.high[long_enough],
        "low": units.low[long_enough],
        **{name: half[document] for name, half in zip(CLAIM[:2], texts.ids(), strict=True)},
        "document": number[document],
    }
    order = sort_rows(*columns.values())
    rows = {name: column[order] for name, column in columns.items()}
    starts = group_starts(*(rows[name] for name in KEY))
    own = np.zeros(len(order), np.int64)
    own[group_starts(*(rows[name] for name in (*KEY, "document")))] = 1
    table = {name: pa.array(column[starts]) for name, column in rows.items()}
    table["documents"] = pa.array(np.add.reduceat(own, starts) if len(starts) else starts)
    partitions = (table["high"].to_numpy() >> np.uint64(32)).astype(np.int64) % plan.num_partitions
    path = plan.path("units", task.name)
    write_partitions(path, pa.table(table), partitions, plan.num_partitions)
    return Done([path], {"units": len(order), "shuffled": len(starts)})


def find_repeated(task: Task, plan: Plan) -> Done:
    """Tell every shard which of its units are repeated, and which document keeps each."""
    shards = len(plan.numbering.shards)
    if not shards:
        return Done([], {"repeated": 0, "top": []})
    files = [plan.path("units", shard) for shard in plan.numbering.shards]
    table = read_partition(files, task.payload["partition"])
    rows = {name: table[name].to_numpy() for name in table.column_names}
    order = sort_rows(*(rows[name] for name in (*KEY, *CLAIM)))
    rows = {name: column[order] for name, column in rows.items()}
    starts = group_starts(*(rows[name] for name in KEY))
    documents = np.add.reduceat(rows["documents"], starts) if len(starts) else starts
    group = spread_groups(starts, len(order))
    repeated = documents >= plan.section.min_documents
    chosen = np.flatnonzero(repeated[group])
    reply = pa.table({
        "high": pa.array(rows["high"][chosen]),
        "low": pa.array(rows["low"][chosen]),
        "keeper": pa.array(rows["document"][starts][group[chosen]]),
    })  # fmt: skip
    shard_of = np.searchsorted(plan.numbering.starts, rows["document"][chosen], side="right") - 1
    path = plan.path("replies", task.name)
    write_partitions(path, reply, shard_of, shards)
    numbers = np.flatnonzero(repeated)
    largest = numbers[sort_rows(-documents[numbers], rows["high"][starts[numbers]])][:MOST_REPEATED]
    top = [
        {"documents": int(documents[number]), "document": int(rows["document"][starts[number]]),
         "key": f"{rows['high'][starts[number]]:016x}{rows['low'][starts[number]]:016x}"}
        for number in largest
    ]  # fmt: skip
    return Done([path], {"repeated": int(repeated.sum()), "top": top})


def apply(task: Task, plan: Plan) -> Done:
    """Write the annotations of one shard."""
    texts = read_judged(plan.inputs, task.name, plan.section.sources)
    units, document = _units(texts, plan.section)
    keeper = _keepers(task, plan, units)
    first = _first_in_document(units, document)
    number = plan.numbering.starts[task.payload["shard"]] + texts.good
    elsewhere = (keeper >= 0) & ((keeper != number[document]) | (plan.section.action == "cut_all"))
    again = ~first & ((keeper >= 0) | plan.section.within_documents)
    cut = (elsewhere | again) & _take_part(units, plan.section)
    removed = np.bincount(document[cut], minlength=len(texts.good))
    characters = np.bincount(document, units.characters, len(texts.good))
    removed_characters = np.bincount(document[cut], units.characters[cut], len(texts.good))
    ratio = removed_characters / np.maximum(characters, 1)
    begins, ends, offsets = cut_units(texts.texts, units, cut)
    reasons: list[str | None] = [
        EMPTY if share == 1.0 else RATIO if share > plan.section.max_removed_line_ratio else None
        for share in ratio.tolist()
    ]
    table, counts = texts.annotate(reasons, {
        "lines_removed": pa.array(removed.astype(np.int64)),
        "removed_line_ratio": pa.array(ratio),
        EDITS: cuts_array(begins, ends, offsets),
    })  # fmt: skip
    write_table(plan.out / task.name, table)
    shown = _excerpts(task.payload["show"], number, texts, units)
    return Done([plan.out / task.name], {
        "counts": counts, "removed": int(cut.sum()), "bytes_cut": int((ends - begins).sum()), "shown": shown
    })  # fmt: skip


def _units(texts: JudgedTexts, section: DedupLines) -> tuple[Units, np.ndarray]:
    """The units of a shard, and which of its readable texts each is in."""
    units = find_units(texts.texts, section.unit, section.normalise == "strip_lower")
    return units, np.repeat(np.arange(len(texts.good)), np.diff(units.offsets))


def _take_part(units: Units, section: DedupLines) -> np.ndarray:
    taken: np.ndarray = (units.words >= section.min_words) & (units.characters >= section.min_characters)
    return taken


def _keepers(task: Task, plan: Plan, units: Units) -> np.ndarray:
    """The number of the document that keeps each unit, -1 where a unit is not repeated."""
    files = [plan.path("replies", f"{number:05d}") for number in range(plan.num_partitions)]
    reply = read_partition(files, task.payload["shard"])
    high, low, keeper = (reply[name].to_numpy() for name in ("high", "low", "keeper"))
    order = sort_rows(high, low)
    places = find_pairs(high[order], low[order], units.high, units.low)
    keepers = np.full(len(places), -1, np.int64)
    keepers[places >= 0] = keeper[order][places[places >= 0]]
    return keepers


def _first_in_document(units: Units, document: np.ndarray) -> np.ndarray:
    """Which units are the first of their kind in their document (bool)."""
    order = sort_rows(document, units.high, units.low)
    first = np.zeros(len(order), bool)
    first[order[group_starts(document[order], units.high[order], units.low[order])]] = True
    return first


def _excerpts(wanted: list[dict[str, Any]], number: np.ndarray, texts: JudgedTexts, units: Units) -> dict[str, Any]:
    """Key -> the beginning of the unit and its document's id, of those units whose document is in this shard."""
    shown = {}
    for row in wanted:
        place = int(np.searchsorted(number, row["document"]))
        if place == len(number) or number[place] != row["document"]:
            continue
        inside = slice(units.offsets[place], units.offsets[place + 1])
        high, low = int(row["key"][:16], 16), int(row["key"][16:], 16)
        matches = np.flatnonzero((units.high[inside] == np.uint64(high)) & (units.low[inside] == np.uint64(low)))
        unit = units.offsets[place] + matches[0]
        text = texts.texts[place].as_py().encode()[units.begins[unit] : units.ends[unit]].decode().strip()
        identity = texts.documents["id"][int(texts.good[place])].as_py().hex()
        shown[row["key"]] = {"text": text[:EXCERPT_CHARACTERS], "document": identity}
    return shown
