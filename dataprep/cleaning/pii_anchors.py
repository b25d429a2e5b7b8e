"""Where personal data may be: one fast pass that finds every place which a matcher of `pii.py` has to look at.

A matcher finds nothing at any other place: the pass may find too many, never too few.
"""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.cleaning.pieces import new_rows, push
from gristmill.dataprep.kernels import kernel
from gristmill.mixtures.clean import PiiKind

KINDS: tuple[PiiKind, ...] = ("email", "iban", "card", "ip", "phone")
"""The kinds in the order in which they claim bytes; their numbers are those of the anchors."""
EMAIL, IBAN, CARD, IP, PHONE = range(len(KINDS))
LEAST_CARD_DIGITS, LEAST_PHONE_DIGITS = 13, 7
MOST_GAP = 3
"""Bytes, or no-break spaces, between two digits of a telephone number."""


@kernel
def find_anchors(data: np.ndarray, offsets: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the places of n texts where personal data may be.

    Args:
        wanted: bool per kind.

    Returns:
        rows of place (byte within the text), kind and 0, ascending in each text; and per text its first row (int64 of
        shape (n + 1,)).
    """
    number = len(offsets) - 1
    rows, count = new_rows(), 0
    firsts = np.zeros(number + 1, np.int64)
    for text in range(number):
        begin, end = offsets[text], offsets[text + 1]
        for at in range(begin, end):
            byte = data[at]
            if byte >= 0x5B or byte < 0x28:  # most of every text: lower-case letters, spaces, what is not ASCII
                continue
            if byte == 0x40:
                if wanted[EMAIL] and at > begin and at + 1 < end and data[at - 1] > 0x20 and data[at + 1] >= 0x30:
                    rows = push(rows, count, at - begin, EMAIL, 0)
                    count += 1
                continue
            digit = is_digit(byte)
            if not (digit or byte >= 0x41 or byte == 0x28 or byte == 0x2B):
                continue
            if at > begin and is_alphanumeric(data[at - 1]):
                continue
            for kind in range(IBAN, len(KINDS)):
                if not wanted[kind]:
                    continue
                if kind == IBAN:
                    found = byte >= 0x41 and _begins_iban(data, at, end)
                elif kind == CARD:
                    found = digit and _digits_from(data, at, end, 1, False) >= LEAST_CARD_DIGITS
                elif kind == IP:
                    found = digit and (_begins_ipv4(data, at, end) or _begins_ipv6(data, at, end))
                else:
                    found = byte < 0x41 and _digits_from(data, at, end, MOST_GAP, True) >= LEAST_PHONE_DIGITS
                if found:
                    rows = push(rows, count, at - begin, kind, 0)
                    count += 1
        firsts[text + 1] = count
    return rows[:count], firsts


@kernel
def is_digit(byte: int) -> bool:
    """Whether a byte is an ASCII digit."""
    return 0x30 <= byte <= 0x39


@kernel
def is_alphanumeric(byte: int) -> bool:
    """Whether a byte is an ASCII letter, digit or underscore."""
    return is_digit(byte) or 0x41 <= byte <= 0x5A or 0x61 <= byte <= 0x7A or byte == 0x5F


@kernel
def _begins_iban(data: np.ndarray, at: int, end: int) -> bool:
    return at + 15 <= end and 0x41 <= data[at + 1] <= 0x5A and is_digit(data[at + 2]) and is_digit(data[at + 3])


@kernel
def _begins_ipv4(data: np.ndarray, at: int, end: int) -> bool:
    """Whether up to three digits and a dot are there three times, and a digit after them."""
    for _ in range(3):
        digits = 0
        while at < end and is_digit(data[at]) and digits < 3:
            at, digits = at + 1, digits + 1
        if digits == 0 or at >= end or data[at] != 0x2E:
            return False
        at += 1
    return at < end and is_digit(data[at])


@kernel
def _begins_ipv6(data: np.ndarray, at: int, end: int) -> bool:
    return at + 6 <= end and data[at] in (0x32, 0x33) and data[at + 4] == 0x3A


@kernel
def _digits_from(data: np.ndarray, at: int, end: int, gap: int, marks: bool) -> int:
    """How many digits come one after the other with at most so many separators between two, up to 13.

    Separators are space, no-break space and `-`, and with `marks` also `.`, `/`, `+` and parentheses.
    """
    digits, between = 0, 0
    while at < end and digits < LEAST_CARD_DIGITS:
        byte = data[at]
        if is_digit(byte):
            digits, between = digits + 1, 0
            at += 1
            continue
        width = 0
        if byte == 0x20 or byte == 0x2D or (marks and (byte == 0x2E or byte == 0x2F or 0x28 <= byte <= 0x2B)):
            width = 1
        elif byte == 0xC2 and at + 1 < end and data[at + 1] == 0xA0:
            width = 2
        between += 1
        if width == 0 or (between > gap and digits):
            break
        at += width
    return digits
