"""The summary that a run prints at its end: the funnel, the losses, samples, the
report's path and questions to ask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from gristmill.dataprep.whatif_thresholds import Rule, short_name
from gristmill.flows.pages.page_elements import Table
from gristmill.flows.pages.terminal_tables import plain_table, print_table, section
from gristmill.flows.questions.find_documents import committed_inputs
from gristmill.flows.questions.threshold_samples import stored_rules
from gristmill.flows.report.before_after import EFFECT_HEADINGS, effect_rows
from gristmill.flows.report.evaluation import (
    evaluation_rows,
    masked_rows,
    some_samples,
    span_rows,
)
from gristmill.flows.report.finetuning import prepared_rows
from gristmill.flows.report.mixture import (
    HEADER,
    describe_vocabulary,
    group_rows,
    limits_note,
    mixture_table,
    prefix_note,
    stage_table,
    used_packing,
)
from gristmill.flows.report.report_facts import (
    Facts,
    eaten_sources,
    gather_facts,
    reading_notes,
    skipped_note,
    top_reasons,
)
from gristmill.flows.report.training import loss_rows
from gristmill.flows.running.session import Session
from gristmill.mixtures.load import short_key
from gristmill.mixtures.sources import INGEST

SAMPLE_CHARS = 240
BAR_WIDTH = 40
QUESTIONS = 3
TOKEN_COLUMNS = ("tokens", "MB", "bytes/token", "tokens/word")
"""Columns of the tokenizer's table that fit a narrow terminal; the report has all."""


def print_summary(session: Session, run: Path, console: Console) -> None:
    """Print the summary of the run with this folder, from the committed outputs."""
    facts = gather_facts(session, whole=False)
    print_funnel(facts, console)
    print_examples(facts, console)
    print_tokens(facts, console)
    print_mixture(facts, console)
    print_packing(facts, console)
    print_losses(facts, console)
    print_samples(facts, console)
    print_next(session, facts, run, console)


def print_funnel(facts: Facts, console: Console) -> None:
    """Documents and bytes through the preparing stages, with the rules that dropped
    most.
    """
    if not facts["funnel"]:
        return
    rows = []
    for row in facts["funnel"]:
        reasons = ", ".join(
            f"{short_name(rule)} {count}" for rule, count in top_reasons(row)
        )
        size = f"{row['bytes_kept'] / 1e6:.1f}"
        rows.append(
            [row["stage"], f"{row['read']:,}", f"{row['kept']:,}", size, reasons]
        )
    print_table(
        console,
        Table(["stage", "read", "kept", "MB kept", "dropped most by"], rows, {1, 2, 3}),
        "Documents",
    )
    draw_funnel(facts["funnel"], console)
    for note in [*reading_notes(facts), *eaten_sources(facts["funnel"])]:
        console.print(Text(note, style="yellow"))
    skipped = skipped_note(facts)
    if skipped:
        console.print(Text(skipped, style="dim"))


