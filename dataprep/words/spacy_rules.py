"""Rules of spaCy's English tokenizer as a kernel.

A run between whitespace loses prefixes and suffixes one by one; infixes cut the rest.
An exception ends this early, if the run or its rest equals it, and replaces adjacent
words of which it consists (`(him):` has a `):`). The expressions and exceptions are
those of the installed spaCy (lang/punctuation.py, tokenizer.pyx). An affix is
one or two marks, or a unit after a digit, and depends on its neighbours, so tables by
kinds of code points are filled by matching the expressions with an example of each kind.

Some runs are left to spaCy: with a code point outside of the basic plane, with a degree
sign or a currency such as `US$`, with overlapping exceptions, with an infix where the
rest may be a web address, or of more than MOST_BYTES.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from string import ascii_letters, digits
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from gristmill.dataprep.text.hashing import ODD, hash_bytes
from gristmill.dataprep.text.kernels import (
    Bytes,
    Positions,
    inlined_kernel,
    inner_kernel,
    kernel,
    text_buffers,
)
from gristmill.dataprep.text.unicode_tables import decode

PLANE = 1 << 16
"""Code points of the basic plane."""
MOST_BYTES = 255
TABLE_BITS = 13
NAMED = ".,+-~–—…'’sSAC°§@"
"""Code points that an expression treats unlike all others."""
REPEATED = ("..", "//", "--", "---", "----")
"""Copies of a mark that are one mark; more than the last are like it."""
SETS = re.compile(r"\\.|(\[(?:\\.|[^]\\])+\])")
"""Matches sets in an expression, as group 1."""
TWO, ADDRESS, CAPITALS, UNKNOWN = 2, 3, 4, 255
"""Entries of `Rules.affixes` besides 0 and 1: a suffix of two marks, a mark in a web
address, a suffix after two capitals, and a run that is left to spaCy.
"""
NOTHING, UNIT = np.uint64(0), np.uint64(1)
"""Cuts of a word that is looked up entire, and of a unit after a digit."""
LONGEST_UNIT = 5
"""Code points."""


Triple = tuple[str, str, str]
"""A mark between its neighbours."""


class Rules(NamedTuple):
    """The rules as arrays, for k kinds of marks; kind 0 is the end of a run.

    Cuts of a word are a uint64 with bit n set if another word begins at its byte n.
    """

    kinds: np.ndarray
    """uint8 of shape (PLANE,): kind of each code point."""
    joined: np.ndarray
    """uint8 of shape (k, k): kind of the mark that two neighbours make; 0 if they stay
    two, or UNKNOWN.
    """
    affixes: np.ndarray
    """uint8 of shape (k, k, k): 1 if a mark is an affix, by that before it, itself, and
    that after it: a prefix if none is before it, a suffix if none is after it, or an
    infix.
    """
    is_capital: np.ndarray
    """bool of shape (k,): kinds of upper-case letters."""
    hosts: np.ndarray
    """uint8 of shape (k,): 1 for marks of host names, 2 for marks before them, 0 for
    others.
    """
    keys: np.ndarray
    """uint64 of shape (2^TABLE_BITS,): hash of an exception or unit and of its cuts
    before it is applied; 0 if free.
    """
    cuts: np.ndarray
    """uint64, aligned with `keys`: cuts of the exception."""
    longest: int
    """Most bytes of an exception."""


class Run(NamedTuple):
    """Buffers for a run's marks, from 2 on, and words."""

    kinds: np.ndarray
    """uint8: kinds of marks; 0 before the first and after the last."""
    places: np.ndarray
    """int64: first byte of each, and the end."""
    is_cut: np.ndarray
    """bool: a word begins at a byte."""
    bounds: np.ndarray
    """int64: first byte of each word, and the end."""


def read_rules(tokenizer: Any) -> Rules:
    """Rules of spaCy's English tokenizer."""
    from spacy.attrs import ORTH
    from spacy.lang.char_classes import LIST_UNITS
    from spacy.lang.en import English

    rules = _read_tables(English.Defaults)
    for unit in LIST_UNITS:
        _insert(rules, unit, UNIT, NOTHING)
    exceptions = {
        word: _cuts_of([len(piece[ORTH].encode()) for piece in pieces])
        for word, pieces in tokenizer.rules.items()
    }
    data, offsets = text_buffers(pa.array([*exceptions], pa.large_string()))
    sizes, lengths = split_runs(data, offsets[:-1], offsets[1:], rules)
    ends = np.cumsum(sizes, dtype=np.int64)
    for (word, cuts), size, end in zip(exceptions.items(), sizes, ends, strict=True):
        _insert(rules, word, NOTHING, cuts)
        if size > 1:
            _insert(rules, word, _cuts_of(lengths[end - size : end].tolist()), cuts)
    return rules._replace(longest=int(np.diff(offsets).max()))


