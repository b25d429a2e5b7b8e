"""What is known about a run, read from the committed outputs: one place for the terminal, the UI and the report."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from gristmill.core.files import read_json
from gristmill.core.secrets import mask_text
from gristmill.core.store import StageFolder
from gristmill.dataprep.documents import column_names, read_annotations, shard_names
from gristmill.dataprep.examples.kept_examples import least_alike
from gristmill.flows.questions.document_samples import shown_documents
from gristmill.flows.questions.find_documents import committed_inputs, documents_of
from gristmill.flows.questions.spike_documents import spike_reports, with_origins
from gristmill.flows.questions.threshold_samples import describe_cuts
from gristmill.flows.running.session import Session
from gristmill.flows.stages.registry import MIX, TOKENIZE
from gristmill.flows.stages.stage import Stage, imported
from gristmill.mixtures.sources import INGEST
from gristmill.tokenize.importing.token_sources import corpora

Facts = dict[str, Any]
SIMILARITIES = ("jaccard", "cosine")
"""Columns that say how similar a duplicate is to the document that stays for it."""
SHOWN_PAIRS, COMPARED_CHARACTERS = 5, 20_000
"""Near duplicates that stand side by side in the report, and what is compared of each text."""
EATEN, EATEN_FROM = 0.1, 20
"""A stage that leaves less than that share of a source of so many documents most likely judges it by rules for another
kind of text, such as source code by those for prose."""


@dataclass
class _Gathered:
    """What was gathered last, and of which commits."""

    session: Session | None = None
    commits: Mapping[str, str] = field(default_factory=dict)
    facts: Facts = field(default_factory=dict)
    is_whole: bool = False


_last, _last_look = _Gathered(), _Gathered()
_gathering = threading.Lock()


def gather_facts(session: Session, whole: bool = True) -> Facts:
    """Everything that a summary or a report shows, by topic; topics whose stage is not committed are absent.

    A run asks several times, for its report, its card in Prefect and its summary: only new commits are looked at again.

    Args:
        session: an opened manifest.
        whole: also what the report alone shows, for which the tables of all documents are read.
    """
    folders = {name: folder for name in session.plan if (folder := session.committed(name)) is not None}
    commits = commits_of(folders)
    with _gathering:
        if _last.session is not session or _last.commits != commits or _last.is_whole < whole:
            _last.facts = _gather(session, folders, whole)
            _last.session, _last.commits, _last.is_whole = session, commits, whole
        return dict(_last.facts)


def commits_of(folders: Mapping[str, StageFolder]) -> dict[str, str]:
    """What names the commit of each of these stages."""
    return {name: (folder.path / "_SUCCESS").read_text() for name, folder in folders.items()}


def _gather(session: Session, folders: Mapping[str, StageFolder], whole: bool) -> Facts:
    manifests = {name: folder.manifest() for name, folder in folders.items()}
    summaries = {name: manifest["summary"] for name, manifest in manifests.items()}
    facts: Facts = {
        "name": session.manifest.name,
        "store": mask_text(str(session.store.root)),
        "stages": [
            {
                "stage": name,
                "fingerprint": node.fingerprint[:16],
                "identity": node.alias[:16],
                "kept_version": node.kept_version,
                "version": node.stage.version,
                "inputs": list(node.inputs),
                "seconds": manifests[name]["seconds"] if name in manifests else None,
                "bytes": sum(file["bytes"] for file in manifests[name]["files"].values())
                if name in manifests
                else None,
                "cost": manifests[name].get("cost") if name in manifests else None,
                "versions": manifests[name]["versions"] if name in manifests else None,
            }
            for name, node in session.plan.items()
        ],
        "funnel": with_tokens(funnel(summaries, session.manifest.steps), summaries.get(TOKENIZE)),
        "summaries": summaries,
        "training": {
            name: training(folder) for name, folder in folders.items() if session.plan[name].stage.trained is not None
        },
    }
    facts["spikes"] = {name: spike_reports(folders[name]) for name in facts["training"]}
    facts["near_duplicates"] = {
        name: least_alike(folder.data) for name, folder in folders.items() if session.plan[name].stage.of_examples
    }
    if INGEST in folders and whole:
        facts |= _looked_at(session, folders, summaries)
    for name, folder in folders.items():
        stage = session.plan[name].stage
        facts |= topics_of(stage, folder)
        for path in (stage.facts, stage.report_facts if whole else None):
            if path is not None:
                facts |= imported(path)(session, name, folder, facts)
    return facts


def _looked_at(
    session: Session, folders: Mapping[str, StageFolder], summaries: Mapping[str, Mapping[str, Any]]
) -> Facts:
    """What needs the documents' own texts: those of the last time, unless documents were read or judged since."""
    steps = {INGEST, *session.manifest.steps}
    commits = commits_of({name: folder for name, folder in folders.items() if name in steps})
    if _last_look.session is not session or _last_look.commits != commits:
        inputs = committed_inputs(session, session.plan)
        recipes = {name: node.recipe for name, node in session.plan.items()}
        _last_look.facts = {
            "cuts": describe_cuts(session, inputs, summaries),
            "shown_documents": shown_documents(recipes, inputs),
        }
        _last_look.session, _last_look.commits = session, commits
    return _last_look.facts


