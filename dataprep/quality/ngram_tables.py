"""Hash tables of an n-gram model, and the log probability of texts under it.

An entry for a sequence of words w1..wn has two decimal logarithms, as in the ARPA
format: of the probability of wn after w1..wn-1, and of the backoff weight of w1..wn as
a context. The probability of a word is that of the longest entry that ends in it and
matches the words before it, times the backoff weights of all longer contexts (Katz
1987; Heafield 2011). A 64-bit hash identifies a sequence, so that tables need 32 bytes
per entry and no words; among a million sequences, two share a hash with a probability
of 3 in 10^8.

Each line of a text with words is a sentence between `<s>` and `</s>`. ASCII whitespace
separates words, as in KenLM. A literal `<s>` in a text is an unknown word.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from gristmill.dataprep.documents import read_table, write_table
from gristmill.dataprep.text.hashing import ODD, fmix64, hash_bytes
from gristmill.dataprep.text.kernels import kernel, text_buffers

BEGIN, END, UNKNOWN = np.uint64(1), np.uint64(2), np.uint64(3)
"""Hashes of `<s>`, `</s>` and `<unk>`."""
NEWLINE = 10
LOAD = 0.5
"""Load factor of the tables: an unsuccessful search probes 2.5 slots on average (Knuth,
section 6.4).
"""


class Entries(NamedTuple):
    """Entries of one order.

    Attributes:
        keys: uint64 of shape (n,), hashes of their words.
        logs: float32 of shape (n,), log10 of the probability of the last word.
        backoffs: float32 of shape (n,), log10 of the backoff weight.
    """

    keys: np.ndarray
    logs: np.ndarray
    backoffs: np.ndarray


class NgramTables(NamedTuple):
    """Model ready to score: one open-addressing table per order, concatenated.

    Attributes:
        starts: int64 of shape (order + 1,): table n is slots [starts[n - 1],
            starts[n]), some of them free.
        cells: uint64 of shape (slots, 2): the key, 0 for a free slot; and its
            logarithms as two float32 in the same 8 bytes. A look-up reads one cache
            line.
    """

    starts: np.ndarray
    cells: np.ndarray

    @property
    def order(self) -> int:
        """Words in the longest entries."""
        return len(self.starts) - 1

    @property
    def logs(self) -> np.ndarray:
        """Cells as float32 of shape (slots, 4): the last two are logarithm and backoff
        weight.
        """
        return self.cells.view(np.float32)


def make_tables(entries: list[Entries]) -> NgramTables:
    """Insert the entries of orders 1, 2, ... into tables with load factor LOAD.

    For every entry, the sequences without its first or without its last word must be
    entries too, as in all models trained here, so that a search can stop at the first
    miss.
    """
    sizes = [int(len(part.keys) / LOAD) + 2 for part in entries]
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    tables = NgramTables(starts, np.zeros((starts[-1], 2), np.uint64))
    for number, part in enumerate(entries):
        _insert(starts, tables.cells, tables.logs, number, *part)
    return tables


def write_entries(path: Path, entries: list[Entries]) -> None:
    """Write a model: a Parquet file of `order`, `key`, `log_probability`, `backoff`,
    sorted by order and key.
    """
    sorted_entries = [
        Entries(*(column[np.argsort(part.keys)] for column in part)) for part in entries
    ]
    columns = [np.concatenate(column) for column in zip(*sorted_entries, strict=True)]
    orders = np.repeat(
        np.arange(1, len(entries) + 1, dtype=np.int8),
        [len(part.keys) for part in entries],
    )
    names = ("order", "key", "log_probability", "backoff")
    write_table(path, pa.table(dict(zip(names, [orders, *columns], strict=True))))


def read_entries(path: Path) -> list[Entries]:
    """Read a file of `write_entries`."""
    orders, *columns = (column.to_numpy() for column in read_table(path).columns)
    borders = np.searchsorted(orders, np.arange(1, int(orders[-1]) + 2))
    return [
        Entries(*(column[begin:end] for column in columns))
        for begin, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True)
    ]


def score_texts(
    tables: NgramTables, texts: pa.Array | pa.ChunkedArray
) -> tuple[np.ndarray, np.ndarray]:
    """Log10 probability of each of n texts, and its number of tokens.

    Returns:
        float64 of shape (n,); and int64 of shape (n,): words plus ends of lines.
    """
    sentences = split_sentences(*text_buffers(texts))
    return _score(*sentences, tables.starts, tables.cells, tables.logs)


@kernel
def next_word(data: np.ndarray, at: int, end: int) -> tuple[int, int, bool]:
    """Find the next word of a line: begin, end, and False if the line has no further
    word.

    Without a word, the first number is the end of the line (its newline, or the end of
    the text).
    """
    while (
        at < end and data[at] != NEWLINE and (data[at] == 32 or (9 <= data[at] <= 13))
    ):
        at += 1
    if at >= end or data[at] == NEWLINE:
        return at, at, False
    begin = at
    while at < end and data[at] != 32 and not 9 <= data[at] <= 13:
        at += 1
    return begin, at, True


@kernel
def word_hash(data: np.ndarray, begin: int, end: int) -> np.uint64:
    """Hash of a word; never that of a mark."""
    return max(hash_bytes(data, begin, end), np.uint64(4))


@kernel
def extend(key: np.uint64, word: np.uint64) -> np.uint64:
    """Hash of a sequence extended by one word; never 0."""
    return max(fmix64(key * ODD + word), np.uint64(1))


@kernel
def _home(key: np.uint64, size: int) -> np.int64:
    """First slot to probe for a key in a table of fewer than 2^32 slots: its upper half
    scaled down.
    """
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
    start = starts[number]
    size = starts[number + 1] - starts[number]
    for entry in range(len(keys)):
        slot = _home(keys[entry], size)
        while cells[start + slot, 0] != 0 and cells[start + slot, 0] != keys[entry]:
            slot = slot + 1 if slot + 1 < size else 0
        cells[start + slot, 0] = keys[entry]
        logs[start + slot, 2], logs[start + slot, 3] = new_logs[entry], backoffs[entry]


@kernel
def _find(starts: np.ndarray, cells: np.ndarray, number: int, key: np.uint64) -> int:
    """Slot of an entry of order number + 1, or -1."""
    start = starts[number]
    size = starts[number + 1] - starts[number]
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
    context_words: int,
) -> float:
    """Log10 probability of a word after `context_words` words; updates the context.

    `chain[n]` and `slots[n]` are hash and slot (or -1) of the last n + 1 words.
    """
    order = len(starts) - 1
    unigram_slot = _find(starts, cells, 0, word)
    if unigram_slot < 0:
        word = UNKNOWN
        unigram_slot = _find(starts, cells, 0, UNKNOWN)
    longest = min(context_words, order - 1)
    # each extends the next shorter one, of the previous word
    for number in range(longest, 0, -1):
        chain[number] = extend(chain[number - 1], word)
    chain[0] = word
    matched = 0
    total = np.float64(logs[unigram_slot, 2])
    context = slots[0]
    slots[0] = unigram_slot
    for number in range(1, longest + 1):
        previous_slot = context
        slot = -1
        context = slots[number] if number < order - 1 else -1
        # the prefix and suffix of an entry are entries, too
        if previous_slot >= 0 and matched == number - 1:
            slot = _find(starts, cells, number, chain[number])
        if slot >= 0:
            matched = number
            total = np.float64(logs[slot, 2])
        elif previous_slot >= 0:
            total += logs[previous_slot, 3]
        slots[number] = slot
    return total


@kernel
def split_sentences(
    data: np.ndarray, offsets: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sentences of texts, each between BEGIN and END, without lines that have no words.

    Returns:
        words: uint64; positions: int64, index within the sentence, 0 for BEGIN; firsts:
            int64 of shape (n + 1,), the first word of each text.
    """
    capacity = 2 * (offsets[-1] - offsets[0]) + 2
    words = np.empty(capacity, np.uint64)
    positions = np.empty(capacity, np.int64)
    firsts = np.zeros(len(offsets), np.int64)
    count = 0
    for text in range(len(offsets) - 1):
        position = offsets[text]
        end = offsets[text + 1]
        while position < end:
            begin, position, is_word = next_word(data, position, end)
            index = 0
            while is_word:
                if index == 0:
                    words[count], positions[count] = BEGIN, 0
                    count = count + 1
                    index = 1
                words[count], positions[count] = word_hash(data, begin, position), index
                count = count + 1
                index = index + 1
                begin, position, is_word = next_word(data, position, end)
            if index:
                words[count], positions[count] = END, index
                count += 1
            position += 1
        firsts[text + 1] = count
    return words[:count].copy(), positions[:count].copy(), firsts


@kernel
def _score(
    words: np.ndarray,
    positions: np.ndarray,
    firsts: np.ndarray,
    starts: np.ndarray,
    cells: np.ndarray,
    logs: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    number = len(firsts) - 1
    order = len(starts) - 1
    totals = np.zeros(number)
    sizes = np.zeros(number, np.int64)
    chain = np.zeros(order, np.uint64)
    slots = np.full(order, -1, np.int64)
    for text in range(number):
        for index in range(firsts[text], firsts[text + 1]):
            if positions[index] == 0:
                slots[:] = -1
                chain[0], slots[0] = BEGIN, _find(starts, cells, 0, BEGIN)
                continue
            totals[text] += _step(
                words[index], starts, cells, logs, chain, slots, positions[index]
            )
            sizes[text] += 1
    return totals, sizes
