"""Search for listed words and phrases in text: many words at once, fixed phrases in any
case, and the user's lists.

Many words are found by the automaton of Aho and Corasick (1975) as a table, over
lower-case UTF-8 bytes, and phrases by Arrow's RE2. A list has one entry per line; long
lists are kept as small sets of hashes.
"""

from __future__ import annotations

import gzip
import io
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.arrays import Column
from gristmill.core.files import as_path
from gristmill.dataprep.text.hashing import hash_texts
from gristmill.dataprep.text.kernels import Bytes, Flags, Offsets, kernel, text_buffers
from gristmill.dataprep.text.unicode_tables import WORD, decode, decode_before


class Automaton(NamedTuple):
    """Automaton that finds the entries of a list."""

    following: np.ndarray
    """int32 of shape (states, 256), the state after a byte."""
    length: np.ndarray
    """int32 of shape (states,), bytes of the entry that ends in a state; 0 if none
    does.
    """
    shorter: np.ndarray
    """int32 of shape (states,), the state of the next shorter entry that ends here too;
    0 if none does.
    """


def lower(texts: Column) -> Column:
    """Return texts in lower case, code point by code point, the form in which entries
    and texts are compared.
    """
    return pc.utf8_lower(texts)


def build(words: Iterable[str]) -> Automaton:
    """Return the automaton of a list; empty entries are ignored, and case does not
    matter.
    """
    entries = sorted(set(lower(pa.array(list(words), pa.string())).to_pylist()) - {""})
    children: list[dict[int, int]] = [{}]
    lengths = [0]
    for entry in (entry.encode("utf-8") for entry in entries):
        state = 0
        for byte in entry:
            if byte not in children[state]:
                children[state][byte] = len(children)
                children.append({})
                lengths.append(0)
            state = children[state][byte]
        lengths[state] = len(entry)
    following = np.zeros((len(children), 256), np.int32)
    length, shorter = np.array(lengths, np.int32), np.zeros(len(children), np.int32)
    suffix = np.zeros(len(children), np.int32)
    queue = deque([0])
    while queue:
        state = queue.popleft()
        following[state] = following[suffix[state]]
        for byte, child in children[state].items():
            suffix[child] = following[suffix[state], byte] if state else 0
            shorter[child] = (
                suffix[child] if length[suffix[child]] else shorter[suffix[child]]
            )
            following[state, byte] = child
            queue.append(child)
    return Automaton(following, length, shorter)


@kernel
def count(
    data: Bytes,
    offsets: Offsets,
    automaton: Automaton,
    flags: Flags,
    whole_words: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Count entries in n texts.

    Args:
        data, offsets: the texts (`kernels.text_buffers`), in lower case.
        flags: `unicode_tables.code_point_flags()`.
        whole_words: count only entries without a word character (`\\w`) on either side.

    Returns:
        places where at least one entry ends, and bytes that belong to entries: two
        int64 arrays of shape (n,).
    """
    following, length, shorter = automaton
    num_texts = len(offsets) - 1
    places, covered = np.zeros(num_texts, np.int64), np.zeros(num_texts, np.int64)
    for text in range(num_texts):
        begin, end = offsets[text], offsets[text + 1]
        state, covered_end = 0, begin
        for at in range(begin, end):
            state = following[state, data[at]]
            entry = state if length[state] else shorter[state]
            if (
                entry
                and whole_words
                and at + 1 < end
                and flags[decode(data, at + 1)[0]] & WORD
            ):
                continue
            while entry:
                first = at + 1 - length[entry]
                if (
                    not whole_words
                    or first == begin
                    or flags[decode_before(data, first)[0]] & WORD == 0
                ):
                    places[text] += 1
                    covered[text] += at + 1 - max(covered_end, first)
                    covered_end = at + 1
                    break
                entry = shorter[entry]
    return places, covered


def any_case(phrase: str) -> str:
    """Pattern (RE2) of an ASCII phrase, its letters in any case.

    `(?i)` would also accept U+017F as `s`, and U+212A as `k`.
    """
    return "".join(
        f"[{letter}{letter.upper()}]" if letter.isalpha() else re.escape(letter)
        for letter in phrase
    )


PLACEHOLDER = any_case("lorem ipsum")
"""Beginning of the text that fills a page in the place of a real one."""


def count_matches(texts: Column, pattern: str) -> np.ndarray:
    """Count the matches of a pattern (RE2) in n texts, from the left and not
    overlapping: int64 of shape (n,); null counts as empty.
    """
    counts = pc.count_substring_regex(pc.fill_null(texts, ""), pattern)
    return counts.to_numpy(zero_copy_only=False).astype(np.int64)


ENTRIES_AT_ONCE = 100_000
COMMENT = "#"


class WordListError(ValueError):
    """A list of the user's cannot be read."""


def read_list(path: str) -> Iterator[str]:
    """Yield the entries of a list, stripped, without empty lines and lines that begin
    with `#`.

    Args:
        path: a UTF-8 file, gzipped if its name ends in `.gz`.

    Raises:
        WordListError: the file does not exist or has another format.
    """
    location = as_path(path)
    try:
        with (
            location.open("rb") as raw,
            gzip.open(raw) if path.endswith(".gz") else raw as stream,
        ):
            for line in io.TextIOWrapper(stream, encoding="utf-8-sig"):
                entry = line.strip()
                if entry and not entry.startswith(COMMENT):
                    yield entry
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise WordListError(
            f"the list {path} cannot be read: {error}; it must be UTF-8 text with one "
            "entry per line, gzipped if its name ends in .gz"
        ) from error


@lru_cache(maxsize=8)
def hashed_list(path: str, normalise: Callable[[str], str]) -> np.ndarray:
    """Return the 64-bit hashes of a list's entries, sorted: uint64 of shape (n,).

    Each entry takes eight bytes, however long it is: a list of five million domains
    takes 40 MB. The probability that any of a billion strings has the hash of one of a
    million entries by chance is below one in ten thousand.

    Args:
        path: see `read_list`.
        normalise: function applied to each entry; defined at module level.
    """
    entries = read_list(path)
    parts = []
    while entry_batch := list(islice(entries, ENTRIES_AT_ONCE)):
        parts.append(hash_strings([normalise(entry) for entry in entry_batch]))
    return np.unique(np.concatenate(parts)) if parts else np.empty(0, np.uint64)


def hash_strings(strings: list[str]) -> np.ndarray:
    """Return the 64-bit hashes of n strings: uint64 of shape (n,)."""
    return hash_texts(*text_buffers(pa.array(strings, pa.large_string())))


def contained(hashes: np.ndarray, listed: np.ndarray) -> np.ndarray:
    """Return which of n hashes are in a sorted list: bool of shape (n,)."""
    if not len(listed):
        return np.zeros(len(hashes), bool)
    places = np.minimum(np.searchsorted(listed, hashes), len(listed) - 1)
    return listed[places] == hashes
