"""Provenance printed for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gristmill.flows.questions.explain import (
    NOT_DRAWN,
    SHOWN_CHARS,
    describe_values,
    shorten,
    shorten_ids,
    shorten_text,
)
from gristmill.flows.running.terminal import plain_console

SHOWN_STEPS = 12


def new_table(*columns: tuple[str, bool]) -> Table:
    """A table without lines; columns are (name, whether it holds numbers)."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, numeric in columns:
        table.add_column(name, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    return table


def print_step(found: Mapping[str, Any]) -> None:
    """Print what a step read."""
    console = plain_console()
    rank = "" if found["rank"] is None else f" on rank {found['rank']} of {found['ranks']}"
    what = (
        f"{len(found['examples'])} examples"
        if "examples" in found
        else (f"{found['tokens']} tokens, {len(found['documents'])} documents")
    )
    console.print(
        Text(
            f"{found['stage']} step {found['step']} {found['use']}{rank}: {len(found['rows'])} rows, {what}",
            style="bold",
        )
    )
    if "answers" in found:
        print_answers(console, found)
        return
    if "examples" in found:
        for row, example in zip(found["rows_of_examples"], found["examples"], strict=True):
            console.print(f"{row:>8}  {example}")
        return
    _print_documents(console, found["documents"])


def _print_documents(console: Console, documents: Sequence[Mapping[str, Any]]) -> None:
    """Two lines a document: what is known of it in columns, and where it is from, whole, since `explain` takes that."""
    rows = [("tokens", "source", "id", "quality", "cluster")]
    for entry in documents:
        quality = " ".join(
            f"{value:.3g}" if isinstance(value, float) else str(value) for value in entry.get("quality", {}).values()
        )
        size = entry.get("cluster_size")
        cluster = "" if size is None else "alone" if size == 1 else f"{entry['cluster'][:8]} of {size}"
        rows.append((str(entry["tokens"]), entry["source"], entry["id"][:16], quality, cluster))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, (tokens, *names) in enumerate(rows):
        cells = [tokens.rjust(widths[0]), *(name.ljust(width) for name, width in zip(names, widths[1:], strict=True))]
        line = "  ".join(cells)
        console.print(Text(line.rstrip(), style="bold" if not number else ""), soft_wrap=True)
        if number:
            entry = documents[number - 1]
            place = f"{'':{widths[0]}}  {entry.get('url', entry['locator'])}"
            console.print(Text(place, style="dim"), soft_wrap=True)


def print_answers(console: Console, found: Mapping[str, Any]) -> None:
    """Print the prompts of a step, each with its answers and what they were rewarded with."""
    if not found["answers"]:
        for example in found["examples"]:
            console.print(Text(f"  {example}"))
        console.print(Text("their answers are not drawn yet", style="dim"))
        return
    for example, answers in groupby(found["answers"], key=lambda one: one["id"]):
        listed = list(answers)
        right = "" if listed[0]["right"] is None else f"  right: {_ending(listed[0]['right'])}"
        console.print(
            Text.assemble((f"{example[:16]}  ", "dim"), (shorten_text(listed[0]["prompt"]), "bold"), (right, "green"))
        )
        table = new_table(("reward", True), ("advantage", True), ("tokens", True), ("", False), ("answer", False))
        for one in listed:
            said = Text()
            for used in one.get("used") or ():
                call = shorten_text(f"{used['name']} {used['arguments']} -> {used['answer']}")
                said.append(f"{call}\n", "red" if used["failed"] else "dim")
            table.add_row(
                f"{one['reward']:.4g}",
                f"{one['advantage']:+.4g}",
                str(one["tokens"]),
                "" if one["ended"] else "cut",
                said.append(shorten_text(one["answer"])),
            )
        console.print(table)


def _ending(text: str) -> str:
    """The end of a right answer, where its result stands, on one line between quotes."""
    return repr(text if len(text) <= SHOWN_CHARS else f"...{text[3 - SHOWN_CHARS :]}")


def print_document(found: Mapping[str, Any]) -> None:
    """Print where a document or an example went."""
    console = plain_console()
    if found["kind"] == "example":
        console.print(Text.assemble((found["id"], "bold"), "  example"))
    else:
        console.print(Text.assemble((found["id"], "bold"), f"  {found['source']}  {found['locator']}"))
    console.print(Text.assemble(("outcome  ", "bold"), describe_outcome(found)))
    for judged in found.get("stages", [])[-1:]:
        for line in describe_values(judged):
            console.print(Text(f"      {line}", style="dim"))
    family = Table.grid(padding=(0, 2, 0, 0))
    for relation in ("parents", "children"):
        if relation in found:
            family.add_row(Text(relation, style="bold"), shorten_ids(found[relation]))
    if family.row_count:
        console.print(family)
    if not found["steps"]:
        return
    table = new_table(("stage", False), ("step", True), ("", False), ("rows", False))
    for entry in found["steps"][:SHOWN_STEPS]:
        table.add_row(entry["stage"], str(entry["step"]), entry["use"], shorten(entry["rows"]))
    console.print(table)
    if len(found["steps"]) > SHOWN_STEPS:
        console.print(Text(f"... and {len(found['steps']) - SHOWN_STEPS} more steps (--json has them)", style="dim"))
    after = [f"{one['stage']} {one['step']}" for one in found["checkpoints_after"]]
    console.print(Text.assemble(("checkpoints that know it  ", "bold"), ", ".join(after) or "none is kept"))


def print_spans(found: Mapping[str, Any]) -> None:
    """Print the passages of a text that stand in the training rows, longest first."""
    console = plain_console()
    share = f"{found['covered'] / found['characters']:.0%}" if found["characters"] else "none"
    console.print(
        Text(
            f"{found['found']} passage{'s' * (found['found'] != 1)} of {found['shortest_span']} tokens or "
            f"more in the training rows, {share} of the text",
            style="bold",
        )
    )
    for span in found["spans"]:
        console.print()
        console.print(
            Text(
                f"{span['tokens']} tokens, characters {span['begin']} to {span['end']}, "
                f"{span['count']:,} place{'s' * (span['count'] != 1)}",
                style="bold",
            )
        )
        console.print(Text(f"  {_excerpt(span['text'])}"), soft_wrap=True)
        for place in span["places"]:
            console.print(
                Text(f"  {place['id'][:16]}  {place['source']}  {place.get('url', place['locator'])}"), soft_wrap=True
            )
            console.print(
                Text(f"    row {place['row']} from token {place['start']}; {_who_read(place['steps'])}", style="dim")
            )
        if span["count"] > len(span["places"]):
            console.print(Text(f"  ... and {span['count'] - len(span['places']):,} more", style="dim"))
    if found["found"] > len(found["spans"]):
        console.print(Text(f"\n... and {found['found'] - len(found['spans']):,} shorter passages", style="dim"))


SPAN_CHARS = 240
"""Of a passage that is printed; more is cut in its middle."""


def _excerpt(text: str) -> str:
    """A passage on one line, between quotes, without the middle of a long one."""
    half = SPAN_CHARS // 2
    return repr(text if len(text) <= SPAN_CHARS else f"{text[:half]} ... {text[-half:]}")


def _who_read(steps: Sequence[Mapping[str, Any]]) -> str:
    """In a few words, the steps that read a row."""
    if not steps:
        return "no step reads it"
    numbers = shorten([step["step"] for step in steps])
    uses = {step["use"] for step in steps}
    return f"{steps[0]['stage']} step{'s' * (len(steps) != 1)} {numbers} {' and '.join(sorted(uses))} it"


def describe_outcome(found: Mapping[str, Any]) -> str:
    """In a sentence, what became of a document."""
    use = found.get("use")
    if use == "not drawn":
        return f"not drawn: {NOT_DRAWN.get(found['reason'], found['reason'])}; no step reads it"
    if use == "held out":
        return f"held out, never trained: {found['tokens']} tokens in validation rows {shorten(found['rows'])}"
    if found["outcome"] not in ("kept", "trained"):
        return f"{found['outcome']}; no step reads it"
    read = sum(step["use"] == "read" for step in found["steps"])
    to_come = len(found["steps"]) - read
    return f"{read} steps have read it, {to_come} will" if found["steps"] else "no step reads it"


def print_takedown(found: Mapping[str, Any], written: Mapping[str, Any] | None, command: str) -> None:
    """Print what holds some documents, which checkpoints know them, and how to continue without them."""
    console = plain_console()
    listed, alike, gone = (len(found[key]) for key in ("documents", "near_duplicates", "excluded"))
    them = "it" if gone - len(found["generated"]) == 1 else "them"
    written_from = f", {len(found['generated'])} written from {them}" if found["generated"] else ""
    console.print(
        Text(
            f"{listed} document{'s' * (listed != 1)}, {alike} near-duplicate{'s' * (alike != 1)}"
            f"{written_from}; {gone} to take down",
            style="bold",
        )
    )
    for title in ("documents", "near_duplicates", "generated"):
        for entry in found[title][:SHOWN_STEPS]:
            mark = " " if entry["id"] in found["excluded"] else "-"
            console.print(Text(f"{mark} {entry['id'][:16]}  {entry['source']}  {entry['locator']}"))
        if len(found[title]) > SHOWN_STEPS:
            console.print(Text(f"... and {len(found[title]) - SHOWN_STEPS} more (--json has them)", style="dim"))
    for entry in found["examples"][:SHOWN_STEPS]:
        console.print(Text(f"  {entry['id'][:16]}  examples://{entry['set']}"))
    if len(found["examples"]) > SHOWN_STEPS:
        console.print(Text(f"... and {len(found['examples']) - SHOWN_STEPS} more (--json has them)", style="dim"))
    for name in found["not_found"]:
        console.print(Text(f"not found: {name}", style="yellow"))
    clean, affected = found["checkpoints"]["clean"], found["checkpoints"]["affected"]
    held_out = sum(len(rows) for rows in found["validation_rows"].values())
    table = new_table(("", False), ("", False))
    for name, value in (
        ("document shards", ", ".join(found["document_shards"])),
        ("packed shards", ", ".join(found["packed_shards"]) or "none"),
        ("rows", f"{len(found['rows'])} of training, {held_out} held out"),
        ("first read by", "no step" if found["first_step"] is None else f"step {found['first_step']}"),
        ("clean checkpoints", ", ".join(map(str, clean)) or "none"),
        ("checkpoints that know them", ", ".join(map(str, affected)) or "none"),
        ("models that know them", ", ".join(found["models"]) or "none"),
        ("answers of asked models", f"{found['answers']:,} kept" + ("" if written is None else ", forgotten now")),
    ):
        table.add_row(name, value)
    console.print(table)
    if found["unknown_answers"]:
        console.print(
            Text(
                f"{found['unknown_answers']:,} answers name no document; remove STORE/answers to be sure",
                style="yellow",
            )
        )
    if written is None:
        return
    begin = "starts over" if written["checkpoint"] is None else f"resumes from step {found['last_clean']}"
    if not command:
        sentence = f"their ids are in {written['list']}; remove their texts from the sources, and run again"
    elif found["steps_done"]:
        sentence = f"without them training {begin}: {command}"
    else:
        sentence = f"continue without them: {command}"
    console.print(Text(sentence, style="green"))


def print_comparison(names: Sequence[str], found: Mapping[str, Any]) -> None:
    """Print from which step on two trainings read other tokens."""
    console = plain_console()
    first, shared = found["first_difference"], min(found["steps"])
    verdict, style = (
        (f"the same tokens in all {shared} steps that both have", "green")
        if first is None
        else (f"the same tokens up to step {first - 1}, other tokens from step {first} on", "yellow")
    )
    console.print(Text(verdict, style=f"bold {style}"))
    table = new_table(("", False), ("set", False), ("steps", True), ("record", False))
    attested = {True: "matches its order", False: "does NOT match its order", None: "none yet"}
    for name, fingerprint, steps, proved in zip(names, found["sets"], found["steps"], found["attested"], strict=True):
        table.add_row(name, fingerprint[:16], str(steps), attested[proved])
    console.print(table)