def topics_of(stage: Stage, folder: StageFolder) -> Facts:
    """What a stage has written for all to read, by topic."""
    return {topic: read_json(folder.data / file) for topic, file in stage.topics.items()}


def exported(session: Session, name: str, folder: StageFolder, facts: Facts) -> Facts:
    """Where the model is."""
    return {"export": mask_text(str(folder.data))}


def exported_documents(session: Session, name: str, folder: StageFolder, facts: Facts) -> Facts:
    """Where the files of documents are."""
    return {"exported_documents": mask_text(str(folder.data))}


def spikes_with_origins(session: Session, name: str, folder: StageFolder, facts: Facts) -> Facts:
    """The loss-spike reports of a training on the mixture, with what is known of the documents by now."""
    inputs = committed_inputs(session, session.plan)
    if MIX not in inputs or not corpora(inputs):
        return {}
    return {"spikes": {**facts["spikes"], name: with_origins(facts["spikes"][name], inputs[MIX], inputs)}}


def clusters_found(session: Session, name: str, folder: StageFolder, facts: Facts) -> Facts:
    """The largest clusters of duplicates, and how many there are of each size."""
    inputs = committed_inputs(session, session.plan)
    if INGEST not in inputs:
        return {}
    clusters = facts["summaries"][name].get("largest_clusters", [])
    sizes, pairs = duplicates_found(inputs, name)
    survivors = {bytes.fromhex(cluster["survivor"]) for cluster in clusters}
    beside = {one[side] for one in pairs for side in ("dropped", "kept")}
    texts = {
        key: {"locator": one["locator"], "text": one["text"][:COMPARED_CHARACTERS]}
        for key, one in documents_of(inputs, survivors | beside, ["locator", "text"]).items()
    }
    locators = {key: one["locator"] for key, one in texts.items()}
    found = [{**cluster, "locator": locators.get(bytes.fromhex(cluster["survivor"]), "")} for cluster in clusters]
    shown = [
        {**one, "dropped": texts[one["dropped"]], "kept": texts[one["kept"]]}
        for one in pairs
        if {one["dropped"], one["kept"]} <= texts.keys()
    ]  # a survivor may be of another run
    return {"clusters": {**facts.get("clusters", {}), name: {"largest": found, "sizes": sizes, "beside": shown}}}


def duplicates_found(inputs: Mapping[str, Path], step: str) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """How many clusters of duplicates have how many documents, in groups that double; and of the documents that a step
    dropped as near duplicates, the SHOWN_PAIRS least like the ones that stay for them.

    Returns:
        the groups that have any; and per document `measure` (the column: jaccard, or cosine where meanings were
        compared), `similarity`, and the ids `dropped` and `kept`.
    """
    edges = [2, 3, 5, 9, 17, 33, 65, 129, 1025]
    names = ["2", "3-4", "5-8", "9-16", "17-32", "33-64", "65-128", "129-1,024", "more"]
    counted, found = np.zeros(len(edges), np.int64), list[tuple[float, bytes, bytes]]()
    shards = shard_names(inputs[INGEST])
    columns = column_names(inputs[step] / shards[0])
    measure = next(name for name in SIMILARITIES if name in columns)
    for shard in shards:
        table = read_annotations(inputs, shard, step, ["keep", "cluster_size", measure, "duplicate_of"])
        sizes = table.filter(pc.fill_null(table["keep"], False))["cluster_size"].drop_null().to_numpy()
        counted += np.bincount(np.searchsorted(edges, sizes, side="right"), minlength=len(edges) + 1)[1:]
        near = table.filter(pc.less(table[measure], 1.0))
        found += zip(near[measure].to_pylist(), near["id"].to_pylist(), near["duplicate_of"].to_pylist(), strict=True)
        found = sorted(found)[:SHOWN_PAIRS]
    return (
        {name: int(count) for name, count in zip(names, counted, strict=True) if count},
        [
            {"measure": measure, "similarity": similarity, "dropped": dropped, "kept": kept}
            for similarity, dropped, kept in found
        ],
    )


