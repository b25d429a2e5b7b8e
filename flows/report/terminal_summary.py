"""The summary that a run prints at its end: the funnel, the losses, samples, the
report's path and questions to ask.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from gristmill.core.secrets import mask_text
from gristmill.dataprep.conservation import ranked, top_reasons
from gristmill.dataprep.documents import open_table, shard_names
from gristmill.dataprep.whatif_thresholds import short_name
from gristmill.flows.pages.page_elements import table
from gristmill.flows.pages.terminal_pages import print_table, section
from gristmill.flows.questions.find_documents import committed_inputs
from gristmill.flows.report.evaluation import held_out_tables, some_samples
from gristmill.flows.report.facts import (
    Facts,
    gather_facts,
)
from gristmill.flows.report.finetuning import prepared_table
from gristmill.flows.report.mixture import (
    GROUP_COLUMNS,
    encoder_note,
    group_rows,
    mixture_notes,
    mixture_tables,
    packing_table,
)
from gristmill.flows.report.stage_summaries import (
    Tokenized,
)
from gristmill.flows.report.training import EFFECT_COLUMNS, effect_rows, loss_rows
from gristmill.flows.running.session import Session
from gristmill.mixtures.schema.sources import INGEST
from gristmill.mixtures.yaml_text import join_first

SAMPLE_CHARS = 240
NOTED_FILES, NOTED_KINDS = 3, 5
"""Most damaged files, and kinds of skipped records, that a note names."""
QUESTIONS = 3
TOKEN_COLUMNS = ("source", "tokens", "MB", "bytes/token", "tokens/word")
"""Columns of the tokenizer's table that fit a narrow terminal; the report has all."""


def print_summary(session: Session, run: Path, console: Console) -> None:
    """Print the summary of the run with this folder, from the committed outputs."""
    facts = gather_facts(session, whole=False)
    print_funnel(facts, console)
    print_table(console, prepared_table(facts), "Examples")
    print_tokens(facts, console)
    print_mixture(facts, console)
    print_table(console, packing_table(facts), "Packing")
    print_losses(facts, console)
    samples = some_samples(facts)
    if samples:
        section(console, "Samples")
    for model, sample in samples:
        text = " ".join(sample.completion.split())[:SAMPLE_CHARS]
        prompt = (sample.prompt, "bold")
        console.print(Text.assemble((f"{model}: ", "dim"), prompt, " ", text))
    print_next(session, facts, run, console)


def print_funnel(facts: Facts, console: Console) -> None:
    """Documents through the preparing stages, with the rules that dropped most."""
    if not facts.funnel:
        return
    rows = []
    for row in facts.funnel:
        reasons = top_reasons(row.dropped, row.quarantined)
        dropped = ", ".join(f"{short_name(rule)} {count}" for rule, count in reasons)
        rows.append([row.stage, row.read, row.kept, row.bytes_kept / 1e6, dropped])
    columns = {"read": ",", "kept": ",", "MB kept": ".1f", "dropped most by": ""}
    print_table(console, table({"stage": "", **columns}, rows), "Documents")
    vanished = facts.losses.verdict() if facts.losses.vanished else None
    _print_notes(console, [reading_note(facts), vanished], "yellow")
    _print_notes(console, [skipped_note(facts)])


def reading_note(facts: Facts) -> str:
    """A sentence about lost records of files that could not be read to their end; empty
    without any.
    """
    ingested = facts.step(INGEST)
    damaged = ingested.damaged
    if not damaged:
        return ""
    files = [f"{file.file} (about {file.lost:,})" for file in damaged]
    return (
        "files that could not be read to their end lost about "
        f"{ingested.lost:,} records: {join_first(files, NOTED_FILES)}"
    )


