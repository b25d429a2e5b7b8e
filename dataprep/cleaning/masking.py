"""Masking of personal data, as edits; the matchers are in `pii.py`.

A replacement depends only on the value, so that equal values stay equal and the order
of documents does not matter. Placeholders are values that belong to nobody and that no
matcher finds again:

- `email`: `user0000@example.com` to `user9999@example.com` (RFC 2606);
- `ip`: an address of the three documentation networks (RFC 5737), or of 2001:db8:: (RFC
  3849);
- `phone`: `202-555-0100` to `202-555-0199` (NANPA's numbers for films and examples);
- `iban`: a number of the country `XX` with the check digits 00, which no IBAN has;
- `card`: a number that begins with zeros, which no issuer has.
"""

from __future__ import annotations

import hashlib
from bisect import bisect
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Literal

import numpy as np
import pyarrow as pa

from gristmill.dataprep.cleaning.pii import (
    KINDS,
    MATCHERS,
    digits_of,
    find_anchors,
)
from gristmill.dataprep.edits import Edit, RuleEdits, edits_array
from gristmill.dataprep.text.kernels import text_buffers
from gristmill.mixtures.steps.clean import Mask, PiiKind

DOCUMENTATION_NETWORKS = ("192.0.2", "198.51.100", "203.0.113")
"""RFC 5737: TEST-NET-1 to 3; 254 hosts each."""

Found = tuple[int, int, PiiKind]
"""Start and end of a byte range in a text, and its kind."""


def mask(texts: pa.Array, options: Mask) -> RuleEdits:
    """Edits that replace the personal data of n texts.

    Returns:
        edits (EDITS_TYPE); per text and rule of `rules` the number of replaced values,
        and their bytes: two int64 arrays of shape (n, rules).
    """
    data, offsets = text_buffers(texts)
    is_masked = np.array([kind in options.kinds for kind in KINDS], bool)
    rows, firsts = find_anchors(data, offsets, is_masked)
    anchors = rows[:, :2].tolist()
    bounds = firsts.tolist()
    edits: list[Sequence[Edit]] = []
    counts = np.zeros((len(texts), len(KINDS)), np.int64)
    sizes = np.zeros((len(texts), len(KINDS)), np.int64)
    for number in range(len(texts)):
        text_anchors = anchors[bounds[number] : bounds[number + 1]]
        if not text_anchors:
            edits.append(())
            continue
        text = data[offsets[number] : offsets[number + 1]].tobytes()
        spans = find_pii(text, text_anchors)
        edits.append(
            [
                (begin, end, replacement(text[begin:end], kind, options.style))
                for begin, end, kind in spans
            ]
        )
        for begin, end, kind in spans:
            counts[number, KINDS.index(kind)] += 1
            sizes[number, KINDS.index(kind)] += end - begin
    return edits_array(edits), counts[:, is_masked], sizes[:, is_masked]


def rules(options: Mask) -> tuple[str, ...]:
    """Names of the masked kinds: `mask_email` and so on, in the order of KINDS."""
    return tuple(f"mask_{kind}" for kind in KINDS if kind in options.kinds)


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
            at = bisect(accepted, (begin, last_end, kind))
            follows = at == 0 or accepted[at - 1][1] <= begin
            if follows and (at == len(accepted) or last_end <= accepted[at][0]):
                accepted.insert(at, (begin, last_end, kind))
    return accepted


def replacement(
    value: bytes, kind: PiiKind, style: Literal["placeholder", "tag"]
) -> str:
    """Replacement of a value."""
    return (
        f"<{kind.upper()}>"
        if style == "tag"
        else placeholder(value.decode("utf-8"), kind)
    )


def placeholder(value: str, kind: PiiKind) -> str:
    """Unassigned value of the same kind, chosen by a hash of the value that ignores its
    spelling.
    """
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
