"""The rows of a fastText model that a line's words stand for, added up: in one pass over the line's bytes.

As fastText 0.9.3 reads a line (`Dictionary::getLine`): words lie between white space of ASCII, a word stands for its
own row, where the dictionary has it, and for those of its n-grams of characters; all words' rows are followed by those
of the n-grams of words. Rows are added one by one in that order, so that the sums are fastText's to the last bit: added
up word by word first, they would not be, and fastText's own sums of a long text are only good to four digits.

Words repeat. Which rows a word stands for is looked up once and kept in a cache, so that most words cost one look at
the cache, at its rows, and nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gristmill.dataprep.judges.fasttext_files import (
    END_OF_LINE,
    FNV_OFFSET,
    WORD_BITS,
    Dictionary,
    Weights,
    find_entry,
    hash_step,
    hash_word,
)
from gristmill.dataprep.text.eight_bytes import HIGH_BITS, equal_to, first_of
from gristmill.dataprep.text.hashing import equal_bytes, first_bytes, fmix64, hash_bytes, load64
from gristmill.dataprep.text.kernels import kernel, unowned

SLOTS = 1 << 16
"""Places of the cache; it is emptied when half of them are taken."""
ROOM_ROWS, ROOM_BYTES = 1 << 19, 1 << 19
"""Rows, and bytes of words of more than eight, that the cache has room for; it is emptied when either is full."""
LONGEST_KEPT = 64
"""Bytes of the longest words that are kept: longer ones hardly repeat."""
CACHE_BYTES = 32 * SLOTS + 4 * ROOM_ROWS + ROOM_BYTES
"""What a cache takes."""
KEY, SIZES, WHERE, HASH = 0, 1, 2, 3
"""Columns of a cache's table: see Cache."""
SKIPPED, LAST = np.uint64(1 << 32), np.uint64(1 << 33)
"""Flags of a word beside its hash: it is a label, which is no word of the text; it ends the line."""
WORD_STEP = np.uint64(116_049_371)
"""By which the hash of an n-gram of words is multiplied for each further word (`Dictionary::addWordNgrams`)."""
STRETCH = 256
"""Bytes of a longer word that are looked at together."""
MOST_ROWS = 1 + (LONGEST_KEPT + 2) ** 2
"""More than a word of LONGEST_KEPT bytes has n-grams of whatever lengths, and itself."""
HALF = np.uint64(32)
LOW_HALF = np.uint64(0xFFFFFFFF)
LABEL = np.frombuffer(b"__label__", np.uint8)
"""How labels begin (`Args::label`, which files do not have)."""
END_OF_LINE_HASH = np.uint32(0xD79C9359)
"""`hash_word` of END_OF_LINE."""
_LOW, _CONTROL, _BEYOND = np.uint64(0x7F7F7F7F7F7F7F7F), np.uint64(0x7777777777777777), np.uint64(0x7272727272727272)


class Lines(NamedTuple):
    """n texts, each a line to the model: line breaks are white space."""

    data: np.ndarray
    """uint8, UTF-8."""
    begins: np.ndarray
    """int64 of shape (n,)."""
    ends: np.ndarray
    """int64 of shape (n,)."""


class Cache(NamedTuple):
    """What was found out about words; for one thread at a time."""

    table: np.ndarray
    """uint64 of shape (SLOTS, 4), by hash. KEY: the bytes of a word of up to eight, the hash of a longer one, 0 where
    nothing is; SIZES: its bytes and, in the upper half, its rows; WHERE: where its rows begin in `rows` and, in the
    upper half, its bytes in `content`, if it has over eight; HASH: fastText's hash, with the flags SKIPPED and LAST."""
    rows: np.ndarray
    """int32 of shape (ROOM_ROWS,)."""
    content: np.ndarray
    """uint8 of shape (ROOM_BYTES,)."""
    taken: np.ndarray
    """int64: how many places of the table, of `rows` and of `content` are taken."""


def make_cache() -> Cache:
    """An empty cache, of CACHE_BYTES."""
    return Cache(np.zeros((SLOTS, 4), np.uint64), np.empty(ROOM_ROWS, np.int32), np.empty(ROOM_BYTES, np.uint8),
                 np.zeros(3, np.int64))  # fmt: skip


