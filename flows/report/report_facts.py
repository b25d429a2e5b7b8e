"""Facts about a run, read from its committed outputs, for the terminal, the UI and the
report.
"""

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
from gristmill.flows.stages.plan import Node
from gristmill.flows.stages.registry import MIX, TOKENIZE
from gristmill.flows.stages.stage import Stage, imported
from gristmill.mixtures.sources import INGEST
from gristmill.tokenize.importing.token_sources import corpora

Facts = dict[str, Any]
SIMILARITIES = ("jaccard", "cosine")
"""Columns with the similarity of a duplicate and the document that stays for it."""
SHOWN_PAIRS = 5
"""Near duplicates that stand side by side in the report."""
COMPARED_CHARACTERS = 20_000
"""Beginning of each of their texts that is compared."""
LEAST_KEPT, LEAST_READ = 0.1, 20
"""A stage that keeps less than that share of a source of so many documents most likely
judges it by rules for another kind of text, such as source code by those for prose.
"""
CLUSTER_SIZES = {
    "2": 2,
    "3-4": 3,
    "5-8": 5,
    "9-16": 9,
    "17-32": 17,
    "33-64": 33,
    "65-128": 65,
    "129-1,024": 129,
    "more": 1025,
}
"""Name of a group of clusters -> the least documents of one."""


@dataclass
class _Gathered:
    """Facts with the commits that they were gathered from."""

    session: Session | None = None
    commits: Mapping[str, str] = field(default_factory=dict)
    facts: Facts = field(default_factory=dict)
    has_documents: bool = False


_last, _last_documents = _Gathered(), _Gathered()
_gathering = threading.Lock()


def gather_facts(session: Session, whole: bool = True) -> Facts:
    """Everything that a summary or a report shows, by topic; topics whose stage is not
    committed are absent.

    A run calls this for its report, its card in Prefect and its summary; only new
    commits are read again.

    Args:
        session: an opened manifest.
        whole: also topics of the report alone, which read the tables of all documents.
    """
    folders = {
        name: folder
        for name in session.plan
        if (folder := session.committed(name)) is not None
    }
    commits = commits_of(folders)
    with _gathering:
        if (
            _last.session is not session
            or _last.commits != commits
            or _last.has_documents < whole
        ):
            _last.facts = _gather(session, folders, whole)
            _last.session, _last.commits, _last.has_documents = session, commits, whole
        return dict(_last.facts)


def commits_of(folders: Mapping[str, StageFolder]) -> dict[str, str]:
    """Stage -> text that differs between two of its commits."""
    return {
        name: (folder.path / "_SUCCESS").read_text() for name, folder in folders.items()
    }


def _gather(session: Session, folders: Mapping[str, StageFolder], whole: bool) -> Facts:
    manifests = {name: folder.manifest() for name, folder in folders.items()}
    summaries = {name: manifest["summary"] for name, manifest in manifests.items()}
    trainings = [
        name for name in folders if session.plan[name].stage.training is not None
    ]
    facts: Facts = {
        "name": session.manifest.name,
        "store": mask_text(str(session.store.root)),
        "stages": [
            _describe_stage(name, node, manifests.get(name))
            for name, node in session.plan.items()
        ],
        "funnel": with_tokens(
            funnel(summaries, session.manifest.steps), summaries.get(TOKENIZE)
        ),
        "summaries": summaries,
        "training": {name: training(folders[name]) for name in trainings},
        "spikes": {name: spike_reports(folders[name]) for name in trainings},
        "near_duplicates": {
            name: least_alike(folder.data)
            for name, folder in folders.items()
            if session.plan[name].stage.output == "examples"
        },
    }
    if INGEST in folders and whole:
        facts |= _document_facts(session, folders, summaries)
    for name, folder in folders.items():
        stage = session.plan[name].stage
        facts |= topics_of(stage, folder)
        for path in (
            stage.display.facts,
            stage.display.report_facts if whole else None,
        ):
            if path is not None:
                facts |= imported(path)(session, name, folder, facts)
    return facts


def _describe_stage(
    name: str, node: Node, manifest: Mapping[str, Any] | None
) -> dict[str, Any]:
    """A stage of the plan; the last four values are None before it is committed."""
    sizes = (
        []
        if manifest is None
        else [file["bytes"] for file in manifest["files"].values()]
    )
    return {
        "stage": name,
        "fingerprint": node.fingerprint[:16],
        "identity": node.alias[:16],
        "kept_version": node.kept_version,
        "version": node.stage.version,
        "inputs": list(node.inputs),
        "seconds": None if manifest is None else manifest["seconds"],
        "bytes": None if manifest is None else sum(sizes),
        "cost": None if manifest is None else manifest.get("cost"),
        "versions": None if manifest is None else manifest["versions"],
    }


