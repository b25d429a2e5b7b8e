"""Terminal output of `gristmill trace` and `gristmill takedown`."""

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
    """Create a table without lines; columns are (name, True if numeric)."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, numeric in columns:
        table.add_column(name, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    return table


def print_step(trace: Mapping[str, Any]) -> None:
    """Print the rows and documents of a step."""
    console = plain_console()
    rank = "" if trace["rank"] is None else f" on rank {trace['rank']} of {trace['ranks']}"
    contents = (
        f"{len(trace['examples'])} examples"
        if "examples" in trace
        else (f"{trace['tokens']} tokens, {len(trace['documents'])} documents")
    )
    console.print(
        Text(
            f"{trace['stage']} step {trace['step']} {trace['use']}{rank}: {len(trace['rows'])} rows, {contents}",
            style="bold",
        )
    )
    if "answers" in trace:
        print_answers(console, trace)
        return
    if "examples" in trace:
        for row, example in zip(trace["rows_of_examples"], trace["examples"], strict=True):
            console.print(f"{row:>8}  {example}")
        return
    _print_documents(console, trace["documents"])


def _print_documents(console: Console, documents: Sequence[Mapping[str, Any]]) -> None:
    """Print two lines per document: its columns, and its whole locator, which `explain` takes."""
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


def print_answers(console: Console, trace: Mapping[str, Any]) -> None:
    """Print the prompts of a step, each with its answers and their rewards."""
    if not trace["answers"]:
        for example in trace["examples"]:
            console.print(Text(f"  {example}"))
        console.print(Text("their answers are not drawn yet", style="dim"))
        return
    for example, answers in groupby(trace["answers"], key=lambda answer: answer["id"]):
        listed = list(answers)
        right = "" if listed[0]["right"] is None else f"  right: {_ending(listed[0]['right'])}"
        console.print(
            Text.assemble((f"{example[:16]}  ", "dim"), (shorten_text(listed[0]["prompt"]), "bold"), (right, "green"))
        )
        table = new_table(("reward", True), ("advantage", True), ("tokens", True), ("", False), ("answer", False))
        for answer in listed:
            cell = Text()
            for tool_call in answer.get("used") or ():
                line = shorten_text(f"{tool_call['name']} {tool_call['arguments']} -> {tool_call['answer']}")
                cell.append(f"{line}\n", "red" if tool_call["failed"] else "dim")
            table.add_row(
                f"{answer['reward']:.4g}",
                f"{answer['advantage']:+.4g}",
                str(answer["tokens"]),
                "" if answer["ended"] else "cut",
                cell.append(shorten_text(answer["answer"])),
            )
        console.print(table)


def _ending(text: str) -> str:
    """Quote the end of a right answer, which holds its result, on one line."""
    return repr(text if len(text) <= SHOWN_CHARS else f"...{text[3 - SHOWN_CHARS :]}")


def print_document(trace: Mapping[str, Any]) -> None:
    """Print the outcome of a document or an example, and the steps that read it."""
    console = plain_console()
    if trace["kind"] == "example":
        console.print(Text.assemble((trace["id"], "bold"), "  example"))
    else:
        console.print(Text.assemble((trace["id"], "bold"), f"  {trace['source']}  {trace['locator']}"))
    console.print(Text.assemble(("outcome  ", "bold"), describe_outcome(trace)))
    for judged in trace.get("stages", [])[-1:]:
        for line in describe_values(judged):
            console.print(Text(f"      {line}", style="dim"))
    family = Table.grid(padding=(0, 2, 0, 0))
    for relation in ("parents", "children"):
        if relation in trace:
            family.add_row(Text(relation, style="bold"), shorten_ids(trace[relation]))
    if family.row_count:
        console.print(family)
    if not trace["steps"]:
        return
    table = new_table(("stage", False), ("step", True), ("", False), ("rows", False))
    for entry in trace["steps"][:SHOWN_STEPS]:
        table.add_row(entry["stage"], str(entry["step"]), entry["use"], shorten(entry["rows"]))
    console.print(table)
    if len(trace["steps"]) > SHOWN_STEPS:
        console.print(Text(f"... and {len(trace['steps']) - SHOWN_STEPS} more steps (--json has them)", style="dim"))
    after = [f"{checkpoint['stage']} {checkpoint['step']}" for checkpoint in trace["checkpoints_after"]]
    console.print(Text.assemble(("checkpoints that know it  ", "bold"), ", ".join(after) or "none is kept"))


def print_spans(matches: Mapping[str, Any]) -> None:
    """Print the passages of a text that occur in the training rows, longest first."""
    console = plain_console()
    share = f"{matches['covered'] / matches['characters']:.0%}" if matches["characters"] else "none"
    console.print(
        Text(
            f"{matches['found']} passage{'s' * (matches['found'] != 1)} of {matches['shortest_span']} tokens or "
            f"more in the training rows, {share} of the text",
            style="bold",
        )
    )
    for span in matches["spans"]:
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
                Text(
                    f"    row {place['row']} from token {place['start']}; {_describe_steps(place['steps'])}",
                    style="dim",
                )
            )
        if span["count"] > len(span["places"]):
            console.print(Text(f"  ... and {span['count'] - len(span['places']):,} more", style="dim"))
    if matches["found"] > len(matches["spans"]):
        console.print(Text(f"\n... and {matches['found'] - len(matches['spans']):,} shorter passages", style="dim"))


SPAN_CHARS = 240
"""Characters of a printed passage; longer ones lose their middle."""


def _excerpt(text: str) -> str:
    """Quote a passage on one line, without the middle if it is long."""
    half = SPAN_CHARS // 2
    return repr(text if len(text) <= SPAN_CHARS else f"{text[:half]} ... {text[-half:]}")


def _describe_steps(steps: Sequence[Mapping[str, Any]]) -> str:
    """Describe the steps that read a row in a few words."""
    if not steps:
        return "no step reads it"
    numbers = shorten([step["step"] for step in steps])
    uses = {step["use"] for step in steps}
    return f"{steps[0]['stage']} step{'s' * (len(steps) != 1)} {numbers} {' and '.join(sorted(uses))} it"


def describe_outcome(trace: Mapping[str, Any]) -> str:
    """Describe the use of a document by training in a sentence."""
    use = trace.get("use")
    if use == "not drawn":
        return f"not drawn: {NOT_DRAWN.get(trace['reason'], trace['reason'])}; no step reads it"
    if use == "held out":
        return f"held out, never trained: {trace['tokens']} tokens in validation rows {shorten(trace['rows'])}"
    if trace["outcome"] not in ("kept", "trained"):
        return f"{trace['outcome']}; no step reads it"
    read = sum(step["use"] == "read" for step in trace["steps"])
    to_come = len(trace["steps"]) - read
    return f"{read} steps have read it, {to_come} will" if trace["steps"] else "no step reads it"


def print_takedown(takedown: Mapping[str, Any], written: Mapping[str, Any] | None, command: str) -> None:
    """Print the outputs, checkpoints and models that some documents affect, and how to continue without them."""
    console = plain_console()
    num_documents, num_duplicates, num_excluded = (
        len(takedown[key]) for key in ("documents", "near_duplicates", "excluded")
    )
    pronoun = "it" if num_excluded - len(takedown["generated"]) == 1 else "them"
    written_from = f", {len(takedown['generated'])} written from {pronoun}" if takedown["generated"] else ""
    console.print(
        Text(
            f"{num_documents} document{'s' * (num_documents != 1)}, {num_duplicates} near-duplicate{'s' * (num_duplicates != 1)}"
            f"{written_from}; {num_excluded} to take down",
            style="bold",
        )
    )
    for title in ("documents", "near_duplicates", "generated"):
        for entry in takedown[title][:SHOWN_STEPS]:
            mark = " " if entry["id"] in takedown["excluded"] else "-"
            console.print(Text(f"{mark} {entry['id'][:16]}  {entry['source']}  {entry['locator']}"))
        if len(takedown[title]) > SHOWN_STEPS:
            console.print(Text(f"... and {len(takedown[title]) - SHOWN_STEPS} more (--json has them)", style="dim"))
    for entry in takedown["examples"][:SHOWN_STEPS]:
        console.print(Text(f"  {entry['id'][:16]}  examples://{entry['set']}"))
    if len(takedown["examples"]) > SHOWN_STEPS:
        console.print(Text(f"... and {len(takedown['examples']) - SHOWN_STEPS} more (--json has them)", style="dim"))
    for name in takedown["not_found"]:
        console.print(Text(f"not found: {name}", style="yellow"))
    clean, affected = takedown["checkpoints"]["clean"], takedown["checkpoints"]["affected"]
    held_out = sum(len(rows) for rows in takedown["validation_rows"].values())
    table = new_table(("", False), ("", False))
    for name, value in (
        ("document shards", ", ".join(takedown["document_shards"])),
        ("packed shards", ", ".join(takedown["packed_shards"]) or "none"),
        ("rows", f"{len(takedown['rows'])} of training, {held_out} held out"),
        ("first read by", "no step" if takedown["first_step"] is None else f"step {takedown['first_step']}"),
        ("clean checkpoints", ", ".join(map(str, clean)) or "none"),
        ("checkpoints that know them", ", ".join(map(str, affected)) or "none"),
        ("models that know them", ", ".join(takedown["models"]) or "none"),
        ("answers of asked models", f"{takedown['answers']:,} kept" + ("" if written is None else ", forgotten now")),
    ):
        table.add_row(name, value)
    console.print(table)
    if takedown["unknown_answers"]:
        console.print(
            Text(
                f"{takedown['unknown_answers']:,} answers name no document; remove STORE/answers to be sure",
                style="yellow",
            )
        )
    if written is None:
        return
    begin = "starts over" if written["checkpoint"] is None else f"resumes from step {takedown['last_clean']}"
    if not command:
        sentence = f"their ids are in {written['list']}; remove their texts from the sources, and run again"
    elif takedown["steps_done"]:
        sentence = f"without them training {begin}: {command}"
    else:
        sentence = f"continue without them: {command}"
    console.print(Text(sentence, style="green"))


def print_comparison(names: Sequence[str], comparison: Mapping[str, Any]) -> None:
    """Print the first step at which two trainings read different tokens."""
    console = plain_console()
    first, shared = comparison["first_difference"], min(comparison["steps"])
    verdict, style = (
        (f"the same tokens in all {shared} steps that both have", "green")
        if first is None
        else (f"the same tokens up to step {first - 1}, different tokens from step {first} on", "yellow")
    )
    console.print(Text(verdict, style=f"bold {style}"))
    table = new_table(("", False), ("set", False), ("steps", True), ("record", False))
    attested = {True: "matches its order", False: "does NOT match its order", None: "none yet"}
    for name, fingerprint, steps, attestation in zip(
        names, comparison["sets"], comparison["steps"], comparison["attested"], strict=True
    ):
        table.add_row(name, fingerprint[:16], str(steps), attested[attestation])
    console.print(table)
