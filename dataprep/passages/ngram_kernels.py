"""The loops of `ngram_index.py`: words and n-grams as numbers, and texts searched for them. Numba kernels."""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.filtering.repetition import empty_table
from gristmill.dataprep.hashing import fmix64
from gristmill.dataprep.kernels import kernel
from gristmill.dataprep.unicode_tables import NOTHING, decode
from gristmill.dataprep.words import hashed_words, same_lower

_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, as in hashing.py
MOST_PLACES = 64
"""An n-gram in more places of the evaluation sets is their template ("answer the following"): not looked for."""


@kernel
def number_words(
    data: np.ndarray, offsets: np.ndarray, flags: np.ndarray, lower: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Number the distinct words of all parts, in the order in which they appear."""
    parts = len(offsets) - 1
    most = offsets[parts] - offsets[0]
    words, part_offsets = np.empty(most, np.int32), np.zeros(parts + 1, np.int64)
    table = empty_table(most)
    hashes, codes, code_offsets = np.empty(most, np.uint64), np.empty(most, np.uint32), np.zeros(most + 1, np.int64)
    total, distinct = 0, 0
    for part in range(parts):
        starts, ends, values = hashed_words(data, offsets[part], offsets[part + 1], flags, lower)
        for word in range(len(starts)):
            value = values[word]
            slot = _word_slot(data, starts[word], ends[word], lower, value, table, hashes, codes, code_offsets)
            if table[slot] < 0:
                table[slot] = distinct
                hashes[distinct] = value
                code_offsets[distinct + 1] = _append_codes(
                    data, starts[word], ends[word], lower, codes, code_offsets[distinct]
                )
                distinct += 1
            words[total] = table[slot]
            total += 1
        part_offsets[part + 1] = total
    used = code_offsets[distinct]
    return (
        table, hashes[:distinct].copy(), codes[:used].copy(), code_offsets[: distinct + 1].copy(),
        words[:total].copy(), part_offsets,
    )  # fmt: skip


@kernel
def _append_codes(data: np.ndarray, begin: int, end: int, lower: np.ndarray, codes: np.ndarray, at: int) -> int:
    while begin < end:
        code, width = decode(data, begin)
        begin += width
        if lower[code] != NOTHING:
            codes[at] = lower[code]
            at += 1
    return at


@kernel
def _word_slot(
    data: np.ndarray, begin: int, end: int, lower: np.ndarray, value: np.uint64, table: np.ndarray,
    hashes: np.ndarray, codes: np.ndarray, code_offsets: np.ndarray,
) -> np.uint64:  # fmt: skip
    """Where the table has a word, or the free slot where it belongs."""
    mask = np.uint64(len(table) - 1)
    slot = value & mask
    while True:
        word = table[slot]
        if word < 0:
            return slot
        if hashes[word] == value and same_lower(
            data, begin, end, lower, codes[code_offsets[word] : code_offsets[word + 1]]
        ):
            return slot
        slot = (slot + np.uint64(1)) & mask


@kernel
def _hash_words(words: np.ndarray, begin: int, length: int) -> np.uint64:
    value = np.uint64(length)
    for word in words[begin : begin + length]:
        value = (value ^ np.uint64(word)) * _ODD
        value ^= value >> np.uint64(32)
    return fmix64(value)


@kernel
def _same_words(first: np.ndarray, begin: int, second: np.ndarray, other: int, length: int) -> bool:
    return bool(np.all(first[begin : begin + length] == second[other : other + length]))


@kernel
def _ngram_slot(
    words: np.ndarray, begin: int, length: int, indexed: np.ndarray, table: np.ndarray, begins: np.ndarray,
    lengths: np.ndarray,
) -> np.uint64:  # fmt: skip
    """Where the table has the n-gram `words[begin:begin + length]`, or the free slot where it belongs."""
    mask = np.uint64(len(table) - 1)
    slot = _hash_words(words, begin, length) & mask
    while True:
        ngram = table[slot]
        if ngram < 0:
            return slot
        if lengths[ngram] == length and _same_words(words, begin, indexed, begins[ngram], length):
            return slot
        slot = (slot + np.uint64(1)) & mask


@kernel
def number_ngrams(
    words: np.ndarray, part_offsets: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Number the distinct n-grams; the number of the one at each position of `words`, or -1."""
    table = empty_table(len(words))
    begins, ngram_lengths = np.empty(len(words), np.int64), np.empty(len(words), np.int64)
    number_at = np.full(len(words), -1, np.int64)
    distinct = 0
    for part in range(len(lengths)):
        length = lengths[part]
        if length == 0:
            continue
        for at in range(part_offsets[part], part_offsets[part + 1] - length + 1):
            slot = _ngram_slot(words, at, length, words, table, begins, ngram_lengths)
            if table[slot] < 0:
                table[slot] = distinct
                begins[distinct], ngram_lengths[distinct] = at, length
                distinct += 1
            number_at[at] = table[slot]
    return table, begins[:distinct].copy(), ngram_lengths[:distinct].copy(), number_at


@kernel
def flag_prefixes(words: np.ndarray, begins: np.ndarray, prefix_words: int) -> np.ndarray:
    """Set the bit of the first words of every n-gram that begins at one of these places."""
    size = 1024
    while size < 2 * len(begins):
        size *= 2
    prefixes = np.zeros(size, np.uint8)
    for begin in begins:
        value = np.uint64(0)
        for at in range(begin + prefix_words - 1, begin - 1, -1):
            value = value * _ODD + np.uint64(words[at])
        bit = fmix64(value) & np.uint64(8 * size - 1)
        prefixes[bit >> np.uint64(3)] |= np.uint8(1) << (bit & np.uint64(7))
    return prefixes


@kernel
def _number_hashed(
    hashes: np.ndarray, word_table: np.ndarray, word_hashes: np.ndarray
) -> np.ndarray:
    """The number of the word with each hash, or -1 (int32)."""
    mask = np.uint64(len(word_table) - 1)
    words = np.empty(len(hashes), np.int32)
    for at in range(len(hashes)):
        slot = hashes[at] & mask
        word = word_table[slot]
        while word >= 0 and word_hashes[word] != hashes[at]:
            slot = (slot + np.uint64(1)) & mask
            word = word_table[slot]
        words[at] = word
    return words


@kernel
def _are_words(
    data: np.ndarray, starts: np.ndarray, ends: np.ndarray, words: np.ndarray, lower: np.ndarray,
    word_codes: np.ndarray, word_offsets: np.ndarray,
) -> bool:  # fmt: skip
    """Whether spans of a text are the words with these numbers, code point by code point."""
    same = 0
    while same < len(words) and same_lower(
        data, starts[same], ends[same], lower, word_codes[word_offsets[words[same]] : word_offsets[words[same] + 1]]
    ):
        same += 1
    return same == len(words)


@kernel
def scan_texts(
    data: np.ndarray, offsets: np.ndarray, flags: np.ndarray, lower: np.ndarray, wanted: np.ndarray,
    word_table: np.ndarray, word_hashes: np.ndarray, word_codes: np.ndarray, word_offsets: np.ndarray,
    indexed: np.ndarray, table: np.ndarray, begins: np.ndarray, lengths: np.ndarray, place_offsets: np.ndarray,
    prefixes: np.ndarray, prefix_words: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Find all n-grams of the index in texts; the arrays are those of `NgramIndex` and `Hits`.

    Args:
        wanted: int64, ascending, the distinct lengths of n-grams.
    """
    size = 1024
    hits = np.empty((5, size), np.int64)
    count = 0
    mask = np.uint64(8 * len(prefixes) - 1)
    oldest = np.uint64(1)
    for _ in range(prefix_words):
        oldest *= _ODD
    for text in range(len(offsets) - 1):
        starts, ends, hashes = hashed_words(data, offsets[text], offsets[text + 1], flags, lower)
        words = _number_hashed(hashes, word_table, word_hashes)
        known = 0  # words from here on that the index knows
        value = np.uint64(0)
        for at in range(len(words) - 1, -1, -1):
            known = known + 1 if words[at] >= 0 else 0
            value = value * _ODD + np.uint64(words[at])
            if at + prefix_words < len(words):
                value -= oldest * np.uint64(words[at + prefix_words])
            bit = fmix64(value) & mask
            if known < prefix_words or prefixes[bit >> np.uint64(3)] >> (bit & np.uint64(7)) & 1 == 0:
                continue
            for length in wanted:
                if length > known:
                    break
                ngram = table[_ngram_slot(words, at, length, indexed, table, begins, lengths)]
                if ngram < 0 or place_offsets[ngram + 1] - place_offsets[ngram] > MOST_PLACES:
                    continue
                if not _are_words(data, starts[at : at + length], ends[at : at + length], words[at : at + length],
                                  lower, word_codes, word_offsets):
                    continue
                if count == size:
                    grown = np.empty((5, 2 * size), np.int64)
                    grown[:, :size] = hits
                    hits, size = grown, 2 * size
                hits[0, count], hits[1, count], hits[4, count] = text, at, ngram
                hits[2, count] = starts[at] - offsets[text]
                hits[3, count] = ends[at + length - 1] - offsets[text]
                count += 1
    return hits[0, :count], hits[1, :count], hits[2, :count], hits[3, :count], hits[4, :count]
