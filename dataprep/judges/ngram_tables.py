"""An n-gram model as hash tables, and the score of text under it: how likely each word is after those before it.

An entry stands for a sequence of words w1..wn and has two decimal logarithms, as in the ARPA format: of the
probability of wn after w1..wn-1, and of the backoff weight of w1..wn as a context. The probability of a word is that
of the longest entry which ends in it and matches the words before it, times the backoff weights of all longer
contexts (Katz 1987; Heafield 2011). A sequence is named by a 64-bit hash of its words, so that the tables need 32
bytes an entry and no words; two of a million sequences share a hash with a chance of 3 in 10^8.

A text is read line by line: each line with words in it is a sentence, between `<s>` and `</s>`. Words are separated
by ASCII white space, as KenLM has it. What is spelt `<s>` in a text is an unknown word.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from gristmill.dataprep.documents import read_table, write_table
from gristmill.dataprep.text.hashing import fmix64, hash_bytes
from gristmill.dataprep.text.kernels import kernel, text_buffers

BEGIN, END, UNKNOWN = np.uint64(1), np.uint64(2), np.uint64(3)
"""What stands for `<s>`, `</s>` and `<unk>`."""
NEWLINE = 10
LOAD = 0.5
"""Share of the slots that are taken: a search in vain then looks at two and a half on average (Knuth, section 6.4)."""
_ODD = np.uint64(0x9E3779B97F4A7C15)


class Entries(NamedTuple):
    """The entries of one order.

    Attributes:
        keys: uint64 of shape (n,), hashes of their words.
        logs: float32 of shape (n,), log10 of the probability of the last word.
        backoffs: float32 of shape (n,), log10 of the backoff weight.
    """

    keys: np.ndarray
    logs: np.ndarray
    backoffs: np.ndarray


class NgramTables(NamedTuple):
    """A model ready to score, one open-addressing table per order, one after the other.

    Attributes:
        starts: int64 of shape (order + 1,): table n is slots [starts[n - 1], starts[n]), some of them free.
        cells: uint64 of shape (slots, 2): the key, 0 where the slot is free; and, as two float32 in the same place,
            its logarithms. One look-up is one cache line.
    """

    starts: np.ndarray
    cells: np.ndarray

    @property
    def order(self) -> int:
        """Words in the longest entries."""
        return len(self.starts) - 1

    @property
    def logs(self) -> np.ndarray:
        """The cells as float32 of shape (slots, 4): the last two are logarithm and backoff weight."""
        return self.cells.view(np.float32)


def make_tables(entries: list[Entries]) -> NgramTables:
    """Put the entries of orders 1, 2, ... into tables that are LOAD full.

    Of every entry what is left without its first or its last word is an entry too, as in all that is trained here, so
    that a search may end at the first miss.
    """
    sizes = [int(len(part.keys) / LOAD) + 2 for part in entries]
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    tables = NgramTables(starts, np.zeros((starts[-1], 2), np.uint64))
    for number, part in enumerate(entries):
        _insert(starts, tables.cells, tables.logs, number, *part)
    return tables


def write_entries(path: Path, entries: list[Entries]) -> None:
    """Write a model: a Parquet file of `order`, `key`, `log_probability`, `backoff`, sorted by order and key."""
    sorted_entries = [Entries(*(column[np.argsort(part.keys)] for column in part)) for part in entries]
    columns = [np.concatenate(column) for column in zip(*sorted_entries, strict=True)]
    orders = np.repeat(np.arange(1, len(entries) + 1, dtype=np.int8), [len(part.keys) for part in entries])
    names = ("order", "key", "log_probability", "backoff")
    write_table(path, pa.table(dict(zip(names, [orders, *columns], strict=True))))


def read_entries(path: Path) -> list[Entries]:
    """Read what `write_entries` wrote."""
    orders, *columns = (column.to_numpy() for column in read_table(path).columns)
    borders = np.searchsorted(orders, np.arange(1, int(orders[-1]) + 2))
    return [
        Entries(*(column[begin:end] for column in columns))
        for begin, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True)
    ]


def score_texts(tables: NgramTables, texts: pa.Array | pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """The log10 probability of each of n texts, and what it is spread over.

    Returns:
        float64 of shape (n,); and int64 of shape (n,): words and ends of lines.
    """
    return _score(*text_buffers(texts), tables.starts, tables.cells, tables.logs)


@kernel
def next_word(data: np.ndarray, at: int, end: int) -> tuple[int, int, bool]:
    """The next word of a line: begin and end, and whether there is one before the line's end.

    Without one, the first number is where the line ends (at its newline, or at the end of the text).
    """
    while at < end and data[at] != NEWLINE and (data[at] == 32 or (9 <= data[at] <= 13)):
        at += 1
    if at >= end or data[at] == NEWLINE:
        return at, at, False
    begin = at
    while at < end and data[at] != 32 and not 9 <= data[at] <= 13:
        at += 1
    return begin, at, True


@kernel
def word_hash(data: np.ndarray, begin: int, end: int) -> np.uint64:
    """What stands for a word; never one of the marks."""
    return max(hash_bytes(data, begin, end), np.uint64(4))


@kernel
def extend(key: np.uint64, word: np.uint64) -> np.uint64:
    """The hash of a sequence with one more word at its end; never 0."""
    return max(fmix64(key * _ODD + word), np.uint64(1))


@kernel
def _home(key: np.uint64, size: int) -> np.int64:
    """Where the search for a key begins in a table of so many slots, fewer than 2^32: its upper half scaled down."""
    return np.int64((key >> np.uint64(32)) * np.uint64(size) >> np.uint64(32))


@kernel
def _insert(
    starts: np.ndarray,
    cells: np.ndarray,
    logs: np.ndarray,
    number: int,
    keys: np.ndarray,
    new_logs: np.ndarray,
    backoffs: np.ndarray,
) -> None:
    start, size = starts[number], starts[number + 1] - starts[number]
    for entry in range(len(keys)):
        slot = _home(keys[entry], size)
        while cells[start + slot, 0] != 0 and cells[start + slot, 0] != keys[entry]:
            slot = slot + 1 if slot + 1 < size else 0
        cells[start + slot, 0] = keys[entry]
        logs[start + slot, 2], logs[start + slot, 3] = new_logs[entry], backoffs[entry]


@kernel
def _find(starts: np.ndarray, cells: np.ndarray, number: int, key: np.uint64) -> int:
    """The slot of an entry of order number + 1, or -1."""
    start, size = starts[number], starts[number + 1] - starts[number]
    slot = _home(key, size)
    while cells[start + slot, 0] != 0:
        if cells[start + slot, 0] == key:
            return start + slot
        slot = slot + 1 if slot + 1 < size else 0
    return -1


@kernel
def _step(
    word: np.uint64,
    starts: np.ndarray,
    cells: np.ndarray,
    logs: np.ndarray,
    chain: np.ndarray,
    slots: np.ndarray,
    known: int,
) -> float:
    """The log10 probability of a word after `known` words, which then is one of them.

    `chain[n]` and `slots[n]` are hash and slot (or -1) of the last n + 1 words; both are brought up to date.
    """
    order = len(starts) - 1
    single = _find(starts, cells, 0, word)
    if single < 0:
        word, single = UNKNOWN, _find(starts, cells, 0, UNKNOWN)
    longest = min(known, order - 1)
    for number in range(longest, 0, -1):  # each is made of the one below, of the word before
        chain[number] = extend(chain[number - 1], word)
    chain[0] = word
    matched, total = 0, np.float64(logs[single, 2])
    context = slots[0]
    slots[0] = single
    for number in range(1, longest + 1):
        before, slot = context, -1
        context = slots[number] if number < order - 1 else -1
        if before >= 0 and matched == number - 1:  # what an entry begins and ends with are entries, too
            slot = _find(starts, cells, number, chain[number])
        if slot >= 0:
            matched, total = number, np.float64(logs[slot, 2])
        elif before >= 0:
            total += logs[before, 3]
        slots[number] = slot
    return total


@kernel
def _score(
    data: np.ndarray,
    offsets: np.ndarray,
    starts: np.ndarray,
    cells: np.ndarray,
    logs: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    number, order = len(offsets) - 1, len(starts) - 1
    totals, sizes = np.zeros(number), np.zeros(number, np.int64)
    chain, slots = np.zeros(order, np.uint64), np.full(order, -1, np.int64)
    for text in range(number):
        at, end = offsets[text], offsets[text + 1]
        while at < end:
            begin, at, found = next_word(data, at, end)
            known = 0
            while found:
                if known == 0:
                    slots[:] = -1
                    chain[0], slots[0], known = BEGIN, _find(starts, cells, 0, BEGIN), 1
                word = word_hash(data, begin, at)
                totals[text] += _step(word, starts, cells, logs, chain, slots, known)
                sizes[text] += 1
                known += 1
                begin, at, found = next_word(data, at, end)
            if known:
                totals[text] += _step(END, starts, cells, logs, chain, slots, known)
                sizes[text] += 1
            at += 1
    return totals, sizes
