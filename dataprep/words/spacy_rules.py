"""Rules of spaCy's English tokenizer as a kernel.

A run between whitespace loses prefixes and suffixes one by one; infixes cut the rest.
An exception ends this early, if the run or its rest equals it, and replaces adjacent
words of which it consists (`(him):` has a `):`). The rules are those of spaCy 3.8
(lang/punctuation.py, lang/en/punctuation.py, tokenizer.pyx); their characters and the
exceptions are read from the installed one.

Some runs are left to spaCy: with a code point outside of the basic plane, with a degree
sign or a currency such as `US$`, with overlapping exceptions, with an infix where the
rest may be a web address, or of more than MOST_BYTES.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from gristmill.dataprep.text.hashing import ODD, hash_bytes
from gristmill.dataprep.text.kernels import (
    Bytes,
    Positions,
    inner_kernel,
    kernel,
    text_buffers,
)
from gristmill.dataprep.text.unicode_tables import decode

PLANE = 1 << 16
"""Code points of the basic plane."""
MOST_BYTES = 255
TABLE_BITS = 13
LOWER, UPPER, ALPHA, DIGIT, QUOTE, PREFIX, SUFFIX, BEFORE_STOP = (
    1 << bit for bit in range(8)
)
INFIX, OPERATOR, JOINT, HYPHEN, HOST, CURRENCY, UNKNOWN = (
    1 << bit for bit in range(8, 15)
)
"""Kinds of code points: infixes anywhere, operators after digits, and joints or hyphens
before letters; characters of host names, and letters of currencies.
"""
STOP, COMMA, PLUS, HYPHEN_MINUS, DOLLAR, APOSTROPHE = (ord(mark) for mark in ".,+-$'")
COLON, SLASH, QUESTION, SHARP, AT = (ord(mark) for mark in ":/?#@")
SMALL_S, CAPITAL_S, RIGHT_QUOTE, ELLIPSIS, EM_DASH = (ord(mark) for mark in "sS’…—")
NOTHING, UNIT = np.uint64(0), np.uint64(1)
"""Cuts of a word that is looked up entire, and of a unit or currency after a digit."""
LONGEST_UNIT = 5
"""Code points."""


class Rules(NamedTuple):
    """The rules as arrays.

    Cuts of a word are a uint64 with bit n set if another word begins at its byte n.
    """

    kinds: np.ndarray
    """uint16 of shape (PLANE,): kinds of each code point."""
    keys: np.ndarray
    """uint64 of shape (2^TABLE_BITS,): hash of an exception or unit and of its cuts
    before it is applied; 0 if free.
    """
    cuts: np.ndarray
    """uint64, aligned with `keys`: cuts of the exception."""
    longest: int
    """Most bytes of an exception."""


class Run(NamedTuple):
    """Buffers for a run's code points and words."""

    codes: np.ndarray
    """int64: code points."""
    kinds: np.ndarray
    """uint16: their kinds."""
    places: np.ndarray
    """int64: first byte of each, and the end."""
    is_cut: np.ndarray
    """bool: a word begins at a byte."""
    bounds: np.ndarray
    """int64: first byte of each word, and the end."""


def read_rules(tokenizer: Any) -> Rules:
    """Rules of spaCy's English tokenizer."""
    from spacy.attrs import ORTH
    from spacy.lang import char_classes

    keys, all_cuts = (np.zeros(1 << TABLE_BITS, np.uint64) for _ in range(2))
    rules = Rules(_code_point_kinds(char_classes), keys, all_cuts, 0)
    for unit in [*char_classes.LIST_UNITS, *char_classes.LIST_CURRENCY, "+"]:
        _insert(rules, unit.replace("\\", "").encode(), UNIT, NOTHING)
    # a single character is a word anyway
    exceptions = {
        word.encode(): _cuts_of([len(piece[ORTH].encode()) for piece in pieces])
        for word, pieces in tokenizer.rules.items()
        if len(word) > 1 and "°" not in word
    }
    data, offsets = text_buffers(
        pa.array(list(exceptions), pa.large_binary()).cast(pa.large_string())
    )
    sizes, lengths = split_runs(data, offsets[:-1], offsets[1:], rules)
    ends = np.cumsum(sizes, dtype=np.int64)
    for (word, cuts), size, end in zip(exceptions.items(), sizes, ends, strict=True):
        _insert(rules, word, NOTHING, cuts)
        if size > 1:
            _insert(rules, word, _cuts_of(lengths[end - size : end].tolist()), cuts)
    return rules._replace(longest=max(map(len, exceptions)))