def draw_funnel(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """A bar for each stage, as long as the share of all documents that it kept."""
    read, last = rows[0]["read"], rows[-1]["kept"]
    if len(rows) == 1 or not read or last == read:
        return
    width = min(BAR_WIDTH, console.width - max(len(row["stage"]) for row in rows) - 8)
    is_unicode = console.encoding.lower().startswith("utf")
    full, parts = ("█", "▏▎▍▌▋▊▉") if is_unicode else ("#", "")
    console.print()
    table = plain_table(("", False), ("", False), ("", True))
    table.show_header = False
    for row in rows:
        cells, remainder = divmod(
            round(row["kept"] / read * width * (len(parts) + 1)), len(parts) + 1
        )
        bar = full * cells + (parts[remainder - 1] if remainder else "")
        table.add_row(
            row["stage"],
            Text(bar.ljust(width), style="cyan"),
            f"{row['kept'] / read:.0%}",
        )
    console.print(table)


def print_examples(facts: Facts, console: Console) -> None:
    """Examples for fine-tuning and preferences that their preparation dropped."""
    header = ["set", "records", "quarantined", "dropped", "kept", "dropped most by"]
    print_table(console, Table(header, prepared_rows(facts), {1, 2, 3, 4}), "Examples")


def print_tokens(facts: Facts, console: Console) -> None:
    """Fit of the tokenizer to each source."""
    summary = facts["summaries"].get("tokenize", {})
    if "vocabulary" not in summary:
        return
    columns = [1 + HEADER.index(name) for name in TOKEN_COLUMNS]
    rows = [
        [row[0], *(row[column] for column in columns)]
        for row in group_rows(summary["sources"])
    ]
    print_table(
        console, Table(["source", *TOKEN_COLUMNS], rows, {1, 2, 3, 4}), "Tokens"
    )
    console.print(Text(describe_vocabulary(summary), style="dim"))


def print_mixture(facts: Facts, console: Console) -> None:
    """Tokens per source, requested and realised, and those of every stage; moved
    tokens, and why.
    """
    if "packed" not in facts:
        return
    section(console, "Mixture")
    for columns in (mixture_table(facts), stage_table(facts)):
        if columns is not None:
            header, rows = columns
            numeric = {
                column
                for column, name in enumerate(header)
                if name not in ("source", "part")
            }
            print_table(console, Table(header, rows, numeric))
    for note in filter(None, (limits_note(facts), prefix_note(facts))):
        console.print(Text(note, style="dim"))


def print_packing(facts: Facts, console: Console) -> None:
    """Cut, dropped and padded tokens of the rows."""
    rows = [
        [
            row["packing"],
            f"{row['rows']:,}",
            *(f"{row[share]:.2%}" for share in ("split", "dropped", "padding")),
        ]
        for row in used_packing(facts)
    ]
    header = ["packing", "rows", "cut documents", "dropped", "padding"]
    print_table(console, Table(header, rows, {1, 2, 3, 4}), "Packing")


def print_losses(facts: Facts, console: Console) -> None:
    """First and last loss of every training, effects of trainings, and the held-out
    measurements.
    """
    if not facts["training"]:
        return
    losses = [
        [
            row["stage"],
            str(row["steps"]),
            f"{row['first']:.3f} -> {row['last']:.3f}",
            row["details"],
        ]
        for row in loss_rows(facts)
    ]
    print_table(
        console, Table(["stage", "steps", "loss", ""], losses, {1, 2}), "Training"
    )
    effects = Table(EFFECT_HEADINGS, effect_rows(facts), {2, 3})
    print_table(
        console, effects, "What each stage changed, on what it did not train on"
    )
    masked = [
        [
            row["model"],
            row["source"],
            f"{row['pseudo_perplexity']:.1f}",
            f"{row['masked_accuracy']:.1%}",
        ]
        for row in masked_rows(facts)
    ]
    masked_header = ["model", "source", "pseudo-perplexity", "masked accuracy"]
    print_table(console, Table(masked_header, masked, {2, 3}), "Held-out text, masked")
    spans = [
        [
            row["model"],
            row["source"],
            f"{row['span_loss']:.3f}",
            f"{row['span_accuracy']:.1%}",
        ]
        for row in span_rows(facts)
    ]
    span_header = ["model", "source", "loss", "accuracy"]
    print_table(
        console, Table(span_header, spans, {2, 3}), "Held-out text, hidden spans"
    )
    texts = [
        [
            row["model"],
            row["source"],
            f"{row['bits_per_byte']:.3f}",
            f"{row['perplexity']:.1f}",
            f"{row['token_accuracy']:.1%}",
        ]
        for row in evaluation_rows(facts)
    ]
    text_header = ["model", "source", "bits/byte", "perplexity", "token accuracy"]
    print_table(console, Table(text_header, texts, {2, 3, 4}), "Held-out text")


def print_samples(facts: Facts, console: Console) -> None:
    """A sample per model: the pre-trained one continues, tuned ones answer; then
    more.
    """
    samples = some_samples(facts)
    if samples:
        section(console, "Samples")
    for sample in samples:
        text = " ".join(sample["completion"].split())[:SAMPLE_CHARS]
        console.print(
            Text.assemble(
                (f"{sample['model']}: ", "dim"), (sample["prompt"], "bold"), " ", text
            )
        )


def print_next(session: Session, facts: Facts, run: Path, console: Console) -> None:
    """The paths of the run's report and exports, and three questions to ask of it."""
    section(console, "Next")
    report = run / "report.html"
    if report.exists():
        console.print(f"report:  {report}", soft_wrap=True)
    if "exported_documents" in facts:
        console.print(f"files:   {facts['exported_documents']}", soft_wrap=True)
    if "export" in facts:
        console.print(f"model:   {facts['export']}", soft_wrap=True)
        cost = facts["summaries"].get("export", {}).get("int8")
        if cost and cost["perplexity"] is not None:
            console.print(
                f"int8:    perplexity {cost['perplexity_before']:.3f} -> "
                f"{cost['perplexity']:.3f} "
                f"({cost['growth']:+.2%}) on {cost['rows']} held-out rows",
                soft_wrap=True,
            )
    questions = next_questions(session, facts)
    if questions:
        section(console, "Ask next")
    for question, command in questions:
        console.print(question)
        console.print(f"  {command}", soft_wrap=True)


def next_questions(session: Session, facts: Facts) -> list[tuple[str, str]]:
    """Questions that this run can answer, each with the command that asks it."""
    questions = []
    document = example_document(session)
    if document is not None:
        questions.append(
            (
                "Why was this document kept or dropped?",
                session.command("explain", document),
            )
        )
    inputs = committed_inputs(session, session.plan)
    rules = stored_rules(session, inputs) if INGEST in inputs else {}
    setting = looser_setting(rules, facts["summaries"])
    if setting is not None:
        questions.append(
            (
                "What would another threshold keep?",
                session.command("whatif", "--set", setting),
            )
        )
    if "pretrain" in facts["training"]:
        questions.append(
            (
                "What did a step of the training read?",
                session.command("trace", "--step", "1"),
            )
        )
    if len(questions) < QUESTIONS:
        questions.append(("What is committed, what is not?", session.command("status")))
    return questions


def looser_setting(
    rules_by_step: Mapping[str, Sequence[Rule]],
    summaries: Mapping[str, Mapping[str, Any]],
) -> str | None:
    """A setting for `whatif`: the threshold that dropped most documents, half as
    strict.

    Args:
        rules_by_step: step -> rules that can be replayed.
        summaries: of the steps.
    """
    dropping = []
    for step, rules in rules_by_step.items():
        for rule in rules:
            # A whole number of 1 cannot be halved.
            if not isinstance(rule.bound, int | float) or rule.bound <= isinstance(
                rule.bound, int
            ):
                continue
            dropped = rule.dropped(summaries.get(step, {}))
            if dropped:
                dropping.append((dropped, rule))
    if not dropping:
        return None
    _, rule = max(dropping, key=lambda entry: (entry[0], entry[1].label))
    looser = rule.bound * (1.5 if rule.side == "max" else 0.5)
    if rule.side == "max" and rule.bound <= 1:
        looser = min(looser, 1.0)  # a share is 1 at most
    value = (
        str(max(round(looser), 1)) if isinstance(rule.bound, int) else f"{looser:.3g}"
    )
    return f"{short_key(rule.key)}={value}"


def example_document(session: Session) -> str | None:
    """The id of a near-duplicate, or else of the first document: one that is worth
    explaining.
    """
    from gristmill.dataprep.documents import open_table, read_table, shard_names

    dedup = session.committed("dedup")
    if dedup is not None and (dedup.data / "clusters.parquet").exists():
        with open_table(dedup.data / "clusters.parquet") as table:
            first = next(
                table.iter_batches(1, columns=["member"], use_threads=False), None
            )
        if first is not None and len(first):
            return str(first["member"][0].as_py().hex()[:16])
    ingest = session.committed("ingest")
    names = shard_names(ingest.data) if ingest is not None else []
    if ingest is None or not names:
        return None
    return str(read_table(ingest.data / names[0], ["id"])["id"][0].as_py().hex()[:16])
