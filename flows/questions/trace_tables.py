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
        table.add_column(
            name,
            justify="right" if numeric else "left",
            no_wrap=numeric,
            overflow="fold",
        )
    return table


def print_step(trace: Mapping[str, Any]) -> None:
    """Print the rows and documents of a step."""
    console = plain_console()
    if "examples" in trace:
        contents = f"{len(trace['examples'])} examples"
    else:
        contents = f"{trace['tokens']} tokens, {len(trace['documents'])} documents"
    rank = (
        "" if trace["rank"] is None else f" on rank {trace['rank']} of {trace['ranks']}"
    )
    console.print(
        Text(
            f"{trace['stage']} step {trace['step']} {trace['use']}{rank}: "
            f"{len(trace['rows'])} rows, {contents}",
            style="bold",
        )
    )
    if "answers" in trace:
        print_answers(console, trace)
    elif "examples" in trace:
        for row, example in zip(
            trace["rows_of_examples"], trace["examples"], strict=True
        ):
            console.print(f"{row:>8}  {example}")
    else:
        _print_documents(console, trace["documents"])


def _print_documents(console: Console, documents: Sequence[Mapping[str, Any]]) -> None:
    """Print two lines per document: its columns, and its whole locator, which `explain`
    takes.
    """
    rows = [["tokens", "source", "id", "quality", "cluster"]]
    for document in documents:
        values = document.get("quality", {}).values()
        quality = " ".join(
            f"{value:.3g}" if isinstance(value, float) else str(value)
            for value in values
        )
        size = document.get("cluster_size")
        if size is None:
            cluster = ""
        elif size == 1:
            cluster = "alone"
        else:
            cluster = f"{document['cluster'][:8]} of {size}"
        rows.append(
            [
                str(document["tokens"]),
                document["source"],
                document["id"][:16],
                quality,
                cluster,
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, (tokens, *names) in enumerate(rows):
        cells = [tokens.rjust(widths[0])]
        cells += [
            name.ljust(width) for name, width in zip(names, widths[1:], strict=True)
        ]
        line = "  ".join(cells).rstrip()
        if number == 0:
            console.print(Text(line, style="bold"), soft_wrap=True)
            continue
        document = documents[number - 1]
        locator = document.get("url", document["locator"])
        console.print(Text(line), soft_wrap=True)
        console.print(Text(f"{'':{widths[0]}}  {locator}", style="dim"), soft_wrap=True)


def print_answers(console: Console, trace: Mapping[str, Any]) -> None:
    """Print the prompts of a step, each with its answers and their rewards."""
    if not trace["answers"]:
        for example in trace["examples"]:
            console.print(Text(f"  {example}"))
        console.print(Text("their answers are not drawn yet", style="dim"))
        return
    for example, group in groupby(trace["answers"], key=lambda answer: answer["id"]):
        answers = list(group)
        right = ""
        if answers[0]["right"] is not None:
            # The end of a right answer holds its result.
            text = answers[0]["right"]
            ending = (
                text if len(text) <= SHOWN_CHARS else f"...{text[3 - SHOWN_CHARS :]}"
            )
            right = f"  right: {ending!r}"
        console.print(
            Text.assemble(
                (f"{example[:16]}  ", "dim"),
                (shorten_text(answers[0]["prompt"]), "bold"),
                (right, "green"),
            )
        )
        table = new_table(
            ("reward", True),
            ("advantage", True),
            ("tokens", True),
            ("", False),
            ("answer", False),
        )
        for answer in answers:
            cell = Text()
            for tool_call in answer.get("used") or ():
                line = shorten_text(
                    f"{tool_call['name']} {tool_call['arguments']} "
                    f"-> {tool_call['answer']}"
                )
                cell.append(f"{line}\n", "red" if tool_call["failed"] else "dim")
            table.add_row(
                f"{answer['reward']:.4g}",
                f"{answer['advantage']:+.4g}",
                str(answer["tokens"]),
                "" if answer["ended"] else "cut",
                cell.append(shorten_text(answer["answer"])),
            )
        console.print(table)


def print_document(trace: Mapping[str, Any]) -> None:
    """Print the outcome of a document or an example, and the steps that read it."""
    console = plain_console()
    if trace["kind"] == "example":
        console.print(Text.assemble((trace["id"], "bold"), "  example"))
    else:
        console.print(
            Text.assemble(
                (trace["id"], "bold"), f"  {trace['source']}  {trace['locator']}"
            )
        )
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
        table.add_row(
            entry["stage"], str(entry["step"]), entry["use"], shorten(entry["rows"])
        )
    console.print(table)
    if len(trace["steps"]) > SHOWN_STEPS:
        console.print(
            Text(
                f"... and {len(trace['steps']) - SHOWN_STEPS} more steps "
                "(--json has them)",
                style="dim",
            )
        )
    after = [
        f"{checkpoint['stage']} {checkpoint['step']}"
        for checkpoint in trace["checkpoints_after"]
    ]
    console.print(
        Text.assemble(
            ("checkpoints that know it  ", "bold"), ", ".join(after) or "none is kept"
        )
    )


def print_spans(matches: Mapping[str, Any]) -> None:
    """Print the passages of a text that occur in the training rows, longest first."""
    console = plain_console()
    share = (
        f"{matches['covered'] / matches['characters']:.0%}"
        if matches["characters"]
        else "none"
    )
    console.print(
        Text(
            f"{matches['found']} passage{'s' * (matches['found'] != 1)} of "
            f"{matches['shortest_span']} tokens or "
            f"more in the training rows, {share} of the text",
            style="bold",
        )
    )
    for span in matches["spans"]:
        console.print()
        console.print(
            Text(
                f"{span['tokens']} tokens, characters {span['begin']} to "
                f"{span['end']}, {span['count']:,} place{'s' * (span['count'] != 1)}",
                style="bold",
            )
        )
        text = span["text"]
        if len(text) > SPAN_CHARS:
            text = f"{text[: SPAN_CHARS // 2]} ... {text[-(SPAN_CHARS // 2) :]}"
        console.print(Text(f"  {text!r}"), soft_wrap=True)
        for place in span["places"]:
            console.print(
                Text(
                    f"  {place['id'][:16]}  {place['source']}  "
                    f"{place.get('url', place['locator'])}"
                ),
                soft_wrap=True,
            )
            readers = _describe_steps(place["steps"])
            console.print(
                Text(
                    f"    row {place['row']} from token {place['start']}; {readers}",
                    style="dim",
                )
            )
        if span["count"] > len(span["places"]):
            console.print(
                Text(
                    f"  ... and {span['count'] - len(span['places']):,} more",
                    style="dim",
                )
            )
    if matches["found"] > len(matches["spans"]):
        num_hidden = matches["found"] - len(matches["spans"])
        console.print(Text(f"\n... and {num_hidden:,} shorter passages", style="dim"))


SPAN_CHARS = 240
"""Characters of a printed passage; longer ones lose their middle."""


def _describe_steps(steps: Sequence[Mapping[str, Any]]) -> str:
    """Describe the steps that read a row in a few words."""
    if not steps:
        return "no step reads it"
    numbers = shorten([step["step"] for step in steps])
    uses = {step["use"] for step in steps}
    return (
        f"{steps[0]['stage']} step{'s' * (len(steps) != 1)} {numbers} "
        f"{' and '.join(sorted(uses))} it"
    )


def describe_outcome(trace: Mapping[str, Any]) -> str:
    """Describe the use of a document by training in a sentence."""
    use = trace.get("use")
    if use == "not drawn":
        return (
            f"not drawn: {NOT_DRAWN.get(trace['reason'], trace['reason'])}; no "
            "step reads it"
        )
    if use == "held out":
        return (
            f"held out, never trained: {trace['tokens']} tokens in validation "
            f"rows {shorten(trace['rows'])}"
        )
    if trace["outcome"] not in ("kept", "trained"):
        return f"{trace['outcome']}; no step reads it"
    if not trace["steps"]:
        return "no step reads it"
    num_read = sum(step["use"] == "read" for step in trace["steps"])
    return f"{num_read} steps have read it, {len(trace['steps']) - num_read} will"


def print_takedown(
    takedown: Mapping[str, Any], written: Mapping[str, Any] | None, command: str
) -> None:
    """Print the outputs, checkpoints and models that some documents affect, and how to
    continue without them.
    """
    console = plain_console()
    num_documents = len(takedown["documents"])
    num_duplicates = len(takedown["near_duplicates"])
    num_generated = len(takedown["generated"])
    num_excluded = len(takedown["excluded"])
    written_from = ""
    if num_generated:
        pronoun = "it" if num_excluded - num_generated == 1 else "them"
        written_from = f", {num_generated} written from {pronoun}"
    console.print(
        Text(
            f"{num_documents} document{'s' * (num_documents != 1)}, "
            f"{num_duplicates} near-duplicate{'s' * (num_duplicates != 1)}"
            f"{written_from}; {num_excluded} to take down",
            style="bold",
        )
    )
    for title in ("documents", "near_duplicates", "generated"):
        for entry in takedown[title][:SHOWN_STEPS]:
            mark = " " if entry["id"] in takedown["excluded"] else "-"
            console.print(
                Text(
                    f"{mark} {entry['id'][:16]}  {entry['source']}  {entry['locator']}"
                )
            )
        _print_hidden(console, len(takedown[title]))
    for entry in takedown["examples"][:SHOWN_STEPS]:
        console.print(Text(f"  {entry['id'][:16]}  examples://{entry['set']}"))
    _print_hidden(console, len(takedown["examples"]))
    for name in takedown["not_found"]:
        console.print(Text(f"not found: {name}", style="yellow"))

    clean = takedown["checkpoints"]["clean"]
    affected = takedown["checkpoints"]["affected"]
    held_out = sum(len(rows) for rows in takedown["validation_rows"].values())
    first_step = (
        "no step"
        if takedown["first_step"] is None
        else f"step {takedown['first_step']}"
    )
    forgotten = "" if written is None else ", forgotten now"
    table = new_table(("", False), ("", False))
    table.add_row("document shards", ", ".join(takedown["document_shards"]))
    table.add_row("packed shards", ", ".join(takedown["packed_shards"]) or "none")
    table.add_row("rows", f"{len(takedown['rows'])} of training, {held_out} held out")
    table.add_row("first read by", first_step)
    table.add_row("clean checkpoints", ", ".join(map(str, clean)) or "none")
    table.add_row("checkpoints that know them", ", ".join(map(str, affected)) or "none")
    table.add_row("models that know them", ", ".join(takedown["models"]) or "none")
    table.add_row("answers of asked models", f"{takedown['answers']:,} kept{forgotten}")
    console.print(table)
    if takedown["unknown_answers"]:
        console.print(
            Text(
                f"{takedown['unknown_answers']:,} answers name no document; remove "
                "STORE/answers to be sure",
                style="yellow",
            )
        )
    if written is None:
        return
    if not command:
        sentence = (
            f"their ids are in {written['list']}; remove their texts from the "
            "sources, and run again"
        )
    elif not takedown["steps_done"]:
        sentence = f"continue without them: {command}"
    elif written["checkpoint"] is None:
        sentence = f"without them training starts over: {command}"
    else:
        sentence = (
            "without them training resumes from step "
            f"{takedown['last_clean']}: {command}"
        )
    console.print(Text(sentence, style="green"))


def _print_hidden(console: Console, number: int) -> None:
    if number > SHOWN_STEPS:
        console.print(
            Text(f"... and {number - SHOWN_STEPS} more (--json has them)", style="dim")
        )


def print_comparison(names: Sequence[str], comparison: Mapping[str, Any]) -> None:
    """Print the first step at which two trainings read different tokens."""
    console = plain_console()
    first = comparison["first_difference"]
    if first is None:
        shared = min(comparison["steps"])
        console.print(
            Text(
                f"the same tokens in all {shared} steps that both have",
                style="bold green",
            )
        )
    else:
        verdict = (
            f"the same tokens up to step {first - 1}, different tokens from "
            f"step {first} on"
        )
        console.print(Text(verdict, style="bold yellow"))
    table = new_table(("", False), ("set", False), ("steps", True), ("record", False))
    attestations = {
        True: "matches its order",
        False: "does NOT match its order",
        None: "none yet",
    }
    for index, name in enumerate(names):
        table.add_row(
            name,
            comparison["sets"][index][:16],
            str(comparison["steps"][index]),
            attestations[comparison["attested"][index]],
        )
    console.print(table)