def _code_point_kinds(classes: Any) -> np.ndarray:
    single = [*classes.LIST_PUNCT, *classes.LIST_QUOTES, *classes.LIST_ICONS, "—", "–"]
    patterns = {
        LOWER: f"[{classes.ALPHA_LOWER}]",
        UPPER: f"[{classes.ALPHA_UPPER}]",
        ALPHA: f"[{classes.ALPHA}]",
        DIGIT: "[0-9]",
        QUOTE: f"[{classes.CONCAT_QUOTES}]",
        PREFIX: "|".join(
            filter(str.strip, [*single, *classes.LIST_CURRENCY, "[§%=+]"])
        ),
        SUFFIX: "|".join(filter(str.strip, single)),
        BEFORE_STOP: rf"[0-9{classes.ALPHA_LOWER}%²\-\+{classes.PUNCT}(?:{classes.CONCAT_QUOTES})]",
        INFIX: f"[…{classes.CONCAT_ICONS}]",
        OPERATOR: r"[+\-*^]",
        JOINT: "[:<>=/]",
        HYPHEN: "[-–—~]",
        HOST: r"[A-Za-z0-9._\-\u00a1-\uffff]",
        CURRENCY: "[ACS]",
        UNKNOWN: "°",
    }
    kinds = np.zeros(PLANE, np.uint16)
    plane = "".join(map(chr, range(PLANE)))
    for kind, pattern in patterns.items():
        for characters in re.finditer(f"(?:{pattern})+", plane):
            kinds[characters.start() : characters.end()] |= kind
    return kinds


def _cuts_of(lengths: Sequence[int]) -> np.uint64:
    return np.uint64(sum(1 << place for place in np.cumsum(lengths)[:-1].tolist()))


def _insert(rules: Rules, word: bytes, inner: np.uint64, cuts: np.uint64) -> None:
    key = _key(np.frombuffer(word, np.uint8), 0, len(word), inner)
    slot = int(key) >> 64 - TABLE_BITS
    while rules.keys[slot] not in (0, key):
        slot = (slot + 1) % len(rules.keys)
    rules.keys[slot], rules.cuts[slot] = key, cuts


@inner_kernel
def _key(data: Bytes, begin: int, end: int, inner: np.uint64) -> np.uint64:
    return (hash_bytes(data, begin, end) ^ inner) * ODD


@inner_kernel
def _find(rules: Rules, data: Bytes, begin: int, end: int, inner: np.uint64) -> int:
    """Slot of an exception or unit with its cuts; -1 if there is none."""
    key = _key(data, begin, end, inner)
    slot = key >> np.uint64(64 - TABLE_BITS)
    while rules.keys[slot] != key:
        if rules.keys[slot] == 0:
            return -1
        slot = (slot + np.uint64(1)) & np.uint64(len(rules.keys) - 1)
    return int(np.int64(slot))  # numba makes a float of -1 or an unsigned number


@kernel
def split_runs(
    data: Bytes, starts: Positions, ends: Positions, rules: Rules
) -> tuple[np.ndarray, np.ndarray]:
    """Split runs into words.

    Args:
        data, starts, ends: the runs, without whitespace.
        rules: of the tokenizer (`read_rules`).

    Returns:
        sizes: uint8, one per run: its number of words; 0 if it is left to spaCy.
        lengths: uint8: bytes of all words of the others, and free space.
    """
    sizes = np.zeros(len(starts), np.uint8)
    lengths = np.empty((ends - starts).sum(), np.uint8)
    run = Run(
        np.empty(MOST_BYTES, np.int64),
        np.empty(MOST_BYTES, np.uint16),
        np.empty(MOST_BYTES + 1, np.int64),
        np.empty(MOST_BYTES + 1, np.bool_),
        np.empty(MOST_BYTES + 1, np.int64),
    )
    count = 0
    for number in range(len(starts)):
        begin, end = starts[number], ends[number]
        if end - begin > MOST_BYTES:
            continue
        pos = begin
        while pos < end and data[pos] < 0x80 and rules.kinds[data[pos]] & ALPHA:
            pos += 1
        if pos == end and (
            end - begin > rules.longest or _find(rules, data, begin, end, NOTHING) < 0
        ):
            sizes[number] = 1
            lengths[count] = end - begin
            count += 1
            continue
        run.is_cut[: end - begin + 1] = False
        if not _cut(rules, data, begin, end, run):
            continue
        words = _find_words(run, end - begin)
        for word in range(words):
            lengths[count + word] = run.bounds[word + 1] - run.bounds[word]
        sizes[number] = words
        count += words
    return sizes, lengths


