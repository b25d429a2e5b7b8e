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
from typing import Literal

import numpy as np
import pyarrow as pa

from gristmill.dataprep.cleaning.entities import find_entities
from gristmill.dataprep.cleaning.pii import (
    KINDS,
    MATCHERS,
    digits_of,
    find_anchors,
)
from gristmill.dataprep.edits import Edit, RuleEdits, edits_array
from gristmill.dataprep.text.kernels import text_buffers
from gristmill.mixtures.steps.clean import Mask

DOCUMENTATION_NETWORKS = ("192.0.2", "198.51.100", "203.0.113")
"""RFC 5737: TEST-NET-1 to 3; 254 hosts each."""

Found = tuple[int, int, str]
"""Start and end of a byte range in a text, and its kind: a PiiKind, or a label of
`entities` in lower case.
"""
EXAMPLES_PER_DOCUMENT = 3
"""Largest number of examples of a kind in one document."""
CONTEXT_CHARACTERS = 60
"""Characters on each side of an example."""
EXAMPLES_TYPE = pa.list_(
    pa.struct([(name, pa.string()) for name in ("kind", "before", "value", "after")])
)


def mask(texts: pa.Array, options: Mask) -> RuleEdits:
    """Edits that replace the personal data of n texts, by the kinds of `kinds`, with
    examples (EXAMPLES_TYPE).
    """
    data, offsets = text_buffers(texts)
    is_masked = np.array([kind in options.kinds for kind in KINDS], bool)
    rows, firsts = find_anchors(data, offsets, is_masked)
    anchors = rows[:, :2].tolist()
    bounds = firsts.tolist()
    names = kinds(options)
    entities = find_entities(texts, options.entities) if options.entities else None
    edits: list[Sequence[Edit]] = []
    examples: list[list[dict[str, str]]] = []
    counts = np.zeros((len(texts), len(names)), np.int64)
    sizes = np.zeros((len(texts), len(names)), np.int64)
    for number in range(len(texts)):
        text_anchors = anchors[bounds[number] : bounds[number + 1]]
        text_entities = entities[number] if entities else ()
        if not text_anchors and not text_entities:
            edits.append(())
            examples.append([])
            continue
        text = data[offsets[number] : offsets[number + 1]].tobytes()
        spans = find_pii(text, text_anchors)
        for entity in text_entities:
            insert_disjoint(spans, entity)
        edits.append(
            [
                (begin, end, replacement(text[begin:end], kind, options.style))
                for begin, end, kind in spans
            ]
        )
        examples.append(show_examples(text, spans, edits[-1], options.show_values))
        for begin, end, kind in spans:
            counts[number, names.index(kind)] += 1
            sizes[number, names.index(kind)] += end - begin
    return RuleEdits(
        edits_array(edits), counts, sizes, pa.array(examples, EXAMPLES_TYPE)
    )


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
) -> list[dict[str, str]]:
    """Some values of a text for people who look for false alarms, each between masked
    text.

    Args:
        text: UTF-8.
        spans, edits: of all values, and their replacements.
        show_values: True for the values themselves, not their shape.
    """
    pieces, end = [], 0
    for begin, next_end, new in edits:
        pieces += [text[end:begin].decode(), new]
        end = next_end
    pieces.append(text[end:].decode())
    shown: dict[str, int] = {}
    examples = []
    for number, (begin, end, kind) in enumerate(spans):
        shown[kind] = shown.get(kind, 0) + 1
        if shown[kind] > EXAMPLES_PER_DOCUMENT:
            continue
        value = text[begin:end].decode()
        before = "".join(pieces[max(0, 2 * number - 2) : 2 * number + 1])
        after = "".join(pieces[2 * number + 2 : 2 * number + 5])
        examples.append(
            {
                "kind": kind,
                "before": before[-CONTEXT_CHARACTERS:],
                "value": value if show_values else shape_of(value),
                "after": after[:CONTEXT_CHARACTERS],
            }
        )
    return examples


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
    for number, kind in enumerate(KINDS):
        last_end = 0
        for place, kind_number in anchors:
            span = MATCHERS[kind](text, place) if kind_number == number else None
            if span is None or span[0] < last_end:
                continue
            begin, last_end = span
            insert_disjoint(accepted, (begin, last_end, kind))
    return accepted


def insert_disjoint(accepted: list[Found], span: Found) -> None:
    """Insert a span into ascending ones, unless it overlaps one of them."""
    at = bisect(accepted, span)
    follows = at == 0 or accepted[at - 1][1] <= span[0]
    if follows and (at == len(accepted) or span[1] <= accepted[at][0]):
        accepted.insert(at, span)


def replacement(value: bytes, kind: str, style: Literal["placeholder", "tag"]) -> str:
    """Replacement of a value."""
    return (
        f"<{kind.upper()}>"
        if style == "tag"
        else placeholder(value.decode("utf-8"), kind)
    )


def placeholder(value: str, kind: str) -> str:
    """Unassigned value of the same kind, chosen by a hash of the value that ignores its
    spelling.
    """
    if kind not in KINDS:
        return f"{kind.upper()}{_choose(' '.join(value.split()), kind, 10_000):04d}"
    if kind == "email":
        return f"user{_choose(value.lower(), kind, 10_000):04d}@example.com"
    if kind == "ip":
        address = ip_address(value)
        if address.version == 6:
            return f"2001:db8::{_choose(address.exploded, kind, 0xFFFF) + 1:x}"
        network, host = divmod(
            _choose(address.exploded, kind, 254 * len(DOCUMENTATION_NETWORKS)), 254
        )
        return f"{DOCUMENTATION_NETWORKS[network]}.{host + 1}"
    if kind == "iban":
        compact = "".join(filter(str.isalnum, value))
        return f"XX00 0000 0000 {_choose(compact, kind, 10_000):04d}"
    digits = digits_of(value.encode()).decode()
    if kind == "phone":
        return f"202-555-01{_choose(digits, kind, 100):02d}"
    return f"0000 0000 0000 {_choose(digits, kind, 10_000):04d}"


def _choose(value: str, kind: str, choices: int) -> int:
    digest = hashlib.blake2b(f"{kind}\0{value}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % choices
