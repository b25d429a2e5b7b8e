"""Masking of personal data, as edits; the matchers are in `pii.py`.

A replacement depends only on the value, so that equal values stay equal and the order
of documents does not matter. Placeholders are values that belong to nobody and that no
matcher finds again:

- `email`: `user0000@example.com` to `user9999@example.com` (RFC 2606);
- `ip`: an address of the three documentation networks (RFC 5737), or of 2001:db8:: (RFC
  3849);
- `phone`: `202-555-0100` to `202-555-0199` (NANPA's numbers for films and examples);
- `iban`: a number of the country `XX` with the check digits 00, which no IBAN has;
- `card`: a number that begins with zeros, which no issuer has;
- labels of `entities`: `PERSON0000` to `PERSON9999`.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect
from collections.abc import Sequence
from ipaddress import ip_address
from operator import itemgetter
from typing import Literal

import numpy as np
import pyarrow as pa

from gristmill.dataprep.cleaning.entities import find_entities
from gristmill.dataprep.cleaning.pii import (
    KINDS,
    MATCHERS,
    find_anchors,
)
from gristmill.dataprep.edits import Edit, RuleEdits, edits_array
from gristmill.dataprep.text.kernels import text_buffers
from gristmill.mixtures.steps.clean import Mask

DOCUMENTATION_NETWORKS = ("192.0.2", "198.51.100", "203.0.113")
"""RFC 5737: TEST-NET-1 to 3; 254 hosts each."""
PLACEHOLDERS = {
    "email": ("user{:04d}@example.com", 10_000),
    "phone": ("202-555-01{:02d}", 100),
    "iban": ("XX00 0000 0000 {:04d}", 10_000),
    "card": ("0000 0000 0000 {:04d}", 10_000),
}
"""Kind -> form of its placeholders, and their number."""

Found = tuple[int, int, str]
"""Start and end of a byte range in a text, and its kind: a PiiKind, or a label of
`entities` in lower case.
"""
EXAMPLES_PER_DOCUMENT = 3
"""Largest number of examples of a kind in one document."""
CONTEXT_CHARACTERS = 60
"""Characters on each side of an example."""
EXAMPLE_TYPE = pa.struct(dict.fromkeys(("before", "value", "after"), pa.string()))
FOUND_TYPE = pa.list_(
    pa.struct(
        {"kind": pa.string(), "values": pa.int64(), "examples": pa.list_(EXAMPLE_TYPE)}
    )
)


def mask(texts: pa.Array, options: Mask) -> RuleEdits:
    """Edits that replace the personal data of n texts, by the kinds of `kinds`, with
    examples (FOUND_TYPE).
    """
    data, offsets = text_buffers(texts)
    is_masked = np.array([kind in options.kinds for kind in KINDS], bool)
    rows, firsts = find_anchors(data, offsets, is_masked)
    anchors = rows[:, :2].tolist()
    entities = find_entities(texts, options.entities) if options.entities else None
    names = kinds(options)
    edits: list[list[Edit]] = []
    found: list[list[dict[str, object]]] = []
    counts, sizes = np.zeros((2, len(texts), len(names)), np.int64)
    for number in range(len(texts)):
        text = data[offsets[number] : offsets[number + 1]].tobytes()
        spans = find_pii(text, anchors[firsts[number] : firsts[number + 1]])
        for entity in entities[number] if entities else ():
            insert_disjoint(spans, entity)
        edits.append(
            [
                (begin, end, replacement(text[begin:end], kind, options.style))
                for begin, end, kind in spans
            ]
        )
        found.append(show_examples(text, spans, edits[-1], options.show_values))
        for begin, end, kind in spans:
            counts[number, names.index(kind)] += 1
            sizes[number, names.index(kind)] += end - begin
    return RuleEdits(edits_array(edits), counts, sizes, pa.array(found, FOUND_TYPE))


def kinds(options: Mask) -> tuple[str, ...]:
    """Masked kinds: those of KINDS in their order, then the labels of `entities`."""
    labels = () if options.entities is None else options.entities.labels
    return (
        *(kind for kind in KINDS if kind in options.kinds),
        *(label.lower() for label in labels),
    )


def rules(options: Mask) -> tuple[str, ...]:
    """Names of the rules: `mask_email` and so on, in the order of `kinds`."""
    return tuple(f"mask_{kind}" for kind in kinds(options))


def show_examples(
    text: bytes, spans: Sequence[Found], edits: Sequence[Edit], show_values: bool
) -> list[dict[str, object]]:
    """Number of a text's values by kind, and some of them for people who look for false
    alarms, each between masked text.

    Args:
        text: UTF-8.
        spans, edits: of all values, and their replacements.
        show_values: True for the values themselves, not their shape.
    """
    if not spans:
        return []
    pieces, last_end = [], 0
    for begin, end, new in edits:
        pieces += [text[last_end:begin].decode(), new]
        last_end = end
    pieces.append(text[last_end:].decode())
    numbers: dict[str, list[int]] = {}
    for number, (*_, kind) in enumerate(spans):
        numbers.setdefault(kind, []).append(number)

    def example(number: int) -> dict[str, str]:
        begin, end, _ = spans[number]
        value = text[begin:end].decode()
        before = "".join(pieces[max(0, 2 * number - 2) : 2 * number + 1])
        after = "".join(pieces[2 * number + 2 : 2 * number + 5])
        return {
            "before": before[-CONTEXT_CHARACTERS:],
            "value": value if show_values else shape_of(value),
            "after": after[:CONTEXT_CHARACTERS],
        }

    return [
        {
            "kind": kind,
            "values": len(of_kind),
            "examples": [example(number) for number in of_kind[:EXAMPLES_PER_DOCUMENT]],
        }
        for kind, of_kind in numbers.items()
    ]


def shape_of(value: str) -> str:
    """A value with `x` for each letter and `9` for each digit."""
    return re.sub(r"[^\W\d_]", "x", re.sub(r"\d", "9", value))


def find_pii(text: bytes, anchors: Sequence[Sequence[int]]) -> list[Found]:
    """Personal data at the anchors of a text, ascending and disjoint.

    If two spans overlap, the one whose kind comes first in KINDS is kept; of one kind,
    the one that begins first.

    Args:
        text: UTF-8.
        anchors: (place, number of the kind), from `find_anchors`.
    """
    accepted: list[Found] = []
    for place, number in sorted(anchors, key=itemgetter(1)):
        kind = KINDS[number]
        span = MATCHERS[kind](text, place)
        if span is not None:
            insert_disjoint(accepted, (*span, kind))
    return accepted


def insert_disjoint(accepted: list[Found], span: Found) -> None:
    """Insert a span into ascending ones, unless it overlaps one of them."""
    at = bisect(accepted, span)
    follows = at == 0 or accepted[at - 1][1] <= span[0]
    if follows and (at == len(accepted) or span[1] <= accepted[at][0]):
        accepted.insert(at, span)


def replacement(value: bytes, kind: str, style: Literal["placeholder", "tag"]) -> str:
    """Replacement of a value."""
    return f"<{kind.upper()}>" if style == "tag" else placeholder(value.decode(), kind)


def placeholder(value: str, kind: str) -> str:
    """Unassigned value of the same kind, chosen by a hash of the value that ignores its
    spelling.
    """
    if kind == "ip":
        address = ip_address(value)
        if address.version == 6:
            return f"2001:db8::{_choose(address.exploded, kind, 0xFFFF) + 1:x}"
        choices = 254 * len(DOCUMENTATION_NETWORKS)
        network, host = divmod(_choose(address.exploded, kind, choices), 254)
        return f"{DOCUMENTATION_NETWORKS[network]}.{host + 1}"
    if kind == "email":
        value = value.lower()
    elif kind in PLACEHOLDERS:
        value = re.sub("[^0-9A-Z]", "", value)
    else:
        value = " ".join(value.split())
    form, choices = PLACEHOLDERS.get(kind, (f"{kind.upper()}{{:04d}}", 10_000))
    return form.format(_choose(value, kind, choices))


def _choose(value: str, kind: str, choices: int) -> int:
    digest = hashlib.blake2b(f"{kind}\0{value}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % choices