@inner_kernel
def _cut(rules: Rules, data: Bytes, begin: int, end: int, run: Run) -> bool:
    """Mark the words of a run; false if it is left to spaCy."""
    first, last = 0, _decode_run(rules, data, begin, end, run)
    if last == 0:
        return False
    is_exception = False
    while first < last and not is_exception:
        prefix, suffix = 0, 0
        is_exception = _apply(rules, data, begin, run, first, last)
        if not is_exception:
            prefix = _prefix(run, first, last)
            is_exception = prefix > 0 and _apply(
                rules, data, begin, run, first + prefix, last
            )
        if not is_exception:
            suffix = _suffix(rules, data, begin, run, first + prefix, last)
            is_exception = suffix > 0 and _apply(
                rules, data, begin, run, first, last - suffix
            )
            if is_exception:
                prefix = 0
        if prefix + suffix == 0:
            break
        first, last = first + prefix, last - suffix
        run.is_cut[run.places[first]] = True
        run.is_cut[run.places[last]] = True
    if not is_exception and not _cut_infixes(run, first, last):
        return False
    return _apply_adjacent(rules, data, begin, end, run)


@inner_kernel
def _decode_run(rules: Rules, data: Bytes, begin: int, end: int, run: Run) -> int:
    """Number of code points of a run, which are decoded; 0 if it is left to spaCy."""
    size = 0
    pos = begin
    while pos < end:
        code, width = decode(data, pos)
        if code >= PLANE:
            return 0
        kind = rules.kinds[code]
        if kind & UNKNOWN or (
            code == DOLLAR and size > 0 and run.kinds[size - 1] & CURRENCY
        ):
            return 0
        run.codes[size], run.kinds[size], run.places[size] = code, kind, pos - begin
        size += 1
        pos += width
    run.places[size] = end - begin
    return size


@inner_kernel
def _apply(
    rules: Rules, data: Bytes, begin: int, run: Run, first: int, last: int
) -> bool:
    """Cut some code points of a run as an exception does, if they are one."""
    start, stop = run.places[first], run.places[last]
    if stop - start < 2 or stop - start > rules.longest:
        return False
    slot = _find(rules, data, begin + start, begin + stop, NOTHING)
    if slot >= 0:
        _copy_cuts(run, rules.cuts[slot], start, stop)
    return slot >= 0


@inner_kernel
def _copy_cuts(run: Run, cuts: np.uint64, start: int, stop: int) -> None:
    for place in range(start + 1, stop):
        run.is_cut[place] = cuts >> np.uint64(place - start) & np.uint64(1) != 0


@inner_kernel
def _prefix(run: Run, first: int, last: int) -> int:
    """Length of a prefix; 0 if there is none."""
    code = run.codes[first]
    if code == STOP:
        size = _repeated(run, first, last)
        return size if size > 1 else 0
    if code == PLUS and first + 1 < last and run.kinds[first + 1] & DIGIT:
        return 0
    return int(run.kinds[first] & PREFIX != 0)


@inner_kernel
def _repeated(run: Run, first: int, last: int) -> int:
    """Number of adjacent copies of a code point."""
    at = first
    while at < last and run.codes[at] == run.codes[first]:
        at += 1
    return at - first


