"""The report's sections about tokens: fit of the tokenizer, the mixture, the cost of
packing.

The terminal and Prefect's cards show the same tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.flows.pages.page_elements import (
    Details,
    Figure,
    Heading,
    Note,
    Part,
    Section,
    Table,
    section_of,
)
from gristmill.flows.pages.pictures import stacked_bars
from gristmill.flows.report.report_facts import Facts

Columns = tuple[list[str], list[list[str]]]
"""Header and rows of a table; the first column is text, the last ones are numbers."""
MOST_LANGUAGES = 20
FAST_ENCODERS = ("gigatoken", "kernels")
"""Values of `encoder` in a summary for documents that our own kernels encoded; the
second in older stores.
"""
MIXTURE_MEANINGS = {
    "share": "of the training tokens of the mixture",
    "tokens": "in the rows of the mixture",
}
HEADER = ["documents", "MB", "tokens", "bytes/token", "characters/token", "tokens/word"]


def tokenizer_section(facts: Facts, name: str = "tokenize") -> Section | None:
    """Bytes per token and tokens per word of each source and language, and the use of
    the vocabulary.
    """
    summary = facts["summaries"].get(name, {})
    if "vocabulary" not in summary:
        return None
    languages = summary.get("languages") or {}
    tokenizer = facts["summaries"].get("tokenizer", {})
    unseen = tokenizer.get("bytes_per_token")
    sources = group_rows(summary["sources"])
    header = ["source", *HEADER]
    if unseen:
        header.append("of unseen text")
        for row in sources:
            row.append(_number(unseen.get(row[0])))
    origin = (
        f"Learnt here, with tokenizer.model {tokenizer['model']}. "
        if tokenizer.get("model")
        else ""
    )
    left_out = None
    if len(languages) > MOST_LANGUAGES:
        text = (
            f"The {MOST_LANGUAGES} languages with most tokens of {len(languages)}; "
            "all are in the stage's report.json."
        )
        left_out = Note(text)
    details = []
    for title, key in (
        ("The most frequent tokens", "most_frequent"),
        ("The longest tokens that occur", "longest"),
    ):
        rows = [
            [repr(token["text"]), token["bytes"], f"{token['count']:,}"]
            for token in summary["vocabulary"][key]
        ]
        details.append(
            Details(title, [Table(["token", "bytes", "times"], rows, {1, 2})])
        )
    return section_of(
        "Tokenizer",
        Note(f"{origin}{describe_vocabulary(summary)}"),
        Note(
            "Over all documents that are left, those too that the vocabulary was "
            "learnt from."
        ),
        Table(header, sources, set(range(1, 8))),
        Table(
            ["language", *HEADER],
            group_rows(languages, MOST_LANGUAGES),
            set(range(1, 7)),
        ),
        left_out,
        details,
    )


def describe_vocabulary(summary: Mapping[str, Any]) -> str:
    """A sentence about the coverage, and one about the encoder if it was the
    library.
    """
    vocabulary = summary["vocabulary"]
    if not vocabulary["used"]:
        return "No document has a token."
    text = (
        f"Of {vocabulary['size']:,} tokens (special ones apart) "
        f"{vocabulary['used']:,} occur "
        f"({vocabulary['used_share']:.1%}) and {vocabulary['never_used']:,} never do; "
        f"{vocabulary['single_byte_share']:.1%} of the text's tokens are single bytes."
    )
    return (
        text
        if summary["encoder"] in FAST_ENCODERS
        else f"{text} Encoded by {summary['encoder']}."
    )


def group_rows(
    groups: Mapping[str, Mapping[str, Any]], most: int | None = None
) -> list[list[str]]:
    """A row per group: its name, then the columns of HEADER; groups with most tokens
    first.
    """
    ordered = sorted(groups.items(), key=lambda item: (-item[1]["tokens"], item[0]))[
        :most
    ]
    return [
        [
            name,
            f"{group['documents']:,}",
            f"{group['bytes'] / 1e6:.2f}",
            f"{group['tokens']:,}",
            *(
                _number(group[key])
                for key in (
                    "bytes_per_token",
                    "characters_per_token",
                    "tokens_per_word",
                )
            ),
        ]
        for name, group in ordered
    ]


def mixture_section(facts: Facts, name: str = "mix") -> Section | None:
    """Requested and packed shares, source by source, and the cost of packing."""
    if "packed" not in facts:
        return None
    packed = facts["packed"]
    tables = []
    for columns, first_number in (
        (mixture_table(facts, 3), 1),
        (stage_table(facts, 3), 2),
    ):
        if columns is not None:
            header, rows = columns
            tables.append(
                Table(
                    header,
                    rows,
                    set(range(first_number, len(header))),
                    MIXTURE_MEANINGS,
                )
            )
    notes = [Note(note) for note in (limits_note(facts), prefix_note(facts)) if note]
    return section_of(
        "Mixture",
        Note(
            f"Vocabulary of {packed['tokenizer']['vocab_size']:,}. Rows of "
            f"{packed['sequence_length']} tokens."
        ),
        Figure(
            mixture_picture(mixture_rows(facts)),
            "Shares of tokens, requested and realised.",
        ),
        tables,
        notes,
        packing(facts),
    )


def mixture_picture(rows: list[dict[str, Any]]) -> str:
    """Requested and packed shares of tokens, of `mixture_rows`."""
    bars = [
        ("requested", {row["source"]: row["requested"] for row in rows}),
        ("packed", {row["source"]: row["share"] for row in rows}),
    ]
    return stacked_bars(bars, "share of tokens")


def packing(facts: Facts) -> list[Part]:
    """Tokens that the packing cuts, drops and pads, compared with the other
    packings.
    """
    shares = ("split", "in_split", "dropped", "padding")
    rows = [
        [
            f"{row['packing']} (used)" if row["used"] else row["packing"],
            f"{row['rows']:,}",
            *(f"{row[share]:.3%}" for share in shares),
        ]
        for row in packing_rows(facts)
    ]
    if not rows:
        return []
    note = (
        "The same documents in rows of every kind: the share of documents that a "
        "row's end cuts, of tokens that "
        "belong to them, of tokens that no row holds, and of the rows that is padding."
    )
    header = [
        "packing",
        "rows",
        "cut documents",
        "tokens in them",
        "dropped",
        "padding",
    ]
    return [Heading("Packing"), Note(note), Table(header, rows, {1, 2, 3, 4, 5})]


def mixture_rows(facts: Facts) -> list[dict[str, Any]]:
    """A row per source of the packed set.

    `tokens` and `share` are realised, `requested` is the share by its weight, `moved`
    the tokens that limits gave it or took, `epochs` the passes over its documents,
    `max_epochs` the allowed ones.
    """
    packed = facts["packed"]
    moved = packed.get("redistributed", {})
    rows = []
    for name in packed["sources"]:
        realised, requested = packed["realised"][name], packed["requested"][name]
        rows.append(
            {
                "source": name,
                "tokens": realised["tokens"],
                "share": realised["share"],
                "requested": requested["share"],
                "moved": moved.get(name, 0),
                "epochs": realised["epochs"],
                "max_epochs": requested["max_epochs"],
            }
        )
    return rows


def mixture_table(facts: Facts, digits: int = 2) -> Columns:
    """Tokens and shares of every source, and moved tokens if there are any."""
    rows = mixture_rows(facts)
    has_moved = any(row["moved"] for row in rows)
    header = [
        "source",
        "tokens",
        "share",
        "requested",
        *(["moved"] if has_moved else []),
        "epochs",
        "at most",
    ]
    lines = []
    for row in rows:
        shares = [f"{row['share']:.{digits}%}", f"{row['requested']:.{digits}%}"]
        if has_moved:
            shares.append(f"{row['moved']:+,}" if row["moved"] else "")
        epochs = [f"{row['epochs']:.2f}", f"{row['max_epochs']:g}"]
        lines.append([row["source"], f"{row['tokens']:,}", *shares, *epochs])
    return header, lines


def stage_table(facts: Facts, digits: int = 2) -> Columns | None:
    """Shares of every source in every stage of the mixture; None for a single stage."""
    stages = facts["packed"].get("shares", [])
    if len(stages) < 2:
        return None
    rows, begin = [], 0.0
    for stage in stages:
        part = f"{begin:.0%} to {stage['until']:.0%}"
        for name, requested in stage["requested"].items():
            realised = stage["realised"][name]
            if requested or realised:
                tokens = round(realised * stage["tokens"])
                rows.append(
                    [
                        part,
                        name,
                        f"{tokens:,}",
                        f"{realised:.{digits}%}",
                        f"{requested:.{digits}%}",
                    ]
                )
                part = ""
        begin = stage["until"]
    return ["part", "source", "tokens", "share", "requested"], rows


def limits_note(facts: Facts) -> str:
    """Limits and repeats of sources in words; empty if there are none but
    `max_epochs`.
    """
    clauses = []
    for name, requested in facts["packed"]["requested"].items():
        limits = [
            f"{key.replace('_tokens', '')} {requested[key]:,} tokens"
            for key in ("min_tokens", "max_tokens")
            if requested.get(key) is not None
        ]
        if requested.get("epochs"):
            limits.append(f"epochs {requested['epochs']}")
        if limits:
            clauses.append(f"{name}: {', '.join(limits)}")
    return "; ".join(clauses)


def prefix_note(facts: Facts) -> str:
    """Distance of prefixes of the training order from the mixture in words; empty if it
    was not measured.
    """
    clauses = [
        f"{name} {drift['largest_drift_rows']:.2f} rows (bound "
        f"{drift['bound_rows']:.2f})"
        for name, drift in facts["summaries"].get("mix", {}).get("prefixes", {}).items()
        if drift["bound_rows"]
    ]
    if not clauses:
        return ""
    return (
        "The mixture holds in every prefix of the training order, within: "
        f"{', '.join(clauses)}."
    )


def packing_rows(facts: Facts) -> list[dict[str, Any]]:
    """A row per packing of the same documents: whether it is used, its rows, and the
    shares of `waste_of`.
    """
    packed = facts.get("packed", {})
    return [
        {
            "packing": name,
            "used": name == packed["packing"],
            "rows": costs["rows"],
            **waste_of(costs),
        }
        for name, costs in packed.get("packings", {}).items()
    ]


def used_packing(facts: Facts) -> list[dict[str, Any]]:
    """The row of `packing_rows` for the packing of the set, if there is one."""
    return [row for row in packing_rows(facts) if row["used"]]


def waste_of(costs: Mapping[str, int]) -> dict[str, float]:
    """Four shares of a packing.

    Returns:
        `split`: of documents that a row's end cuts; `in_split`: of tokens that belong
        to them; `dropped`: of tokens that no row holds; `padding`: of all rows without
        a token of a document.
    """
    read, space = (
        costs["tokens"] + costs["dropped_tokens"],
        costs["tokens"] + costs["padding_tokens"],
    )
    return {
        "split": costs["split_documents"] / max(costs["documents"], 1),
        "in_split": costs["split_tokens"] / max(read, 1),
        "dropped": costs["dropped_tokens"] / max(read, 1),
        "padding": costs["padding_tokens"] / max(space, 1),
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
