"""Sums of a fastText model's rows for the words of a line, in one pass over the line's
bytes.

Lines are read as in fastText 0.9.3 (`Dictionary::getLine`): ASCII whitespace separates
words; a word contributes its own row, if the dictionary has it, and the rows of its
character n-grams; the rows of the word n-grams follow those of all words.

Words repeat. The rows of a word are summed once, in fastText's order, and the sum is
cached: a repeated word costs one look-up and one addition. If words have several rows,
a line's sum thus differs in the last bits from fastText's, which adds row by row. It
does not depend on the state of the cache: an uncached word is summed in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gristmill.dataprep.fasttext.fasttext_files import (
    END_OF_LINE,
    FNV_OFFSET,
    LABEL_PREFIX,
    WORD_BITS,
    Dictionary,
    Ngrams,
    Weights,
    aligned,
    find_entry,
    hash_step,
    hash_word,
)
from gristmill.dataprep.fasttext.float_rows import (
    FLOAT_BYTES,
    add_rows,
    fetch_floats,
    set_floats,
)
from gristmill.dataprep.text.hashing import equal_bytes, first_bytes, load64
from gristmill.dataprep.text.kernels import Bytes, inlined_kernel, inner_kernel, kernel
from gristmill.dataprep.text.simd import (
    WIDTH,
    address_of,
    high_half,
    ones,
    separators_of_64,
    trailing_zeros,
)
from gristmill.dataprep.text.unicode_tables import byte_table

MOST_SLOTS = 1 << 18
"""Largest number of words in a cache."""
MOST_CACHE_BYTES = 32 << 20
"""Largest size of a cache; with long rows it holds fewer words."""
COLUMNS = 8
"""Numbers of a slot, 64 bytes: WORD_COLUMNS, FOUND and ROWS; see Cache."""
WORD_COLUMNS, FOUND, ROWS = 6, 6, 7
LONGEST_KEPT = 8 * WORD_COLUMNS
"""Longest word in bytes that is cached: longer words rarely repeat."""
SKIPPED, LAST = np.uint64(1 << 32), np.uint64(1 << 33)
"""Flags stored with a word's hash: it is a label, which is not a word of the text; it
ends the line.
"""
STRETCH = 64
"""N-grams whose buckets are computed before the first of their rows is added."""
MOST_LATER = 1024
"""Word n-grams whose rows are prefetched before all words of a line are added."""
WORDS_AHEAD = 128
"""Words whose slots are prefetched before the first of them is read."""
HALF = np.uint64(32)
LOW_HALF = np.uint64(0xFFFFFFFF)
MASKS = np.array(
    [
        [2 ** (8 * min(max(size - first, 0), 8)) - 1 for first in (0, 8)]
        for size in range(LONGEST_KEPT + 1)
    ],
    np.uint64,
)
"""Masks of the first eight bytes of a word and of the next eight, by its size."""
_IS_SEPARATOR = byte_table(" \t\n\v\f\r\0")
LABEL = np.frombuffer(LABEL_PREFIX, np.uint8)
END_OF_LINE_HASH = np.uint32(0xD79C9359)
"""`hash_word` of END_OF_LINE."""
_ODD, _OTHER_ODD, _TOP = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xC2B2AE3D27D4EB4F),
    np.uint64(64 - 18),
)
"""2^64 divided by the golden ratio: the highest bits of a product depend on all bits of
a number (Knuth, The Art of Computer Programming, volume 3, section 6.4); xxHash's
second 64-bit prime (Collet, BSD); bits below those of a slot.
"""


WORD_STEP = np.uint64(116_049_371)
"""Factor of a word n-gram's hash for each further word
(`Dictionary::addWordNgrams`).
"""
WORD_SIZE = np.uint64(WORD_BITS)


class Lines(NamedTuple):
    """n texts, each one line for the model: line breaks are whitespace."""

    data: np.ndarray
    """uint8, UTF-8."""
    begins: np.ndarray
    """int64 of shape (n,)."""
    ends: np.ndarray
    """int64 of shape (n,)."""


class Cache(NamedTuple):
    """Cache of words' hashes and sums of rows; for one thread at a time.

    A word's slot is determined by its bytes; if that slot is taken, its neighbour (the
    other slot of the pair) is used if it is free, otherwise the word replaces the one
    in its own slot. One more slot at the end is for words that are too long to be
    cached.
    """

    table: np.ndarray
    """uint64 of shape (slots + 1, COLUMNS). First the word, padded with zeros, which
    words do not contain; FOUND: fastText's hash, with the flags SKIPPED and LAST; ROWS:
    the number of its rows and, in the upper half, 1 + the row if it is a single one,
    else 0.
    """
    sums: np.ndarray
    """float32 of shape (slots + 1, d): sums of rows, if words may have several;
    otherwise without columns.
    """


class Words(NamedTuple):
    """Next words of a line, up to WORDS_AHEAD."""

    begins: np.ndarray
    """int64, offset in the lines' bytes."""
    ends: np.ndarray
    """int64, end in the lines' bytes."""
    slots: np.ndarray
    """int64: slot of each word."""
    firsts: np.ndarray
    """uint64: its first eight bytes, padded with zeros."""
    seconds: np.ndarray
    """uint64: its next eight bytes."""