def funnel(summaries: Mapping[str, Mapping[str, Any]], steps: Iterable[str]) -> list[dict[str, Any]]:
    """One row per stage that read documents: read, kept, dropped by rule, quarantined, bytes; sources beneath.

    Args:
        summaries: of the committed stages.
        steps: the names of the steps of `prepare`, in their order.
    """
    rows = []
    for name in (INGEST, *steps):
        counts = summaries.get(name, {}).get("counts")
        if counts is not None:
            rows.append({"stage": name, **counts})
    return rows


def with_tokens(rows: list[dict[str, Any]], tokenized: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The funnel with the tokens that are left: counted after the last stage, estimated before it by source."""
    if not tokenized or not rows:
        return rows
    tokens: Mapping[str, int] = tokenized["tokens_per_source"]
    sizes = tokenized["counts"]["sources"]
    per_byte = {name: tokens.get(name, 0) / max(size["bytes_kept"], 1) for name, size in sizes.items()}
    average = sum(tokens.values()) / max(tokenized["counts"]["bytes_kept"], 1)
    found = []
    for row in rows:
        left = {
            name: tokens.get(name, 0) if row is rows[-1] else size["bytes_kept"] * per_byte.get(name, average)
            for name, size in row["sources"].items()
        }
        found.append(
            {
                **row,
                "tokens_exact": row is rows[-1],
                "tokens_kept": sum(left.values()),
                "sources": {name: {**size, "tokens_kept": left[name]} for name, size in row["sources"].items()},
            }
        )
    return found


def eaten_sources(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A sentence about each stage that leaves less than EATEN of a source, with the rules that dropped most of it."""
    found = []
    for row in rows:
        for name, part in sorted(row.get("sources", {}).items()):
            if part.get("read", 0) >= EATEN_FROM and part["kept"] < EATEN * part["read"]:
                rules = " and ".join(f"{rule} ({count:,})" for rule, count in top_reasons(part, 2))
                found.append(
                    f"{row['stage']} keeps {part['kept']:,} of {part['read']:,} documents of {name!r} "
                    f"({part['kept'] / part['read']:.1%})" + (f", most dropped by {rules}" if rules else "")
                )
    return found


def top_reasons(counts: Mapping[str, Any], most: int = 3) -> list[tuple[str, int]]:
    """The rules that dropped most, quarantine among them."""
    dropped = dict(counts.get("dropped", {}))
    if counts.get("quarantined"):
        dropped["quarantined"] = counts["quarantined"]
    return sorted(dropped.items(), key=lambda item: (-item[1], item[0]))[:most]


def reading_notes(facts: Facts, most: int = 3) -> list[str]:
    """What `ingest` lost, in sentences: files that could not be read to their end."""
    summary = facts["summaries"].get(INGEST, {})
    damaged = summary.get("damaged", [])
    if not damaged:
        return []
    named = ", ".join(f"{file['file']} (about {file['lost']:,})" for file in damaged[:most])
    more = f" and {len(damaged) - most} more" if len(damaged) > most else ""
    return [f"files that could not be read to their end lost about {summary['lost']:,} records: {named}{more}"]


def skipped_note(facts: Facts, most: int = 5) -> str:
    """What the sources hold besides documents, by what it is, or nothing."""
    skipped: Mapping[str, int] = facts["summaries"].get(INGEST, {}).get("skipped", {})
    if not skipped:
        return ""
    largest = sorted(skipped.items(), key=lambda item: (-item[1], item[0]))
    named = ", ".join(f"{what} {count:,}" for what, count in largest[:most])
    others = sum(count for _, count in largest[most:])
    return f"ingest skipped {sum(skipped.values()):,} records: {named}" + (f", others {others:,}" if others else "")


def training(folder: StageFolder) -> list[dict[str, Any]]:
    """The record of a training stage: one dictionary per logged step."""
    return [json.loads(line) for line in (folder.data / "metrics.jsonl").read_text().splitlines()]