@kernel
def average_rows(weights: Weights, cache: Cache, lines: Lines, hidden: np.ndarray, counts: np.ndarray) -> None:
    """Average the rows of n lines.

    Args:
        hidden: float32 of shape (n, d), filled.
        counts: int64 of shape (n,), filled: how many rows each line has; `hidden` is 0 without any.
    """
    known = Cache(unowned(cache.table), unowned(cache.rows), unowned(cache.content), unowned(cache.taken))
    seen = Lines(unowned(lines.data), unowned(lines.begins), unowned(lines.ends))
    _average_rows(borrow(weights), known, seen, unowned(hidden), unowned(counts))


@kernel
def borrow(weights: Weights) -> Weights:
    """The same weights, whose arrays nobody counts."""
    names = weights.dictionary
    dictionary = Dictionary(unowned(names.content), unowned(names.starts), unowned(names.ends), unowned(names.places))
    return Weights(
        dictionary, weights.words, weights.end_of_line, unowned(weights.rows), unowned(weights.kept),
        unowned(weights.kept_before), unowned(weights.kept_rows), weights.shortest, weights.longest,
        weights.word_ngrams, weights.buckets, weights.loss, unowned(weights.output), unowned(weights.norms),
        unowned(weights.left), unowned(weights.right), unowned(weights.sigmoid),
    )  # fmt: skip


@kernel
def _average_rows(weights: Weights, cache: Cache, lines: Lines, hidden: np.ndarray, counts: np.ndarray) -> None:
    rows, table, known, content = weights.rows, cache.table, cache.rows, cache.content
    data, bigrams, words = lines.data, weights.word_ngrams > 1, 0
    hashes = np.empty(_most_words(lines) if bigrams else 1, np.uint32)
    for line in range(len(counts)):
        hidden[line] = 0
        count, words, at, end, ended = 0, 0, lines.begins[line], lines.ends[line], False
        while not ended:
            while at < end and is_space(data[at]):
                at += 1
            if at == end:
                break
            stop = word_end(data, at, end)
            key = key_of(data, at, stop)
            place = find_known(table, content, key, data, at, stop)
            if table[place, KEY] == 0:
                if stop - at > LONGEST_KEPT or key == 0:
                    place = -1
                else:
                    place = remember(weights, cache, place, key, data, at, stop)
            if place < 0:
                added, found = add_long_word(weights, data, at, stop, hidden[line])
            else:
                first, added = np.int64(table[place, WHERE] & LOW_HALF), np.int64(table[place, SIZES] >> HALF)
                found = table[place, HASH]
                for number in range(first, first + added):
                    add_row(rows, known[number], hidden, line)
            count += added
            ended = found & LAST != 0
            if bigrams and found & SKIPPED == 0:
                hashes[words] = np.uint32(found & LOW_HALF)
                words += 1
            at = stop
        if not ended:  # fastText is given every line with a line break
            if 0 <= weights.end_of_line < weights.words:
                add_row(rows, weights.end_of_line, hidden, line)
                count += 1
            if bigrams:
                hashes[words] = END_OF_LINE_HASH
                words += 1
        if bigrams:
            count += add_word_ngrams(weights, hashes[:words], hidden[line])
        counts[line] = count
        if count:
            share = np.float32(1.0 / count)
            for column in range(hidden.shape[1]):
                hidden[line, column] *= share


@kernel
def _most_words(lines: Lines) -> int:
    """No line has more words, its end counted."""
    most = 0
    for line in range(len(lines.begins)):
        most = max(most, lines.ends[line] - lines.begins[line])
    return most // 2 + 2


@kernel
def is_space(byte: int) -> bool:
    """Whether a byte is between words: a space, a control character from tab to carriage return, or zero."""
    return byte == 0x20 or 0x09 <= byte <= 0x0D or byte == 0


@kernel
def word_end(data: np.ndarray, begin: int, end: int) -> int:
    """Where the first white space is, or the end."""
    at = begin
    while at + 8 <= len(data):
        eight = load64(data, at)
        low = eight & _LOW
        spaces = (low + _CONTROL) & ~(low + _BEYOND) & ~eight & HIGH_BITS | equal_to(eight, 0x20) | equal_to(eight, 0)
        if spaces:
            return min(end, at + int(np.int64(first_of(spaces))))
        at += 8
        if at >= end:
            return end
    while at < end and not is_space(data[at]):
        at += 1
    return at


