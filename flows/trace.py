"""What did training step N read: the documents of that step's rows, from the order alone, without a log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gristmill.flows.lookup import committed_inputs, locators_of
from gristmill.flows.session import Session


class TraceError(LookupError):
    """There is no such step, or no packed set yet."""


def trace_step(session: Session, step: int) -> dict[str, Any]:
    """The rows and documents of a pre-training step.

    Args:
        session: the opened manifest.
        step: counted from 1, as in the metrics.

    Raises:
        TraceError: the manifest does not train, has fewer steps, or its mixture is not packed yet.
    """
    from gristmill.tokenize.packed import PackedSet
    from gristmill.train.loop.stream import plan_of

    pretrain = session.manifest.pretrain
    if pretrain is None:
        raise TraceError(f"{session.manifest_file} has no `pretrain:` section, so there are no steps")
    if step > pretrain.steps:
        raise TraceError(f"pre-training has {pretrain.steps} steps; there is no step {step}")
    inputs = committed_inputs(session, session.plan)
    if "mix" not in inputs:
        raise TraceError(f"the mixture is not packed yet; run: {session.command('run', '--until', 'mix')}")
    packed = PackedSet(inputs["mix"])
    seed = session.plan["pretrain"].config["seed"]
    rows = plan_of(pretrain, packed.sequence_length).rows(packed.order(seed), step - 1)
    pieces = packed.pieces(rows)
    locators = locators_of(inputs, {piece["id"] for piece in pieces.select(["id"]).to_pylist()})
    documents: dict[bytes, dict[str, Any]] = {}
    for piece in pieces.to_pylist():
        entry = documents.setdefault(piece["id"], {
            "id": piece["id"].hex(), "source": packed.sources[piece["source"]],
            "locator": locators.get(piece["id"], "?"), "tokens": 0, "rows": []})
        entry["tokens"] += piece["length"]
        if piece["row"] not in entry["rows"]:
            entry["rows"].append(piece["row"])
    ordered = sorted(documents.values(), key=lambda entry: (-entry["tokens"], entry["id"]))
    return {"step": step, "rows": [int(row) for row in rows], "tokens": sum(entry["tokens"] for entry in ordered),
            "documents": ordered}


def print_step(found: Mapping[str, Any]) -> None:
    """Print a step's documents for people."""
    console = Console(highlight=False)
    console.print(Text(f"step {found['step']}: {len(found['rows'])} rows, {found['tokens']} tokens, "
                       f"{len(found['documents'])} documents", style="bold"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("tokens", justify="right")
    table.add_column("source", no_wrap=True)
    table.add_column("id", no_wrap=True)
    table.add_column("locator", overflow="fold")
    for entry in found["documents"]:
        table.add_row(str(entry["tokens"]), entry["source"], entry["id"][:16], entry["locator"])
    console.print(table)
