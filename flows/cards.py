"""Short markdown about a stage or a run, for the Prefect UI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gristmill.flows.facts import gather_facts, top_reasons, training
from gristmill.flows.run import Outcome
from gristmill.flows.session import Session
from gristmill.flows.summary import all_samples, evaluation_rows, loss_rows, mixture_rows

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


def run_card(session: Session, report: Path) -> str:
    """The whole run: funnel, mixture, losses, measurements, samples, the report's path."""
    facts = gather_facts(session)
    lines = [f"# {session.manifest.name}", "", f"Report: `{report}`", "", "## Documents", "",
             markdown_table(["stage", "read", "kept", "dropped most by"], [
                 [row["stage"], row["read"], row["kept"],
                  ", ".join(f"{rule} {count}" for rule, count in top_reasons(row))] for row in facts["funnel"]]), ""]
    if "packed" in facts:
        lines += ["## Mixture", "", markdown_table(["source", "tokens", "share", "asked for"], [
            [row["source"], row["tokens"], f"{row['share']:.2%}", f"{row['requested']:.2%}"]
            for row in mixture_rows(facts)]), ""]
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