def _read_tables(defaults: Any) -> Rules:
    """Rules without units and exceptions."""
    from spacy.lang.char_classes import ALPHA_LOWER, ALPHA_UPPER

    rules = [
        [*filter(str.strip, affixes)]
        for affixes in (defaults.prefixes, defaults.infixes, defaults.suffixes)
    ]
    kinds, marks = _kinds_of_marks(rules)
    number = {mark: place for place, mark in enumerate(marks)}
    is_capital, is_domain = (
        np.array([re.fullmatch(f"[{letters}]", mark) is not None for mark in marks])
        for letters in (ALPHA_UPPER, f"{ALPHA_LOWER}0-9")
    )
    dot, dash = number["."], number["—"]
    joined = np.zeros((len(marks), len(marks)), np.uint8)
    for mark in REPEATED:
        joined[[number[mark[1:]], number[mark]], number[mark[0]]] = number[mark]
    joined[[number[letter] for letter in "ACS"], number["$"]] = UNKNOWN
    joined[:, number["°"]] = UNKNOWN
    prefixes, infixes, suffixes = map("|".join, rules)
    cutting = [mark for mark in marks if not mark.isalnum()]
    affixes = np.zeros((len(marks), len(marks), len(marks)), np.uint8)
    for expression, triples in (
        (f"^(?:{prefixes})", product([""], marks, marks)),
        (infixes, product(marks[1:], cutting, marks)),
        (f"(?:{suffixes})$", product(marks, marks[1:], [""])),
    ):
        for triple, begin, end in _matches(expression, [*triples]):
            before, mark, after = triple
            cell = number[before], number[mark], number[after]
            if begin == len(before):
                affixes[cell] = 1 if end == len(before + mark) else UNKNOWN
            elif not after:
                affixes[cell] = TWO if end - begin == len(before + mark) else UNKNOWN
    affixes[1:, dash, dash] = UNKNOWN
    affixes[1:, dot, is_domain] = np.where(
        affixes[1:, dot, is_domain], UNKNOWN, ADDRESS
    )
    affixes[is_capital & (affixes[:, dot, 0] == 0), dot, 0] = CAPITALS
    hosts = np.zeros(len(marks), np.uint8)
    hosts[kinds[[*map(ord, ascii_letters + digits + "-_."), *range(0xA1, PLANE)]]] = 1
    hosts[-len(REPEATED) :] = 1
    hosts[[number["//"], number["@"]]] = 2
    keys, cuts = np.zeros((2, 1 << TABLE_BITS), np.uint64)
    return Rules(kinds, joined, affixes, is_capital, hosts, keys, cuts, 0)


def _kinds_of_marks(rules: Sequence[Sequence[str]]) -> tuple[np.ndarray, list[str]]:
    """Kind of each code point, by the sets of the expressions that it is in, and an
    example of each kind, of which the first is empty and the last are REPEATED.
    """
    expressions = "|".join(map("|".join, rules))
    sets = {match[1] for match in SETS.finditer(expressions) if match[1]}
    sets |= {f"[{mark}]" for mark in NAMED}
    for affixes in rules:
        single = [mark for mark in affixes if len(mark.strip("\\")) == 1]
        sets.add(f"[{''.join(single)}]")
    plane = "".join(map(chr, range(PLANE)))
    signatures = np.zeros(PLANE, np.uint64)
    for bit, characters in enumerate(sorted(sets)):
        for match in re.finditer(f"{characters}+", plane):
            signatures[slice(*match.span())] |= UNIT << np.uint64(bit)
    _, firsts, kinds = np.unique(signatures, return_index=True, return_inverse=True)
    examples = map(chr, firsts.tolist())
    return (kinds + 1).astype(np.uint8), ["", *examples, *REPEATED]


def _matches(
    expression: str, triples: Sequence[Triple]
) -> Iterator[tuple[Triple, int, int]]:
    """Matches in the texts of three marks: the marks, begin and end."""
    texts = [*map("".join, triples)]
    starts = [0, *accumulate(len(text) + 1 for text in texts)]
    for match in re.compile(expression, re.MULTILINE).finditer("\n".join(texts)):
        text = bisect(starts, match.start()) - 1
        yield triples[text], match.start() - starts[text], match.end() - starts[text]


def _cuts_of(lengths: Sequence[int]) -> np.uint64:
    return np.uint64(sum(1 << place for place in accumulate(lengths[:-1])))


def _insert(rules: Rules, word: str, inner: np.uint64, cuts: np.uint64) -> None:
    data = np.frombuffer(word.encode(), np.uint8)
    slot, key = _find(rules, data, 0, len(data), inner)
    rules.keys[slot], rules.cuts[slot] = key, cuts