@inner_kernel
def _suffix(
    rules: Rules, data: Bytes, begin: int, run: Run, first: int, last: int
) -> int:
    """Length of the longest suffix; 0 if there is none."""
    if first == last:
        return 0
    code = run.codes[last - 1]
    before, before_kind = 0, 0
    if last - first > 1:
        before, before_kind = run.codes[last - 2], int(run.kinds[last - 2])
    if code == STOP:
        size = 1
        while last - size > first and run.codes[last - size - 1] == STOP:
            size += 1
        if size > 1 or before_kind & BEFORE_STOP:
            return size
        return int(last - first > 2 and before_kind & run.kinds[last - 3] & UPPER != 0)
    if run.kinds[last - 1] & SUFFIX:
        return 2 if code == ELLIPSIS and before == ELLIPSIS else 1
    if code in (SMALL_S, CAPITAL_S) and before in (APOSTROPHE, RIGHT_QUOTE):
        return 2
    for size in range(1, min(LONGEST_UNIT, last - first - 1) + 1):
        if run.kinds[last - size] & DIGIT:
            return 0
        if run.kinds[last - size - 1] & DIGIT:
            start, stop = run.places[last - size], run.places[last]
            slot = _find(rules, data, begin + start, begin + stop, UNIT)
            return size if slot >= 0 else 0
    return 0


@inner_kernel
def _cut_infixes(run: Run, first: int, last: int) -> bool:
    """Cut some code points of a run at infixes; false if they may be a web address."""
    has_infix = False
    at = first
    while at < last:
        size = _infix(run, first, last, at)
        if size > 0 and at > first:
            run.is_cut[run.places[at]] = True
            run.is_cut[run.places[at + size]] = True
            has_infix = True
        at += max(size, 1)
    return not has_infix or not _may_be_address(run, first, last)


@inner_kernel
def _infix(run: Run, first: int, last: int, at: int) -> int:
    """Length of an infix; 0 if there is none."""
    code, kind = run.codes[at], run.kinds[at]
    if kind & INFIX:
        return 1
    size = _repeated(run, at, last)
    if code == STOP and size > 1:
        return size
    if at == first or at + 1 == last:
        return 0
    before, after = run.kinds[at - 1], run.kinds[at + 1]
    if code == STOP:
        return int(before & (LOWER | QUOTE) != 0 and after & (UPPER | QUOTE) != 0)
    if code == COMMA:
        return int(before & after & ALPHA != 0)
    is_negative = run.codes[at + 1] == HYPHEN_MINUS
    if kind & OPERATOR and before & DIGIT and (after & DIGIT or is_negative):
        return 1
    if before & (ALPHA | DIGIT) == 0:
        return 0
    if kind & JOINT:
        return int(after & ALPHA != 0)
    if kind & HYPHEN and at + size < last and run.kinds[at + size] & ALPHA:
        most = 3 if code == HYPHEN_MINUS else 2 if code == EM_DASH else 1
        return size if size <= most else 0
    return 0


@inner_kernel
def _may_be_address(run: Run, first: int, last: int) -> bool:
    """True if a host's name is at the beginning, or after `//` or `@`."""
    for at in range(first + 1, last - 1):
        if run.codes[at] != STOP or run.kinds[at - 1] & HOST == 0:
            continue
        end = at + 1
        while end < last and run.kinds[end] & (LOWER | DIGIT):
            end += 1
        if end < last:
            code = run.codes[end]
            if code not in (COLON, SLASH, QUESTION, SHARP):
                continue
        start = at
        while start > first and run.kinds[start - 1] & HOST:
            start -= 1
        if start == first or run.codes[start - 1] == AT:
            return True
        if (
            start - first > 1
            and run.codes[start - 1] == SLASH
            and run.codes[start - 2] == SLASH
        ):
            return True
    return False


@inner_kernel
def _find_words(run: Run, size: int) -> int:
    """Number of words of a run of `size` bytes; `bounds` receives them."""
    words = 0
    for place in range(size):
        if place == 0 or run.is_cut[place]:
            run.bounds[words] = place
            words += 1
    run.bounds[words] = size
    return words


@inner_kernel
def _apply_adjacent(rules: Rules, data: Bytes, begin: int, end: int, run: Run) -> bool:
    """Cut adjacent words as an exception does, if they are one; false if two
    overlap.
    """
    words = _find_words(run, end - begin)
    covered = 0
    for first in range(words - 1):
        start = run.bounds[first]
        inner = NOTHING
        for last in range(first + 1, words):
            stop = run.bounds[last + 1]
            if stop - start > rules.longest:
                break
            inner |= UNIT << np.uint64(run.bounds[last] - start)
            slot = _find(rules, data, begin + start, begin + stop, inner)
            if slot < 0:
                continue
            if first < covered:
                return False
            covered = last + 1
            _copy_cuts(run, rules.cuts[slot], start, stop)
    return True
