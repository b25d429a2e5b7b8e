"""What is known about a run, read from the committed outputs: one place for the terminal, the UI and the report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from gristmill.dataprep.documents import read_annotations, shard_names
from gristmill.dataprep.examples.kept_examples import least_alike
from gristmill.dataprep.files import read_json
from gristmill.dataprep.secrets import mask_text
from gristmill.flows.questions.cut_samples import describe_cuts
from gristmill.flows.questions.find_documents import committed_inputs, locators_of
from gristmill.flows.questions.spike_documents import autopsies, with_origins
from gristmill.flows.running.session import Session
from gristmill.flows.store.store import StageFolder
from gristmill.mixtures.prepare import PREPARE_STAGES

TRAINING_STAGES = ("pretrain", "sft", "reward", "dpo", "rl")
EXAMPLE_STAGES = ("sft_prepare", "dpo_prepare")
Facts = dict[str, Any]


def gather_facts(session: Session) -> Facts:
    """Everything that a summary or a report shows, by topic; topics whose stage is not committed are absent."""
    folders = {name: folder for name in session.plan if (folder := session.committed(name)) is not None}
    manifests = {name: folder.manifest() for name, folder in folders.items()}
    summaries = {name: manifest["summary"] for name, manifest in manifests.items()}
    facts: Facts = {
        "name": session.manifest.name,
        "store": mask_text(str(session.store.root)),
        "stages": [
            {"stage": name, "fingerprint": node.fingerprint[:16], "inputs": list(node.inputs),
             "seconds": manifests[name]["seconds"] if name in manifests else None,
             "bytes": sum(file["bytes"] for file in manifests[name]["files"].values()) if name in manifests else None,
             "cost": manifests[name].get("cost") if name in manifests else None,
             "versions": manifests[name]["versions"] if name in manifests else None}
            for name, node in session.plan.items()
        ],
        "funnel": with_tokens(funnel(summaries), summaries.get("tokenize")),
        "summaries": summaries,
        "training": {name: training(folders[name]) for name in TRAINING_STAGES if name in folders},
    }
    facts["spikes"] = {name: autopsies(folders[name]) for name in facts["training"]}
    inputs = committed_inputs(session, session.plan)
    if {"ingest", "mix", "pretrain"} <= folders.keys():
        facts["spikes"]["pretrain"] = with_origins(facts["spikes"]["pretrain"], folders["mix"].data, inputs)
    if "ingest" in folders:
        facts["cuts"] = describe_cuts(session, inputs, summaries)
    if "dedup" in folders:
        facts["clusters"] = largest_clusters(session, summaries["dedup"])
        facts["cluster_sizes"] = cluster_sizes(inputs)
    facts["twins"] = {name: least_alike(folders[name].data) for name in EXAMPLE_STAGES if name in folders}
    if "mix" in folders:
        facts["packed"] = read_json(folders["mix"].data / "packed.json")
    if "evaluate" in folders:
        facts["evaluation"] = read_json(folders["evaluate"].data / "evaluation.json")
    if "export" in folders:
        facts["export"] = mask_text(str(folders["export"].data))
    return facts


def largest_clusters(session: Session, summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The largest clusters of duplicates: the survivor's id and locator, and the number of members."""
    clusters = summary.get("largest_clusters", [])
    inputs = committed_inputs(session, session.plan)
    if "ingest" not in inputs:
        return []
    locators = locators_of(inputs, {bytes.fromhex(cluster["survivor"]) for cluster in clusters})
    return [{**cluster, "locator": locators.get(bytes.fromhex(cluster["survivor"]), "")} for cluster in clusters]


def funnel(summaries: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per stage that read documents: read, kept, dropped by rule, quarantined, bytes; sources beneath."""
    rows = []
    for name in ("ingest", *[stage for stage in summaries if stage in PREPARE_STAGES]):
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
    return [
        {**row, "tokens_exact": row is rows[-1], "tokens_kept": sum(tokens.values()) if row is rows[-1] else sum(
            size["bytes_kept"] * per_byte.get(name, average) for name, size in row["sources"].items())}
        for row in rows
    ]  # fmt: skip


def cluster_sizes(inputs: Mapping[str, Path]) -> dict[str, int]:
    """How many clusters of duplicates have how many documents, in groups that double."""
    edges = [2, 3, 5, 9, 17, 33, 65, 129, 1025]
    names = ["2", "3-4", "5-8", "9-16", "17-32", "33-64", "65-128", "129-1,024", "more"]
    found = np.zeros(len(edges), np.int64)
    for shard in shard_names(inputs["ingest"]):
        table = read_annotations(inputs, shard, "dedup", ["keep", "cluster_size"])
        sizes = table.filter(pc.fill_null(table["keep"], False))["cluster_size"].drop_null().to_numpy()
        found += np.bincount(np.searchsorted(edges, sizes, side="right"), minlength=len(edges) + 1)[1:]
    return {name: int(count) for name, count in zip(names, found, strict=True) if count}


def top_reasons(counts: Mapping[str, Any], most: int = 3) -> list[tuple[str, int]]:
    """The rules that dropped most, quarantine among them."""
    dropped = dict(counts.get("dropped", {}))
    if counts.get("quarantined"):
        dropped["quarantined"] = counts["quarantined"]
    return sorted(dropped.items(), key=lambda item: (-item[1], item[0]))[:most]


def reading_notes(facts: Facts, most: int = 3) -> list[str]:
    """What `ingest` lost, in sentences: files that could not be read to their end."""
    summary = facts["summaries"].get("ingest", {})
    damaged = summary.get("damaged", [])
    if not damaged:
        return []
    named = ", ".join(f"{file['file']} (about {file['lost']:,})" for file in damaged[:most])
    more = f" and {len(damaged) - most} more" if len(damaged) > most else ""
    return [f"files that could not be read to their end lost about {summary['lost']:,} records: {named}{more}"]


def skipped_note(facts: Facts, most: int = 5) -> str:
    """What the sources hold besides documents, by what it is, or nothing."""
    skipped: Mapping[str, int] = facts["summaries"].get("ingest", {}).get("skipped", {})
    if not skipped:
        return ""
    largest = sorted(skipped.items(), key=lambda item: (-item[1], item[0]))
    named = ", ".join(f"{what} {count:,}" for what, count in largest[:most])
    others = sum(count for _, count in largest[most:])
    return f"ingest skipped {sum(skipped.values()):,} records: {named}" + (f", others {others:,}" if others else "")


def training(folder: StageFolder) -> list[dict[str, Any]]:
    """The record of a training stage: one dictionary per logged step."""
    return [json.loads(line) for line in (folder.data / "metrics.jsonl").read_text().splitlines()]
