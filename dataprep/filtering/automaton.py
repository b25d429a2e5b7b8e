"""Finding many words at once: the automaton of Aho and Corasick (1975) as a table, over lower-case UTF-8 bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.text.kernels import kernel, text_buffers
from gristmill.dataprep.text.unicode_tables import WORD, code_point_flags, decode


@dataclass(frozen=True)
class Automaton:
    """What finds the entries of a list.

    Attributes:
        following: int32 of shape (states, 256), the state after a byte.
        length: int32 of shape (states,), bytes of the entry that ends in a state; 0 where none does.
        shorter: int32 of shape (states,), the state of the next shorter entry that ends here too; 0 where none does.
    """

    following: np.ndarray
    length: np.ndarray
    shorter: np.ndarray


def lower(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Texts in lower case, code point by code point: what entries and texts are compared in."""
    return pc.utf8_lower(texts)


def build(words: Iterable[str]) -> Automaton:
    """The automaton of a list; empty entries are left out, and case does not matter."""
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
            shorter[child] = suffix[child] if length[suffix[child]] else shorter[suffix[child]]
            following[state, byte] = child
            queue.append(child)
    return Automaton(following, length, shorter)


def count(texts: pa.Array | pa.ChunkedArray, automaton: Automaton, whole_words: bool) -> tuple[np.ndarray, np.ndarray]:
    """Count entries in n texts that are in lower case.

    Args:
        whole_words: only where no word character (`\\w`) is on either side.

    Returns:
        places where at least one entry ends, and bytes that belong to entries: two int64 arrays of shape (n,).
    """
    data, offsets = text_buffers(texts)
    places, covered = _count(
        data, offsets, automaton.following, automaton.length, automaton.shorter, code_point_flags(), whole_words
    )
    return places, covered


@kernel
def _count(
    data: np.ndarray, offsets: np.ndarray, following: np.ndarray, length: np.ndarray, shorter: np.ndarray,
    flags: np.ndarray, whole_words: bool,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    number = len(offsets) - 1
    places, covered = np.zeros(number, np.int64), np.zeros(number, np.int64)
    for text in range(number):
        begin, end = offsets[text], offsets[text + 1]
        state, taken = 0, begin
        for at in range(begin, end):
            state = following[state, data[at]]
            entry = state if length[state] else shorter[state]
            if entry and whole_words and at + 1 < end and flags[decode(data, at + 1)[0]] & WORD:
                continue
            while entry:
                first = at + 1 - length[entry]
                if not whole_words or first == begin or flags[_code_before(data, first)] & WORD == 0:
                    places[text] += 1
                    covered[text] += at + 1 - max(taken, first)
                    taken = at + 1
                    break
                entry = shorter[entry]
    return places, covered


@kernel
def _code_before(data: np.ndarray, at: int) -> int:
    at -= 1
    while data[at] & 0xC0 == 0x80:
        at -= 1
    return decode(data, at)[0]
