"""What a run prints at its end: the funnel, the losses, samples, the report's path and what to try next."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gristmill.flows.facts import TRAINING_STAGES, Facts, gather_facts, reading_notes, skipped_note, top_reasons
from gristmill.flows.report.examples import prepared_rows
from gristmill.flows.report.mixture_table import limits_note, mixture_table, prefix_note, stage_table
from gristmill.flows.report.reinforcement import reinforcement_details
from gristmill.flows.running.session import Session

SAMPLES = 3
SAMPLE_CHARS = 240


def print_summary(session: Session, run: Path, console: Console) -> None:
    """Print the summary of the run with this folder, from the committed outputs."""
    facts = gather_facts(session)
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
    section(console, "Documents")
    table = plain_table(("stage", False), ("read", True), ("kept", True), ("MB kept", True), ("dropped most by", False))
    for row in facts["funnel"]:
        reasons = ", ".join(f"{rule.rpartition('/')[2]} {count}" for rule, count in top_reasons(row))
        table.add_row(row["stage"], f"{row['read']:,}", f"{row['kept']:,}", f"{row['bytes_kept'] / 1e6:.1f}", reasons)
    console.print(table)
    for note in reading_notes(facts):
        console.print(Text(note, style="yellow"))
    if note := skipped_note(facts):
        console.print(Text(note, style="dim"))


def print_examples(facts: Facts, console: Console) -> None:
    """What was dropped of the examples for fine-tuning and preferences, where that was asked for."""
    rows = prepared_rows(facts)
    if not rows:
        return
    section(console, "Examples")
    table = plain_table(("set", False), ("records", True), ("refused", True), ("dropped", True), ("kept", True),
                        ("dropped most by", False))
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_tokens(facts: Facts, console: Console) -> None:
    """How the tokenizer fits each source."""
    from gristmill.flows.report.tokens import HEADER, describe_vocabulary, group_rows

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
    """What the rows cost in cut, dropped and padded tokens, beside what the other packings would."""
    rows = packing_rows(facts)
    if not rows:
        return
    section(console, "Packing")
    table = plain_table(("packing", False), ("rows", True), ("cut documents", True), ("dropped", True),
                        ("padding", True))
    for row in rows:
        table.add_row(row["packing"] + (" (used)" if row["used"] else ""), f"{row['rows']:,}", f"{row['split']:.2%}",
                      f"{row['dropped']:.2%}", f"{row['padding']:.2%}")
    console.print(table)


def packing_rows(facts: Facts) -> list[dict[str, Any]]:
    """One row per packing, made of the same tokens of documents: which is used, its rows, and four shares.

    `split` is the share of documents that a row's end cuts, `in_split` that of tokens which belong to them, `dropped`
    that of tokens which no row holds, `padding` the share of all rows that holds no token of a document.
    """
    packed = facts.get("packed", {})
    rows = []
    for name, costs in packed.get("packings", {}).items():
        rows.append({"packing": name, "used": name == packed["packing"], "rows": costs["rows"], **waste_of(costs)})
    return rows


def waste_of(costs: Mapping[str, int]) -> dict[str, float]:
    """The four shares of one packing; see `packing_rows`."""
    read, space = costs["tokens"] + costs["dropped_tokens"], costs["tokens"] + costs["padding_tokens"]
    return {"split": costs["split_documents"] / max(costs["documents"], 1),
            "in_split": costs["split_tokens"] / max(read, 1), "dropped": costs["dropped_tokens"] / max(read, 1),
            "padding": costs["padding_tokens"] / max(space, 1)}


def print_losses(facts: Facts, console: Console) -> None:
    """First and last loss of every training, and the held-out measurements."""
    if not facts["training"]:
        return
    section(console, "Training")
    table = plain_table(("stage", False), ("steps", True), ("loss", True), ("", False))
    for row in loss_rows(facts):
        table.add_row(row["stage"], str(row["steps"]), f"{row['first']:.3f} -> {row['last']:.3f}", row["details"])
    console.print(table)
    rows = evaluation_rows(facts)
    if not rows:
        return
    section(console, "Held-out text")
    table = plain_table(("model", False), ("source", False), ("bits/byte", True), ("perplexity", True),
                        ("token accuracy", True))
    for row in rows:
        table.add_row(row["model"], row["source"], f"{row['bits_per_byte']:.3f}", f"{row['perplexity']:.1f}",
                      f"{row['token_accuracy']:.1%}")
    console.print(table)


def loss_rows(facts: Facts) -> list[dict[str, Any]]:
    """One row per training stage: steps, first and last logged loss, and a detail."""
    rows = []
    for stage, record in facts["training"].items():
        steps = [line for line in record if "loss" in line]
        if not steps:
            continue
        describe = {"sft": teaching_details, "reward": ranking_details, "dpo": reward_details,
                    "rl": reinforcement_details}.get(stage, no_details)
        rows.append({"stage": stage, "steps": steps[-1]["step"], "first": steps[0]["loss"], "last": steps[-1]["loss"],
                     "details": describe(facts, steps)})
    return rows


def reward_details(facts: Facts, steps: list[dict[str, Any]]) -> str:
    """How often answers are rewarded as they were judged in the end: those trained on, and those held out."""
    summary = facts["summaries"].get("dpo", {})
    shares = shares_right(summary)
    accuracy = [f"{'answers rewarded right' if summary.get('objective') == 'kto' else 'reward accuracy'} {shares}"
                ] if shares else []
    found = summary.get("chosen_decline", {})
    if found.get("fell_chosen") is not None:
        alarm = "" if found["alarm_step"] is None else f", alarm at step {found['alarm_step']}"
        accuracy.append(f"fell in the last batch: {found['fell_chosen']:.0%} of chosen, "
                        f"{found['fell_rejected']:.0%} of rejected{alarm}")
    return "\n".join(accuracy)


def teaching_details(facts: Facts, steps: list[dict[str, Any]]) -> str:
    """The loss on held-out conversations, and how far a student is from its teacher, where there are any."""
    apart = [line["divergence"] for line in steps if "divergence" in line]
    measured = [line["held_out"]["loss"] for line in facts["training"]["sft"] if "held_out" in line]
    found = [f"divergence from the teacher {apart[0]:.3f} -> {apart[-1]:.3f}"] if apart else []
    return "\n".join([*found, *([f"held-out loss {measured[-1]:.4f}"] if measured else [])])


def ranking_details(facts: Facts, steps: list[dict[str, Any]]) -> str:
    """How often a reward model ranks held-out pairs as they were judged, with the interval."""
    shares = shares_right(facts["summaries"].get("reward", {}))
    return f"ranked right {shares}" if shares else ""


def shares_right(summary: dict[str, Any]) -> str:
    """The shares of positive margins, as `95% of 22 trained, 80% of 5 held out (38% to 96%)` (objectives/margins.py).

    Empty where none were measured, as in outputs of earlier versions.
    """
    right = summary.get("margins", {}).get("right", {})
    shown = [f"{found['value']:.0%} of {found['units']:,} {part.replace('_', ' ')}"
             + ("" if part == "trained" else f" ({found['low']:.0%} to {found['high']:.0%})")
             for part, found in sorted(right.items(), reverse=True)]
    return ", ".join(shown)


def no_details(facts: Facts, steps: list[dict[str, Any]]) -> str:
    """Of stages whose loss says it all."""
    return ""


def evaluated_models(facts: Facts) -> list[tuple[str, Any]]:
    """(name, measurements) of every model, in the order of their training."""
    models = facts.get("evaluation", {}).get("models", {})
    return [(name, models[name]) for name in TRAINING_STAGES if name in models]


def evaluation_rows(facts: Facts) -> list[dict[str, Any]]:
    """One row per model and source: bits per byte, perplexity, token accuracy."""
    return [{"model": model, "source": source, **values}
            for model, measured in evaluated_models(facts) for source, values in measured["sources"].items()]


def some_samples(facts: Facts) -> list[dict[str, str]]:
    """A few generated texts (model, prompt, completion): one of every model, then more."""
    models = [(name, measured["samples"]) for name, measured in evaluated_models(facts) if measured["samples"]]
    chosen = [{"model": name, **made[0 if name == "pretrain" else -1]} for name, made in models]
    more = [{"model": name, **sample} for name, made in models for sample in made]
    return [*chosen, *(sample for sample in more if sample not in chosen)][:max(SAMPLES, len(chosen))]


def print_samples(facts: Facts, console: Console) -> None:
    """One sample per model: how the pre-trained one goes on, what the tuned ones answer; then more."""
    chosen = some_samples(facts)
    if chosen:
        section(console, "Samples")
    for sample in chosen:
        text = " ".join(sample["completion"].split())[:SAMPLE_CHARS]
        console.print(Text.assemble((f"{sample['model']}: ", "dim"), (sample["prompt"], "bold"), " ", text))


def print_next(session: Session, facts: Facts, run: Path, console: Console) -> None:
    """The path of the run's report, and three commands to try."""
    section(console, "Next")
    report = run / "report.html"
    if report.exists():
        console.print(f"report:  {report}", soft_wrap=True)
    if "export" in facts:
        console.print(f"model:   {facts['export']}", soft_wrap=True)
        cost = facts["summaries"].get("export", {}).get("int8")
        if cost and cost["perplexity"] is not None:
            console.print(f"int8:    perplexity {cost['perplexity_before']:.3f} -> {cost['perplexity']:.3f} "
                          f"({cost['growth']:+.2%}) on {cost['rows']} held-out rows", soft_wrap=True)
    document = example_document(session)
    commands = [session.command("status")]
    if document is not None:
        commands.append(session.command("explain", document))
    if "pretrain" in facts["training"]:
        commands.append(session.command("trace", "--step", "1"))
    console.print("try:     " + "\n         ".join(commands), soft_wrap=True)


def example_document(session: Session) -> str | None:
    """The id of a near-duplicate, or else of the first document: one that is worth explaining."""
    from gristmill.dataprep.documents import read_table, shard_names

    dedup = session.committed("dedup")
    if dedup is not None and (dedup.data / "clusters.parquet").exists():
        members = read_table(dedup.data / "clusters.parquet", ["member"])["member"].to_pylist()
        if members:
            return str(members[0].hex()[:16])
    ingest = session.committed("ingest")
    names = shard_names(ingest.data) if ingest is not None else []
    if ingest is None or not names:
        return None
    return str(read_table(ingest.data / names[0], ["id"])["id"][0].as_py().hex()[:16])