def skipped_note(facts: Facts) -> str:
    """Records of the sources that are not documents, by kind; empty without any."""
    skipped = facts.step(INGEST).skipped
    if not skipped:
        return ""
    kinds = ranked(skipped)
    remainder = sum(count for _, count in kinds[NOTED_KINDS:])
    kinds[NOTED_KINDS:] = [("others", remainder)] if remainder else []
    counts = ", ".join(f"{kind} {count:,}" for kind, count in kinds)
    return f"ingest skipped {sum(skipped.values()):,} records: {counts}"


def _print_notes(
    console: Console, notes: Iterable[str | None], style: str = "dim"
) -> None:
    for note in filter(None, notes):
        console.print(Text(note, style=style))


def print_tokens(facts: Facts, console: Console) -> None:
    """Fit of the tokenizer to each source."""
    summary = facts.summary("tokenize", Tokenized)
    if not summary.sources:
        return
    names = ["source", *GROUP_COLUMNS]
    groups = [dict(zip(names, row, strict=True)) for row in group_rows(summary.sources)]
    rows = [[group[name] for name in TOKEN_COLUMNS] for group in groups]
    formats = {name: GROUP_COLUMNS.get(name, "") for name in TOKEN_COLUMNS}
    print_table(console, table(formats, rows), "Tokens")
    _print_notes(console, [encoder_note(summary.encoder)])


def print_mixture(facts: Facts, console: Console) -> None:
    """Tokens per source, requested and realised, and those of every stage; moved
    tokens, and why.
    """
    if facts.packed is None:
        return
    section(console, "Mixture")
    for mixture in mixture_tables(facts):
        print_table(console, mixture)
    _print_notes(console, mixture_notes(facts))


def print_losses(facts: Facts, console: Console) -> None:
    """First and last loss of every training, effects of trainings, and the held-out
    measurements.
    """
    losses = [
        [row.stage, row.steps, f"{row.first:.3f} -> {row.last:.3f}", row.ended]
        for row in loss_rows(facts)
    ]
    columns = {"stage": "", "steps": "d", "loss": ">", "": ""}
    print_table(console, table(columns, losses), "Training")
    effects = table(EFFECT_COLUMNS, effect_rows(facts))
    title = "What each stage changed, on held-out data"
    print_table(console, effects, title)
    for held_out in held_out_tables(facts):
        print_table(console, held_out, "Held-out text")


def print_next(session: Session, facts: Facts, run: Path, console: Console) -> None:
    """The paths of the run's report and exports, and three questions to ask of it."""
    section(console, "Next")
    committed = committed_inputs(session)
    paths = {
        "report": run / "report.html",
        "files": committed.get("documents"),
        "model": committed.get("export"),
    }
    for label, path in paths.items():
        if path is not None and path.exists():
            console.print(f"{label}:".ljust(9) + mask_text(str(path)), soft_wrap=True)
    section(console, "Ask next")
    for question, command in next_questions(session, facts).items():
        console.print(question)
        console.print(f"  {command}", soft_wrap=True)


def next_questions(session: Session, facts: Facts) -> dict[str, str]:
    """Questions that this run can answer, each with the command that asks it."""
    commands: dict[str, tuple[str, ...]] = {}
    document = example_document(session)
    if document is not None:
        commands["Why was this document kept or dropped?"] = ("explain", document)
    if any(facts.step(name).rules for name in session.manifest.steps):
        commands["What would other thresholds keep?"] = ("whatif",)
    if "pretrain" in facts.training:
        commands["What did a step of the training read?"] = ("trace", "--step", "1")
    if len(commands) < QUESTIONS:
        commands["What is committed, what is not?"] = ("status",)
    return {
        question: session.command(*command) for question, command in commands.items()
    }


def example_document(session: Session) -> str | None:
    """The id of the first document."""
    inputs = committed_inputs(session)
    for name in shard_names(inputs[INGEST])[:1] if INGEST in inputs else ():
        with open_table(inputs[INGEST] / name) as file:
            for batch in file.iter_batches(1, columns=["id"], use_threads=False):
                return str(batch["id"][0].as_py().hex()[:16])
    return None