@inlined_kernel
def _find(
    rules: Rules, data: Bytes, begin: int, end: int, inner: np.uint64
) -> tuple[int, np.uint64]:
    """Slot of an exception with its cuts, or the free slot for it; and its key."""
    key = (hash_bytes(data, begin, end) ^ inner) * ODD
    slot = key >> np.uint64(64 - TABLE_BITS)
    while rules.keys[slot] != key and rules.keys[slot] != 0:
        slot = (slot + UNIT) & np.uint64(len(rules.keys) - 1)
    return int(np.int64(slot)), key


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
        np.zeros(MOST_BYTES + 3, np.uint8),
        np.empty(MOST_BYTES + 3, np.int64),
        np.empty(MOST_BYTES + 1, np.bool_),
        np.empty(MOST_BYTES + 1, np.int64),
    )
    count = 0
    for number in range(len(starts)):
        begin, end = starts[number], ends[number]
        if end - begin > MOST_BYTES:
            continue
        pos = begin
        while pos < end and 0x61 <= data[pos] | 0x20 <= 0x7A:
            pos += 1
        # most runs are letters, and one word
        if pos == end and (
            end - begin > rules.longest
            or rules.keys[_find(rules, data, begin, end, NOTHING)[0]] == 0
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


@inlined_kernel
def _cut(rules: Rules, data: Bytes, begin: int, end: int, run: Run) -> bool:
    """Mark the words of a run; false if it is left to spaCy."""
    first, last = 2, _read_marks(rules, data, begin, end, run)
    if last == 0:
        return False
    kinds, places = run.kinds, run.places
    is_exception = False
    while first < last and not is_exception:
        prefix, suffix = 0, 0
        is_exception = _apply(rules, data, begin, run, places[first], places[last])
        if not is_exception:
            prefix = int(rules.affixes[0, kinds[first], kinds[first + 1]])
            if prefix == UNKNOWN:
                return False
            is_exception = prefix > 0 and _apply(
                rules, data, begin, run, places[first + prefix], places[last]
            )
        if not is_exception:
            if prefix > 0:
                kinds[first] = 0
            suffix = int(rules.affixes[kinds[last - 2], kinds[last - 1], 0])
            if suffix == CAPITALS:
                suffix = int(rules.is_capital[kinds[last - 3]])
            if suffix == UNKNOWN:
                return False
            if suffix == 0:
                suffix = _unit(rules, data, begin, run, last)
            is_exception = suffix > 0 and _apply(
                rules, data, begin, run, places[first], places[last - suffix]
            )
            if is_exception:
                prefix = 0
        if prefix + suffix == 0:
            break
        first, last = first + prefix, last - suffix
        kinds[last] = 0
        run.is_cut[places[first]] = True
        run.is_cut[places[last]] = True
    if not is_exception and not _cut_infixes(rules, run, first, last):
        return False
    return _apply_adjacent(rules, data, begin, end, run)


@inner_kernel
def _read_marks(rules: Rules, data: Bytes, begin: int, end: int, run: Run) -> int:
    """Place after a run's last mark; 0 if it is left to spaCy."""
    last = 1
    pos = begin
    while pos < end:
        code, width = decode(data, pos)
        if code >= PLANE:
            return 0
        kind = rules.kinds[code]
        joined = rules.joined[run.kinds[last], kind]
        if joined == UNKNOWN:
            return 0
        if joined > 0:
            run.kinds[last] = joined
        else:
            last += 1
            run.kinds[last], run.places[last] = kind, pos - begin
        pos += width
    last += 1
    run.kinds[last], run.places[last] = 0, end - begin
    return last


@inlined_kernel
def _unit(rules: Rules, data: Bytes, begin: int, run: Run, last: int) -> int:
    """Number of the last marks if they are a unit after a digit, or 0."""
    for size in range(1, min(LONGEST_UNIT, last - 3) + 1):
        if run.kinds[last - size - 1] == rules.kinds[0x30]:
            start, stop = run.places[last - size], run.places[last]
            slot, key = _find(rules, data, begin + start, begin + stop, UNIT)
            return size if rules.keys[slot] == key else 0
    return 0


@inlined_kernel
def _apply(
    rules: Rules,
    data: Bytes,
    begin: int,
    run: Run,
    start: int,
    stop: int,
    inner: np.uint64 = NOTHING,
) -> bool:
    """Cut some bytes of a run as an exception does, if they are one with such cuts."""
    if stop - start > rules.longest:
        return False
    slot, key = _find(rules, data, begin + start, begin + stop, inner)
    if rules.keys[slot] != key:
        return False
    for place in range(start + 1, stop):
        run.is_cut[place] = rules.cuts[slot] >> np.uint64(place - start) & UNIT != 0
    return True


@inner_kernel
def _cut_infixes(rules: Rules, run: Run, first: int, last: int) -> bool:
    """Cut some marks of a run at infixes; false if it is left to spaCy."""
    has_infix, is_host, has_host = False, True, False
    for mark in range(first, last):
        kind = run.kinds[mark]
        entry = rules.affixes[run.kinds[mark - 1], kind, run.kinds[mark + 1]]
        is_host = rules.hosts[kind] + is_host > 1
        has_host |= is_host and entry == ADDRESS
        if entry == UNKNOWN:
            return False
        if entry == 1:
            run.is_cut[run.places[mark]] = True
            run.is_cut[run.places[mark + 1]] = True
            has_infix = True
    return not (has_infix and has_host)


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


@inlined_kernel
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
            if _apply(rules, data, begin, run, start, stop, inner):
                if first < covered:
                    return False
                covered = last + 1
    return True