class Room(NamedTuple):
    """Scratch memory of a call."""

    words: Words
    sources: np.ndarray
    """int64: addresses of words' rows and sums of rows."""
    marked: np.ndarray
    """uint8: a word between its boundary marks."""
    buckets: np.ndarray
    """uint64: buckets of character n-grams; then the addresses of their rows."""
    hashes: np.ndarray
    """uint32: hashes of a line's words, if the model has word n-grams."""
    later: np.ndarray
    """uint64: addresses of the word n-grams' rows."""


def make_cache(weights: Weights) -> Cache:
    """Empty cache of at most MOST_CACHE_BYTES, plus one slot."""
    d = weights.rows.shape[1] if weights.ngrams.longest > 0 else 0
    slots = MOST_SLOTS
    while slots * (8 * COLUMNS + FLOAT_BYTES * d) > MOST_CACHE_BYTES:
        slots //= 2
    return Cache(
        aligned((slots + 1, COLUMNS), np.uint64), aligned((slots + 1, d), np.float32)
    )


@kernel
def average_rows(
    weights: Weights, cache: Cache, lines: Lines, hidden: np.ndarray, counts: np.ndarray
) -> None:
    """Average the rows of n lines.

    Args:
        hidden: float32 of shape (n, d), filled.
        counts: int64 of shape (n,), filled: number of rows per line; `hidden` is 0 if
            it is 0.
    """
    longest = 0
    for line in range(len(lines.begins)):
        longest = max(longest, lines.ends[line] - lines.begins[line])
    places = np.empty((3, WORDS_AHEAD), np.int64)
    eights = np.empty((2, WORDS_AHEAD), np.uint64)
    words = Words(places[0], places[1], places[2], eights[0], eights[1])
    # with the end of the line
    most_hashes = longest // 2 + 2 if weights.word_ngrams > 1 else 0
    room = Room(
        words,
        np.empty(WORDS_AHEAD + 1, np.int64),
        np.empty(longest + 2, np.uint8),
        np.empty(STRETCH + weights.ngrams.longest, np.uint64),
        np.empty(most_hashes, np.uint32),
        np.empty(MOST_LATER + weights.word_ngrams, np.uint64),
    )
    _average_rows(weights, cache, lines, room, hidden, counts)