def _document_facts(
    session: Session,
    folders: Mapping[str, StageFolder],
    summaries: Mapping[str, Mapping[str, Any]],
) -> Facts:
    """Facts from the documents' own texts: the last ones, unless documents were read or
    judged since.
    """
    steps = {INGEST, *session.manifest.steps}
    commits = commits_of(
        {name: folder for name, folder in folders.items() if name in steps}
    )
    if _last_documents.session is not session or _last_documents.commits != commits:
        inputs = committed_inputs(session, session.plan)
        recipes = {name: node.recipe for name, node in session.plan.items()}
        _last_documents.facts = {
            "cuts": describe_cuts(session, inputs, summaries),
            "shown_documents": shown_documents(recipes, inputs),
        }
        _last_documents.session, _last_documents.commits = session, commits
    return _last_documents.facts


def topics_of(stage: Stage, folder: StageFolder) -> Facts:
    """Topics that a stage wrote for every reader."""
    return {
        topic: read_json(folder.data / file)
        for topic, file in stage.display.topics.items()
    }


def exported(session: Session, name: str, folder: StageFolder, facts: Facts) -> Facts:
    """The folder of the model."""
    return {"export": mask_text(str(folder.data))}


def exported_documents(
    session: Session, name: str, folder: StageFolder, facts: Facts
) -> Facts:
    """The folder of exported documents."""
    return {"exported_documents": mask_text(str(folder.data))}


def spikes_with_origins(
    session: Session, name: str, folder: StageFolder, facts: Facts
) -> Facts:
    """The loss-spike reports of a training on the mixture, with the origins and
    judgements of their documents.
    """
    inputs = committed_inputs(session, session.plan)
    if MIX not in inputs or not corpora(inputs):
        return {}
    return {
        "spikes": {
            **facts["spikes"],
            name: with_origins(facts["spikes"][name], inputs[MIX], inputs),
        }
    }


def clusters_found(
    session: Session, name: str, folder: StageFolder, facts: Facts
) -> Facts:
    """The largest clusters of duplicates, sizes of all, and near duplicates with their
    texts.
    """
    inputs = committed_inputs(session, session.plan)
    if INGEST not in inputs:
        return {}
    clusters = facts["summaries"][name].get("largest_clusters", [])
    sizes, pairs = duplicates_found(inputs, name)
    ids = {bytes.fromhex(cluster["survivor"]) for cluster in clusters}
    for pair in pairs:
        ids |= {pair["dropped"], pair["kept"]}
    documents = {
        id_: {
            "locator": document["locator"],
            "text": document["text"][:COMPARED_CHARACTERS],
        }
        for id_, document in documents_of(inputs, ids, ["locator", "text"]).items()
    }
    largest = [
        {
            **cluster,
            "locator": documents.get(bytes.fromhex(cluster["survivor"]), {}).get(
                "locator", ""
            ),
        }
        for cluster in clusters
    ]
    beside = [
        {**pair, "dropped": documents[pair["dropped"]], "kept": documents[pair["kept"]]}
        for pair in pairs
        if {pair["dropped"], pair["kept"]} <= documents.keys()
    ]  # a survivor may be of another run
    return {
        "clusters": {
            **facts.get("clusters", {}),
            name: {"largest": largest, "sizes": sizes, "beside": beside},
        }
    }


def duplicates_found(
    inputs: Mapping[str, Path], step: str
) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Sizes of clusters of duplicates in groups that double, and the least similar near
    duplicates.

    Returns:
        the groups of CLUSTER_SIZES that have any; and of SHOWN_PAIRS dropped documents
        `measure` (the column: jaccard, or cosine of meanings), `similarity`, and the
        ids `dropped` and `kept`.
    """
    least = list(CLUSTER_SIZES.values())
    counts, nearest = np.zeros(len(least), np.int64), list[tuple[float, bytes, bytes]]()
    shards = shard_names(inputs[INGEST])
    columns = column_names(inputs[step] / shards[0])
    measure = next(name for name in SIMILARITIES if name in columns)
    for shard in shards:
        table = read_annotations(
            inputs, shard, step, ["keep", "cluster_size", measure, "duplicate_of"]
        )
        sizes = (
            table.filter(pc.fill_null(table["keep"], False))["cluster_size"]
            .drop_null()
            .to_numpy()
        )
        counts += np.bincount(
            np.searchsorted(least, sizes, side="right"), minlength=len(least) + 1
        )[1:]
        near = table.filter(pc.less(table[measure], 1.0))
        nearest += zip(
            near[measure].to_pylist(),
            near["id"].to_pylist(),
            near["duplicate_of"].to_pylist(),
            strict=True,
        )
        nearest = sorted(nearest)[:SHOWN_PAIRS]
    return (
        {
            name: int(count)
            for name, count in zip(CLUSTER_SIZES, counts, strict=True)
            if count
        },
        [
            {
                "measure": measure,
                "similarity": similarity,
                "dropped": dropped,
                "kept": kept,
            }
            for similarity, dropped, kept in nearest
        ],
    )


def funnel(
    summaries: Mapping[str, Mapping[str, Any]], steps: Iterable[str]
) -> list[dict[str, Any]]:
    """A row per stage that read documents: read, kept, dropped by rule, quarantined,
    bytes, and counts by source.

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


