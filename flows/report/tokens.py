"""The report's section about the tokenizer, and the rows of it that the terminal prints."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from gristmill.flows.facts import Facts
from gristmill.flows.report.html import details, table

MOST_LANGUAGES = 20
HEADER = ["documents", "MB", "tokens", "bytes/token", "characters/token", "tokens/word"]


def tokenizer_section(facts: Facts) -> str:
    """Bytes per token and tokens per word of each source and language, and what of the vocabulary is used."""
    summary = facts["summaries"].get("tokenize", {})
    if "vocabulary" not in summary:
        return ""
    parts = ["<h2>Tokenizer</h2>", f'<p class="note">{escape(describe_vocabulary(summary))}</p>',
             '<p class="note">Over all documents that are left, those too that the merges were learnt from.</p>',
             table(["source", *HEADER], group_rows(summary["sources"]), set(range(1, 7)))]
    if languages := summary.get("languages"):
        parts.append(table(["language", *HEADER], group_rows(languages, MOST_LANGUAGES), set(range(1, 7))))
        if len(languages) > MOST_LANGUAGES:
            parts.append(f'<p class="note">The {MOST_LANGUAGES} languages with most tokens of {len(languages)}; all '
                         "are in the stage's report.json.</p>")
    for title, key in (("The most frequent tokens", "most_frequent"), ("The longest tokens that occur", "longest")):
        rows = [[repr(token["text"]), token["bytes"], f"{token['count']:,}"] for token in summary["vocabulary"][key]]
        parts.append(details(title, table(["token", "bytes", "times"], rows, {1, 2})))
    return "".join(parts)


def describe_vocabulary(summary: Mapping[str, Any]) -> str:
    """One sentence about the coverage, and one about who encoded where it was not the kernels."""
    vocabulary = summary["vocabulary"]
    if not vocabulary["used"]:
        return "No document has a token."
    text = (f"Of {vocabulary['size']:,} tokens (special ones apart) {vocabulary['used']:,} occur "
            f"({vocabulary['used_share']:.1%}) and {vocabulary['never_used']:,} never do; "
            f"{vocabulary['single_byte_share']:.1%} of the text's tokens are single bytes.")
    return text if summary["encoder"] == "kernels" else f"{text} Encoded by {summary['encoder']}."


def group_rows(groups: Mapping[str, Mapping[str, Any]], most: int | None = None) -> list[list[str]]:
    """A row per group, in the order of HEADER behind the name; those with most tokens first."""
    ordered = sorted(groups.items(), key=lambda item: (-item[1]["tokens"], item[0]))[:most]
    return [[name, f"{group['documents']:,}", f"{group['bytes'] / 1e6:.2f}", f"{group['tokens']:,}",
             *(_shown(group[key]) for key in ("bytes_per_token", "characters_per_token", "tokens_per_word"))]
            for name, group in ordered]


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
