"""Short markdown about a stage or a run, for the Prefect UI."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from gristmill.flows.facts import Facts, gather_facts, top_reasons, training
from gristmill.flows.mixture_table import limits_note, mixture_table, stage_table
from gristmill.flows.report_documents import (
    clusters_picture,
    funnel_picture,
    languages_picture,
    quality_picture,
    reasons_picture,
    tokens_kept,
)
from gristmill.flows.run import Outcome
from gristmill.flows.session import Session
from gristmill.flows.summary import all_samples, evaluation_rows, loss_rows, packing_rows

SAMPLE_CHARS = 300


def markdown_table(header: list[str], rows: list[list[Any]]) -> str:
    """A markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    for row in rows:
        cells = (str(cell).replace("|", "\\|").replace("\n", " ") for cell in row)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def stage_card(outcome: Outcome) -> str:
    """What one stage did: counts and reasons, or losses, and where its output is."""
    manifest = outcome.folder.manifest()
    lines = [f"# {outcome.stage}: {outcome.how}", "",
             f"Made in {manifest['seconds']:.1f} s, fingerprint `{outcome.fingerprint[:16]}`. {outcome.note}", ""]
    counts = manifest["summary"].get("counts")
    if counts and "kept" in counts:
        lines += [markdown_table(["", "documents"], [
            ["read", counts["read"]], ["kept", counts["kept"]],
            *[[f"dropped: {rule}", number] for rule, number in top_reasons(counts, 20)]]), ""]
    if (outcome.folder.data / "metrics.jsonl").exists():
        steps = [line for line in training(outcome.folder) if "loss" in line]
        shown = steps[:: max(1, len(steps) // 12)]
        lines += [markdown_table(["step", "loss"], [[line["step"], f"{line['loss']:.4f}"] for line in shown]), ""]
    lines += [f"Output: `{outcome.folder.path}`"]
    return "\n".join(lines)


def picture(svg: str, caption: str) -> str:
    """A picture inside markdown."""
    return f"![{caption}](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"


def document_lines(facts: Facts) -> list[str]:
    """The funnel, drop reasons, languages, quality, duplicates and quarantine, as tables and pictures."""
    if not facts["funnel"]:
        return []
    summaries = facts["summaries"]
    lines = ["## Documents", "", picture(funnel_picture(facts), "text left after each stage"), "",
             markdown_table(["stage", "read", "kept", "MB kept", "tokens kept", "quarantined"], [
                 [row["stage"], f"{row['read']:,}", f"{row['kept']:,}", f"{row['bytes_kept'] / 1e6:.1f}",
                  tokens_kept(row), row["quarantined"]] for row in facts["funnel"]]), ""]
    reasons = [[row["stage"], rule, f"{count:,}", f"{count / max(row['read'], 1):.2%}"]
               for row in facts["funnel"] for rule, count in top_reasons(row, 10)]
    if reasons:
        lines += ["## Why documents went", "", picture(reasons_picture(facts), "documents by rule"), "",
                  markdown_table(["stage", "rule", "documents", "of those read"], reasons), ""]
    if summaries.get("langid", {}).get("languages"):
        lines += ["## Languages", "", picture(languages_picture(facts), "documents by language"), ""]
    if summaries.get("quality", {}).get("histogram"):
        lines += ["## Quality", "", picture(quality_picture(facts), "quality scores by source"), ""]
    if facts.get("cluster_sizes"):
        lines += ["## Duplicates", "", picture(clusters_picture(facts), "clusters by size"), ""]
    return lines


def run_card(session: Session, report: Path) -> str:
    """The whole run: funnel, mixture, losses, measurements, samples, the report's path."""
    facts = gather_facts(session)
    lines = [f"# {session.manifest.name}", "", f"Report: `{report}`", "", *document_lines(facts)]
    if "packed" in facts:
        lines += ["## Mixture", ""]
        for table in (mixture_table(facts), stage_table(facts)):
            lines += [markdown_table(*table), ""] if table is not None else []
        lines += [limits_note(facts), ""] if limits_note(facts) else []
        lines += ["## Packing", "", markdown_table(["packing", "rows", "cut documents", "dropped", "padding"], [
            [f"**{row['packing']}**" if row["used"] else row["packing"], row["rows"], f"{row['split']:.2%}",
             f"{row['dropped']:.2%}", f"{row['padding']:.2%}"] for row in packing_rows(facts)]), ""]
    if facts["training"]:
        lines += ["## Training", "", markdown_table(["stage", "steps", "first loss", "last loss"], [
            [row["stage"], row["steps"], f"{row['first']:.3f}", f"{row['last']:.3f}"] for row in loss_rows(facts)]), ""]
    if evaluation_rows(facts):
        lines += ["## Held-out text", "", markdown_table(["model", "source", "bits per byte"], [
            [row["model"], row["source"], f"{row['bits_per_byte']:.3f}"] for row in evaluation_rows(facts)]), ""]
    for sample in all_samples(facts)[:3]:
        lines += [f"**{sample['model']}**: {sample['prompt']}", "",
                  "> " + " ".join(sample["completion"].split())[:SAMPLE_CHARS], ""]
    return "\n".join(lines)