def with_tokens(
    rows: list[dict[str, Any]], tokenized: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """The funnel with tokens: counted after the last stage, estimated before it by
    source.
    """
    if not tokenized or not rows:
        return rows
    tokens: Mapping[str, int] = tokenized["tokens_per_source"]
    sizes = tokenized["counts"]["sources"]
    per_byte = {
        name: tokens.get(name, 0) / max(size["bytes_kept"], 1)
        for name, size in sizes.items()
    }
    average = sum(tokens.values()) / max(tokenized["counts"]["bytes_kept"], 1)
    rows_with_tokens = []
    for row in rows:
        is_last = row is rows[-1]
        sources, total = {}, 0.0
        for name, size in row["sources"].items():
            kept = (
                tokens.get(name, 0)
                if is_last
                else size["bytes_kept"] * per_byte.get(name, average)
            )
            sources[name] = {**size, "tokens_kept": kept}
            total += kept
        rows_with_tokens.append(
            {**row, "tokens_exact": is_last, "tokens_kept": total, "sources": sources}
        )
    return rows_with_tokens


def eaten_sources(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A sentence about each stage that keeps less than LEAST_KEPT of a source, with the
    rules that dropped most of it.
    """
    sentences = []
    for row in rows:
        for name, counts in sorted(row.get("sources", {}).items()):
            read, kept = counts.get("read", 0), counts.get("kept", 0)
            if read < LEAST_READ or kept >= LEAST_KEPT * read:
                continue
            rules = " and ".join(
                f"{rule} ({count:,})" for rule, count in top_reasons(counts, 2)
            )
            suffix = f", most dropped by {rules}" if rules else ""
            sentences.append(
                f"{row['stage']} keeps {kept:,} of {read:,} documents of {name!r} "
                f"({kept / read:.1%}){suffix}"
            )
    return sentences


def top_reasons(counts: Mapping[str, Any], most: int = 3) -> list[tuple[str, int]]:
    """The rules that dropped most, quarantine among them."""
    dropped = dict(counts.get("dropped", {}))
    if counts.get("quarantined"):
        dropped["quarantined"] = counts["quarantined"]
    return sorted(dropped.items(), key=lambda item: (-item[1], item[0]))[:most]


def reading_notes(facts: Facts, most: int = 3) -> list[str]:
    """Sentences about records that `ingest` lost: files that could not be read to their
    end.
    """
    summary = facts["summaries"].get(INGEST, {})
    damaged = summary.get("damaged", [])
    if not damaged:
        return []
    files = ", ".join(
        f"{file['file']} (about {file['lost']:,})" for file in damaged[:most]
    )
    more = f" and {len(damaged) - most} more" if len(damaged) > most else ""
    return [
        "files that could not be read to their end lost about "
        f"{summary['lost']:,} records: {files}{more}"
    ]


def skipped_note(facts: Facts, most: int = 5) -> str:
    """Records of the sources that are not documents, by kind; empty without any."""
    skipped: Mapping[str, int] = facts["summaries"].get(INGEST, {}).get("skipped", {})
    if not skipped:
        return ""
    largest = sorted(skipped.items(), key=lambda item: (-item[1], item[0]))
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in largest[:most])
    others = sum(count for _, count in largest[most:])
    return f"ingest skipped {sum(skipped.values()):,} records: {kinds}" + (
        f", others {others:,}" if others else ""
    )


def training(folder: StageFolder) -> list[dict[str, Any]]:
    """The record of a training stage: a dictionary per logged step."""
    return [
        json.loads(line)
        for line in (folder.data / "metrics.jsonl").read_text().splitlines()
    ]
