"""What a run prints at its end: the funnel, the losses, samples, the report's path and what to try next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gristmill.dataprep.whatif_thresholds import Rule, short_name
from gristmill.flows.questions.find_documents import committed_inputs
from gristmill.flows.questions.threshold_samples import stored_rules
from gristmill.flows.report.before_after import EFFECT_HEADINGS, effect_rows
from gristmill.flows.report.evaluation import evaluation_rows, masked_rows, some_samples, span_rows
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


def section(console: Console, title: str) -> None:
    """Print a heading."""
    console.print()
    console.print(Text(title, style="bold"))


def plain_table(*columns: tuple[str, bool]) -> Table:
    """A table without lines; columns are (name, whether it holds numbers)."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, numeric in columns:
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    return table


def print_funnel(facts: Facts, console: Console) -> None:
    """Documents and bytes through the preparing stages, with the rules that dropped most."""
    if not facts["funnel"]:
        return
    section(console, "Documents")
    table = plain_table(("stage", False), ("read", True), ("kept", True), ("MB kept", True), ("dropped most by", False))
    for row in facts["funnel"]:
        reasons = ", ".join(f"{short_name(rule)} {count}" for rule, count in top_reasons(row))
        table.add_row(row["stage"], f"{row['read']:,}", f"{row['kept']:,}", f"{row['bytes_kept'] / 1e6:.1f}", reasons)
    console.print(table)
    draw_funnel(facts["funnel"], console)
    for note in [*reading_notes(facts), *eaten_sources(facts["funnel"])]:
        console.print(Text(note, style="yellow"))
    if note := skipped_note(facts):
        console.print(Text(note, style="dim"))


