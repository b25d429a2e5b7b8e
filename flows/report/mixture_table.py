"""What a mixture was asked for and what came of it, as tables for the terminal, the report and Prefect's cards."""

from __future__ import annotations

from typing import Any

from gristmill.flows.facts import Facts

Table = tuple[list[str], list[list[str]]]
"""Names of the columns, and rows of cells; the first column is text, the last ones are numbers."""


def mixture_rows(facts: Facts) -> list[dict[str, Any]]:
    """One row per source of the packed set.

    `tokens` and `share` are realised, `requested` is the share that its weight asks for, `moved` the tokens that the
    limits gave it or took, `epochs` how many passes over its documents were taken, `max_epochs` how many may be.
    """
    packed = facts["packed"]
    moved = packed.get("redistributed", {})
    return [
        {"source": name, "tokens": packed["realised"][name]["tokens"], "share": packed["realised"][name]["share"],
         "requested": packed["requested"][name]["share"], "moved": moved.get(name, 0),
         "epochs": packed["realised"][name]["epochs"], "max_epochs": packed["requested"][name]["max_epochs"]}
        for name in packed["sources"]
    ]


def mixture_table(facts: Facts, digits: int = 2) -> Table:
    """Tokens and shares of every source; what was moved has a column where something was."""
    rows = mixture_rows(facts)
    moved = any(row["moved"] for row in rows)
    header = ["source", "tokens", "share", "asked for", *(["moved"] if moved else []), "epochs", "at most"]
    return header, [
        [row["source"], f"{row['tokens']:,}", f"{row['share']:.{digits}%}", f"{row['requested']:.{digits}%}",
         *([f"{row['moved']:+,}" if row["moved"] else ""] if moved else []),
         f"{row['epochs']:.2f}", f"{row['max_epochs']:g}"]
        for row in rows
    ]


def stage_table(facts: Facts, digits: int = 2) -> Table | None:
    """Shares of every source in every stage that gives it some; None where the set has one stage."""
    stages = facts["packed"].get("shares", [])
    if len(stages) < 2:
        return None
    rows, begin = [], 0.0
    for stage in stages:
        part = f"{begin:.0%} to {stage['until']:.0%}"
        for name, asked in stage["requested"].items():
            if asked or stage["realised"][name]:
                tokens = round(stage["realised"][name] * stage["tokens"])
                rows.append([part, name, f"{tokens:,}", f"{stage['realised'][name]:.{digits}%}", f"{asked:.{digits}%}"])
                part = ""
        begin = stage["until"]
    return ["part", "source", "tokens", "share", "asked for"], rows


def limits_note(facts: Facts) -> str:
    """The limits and repeats that sources have, in words; empty where there are none but `max_epochs`."""
    parts = []
    for name, asked in facts["packed"]["requested"].items():
        found = [f"{key.replace('_tokens', '')} {asked[key]:,} tokens" for key in ("min_tokens", "max_tokens")
                 if asked.get(key) is not None]
        found += [f"epochs {asked['epochs']}"] if asked.get("epochs") else []
        parts += [f"{name}: {', '.join(found)}"] if found else []
    return "; ".join(parts)


def prefix_note(facts: Facts) -> str:
    """How far the beginnings of the training order are from the mixture, in words; empty where it was not measured."""
    found = facts["summaries"].get("mix", {}).get("prefixes", {})
    parts = [f"{name} {drift['largest_drift_rows']:.2f} rows (at most {drift['bound_rows']:.2f} by construction)"
             for name, drift in found.items() if drift["bound_rows"]]
    return f"Every beginning of the training order is the mixture, give or take: {', '.join(parts)}." if parts else ""
