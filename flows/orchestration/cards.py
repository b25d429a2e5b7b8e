"""Markdown cards about stages and runs for the Prefect UI."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gristmill.flows.pages.markdown import markdown
from gristmill.flows.pages.pictures import curves
from gristmill.flows.report.document_sections import (
    count_bars,
    funnel_picture,
    languages_picture,
    quality_picture,
    reasons_picture,
    tokens_kept,
)
from gristmill.flows.report.evaluation import evaluation_rows, some_samples
from gristmill.flows.report.facts import (
    Facts,
    gather_facts,
    reading_note,
    skipped_note,
    top_reasons,
    training,
)
from gristmill.flows.report.mixture import (
    mixture_notes,
    mixture_picture,
    mixture_tables,
    packing_table,
)
from gristmill.flows.report.stage_summaries import Counts, Record, read_as
from gristmill.flows.report.training import loss_rows, reward_points
from gristmill.flows.running.events import Outcome
from gristmill.flows.running.session import Session

SAMPLE_CHARS = 300


def markdown_table(header: list[str], rows: list[list[Any]]) -> str:
    """Format a markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    for row in rows:
        cells = (str(cell).replace("|", "\\|").replace("\n", " ") for cell in row)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def stage_card(outcome: Outcome) -> str:
    """Card of a finished stage: counts and reasons, or losses, and the folder of its
    output.
    """
    manifest = outcome.folder.manifest()
    blocks = [
        f"# {outcome.stage}: {outcome.how}",
        f"Made in {manifest['seconds']:.1f} s, fingerprint "
        f"`{outcome.fingerprint[:16]}`. {outcome.note}",
    ]
    counted = manifest["summary"].get("counts")
    if counted and "kept" in counted:
        counts = read_as(Counts, counted)
        reasons = top_reasons(counts.dropped, counts.quarantined, 20)
        rows = [
            ["read", counts.read],
            ["kept", counts.kept],
            *[[f"dropped: {rule}", number] for rule, number in reasons],
        ]
        blocks.append(markdown_table(["", "documents"], rows))
    if (outcome.folder.data / "metrics.jsonl").exists():
        record = training(outcome.folder)
        blocks += loss_lines(_losses(record))
        if rewards := reward_points(record):
            blocks.append(picture(curves(rewards, "step", "reward"), "reward by step"))
    return "\n\n".join([*blocks, f"Output: `{outcome.folder.path}`"])


def _losses(record: Record) -> list[tuple[float, float]]:
    return [(line["step"], line["loss"]) for line in record if "loss" in line]


def loss_lines(losses: Sequence[tuple[float, float]]) -> list[str]:
    """Loss of a training as a picture, and as a short table with its first and last
    value.
    """
    if not losses:
        return []
    every = max(1, (len(losses) - 1) // 10)
    rows = dict([*losses[::every], losses[-1]])
    return [
        picture(curves({"training": losses}, "step", "loss"), "loss by step"),
        markdown_table(
            ["step", "loss"],
            [[f"{step:g}", f"{loss:.4f}"] for step, loss in rows.items()],
        ),
    ]


def live_card(
    stage: str, description: str, losses: Sequence[tuple[float, float]]
) -> str:
    """Card of a running training: its progress and its loss so far."""
    return "\n\n".join([f"# {stage}: running", description, *loss_lines(losses)])


def picture(svg: str, caption: str) -> str:
    """Embed an SVG in markdown."""
    return f"![{caption}](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"


def document_lines(facts: Facts) -> list[str]:
    """Tables and pictures of funnel, drop reasons, languages, quality, duplicates and
    quarantine.
    """
    if not facts.funnel:
        return []
    blocks = [
        "## Documents",
        picture(funnel_picture(facts), "text kept after each stage"),
        markdown_table(
            ["stage", "read", "kept", "MB kept", "tokens kept", "quarantined"],
            [
                [
                    row.stage,
                    f"{row.read:,}",
                    f"{row.kept:,}",
                    f"{row.bytes_kept / 1e6:.1f}",
                    tokens_kept(row, row),
                    row.quarantined,
                ]
                for row in facts.funnel
            ],
        ),
        *filter(None, (reading_note(facts), skipped_note(facts))),
    ]
    reasons = [
        [row.stage, rule, f"{count:,}", f"{count / max(row.read, 1):.2%}"]
        for row in facts.funnel
        for rule, count in top_reasons(row.dropped, row.quarantined, 10)
    ]
    if reasons:
        blocks += [
            "## Why documents were dropped",
            picture(reasons_picture(facts), "documents by rule"),
            markdown_table(["stage", "rule", "documents", "of those read"], reasons),
        ]
    if facts.step("langid").languages:
        languages = languages_picture(facts.step("langid"))
        blocks += ["## Languages", picture(languages, "documents by language")]
    quality = quality_picture(facts.step("quality"))
    if quality:
        blocks += ["## Quality", picture(quality, "quality scores by source")]
    for clusters in facts.clusters.values():
        if clusters.sizes:
            sizes = count_bars(list(clusters.sizes.items()), "clusters")
            blocks += ["## Duplicates", picture(sizes, "clusters by size")]
    return blocks


def mixture_lines(facts: Facts) -> list[str]:
    """Tables of the requested and of the packed mixture, and of the cost of packing."""
    if facts.packed is None:
        return []
    return [
        "## Mixture",
        picture(mixture_picture(facts), "shares of tokens, requested and realised"),
        *map(markdown, mixture_tables(facts)),
        *mixture_notes(facts),
        "## Packing",
        markdown(packing_table(facts)),
    ]


def training_lines(facts: Facts) -> list[str]:
    """Loss of every training stage, as a table and as curves."""
    if not facts.training:
        return []
    rows = [
        [row.stage, row.steps, f"{row.first:.3f}", f"{row.last:.3f}"]
        for row in loss_rows(facts)
    ]
    blocks = [
        "## Training",
        markdown_table(["stage", "steps", "first loss", "last loss"], rows),
    ]
    for stage, record in facts.training.items():
        if losses := _losses(record):
            curve = curves({stage: losses}, f"step of {stage}", "loss")
            blocks.append(picture(curve, f"loss of {stage} by step"))
    return blocks


def run_card(session: Session, report: Path, link: str | None) -> str:
    """Card of a run: funnel, mixture, losses, measurements, samples, the report.

    Args:
        session: session of the run.
        report: path of its report.
        link: URL of the report, if a browser can open it.
    """
    facts = gather_facts(session)
    blocks = [
        f"# {session.manifest.name}",
        f"[Open the report]({link}) (`{report}`)" if link else f"Report: `{report}`",
        *document_lines(facts),
        *mixture_lines(facts),
        *training_lines(facts),
    ]
    rows = [
        [row.model, row.source, f"{row.bits_per_byte:.3f}"]
        for row in evaluation_rows(facts)
    ]
    if rows:
        table = markdown_table(["model", "source", "bits per byte"], rows)
        blocks += ["## Held-out text", table]
    samples = some_samples(facts)
    blocks += ["## Samples"] if samples else []
    for model, sample in samples:
        # Indented text is literal: a sample may contain anything, also markdown.
        blocks += [
            f"**{model}**: {' '.join(sample.prompt.split())}",
            "    " + " ".join(sample.completion.split())[:SAMPLE_CHARS],
        ]
    return "\n\n".join(blocks)