@inner_kernel
def _average_rows(
    weights: Weights,
    cache: Cache,
    lines: Lines,
    room: Room,
    hidden: np.ndarray,
    counts: np.ndarray,
) -> None:
    table = cache.table
    data = lines.data
    words = room.words
    hashes = room.hashes
    d = hidden.shape[1]
    names = weights.dictionary
    slots = len(table) - 1
    d_kept = cache.sums.shape[1]
    ngrams = weights.ngrams
    rows_at = address_of(weights.rows)
    sums_at = address_of(cache.sums)
    hidden_at = address_of(hidden)
    row_bytes = FLOAT_BYTES * d
    last = weights.end_of_line
    bigrams = weights.word_ngrams > 1
    longest = np.uint64(weights.word_ngrams)
    first_at = rows_at + row_bytes * weights.words
    sources = room.sources
    single = np.uint64(1)
    for line in range(len(counts)):
        total = hidden_at + row_bytes * line
        set_floats(total, d)
        count = 0
        number = np.uint64(0)
        at = lines.begins[line]
        end = lines.ends[line]
        ended = False
        first_word = np.uint64(0)
        later = np.uint64(0)
        while at < end and not ended:
            word_count, at = find_words(data, at, end, words, cache)
            pending = np.uint64(0)
            for word in range(np.uint64(word_count)):
                place = words.slots[word]
                if not is_at(table, place, words, word, data):
                    neighbour = int(np.int64(place ^ 1))
                    if place < slots and is_at(table, neighbour, words, word, data):
                        place = neighbour
                    else:
                        # the slot may be that of a pending word
                        add_rows(total, sources, pending, d)
                        pending = np.uint64(0)
                        if (
                            place < slots
                            and table[np.uint64(place), 0]
                            and not table[np.uint64(neighbour), 0]
                        ):
                            place = neighbour
                        begin = words.begins[word]
                        stop = words.ends[word]
                        row, is_open = look_up(
                            names,
                            table,
                            place,
                            data,
                            begin,
                            stop,
                            weights.words,
                            d_kept > 0,
                        )
                        if is_open:
                            sum_at = sums_at + row_bytes * place
                            table[np.uint64(place), ROWS] = add_up(
                                ngrams, room, data, begin, stop, rows_at, row, sum_at, d
                            )
                rows = table[np.uint64(place), ROWS]
                hash_and_flags = table[np.uint64(place), FOUND]
                row = int(np.int64(rows >> HALF))
                sources[pending] = (
                    rows_at + row_bytes * (row - 1)
                    if row
                    else sums_at + row_bytes * place
                )
                pending += np.uint64(rows != 0)
                count += int(np.int64(rows & LOW_HALF))
                if bigrams:
                    hashes[number] = np.uint32(hash_and_flags & LOW_HALF)
                    number += np.uint64(hash_and_flags & SKIPPED == 0)
                    if first_word + longest <= number and later < MOST_LATER:
                        later = ask_for_ngrams(
                            ngrams,
                            longest,
                            hashes,
                            room.later,
                            first_word,
                            number,
                            later,
                            first_at,
                            d,
                        )
                        first_word += single
                if hash_and_flags & LAST:
                    ended = True
                    break
            add_rows(total, sources, pending, d)
        if not ended:  # fastText gets every line with a line break
            if 0 <= last < weights.words:
                sources[0] = rows_at + row_bytes * last
                add_rows(total, sources, single, d)
                count += 1
            if bigrams:
                hashes[number] = END_OF_LINE_HASH
                number += single
        while first_word < number or later:
            while first_word < number and later < MOST_LATER:
                later = ask_for_ngrams(
                    ngrams,
                    longest,
                    hashes,
                    room.later,
                    first_word,
                    number,
                    later,
                    first_at,
                    d,
                )
                first_word += single
            add_rows(total, room.later, later, d)
            count = count + int(np.int64(later))
            later = np.uint64(0)
        counts[line] = count
        if count:
            share = np.float32(1.0 / count)
            for column in range(d):
                hidden[np.uint64(line), np.uint64(column)] *= share


@inlined_kernel
def find_words(
    data: Bytes, at: int, end: int, words: Words, cache: Cache
) -> tuple[int, int]:
    """Find the next words of a line, and prefetch their slots.

    Args:
        words: filled.

    Returns:
        the number of words, and the offset after them.
    """
    number = np.uint64(0)
    while number < WORDS_AHEAD and at < end:
        separators = separators_from(data, at, end)
        word_bits = ~separators  # bytes of words that are still to be read
        while word_bits and number < WORDS_AHEAD:
            first = trailing_zeros(word_bits)
            ends = separators >> first << first
            if not ends:
                break
            last = trailing_zeros(ends)
            note_word(
                data,
                at + int(np.int64(first)),
                at + int(np.int64(last)),
                words,
                number,
                cache,
            )
            number += np.uint64(1)
            word_bits = word_bits >> last << last
        if word_bits == np.uint64(0):
            at = min(at + WIDTH, end)
        elif number == WORDS_AHEAD or not word_bits & np.uint64(1):
            at += int(np.int64(trailing_zeros(word_bits)))
        else:  # all bytes belong to one word
            stop = at + WIDTH
            separators = separators_from(data, stop, end)
            while separators == np.uint64(0):
                stop += WIDTH
                separators = separators_from(data, stop, end)
            stop += int(np.int64(trailing_zeros(separators)))
            note_word(data, at, stop, words, number, cache)
            number += np.uint64(1)
            at = stop
    return int(np.int64(number)), at


@inlined_kernel
def separators_from(data: Bytes, at: int, end: int) -> np.uint64:
    """Bit per byte of the next WIDTH bytes, set for separators of words and after the
    end of the line.
    """
    bits = ~np.uint64(0) << np.uint64(end - at) if end - at < WIDTH else np.uint64(0)
    if at + WIDTH <= len(data):
        return bits | separators_of_64(address_of(data) + at)
    for step in range(min(WIDTH, end - at)):
        bits |= np.uint64(_IS_SEPARATOR[data[np.uint64(at + step)]]) << np.uint64(step)
    return bits