def draw_funnel(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """A bar for each stage, as long as the share of all documents that it kept."""
    read, last = rows[0]["read"], rows[-1]["kept"]
    if len(rows) == 1 or not read or last == read:
        return
    width = min(BAR_WIDTH, console.width - max(len(row["stage"]) for row in rows) - 8)
    full, parts = ("█", "▏▎▍▌▋▊▉") if console.encoding.lower().startswith("utf") else ("#", "")
    console.print()
    table = plain_table(("", False), ("", False), ("", True))
    table.show_header = False
    for row in rows:
        whole, rest = divmod(round(row["kept"] / read * width * (len(parts) + 1)), len(parts) + 1)
        bar = full * whole + (parts[rest - 1] if rest else "")
        table.add_row(row["stage"], Text(bar.ljust(width), style="cyan"), f"{row['kept'] / read:.0%}")
    console.print(table)


def print_examples(facts: Facts, console: Console) -> None:
    """What was dropped of the examples for fine-tuning and preferences, where that was asked for."""
    rows = prepared_rows(facts)
    if not rows:
        return
    section(console, "Examples")
    table = plain_table(
        ("set", False),
        ("records", True),
        ("quarantined", True),
        ("dropped", True),
        ("kept", True),
        ("dropped most by", False),
    )
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_tokens(facts: Facts, console: Console) -> None:
    """How the tokenizer fits each source."""
    # What fits a narrow terminal; the report has all.
    shown = [HEADER.index(name) for name in ("tokens", "MB", "bytes/token", "tokens/word")]

    summary = facts["summaries"].get("tokenize", {})
    if "vocabulary" not in summary:
        return
    section(console, "Tokens")
    table = plain_table(("source", False), *((HEADER[number], True) for number in shown))
    for name, *row in group_rows(summary["sources"]):
        table.add_row(name, *(row[number] for number in shown))
    console.print(table)
    console.print(Text(describe_vocabulary(summary), style="dim"))


def print_mixture(facts: Facts, console: Console) -> None:
    """Tokens per source, requested and realised, and those of every stage; what was moved, and why."""
    if "packed" not in facts:
        return
    section(console, "Mixture")
    for found in (mixture_table(facts), stage_table(facts)):
        if found is None:
            continue
        header, rows = found
        table = plain_table(*((name, name not in ("source", "part")) for name in header))
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for note in filter(None, (limits_note(facts), prefix_note(facts))):
        console.print(Text(note, style="dim"))


def print_packing(facts: Facts, console: Console) -> None:
    """What the rows cost in cut, dropped and padded tokens."""
    rows = used_packing(facts)
    if not rows:
        return
    section(console, "Packing")
    table = plain_table(
        ("packing", False), ("rows", True), ("cut documents", True), ("dropped", True), ("padding", True)
    )
    for row in rows:
        table.add_row(
            row["packing"],
            f"{row['rows']:,}",
            f"{row['split']:.2%}",
            f"{row['dropped']:.2%}",
            f"{row['padding']:.2%}",
        )
    console.print(table)


def print_losses(facts: Facts, console: Console) -> None:
    """First and last loss of every training, and the held-out measurements."""
    if not facts["training"]:
        return
    section(console, "Training")
    table = plain_table(("stage", False), ("steps", True), ("loss", True), ("", False))
    for row in loss_rows(facts):
        table.add_row(row["stage"], str(row["steps"]), f"{row['first']:.3f} -> {row['last']:.3f}", row["details"])
    console.print(table)
    if effects := effect_rows(facts):
        section(console, "What each stage changed, on what it did not train on")
        table = plain_table(*((name, name in ("before", "after")) for name in EFFECT_HEADINGS))
        for effect in effects:
            table.add_row(*effect)
        console.print(table)
    rows, masked = evaluation_rows(facts), masked_rows(facts)
    if masked:
        section(console, "Held-out text, masked")
        table = plain_table(("model", False), ("source", False), ("pseudo-perplexity", True), ("masked accuracy", True))
        for row in masked:
            table.add_row(
                row["model"], row["source"], f"{row['pseudo_perplexity']:.1f}", f"{row['masked_accuracy']:.1%}"
            )
        console.print(table)
    if spans := span_rows(facts):
        section(console, "Held-out text, hidden spans")
        table = plain_table(("model", False), ("source", False), ("loss", True), ("accuracy", True))
        for row in spans:
            table.add_row(row["model"], row["source"], f"{row['span_loss']:.3f}", f"{row['span_accuracy']:.1%}")
        console.print(table)
    if not rows:
        return
    section(console, "Held-out text")
    table = plain_table(
        ("model", False), ("source", False), ("bits/byte", True), ("perplexity", True), ("token accuracy", True)
    )
    for row in rows:
        table.add_row(
            row["model"],
            row["source"],
            f"{row['bits_per_byte']:.3f}",
            f"{row['perplexity']:.1f}",
            f"{row['token_accuracy']:.1%}",
        )
    console.print(table)


def print_samples(facts: Facts, console: Console) -> None:
    """One sample per model: how the pre-trained one continues, what the tuned ones answer; then more."""
    chosen = some_samples(facts)
    if chosen:
        section(console, "Samples")
    for sample in chosen:
        text = " ".join(sample["completion"].split())[:SAMPLE_CHARS]
        console.print(Text.assemble((f"{sample['model']}: ", "dim"), (sample["prompt"], "bold"), " ", text))


def print_next(session: Session, facts: Facts, run: Path, console: Console) -> None:
    """The paths of what the run left, and three questions to ask of it."""
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
                f"int8:    perplexity {cost['perplexity_before']:.3f} -> {cost['perplexity']:.3f} "
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
    found = []
    if (document := example_document(session)) is not None:
        found.append(("Why was this document kept or dropped?", session.command("explain", document)))
    inputs = committed_inputs(session, session.plan)
    rules = stored_rules(session, inputs) if INGEST in inputs else {}
    if (setting := looser_setting(rules, facts["summaries"])) is not None:
        found.append(("What would another threshold keep?", session.command("whatif", "--set", setting)))
    if "pretrain" in facts["training"]:
        found.append(("What did a step of the training read?", session.command("trace", "--step", "1")))
    if len(found) < QUESTIONS:
        found.append(("What is committed, what is not?", session.command("status")))
    return found


def looser_setting(rules: Mapping[str, Sequence[Rule]], summaries: Mapping[str, Mapping[str, Any]]) -> str | None:
    """A setting for `whatif`: the threshold that dropped most documents, half as strict.

    Args:
        rules: step -> those that can be replayed.
        summaries: of the steps.
    """
    dropping = [
        (count, rule)
        for step, of_step in rules.items()
        for rule in of_step
        if isinstance(rule.bound, int | float)
        and rule.bound > isinstance(rule.bound, int)
        and (count := rule.dropped(summaries.get(step, {})))
    ]
    if not dropping:
        return None
    _, rule = max(dropping, key=lambda one: (one[0], one[1].label))
    looser = rule.bound * (1.5 if rule.side == "max" else 0.5)
    if rule.side == "max" and rule.bound <= 1:
        looser = min(looser, 1.0)  # of a share there is no more
    shown = str(max(round(looser), 1)) if isinstance(rule.bound, int) else f"{looser:.3g}"
    return f"{short_key(rule.key)}={shown}"


def example_document(session: Session) -> str | None:
    """The id of a near-duplicate, or else of the first document: one that is worth explaining."""
    from gristmill.dataprep.documents import open_table, read_table, shard_names

    dedup = session.committed("dedup")
    if dedup is not None and (dedup.data / "clusters.parquet").exists():
        with open_table(dedup.data / "clusters.parquet") as table:
            first = next(table.iter_batches(1, columns=["member"], use_threads=False), None)
        if first is not None and len(first):
            return str(first["member"][0].as_py().hex()[:16])
    ingest = session.committed("ingest")
    names = shard_names(ingest.data) if ingest is not None else []
    if ingest is None or not names:
        return None
    return str(read_table(ingest.data / names[0], ["id"])["id"][0].as_py().hex()[:16])
