"""The report's sections about tokens: how the tokenizer fits the text, what the mixture became, what packing costs.

The tables of the mixture are those of the terminal and of Prefect's cards too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.flows.report.page_elements import Details, Figure, Heading, Note, Part, Section, Table
from gristmill.flows.report.pictures import stacked_bars
from gristmill.flows.report.report_facts import Facts

Columns = tuple[list[str], list[list[str]]]
"""Names of columns, and rows of cells; the first column is text, the last ones are numbers."""
MOST_LANGUAGES = 20
FAST_ENCODERS = ("gigatoken", "kernels")
"""What `encoder` of a summary says where documents were not left to `tokenizers`; the second in stores of before."""
OF_TRAINING = {"share": "of the training tokens of the mixture", "tokens": "in the rows of the mixture"}
"""What columns of the mixture hold that elsewhere hold something else."""
HEADER = ["documents", "MB", "tokens", "bytes/token", "characters/token", "tokens/word"]


def tokenizer_section(facts: Facts, name: str = "tokenize") -> Section | None:
    """Bytes per token and tokens per word of each source and language, and what of the vocabulary is used."""
    summary = facts["summaries"].get(name, {})
    if "vocabulary" not in summary:
        return None
    languages = summary.get("languages") or {}
    tokenizer = facts["summaries"].get("tokenizer", {})
    model, unseen = tokenizer.get("model"), tokenizer.get("bytes_per_token")
    sources = [[*row, *([_shown(unseen.get(row[0]))] if unseen else [])] for row in group_rows(summary["sources"])]
    parts: list[Part] = [
        Note(
            f"Learnt here, with tokenizer.model {model}. {describe_vocabulary(summary)}"
            if model
            else describe_vocabulary(summary)
        ),
        Note("Over all documents that are left, those too that the vocabulary was learnt from."),
        Table(["source", *HEADER, *(["of unseen text"] if unseen else [])], sources, set(range(1, 8))),
        Table(["language", *HEADER], group_rows(languages, MOST_LANGUAGES), set(range(1, 7))),
    ]
    if len(languages) > MOST_LANGUAGES:
        parts.append(
            Note(
                f"The {MOST_LANGUAGES} languages with most tokens of {len(languages)}; all are in the "
                "stage's report.json."
            )
        )
    for title, key in (("The most frequent tokens", "most_frequent"), ("The longest tokens that occur", "longest")):
        rows = [[repr(token["text"]), token["bytes"], f"{token['count']:,}"] for token in summary["vocabulary"][key]]
        parts.append(Details(title, [Table(["token", "bytes", "times"], rows, {1, 2})]))
    return Section("Tokenizer", parts)


def describe_vocabulary(summary: Mapping[str, Any]) -> str:
    """One sentence about the coverage, and one about who encoded where it was the library."""
    vocabulary = summary["vocabulary"]
    if not vocabulary["used"]:
        return "No document has a token."
    text = (
        f"Of {vocabulary['size']:,} tokens (special ones apart) {vocabulary['used']:,} occur "
        f"({vocabulary['used_share']:.1%}) and {vocabulary['never_used']:,} never do; "
        f"{vocabulary['single_byte_share']:.1%} of the text's tokens are single bytes."
    )
    return text if summary["encoder"] in FAST_ENCODERS else f"{text} Encoded by {summary['encoder']}."


def group_rows(groups: Mapping[str, Mapping[str, Any]], most: int | None = None) -> list[list[str]]:
    """A row per group, in the order of HEADER behind the name; those with most tokens first."""
    ordered = sorted(groups.items(), key=lambda item: (-item[1]["tokens"], item[0]))[:most]
    return [
        [
            name,
            f"{group['documents']:,}",
            f"{group['bytes'] / 1e6:.2f}",
            f"{group['tokens']:,}",
            *(_shown(group[key]) for key in ("bytes_per_token", "characters_per_token", "tokens_per_word")),
        ]
        for name, group in ordered
    ]


def mixture_section(facts: Facts, name: str = "mix") -> Section | None:
    """What was asked for and what was packed, source by source, and what the packing costs."""
    if "packed" not in facts:
        return None
    rows = mixture_rows(facts)
    return Section(
        "Mixture",
        [
            Note(
                f"Vocabulary of {facts['packed']['tokenizer']['vocab_size']:,}. Rows of "
                f"{facts['packed']['sequence_length']} tokens."
            ),
            Figure(mixture_picture(rows), "Shares of tokens, requested and realised."),
            *(
                Table(*found, set(range(1 if found[0][0] == "source" else 2, len(found[0]))), OF_TRAINING)
                for found in (mixture_table(facts, 3), stage_table(facts, 3))
                if found is not None
            ),
            *(Note(note) for note in (limits_note(facts), prefix_note(facts)) if note),
            *packing(facts),
        ],
    )


def mixture_picture(rows: list[dict[str, Any]]) -> str:
    """Shares of tokens as asked for and as packed, of `mixture_rows`."""
    return stacked_bars(
        [
            ("requested", {row["source"]: row["requested"] for row in rows}),
            ("packed", {row["source"]: row["share"] for row in rows}),
        ],
        "share of tokens",
    )


def packing(facts: Facts) -> list[Part]:
    """What the packing cuts, drops and pads, beside the other ones."""
    rows = [
        [
            row["packing"] + (" (used)" if row["used"] else ""),
            f"{row['rows']:,}",
            f"{row['split']:.3%}",
            f"{row['in_split']:.3%}",
            f"{row['dropped']:.3%}",
            f"{row['padding']:.3%}",
        ]
        for row in packing_rows(facts)
    ]
    return (
        []
        if not rows
        else [
            Heading("Packing"),
            Note(
                "The same documents in rows of every kind: the share of documents that a row's end cuts, of tokens that "
                "belong to them, of tokens that no row holds, and of the rows that is padding."
            ),
            Table(["packing", "rows", "cut documents", "tokens in them", "dropped", "padding"], rows, {1, 2, 3, 4, 5}),
        ]
    )


def mixture_rows(facts: Facts) -> list[dict[str, Any]]:
    """One row per source of the packed set.

    `tokens` and `share` are realised, `requested` is the share that its weight asks for, `moved` the tokens that the
    limits gave it or took, `epochs` how many passes over its documents were taken, `max_epochs` how many may be.
    """
    packed = facts["packed"]
    moved = packed.get("redistributed", {})
    return [
        {
            "source": name,
            "tokens": packed["realised"][name]["tokens"],
            "share": packed["realised"][name]["share"],
            "requested": packed["requested"][name]["share"],
            "moved": moved.get(name, 0),
            "epochs": packed["realised"][name]["epochs"],
            "max_epochs": packed["requested"][name]["max_epochs"],
        }
        for name in packed["sources"]
    ]


def mixture_table(facts: Facts, digits: int = 2) -> Columns:
    """Tokens and shares of every source; what was moved has a column where something was."""
    rows = mixture_rows(facts)
    moved = any(row["moved"] for row in rows)
    header = ["source", "tokens", "share", "requested", *(["moved"] if moved else []), "epochs", "at most"]
    return header, [
        [
            row["source"],
            f"{row['tokens']:,}",
            f"{row['share']:.{digits}%}",
            f"{row['requested']:.{digits}%}",
            *([f"{row['moved']:+,}" if row["moved"] else ""] if moved else []),
            f"{row['epochs']:.2f}",
            f"{row['max_epochs']:g}",
        ]
        for row in rows
    ]


def stage_table(facts: Facts, digits: int = 2) -> Columns | None:
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
    return ["part", "source", "tokens", "share", "requested"], rows


def limits_note(facts: Facts) -> str:
    """The limits and repeats that sources have, in words; empty where there are none but `max_epochs`."""
    parts = []
    for name, asked in facts["packed"]["requested"].items():
        found = [
            f"{key.replace('_tokens', '')} {asked[key]:,} tokens"
            for key in ("min_tokens", "max_tokens")
            if asked.get(key) is not None
        ]
        found += [f"epochs {asked['epochs']}"] if asked.get("epochs") else []
        parts += [f"{name}: {', '.join(found)}"] if found else []
    return "; ".join(parts)


def prefix_note(facts: Facts) -> str:
    """How far the beginnings of the training order are from the mixture, in words; empty where it was not measured."""
    found = facts["summaries"].get("mix", {}).get("prefixes", {})
    parts = [
        f"{name} {drift['largest_drift_rows']:.2f} rows (bound {drift['bound_rows']:.2f})"
        for name, drift in found.items()
        if drift["bound_rows"]
    ]
    return f"The mixture holds in every prefix of the training order, within: {', '.join(parts)}." if parts else ""


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


def used_packing(facts: Facts) -> list[dict[str, Any]]:
    """The row of `packing_rows` for the packing of the set, if there is one."""
    return [row for row in packing_rows(facts) if row["used"]]


def waste_of(costs: Mapping[str, int]) -> dict[str, float]:
    """The four shares of one packing; see `packing_rows`."""
    read, space = costs["tokens"] + costs["dropped_tokens"], costs["tokens"] + costs["padding_tokens"]
    return {
        "split": costs["split_documents"] / max(costs["documents"], 1),
        "in_split": costs["split_tokens"] / max(read, 1),
        "dropped": costs["dropped_tokens"] / max(read, 1),
        "padding": costs["padding_tokens"] / max(space, 1),
    }


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