@inlined_kernel
def note_word(
    data: Bytes,
    begin: int,
    end: int,
    words: Words,
    number: np.uint64,
    cache: Cache,
) -> None:
    """Record the key of a word, and prefetch its slot."""
    size = end - begin
    slots = len(cache.table) - 1
    d = cache.sums.shape[1]
    # no word begins with these bytes
    first = ~np.uint64(0)
    second = np.uint64(0)
    place = slots
    if size <= LONGEST_KEPT:
        if begin + 16 <= len(data):
            first = load64(data, begin) & MASKS[size, 0]
            second = load64(data, begin + 8) & MASKS[size, 1]
        else:
            first = first_bytes(data, begin, size)
            second = first_bytes(data, begin + 8, max(size - 8, 0))
        value = first * _ODD ^ second * _OTHER_ODD
        for at in range(begin + 16, end, 8):
            value = (value ^ value >> HALF ^ first_bytes(data, at, end - at)) * _ODD
        place = int(np.int64((value ^ value >> HALF) * _ODD >> _TOP)) & (slots - 1)
    words.begins[number], words.ends[number], words.slots[number] = begin, end, place
    words.firsts[number], words.seconds[number] = first, second
    fetch_floats(address_of(cache.table) + 8 * COLUMNS * place, 1)
    fetch_floats(address_of(cache.sums) + FLOAT_BYTES * d * place, d)


@inlined_kernel
def is_at(
    table: np.ndarray, place: int, words: Words, word: np.uint64, data: Bytes
) -> bool:
    """Return True if a slot holds a word."""
    slot = np.uint64(place)
    column = np.uint64(2)
    at = words.begins[word] + 16
    if table[slot, 0] != words.firsts[word] or table[slot, 1] != words.seconds[word]:
        return False
    end = words.ends[word]
    while at < end:
        if table[slot, column] != first_bytes(data, at, end - at):
            return False
        column += np.uint64(1)
        at += 8
    return column == WORD_COLUMNS or table[slot, column] == 0


@inner_kernel
def look_up(
    names: Dictionary,
    table: np.ndarray,
    place: int,
    data: Bytes,
    begin: int,
    end: int,
    words: int,
    has_ngrams: bool,
) -> tuple[int, bool]:
    """Put a word into a slot.

    Returns:
        its row, or -1; and True if it has character n-grams, so that ROWS is still to
        be set.
    """
    slot = np.uint64(place)
    size = end - begin
    value = hash_word(data, begin, end)
    entry = find_entry(names, value, data, begin, end)
    for column in range(np.uint64(WORD_COLUMNS)):
        at = begin + 8 * np.int64(column)
        table[slot, column] = np.uint64(0)
        if at < end and size <= LONGEST_KEPT:
            table[slot, column] = first_bytes(data, at, end - at)
    hash_and_flags = np.uint64(value)
    if entry >= words or (entry < 0 and _begins_with(data, begin, end, LABEL)):
        hash_and_flags |= SKIPPED
    if (
        value == END_OF_LINE_HASH
        and size == len(END_OF_LINE)
        and _begins_with(data, begin, end, END_OF_LINE)
    ):
        hash_and_flags |= LAST
    table[slot, FOUND] = hash_and_flags
    row = entry if entry < words else -1
    if has_ngrams and hash_and_flags & (SKIPPED | LAST) == 0:
        return row, True
    table[slot, ROWS] = np.uint64(row + 1) << HALF | np.uint64(row >= 0)
    return row, False


@inner_kernel
def _begins_with(data: Bytes, begin: int, end: int, beginning: np.ndarray) -> bool:
    return end - begin >= len(beginning) and equal_bytes(
        data, begin, beginning, 0, len(beginning)
    )