@kernel
def key_of(data: np.ndarray, begin: int, end: int) -> np.uint64:
    """A word's KEY."""
    return first_bytes(data, begin, end - begin) if end - begin <= 8 else hash_bytes(data, begin, end)


@kernel
def find_known(table: np.ndarray, content: np.ndarray, key: np.uint64, data: np.ndarray, begin: int, end: int) -> int:
    """The place of a word in a cache's table, or the empty one where it would be."""
    size, place = np.uint64(end - begin), np.int64(fmix64(key) & np.uint64(SLOTS - 1))
    while table[place, KEY]:
        if table[place, KEY] == key and table[place, SIZES] & LOW_HALF == size and (
            end - begin <= 8 or equal_bytes(content, np.int64(table[place, WHERE] >> HALF), data, begin, end - begin)
        ):  # fmt: skip
            break
        place = (place + 1) & (SLOTS - 1)
    return int(place)


@kernel
def remember(
    weights: Weights, cache: Cache, place: int, key: np.uint64, data: np.ndarray, begin: int, end: int
) -> int:
    """Put a word of at most LONGEST_KEPT bytes into the cache, and empty that first where it is full.

    Args:
        place: the empty one where the word would be.

    Returns:
        where it is.
    """
    taken, size = cache.taken, end - begin
    if taken[0] >= SLOTS // 2 or taken[1] + MOST_ROWS > ROOM_ROWS or taken[2] + size > ROOM_BYTES:
        cache.table[:] = 0
        taken[:] = 0
        place = int(np.int64(fmix64(key) & np.uint64(SLOTS - 1)))
    entry, found = look_up(weights, data, begin, end)
    first, count = taken[1], 0
    if 0 <= entry < weights.words:
        cache.rows[first], count = entry, 1
    if weights.longest > 0 and found & (SKIPPED | LAST) == 0:
        word = between_marks(data, begin, end)
        count += find_ngrams(weights, word, 0, len(word), cache.rows[first + count :])
    cache.table[place, KEY] = key
    cache.table[place, SIZES] = np.uint64(size) | np.uint64(count) << HALF
    cache.table[place, WHERE] = np.uint64(first) | np.uint64(taken[2]) << HALF
    cache.table[place, HASH] = found
    if size > 8:
        cache.content[taken[2] : taken[2] + size] = data[begin:end]
        taken[2] += size
    taken[0] += 1
    taken[1] += count
    return place


@kernel
def add_long_word(
    weights: Weights, data: np.ndarray, begin: int, end: int, total: np.ndarray
) -> tuple[int, np.uint64]:
    """Add the rows of a word of any length to `total`; how many they are, and the word's HASH."""
    entry, found = look_up(weights, data, begin, end)
    count = 0
    if 0 <= entry < weights.words:
        _add_rows(weights.rows, np.array([entry], np.int32), total)
        count = 1
    if weights.longest > 0 and found & SKIPPED == 0:
        word = between_marks(data, begin, end)
        rows = np.empty(STRETCH * min(weights.longest, len(word)), np.int32)
        for at in range(0, len(word), STRETCH):
            size = find_ngrams(weights, word, at, min(at + STRETCH, len(word)), rows)
            _add_rows(weights.rows, rows[:size], total)
            count += size
    return count, found


@kernel
def look_up(weights: Weights, data: np.ndarray, begin: int, end: int) -> tuple[int, np.uint64]:
    """A word's entry in the dictionary, -1 where it has none, and its HASH."""
    entry = find_entry(weights.dictionary, data, begin, end)
    found = np.uint64(hash_word(data, begin, end))
    if entry >= weights.words or (entry < 0 and _begins_with(data, begin, end, LABEL)):
        found |= SKIPPED
    if end - begin == len(END_OF_LINE) and _begins_with(data, begin, end, END_OF_LINE):
        found |= LAST
    return entry, found


