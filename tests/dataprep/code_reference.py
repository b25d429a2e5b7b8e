"""Plain Python reference of `filters/code.py`, one document at a time."""

from __future__ import annotations

import math
import re

from gristmill.dataprep.filters.code import (
    DATA,
    DIGITS,
    GENERATED,
    HTML,
    MARKUP,
    SCRIPTS,
    SHORT,
    XML,
)
from tests.dataprep.rules_reference import ascii_lower, share, words

ENCODED = (
    r"[a-zA-Z0-9+/\n=]{64,}",
    r"(?:\b(?:0x|\\x)?[0-9a-fA-F]{2}(?:,|\b\s*)){8,}",
    r"(?:\\u[0-9a-fA-F]{4}){8,}",
)
"""As StarCoder2's paper has them."""

REST = r"""(?:=[ \t\n\f\r]*"[^"]*(?:"|\Z)|=[ \t\n\f\r]*'[^']*(?:'|\Z)|[^>])*(?:>|\Z)"""
INVISIBLE = (
    r"<!--.*?(?:-->|\Z)"
    rf"|<(?P<name>script|style)(?=[>/ \t\n\f\r]){REST}.*?(?:</(?P=name)(?=[>/ \t\n\f\r]){REST}|\Z)"
    rf"|<[a-zA-Z/!?]{REST}"
)


def code(text: str, name: str) -> dict[str, float | None]:
    """`code.measure` of one text; None where a statistic does not
    apply.
    """
    extension = name.rpartition(".")[2] if "." in name else ""
    lengths = [len(line) for line in lines(text)]
    longest, mean = max(lengths, default=0), share(sum(lengths), len(lengths))
    encoded = [
        len(match[0]) for pattern in ENCODED for match in re.finditer(pattern, text)
    ]
    visible = len(
        re.sub(INVISIBLE, "", text, flags=re.DOTALL | re.IGNORECASE | re.ASCII)
    )
    head = ascii_lower("\n".join(lines(text)[:5]))
    minified = name.endswith((".min.js", ".min.css")) or (
        extension in SCRIPTS and mean > 110
    )

    def only(where: bool, value: float) -> float | None:
        return value if where else None

    return {
        "generated_markers": sum(head.count(marker.decode()) for marker in GENERATED),
        "minified": int(minified),
        "xml_header": only(
            extension not in XML, int("<?xml version=" in ascii_lower(text[:100]))
        ),
        "code_lines": len(lengths),
        "data_lines": only(extension in SHORT, len(lengths)),
        "data_characters": only(extension in DATA, len(text)),
        "longest_line_characters": only(extension not in MARKUP, longest),
        "mean_line_characters": only(extension not in MARKUP, mean),
        "longest_markup_line_characters": only(extension in MARKUP, longest),
        "alphanumeric_ratio": share(sum(map(str.isalnum, text)), len(text)),
        "alphabetic_ratio": only(
            extension not in DIGITS, share(sum(map(str.isalpha, text)), len(text))
        ),
        "longest_encoded_characters": max(encoded, default=0),
        "encoded_ratio": share(sum(encoded), len(text)),
        "html_visible_characters": only(extension in HTML, visible),
        "html_visible_ratio": only(extension in HTML, share(visible, len(text))),
        "code_tokens": words(text),
    }


def lines(text: str) -> list[str]:
    """The lines of a text, which end in LF, CR LF or CR."""
    parts = re.split(r"\r\n|\n|\r", text)
    return parts if parts[-1] else parts[:-1]


def null(value: float) -> float | None:
    """NaN as None."""
    return None if math.isnan(value) else value