@inner_kernel
def add_up(
    ngrams: Ngrams,
    room: Room,
    data: Bytes,
    begin: int,
    end: int,
    rows_at: int,
    row: int,
    total: int,
    d: int,
) -> np.uint64:
    """Sum a word's own row, unless it is -1, and those of its n-grams of code points,
    except single boundary marks.

    Args:
        rows_at: address of the model's rows.
        total: address of the sum.

    Returns:
        number of rows.
    """
    word = room.marked
    buckets = room.buckets
    size = np.uint64(end - begin + 2)
    high = np.uint8(0)
    for step in range(np.uint64(end - begin)):
        byte = data[np.uint64(begin) + step]
        word[step + np.uint64(1)] = byte
        high |= byte
    word[0], word[size - np.uint64(1)] = 0x3C, 0x3E
    set_floats(total, d)
    count = np.uint64(0)
    none = np.uint64(0)
    number = none
    first_at = rows_at + FLOAT_BYTES * d * ngrams.words
    if row >= 0:
        count = np.uint64(1)
        buckets[0] = rows_at + FLOAT_BYTES * d * row
        add_rows(total, buckets, count, d)
    shortest = ngrams.shortest
    longest = ngrams.longest
    is_ascii = high < 0x80
    for first in range(size):
        start = np.uint64(first)
        if word[start] & 0xC0 == 0x80:
            continue
        value = FNV_OFFSET
        at = start
        for length in range(1, longest + 1):
            if at == size:
                break
            value = hash_step(value, word[at])
            at += np.uint64(1)
            while not is_ascii and at < size and word[at] & 0xC0 == 0x80:
                value = hash_step(value, word[at])
                at += np.uint64(1)
            if length >= shortest and not (length == 1 and (start == 0 or at == size)):
                buckets[number] = bucket_of(ngrams, np.uint64(value))
                number += np.uint64(1)
        if number >= STRETCH:
            number = find_rows(ngrams, buckets, none, number, first_at, d)
            add_rows(total, buckets, number, d)
            count = count + number
            number = none
    number = find_rows(ngrams, buckets, none, number, first_at, d)
    add_rows(total, buckets, number, d)
    return count + number


@inlined_kernel
def find_rows(
    ngrams: Ngrams,
    buckets: np.ndarray,
    begin: np.uint64,
    end: np.uint64,
    first_at: int,
    d: int,
) -> np.uint64:
    """Find the rows of n-gram buckets, and prefetch them.

    Rows are scattered over a large matrix: all are prefetched before the first of them
    is added.

    Args:
        buckets: of which those from `begin` to `end` are replaced by the addresses of
            their rows.
        first_at: address of the first bucket's row.

    Returns:
        end of the addresses, without the buckets that a pruned model dropped
        (`Dictionary::pushHash`).
    """
    if len(ngrams.kept):
        kept_end = begin
        for index in range(begin, end):
            bucket = buckets[index]
            buckets[kept_end] = bucket
            kept_end += is_kept(ngrams, bucket)
        end = kept_end
        for index in range(begin, end):
            buckets[index] = place_of(ngrams, buckets[index])
    for index in range(begin, end):
        buckets[index] = (
            np.uint64(first_at) + np.uint64(FLOAT_BYTES * d) * buckets[index]
        )
        fetch_floats(int(np.int64(buckets[index])), d)
    return end


@inlined_kernel
def ask_for_ngrams(
    ngrams: Ngrams,
    longest: np.uint64,
    hashes: np.ndarray,
    addresses: np.ndarray,
    first: np.uint64,
    number: np.uint64,
    filled: np.uint64,
    first_at: int,
    d: int,
) -> np.uint64:
    """Find the rows of the n-grams of two or more words that begin at a word of a line,
    and prefetch them.

    Args:
        longest: words of the longest n-grams.
        hashes: uint32, of the line's words.
        addresses: uint64; receives the addresses of the rows.
        first: index of the word.
        number: number of words of the line that have their hashes.
        filled: number of addresses in `addresses`.
        first_at: address of the first bucket's row.

    Returns:
        new number of addresses.
    """
    single = np.uint64(1)
    value = np.uint64(np.int64(np.int32(hashes[first])))
    end = filled
    for last in range(first + single, min(first + longest, number)):
        value = value * WORD_STEP + np.uint64(np.int64(np.int32(hashes[last])))
        addresses[end] = bucket_of(ngrams, value)
        end += single
    return find_rows(ngrams, addresses, filled, end, first_at, d)


@inlined_kernel
def is_kept(ngrams: Ngrams, bucket: np.uint64) -> np.uint64:
    """Return 1 if a pruned model kept a bucket, else 0."""
    return ngrams.kept[bucket // WORD_SIZE] >> bucket % WORD_SIZE & np.uint64(1)


@inlined_kernel
def place_of(ngrams: Ngrams, bucket: np.uint64) -> np.uint64:
    """Number of buckets that a pruned model kept before a bucket."""
    bits = ngrams.kept[bucket // WORD_SIZE] & (
        (np.uint64(1) << bucket % WORD_SIZE) - np.uint64(1)
    )
    return np.uint64(ngrams.kept_before[bucket // WORD_SIZE]) + ones(bits)


@inlined_kernel
def bucket_of(ngrams: Ngrams, value: np.uint64) -> np.uint64:
    """Remainder of a hash by the number of buckets, without a division: the quotient is
    at most one too small.
    """
    remainder = value - high_half(value, ngrams.reciprocal) * ngrams.buckets
    return remainder - ngrams.buckets if remainder >= ngrams.buckets else remainder