@kernel
def _begins_with(data: np.ndarray, begin: int, end: int, beginning: np.ndarray) -> bool:
    return end - begin >= len(beginning) and equal_bytes(data, begin, beginning, 0, len(beginning))


@kernel
def between_marks(data: np.ndarray, begin: int, end: int) -> np.ndarray:
    """The bytes of `<word>`."""
    word = np.empty(end - begin + 2, np.uint8)
    word[0], word[-1] = 0x3C, 0x3E
    word[1:-1] = data[begin:end]
    return word


@kernel
def find_ngrams(weights: Weights, word: np.ndarray, begin: int, end: int, rows: np.ndarray) -> int:
    """Write down the rows of the n-grams of code points that begin in `word[begin:end]`; a single mark is none.

    Returns:
        how many they are.
    """
    kept, kept_before, kept_rows, size = weights.kept, weights.kept_before, weights.kept_rows, len(word)
    shortest, longest, words, buckets = weights.shortest, weights.longest, weights.words, np.uint32(weights.buckets)
    count = 0
    for start in range(begin, end):
        if word[start] & 0xC0 == 0x80:
            continue
        value, at = FNV_OFFSET, start
        for length in range(1, longest + 1):
            if at == size:
                break
            value = hash_step(value, word[at])
            at += 1
            while at < size and word[at] & 0xC0 == 0x80:
                value = hash_step(value, word[at])
                at += 1
            if length < shortest or (length == 1 and (start == 0 or at == size)):
                continue
            row = row_of_bucket(kept, kept_before, kept_rows, np.int64(value % buckets))
            if row >= 0:
                rows[count] = words + row
                count += 1
    return count


@kernel
def row_of_bucket(kept: np.ndarray, kept_before: np.ndarray, kept_rows: np.ndarray, bucket: int) -> int:
    """The row behind the words of a bucket of n-grams, -1 where a pruned model dropped it (`Dictionary::pushHash`)."""
    if len(kept) == 0:
        return bucket
    number, bit = bucket // WORD_BITS, np.uint64(bucket % WORD_BITS)
    if kept[number] >> bit & np.uint64(1) == 0:
        return -1
    return kept_rows[kept_before[number] + count_bits(kept[number] & ((np.uint64(1) << bit) - np.uint64(1)))]


@kernel
def count_bits(number: np.uint64) -> int:
    """How many bits are set (Warren, Hacker's Delight, section 5-1)."""
    number -= number >> np.uint64(1) & np.uint64(0x5555555555555555)
    number = (number & np.uint64(0x3333333333333333)) + (number >> np.uint64(2) & np.uint64(0x3333333333333333))
    number = (number + (number >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return int(np.int64(number * np.uint64(0x0101010101010101) >> np.uint64(56)))


@kernel
def add_word_ngrams(weights: Weights, hashes: np.ndarray, total: np.ndarray) -> int:
    """Add the rows of the n-grams of two words and more to `total`; how many they are."""
    rows, kept, kept_before, kept_rows = weights.rows, weights.kept, weights.kept_before, weights.kept_rows
    words, longest, buckets, count = weights.words, weights.word_ngrams, np.uint64(weights.buckets), 0
    for first in range(len(hashes)):
        value = np.uint64(np.int64(np.int32(hashes[first])))
        for last in range(first + 1, min(first + longest, len(hashes))):
            value = value * WORD_STEP + np.uint64(np.int64(np.int32(hashes[last])))
            row = row_of_bucket(kept, kept_before, kept_rows, np.int64(value % buckets))
            if row >= 0:
                place = np.uint64(words + row)
                for column in range(len(total)):
                    total[column] += rows[place, column]
                count += 1
    return count


@kernel
def _add_rows(matrix: np.ndarray, rows: np.ndarray, total: np.ndarray) -> None:
    for row in rows:
        place = np.uint64(row)
        for column in range(len(total)):
            total[column] += matrix[place, column]


@kernel
def add_row(matrix: np.ndarray, row: int, hidden: np.ndarray, line: int) -> None:
    """Add a row of a matrix to one of another."""
    source, target = np.uint64(row), np.uint64(line)
    for column in range(hidden.shape[1]):
        hidden[target, column] += matrix[source, column]
