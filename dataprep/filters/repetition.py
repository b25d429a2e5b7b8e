"""Repeated segments and word n-grams of a text, which the Gopher dialects count in
different ways.

A word, segment or n-gram is repeated if the text has it at least twice, byte for byte.
Collisions are impossible: equal hashes are compared byte by byte, and an n-gram is
identified by the exact numbers of its two (n-1)-grams. It can only be repeated if both
of those are, so each n only examines what remains of the previous one. Time is linear
in the words for every text.

The repeated n-grams of a text are three int32 arrays: `at`, the word positions at which
one begins, ascending; `group`, its number, from 0 in the order of first copies;
`copies`, the number of copies of each.

datatrove compares repeated n-grams by the text of their words without separators: `to
day x y z` and `today x y z !` are then equal, so these exact numbers do not suffice.
But equal n-grams begin with the same bytes, so only positions that share their first
bytes with another one must be examined; those are compared byte by byte.
"""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.text.hashing import (
    ODD,
    equal_bytes,
    first_bytes,
    hash_bytes,
    load64,
    store64,
)
from gristmill.dataprep.text.kernels import Bytes, Offsets, Positions, kernel
from gristmill.dataprep.text.spans import count_code_points

TOP_NGRAMS = (2, 3, 4)
DUPLICATE_NGRAMS = (5, 6, 7, 8, 9, 10)
LONGEST_TOP, LONGEST_NGRAM = TOP_NGRAMS[-1], DUPLICATE_NGRAMS[-1]

_OTHER_ODD = np.uint64(0xD6E8FEB86659FD93)


@kernel
def empty_table(entries: int) -> np.ndarray:
    """Return a hash table (open addressing, int32 entry numbers, -1 is free) of which
    the entries fill at most half.
    """
    size = 4
    while size < 2 * entries:
        size *= 2
    return np.full(size, -1, np.int32)


@kernel
def number_spans(
    data: Bytes, starts: Positions, ends: Positions
) -> tuple[np.ndarray, np.ndarray]:
    """Number spans so that equal bytes have equal numbers, from 0 in the order of first
    copies.

    Returns:
        numbers: int32, one per span; copies: int32, one per number.
    """
    spans = len(starts)
    table = empty_table(spans)
    mask = np.uint64(len(table) - 1)
    numbers, copies = np.empty(spans, np.int32), np.zeros(spans, np.int32)
    keys, firsts = np.empty(spans, np.uint64), np.empty(spans, np.int32)
    num_distinct = 0
    for span in range(spans):
        start, length = starts[span], ends[span] - starts[span]
        # Up to eight bytes are their own key; longer spans are compared.
        key = (
            first_bytes(data, start, length)
            if length <= 8
            else hash_bytes(data, start, start + length)
        )
        value = (key ^ np.uint64(length)) * ODD
        slot = (value ^ value >> np.uint64(32)) & mask
        # Record the span as if it were new: a free slot then stands for it, without a
        # branch that half of the words of a text would take.
        keys[num_distinct], firsts[num_distinct] = key, span
        number = min(np.uint32(table[slot]), np.uint32(num_distinct))
        # an earlier span with the key, or the span itself
        while keys[number] != key or not _is_copy(
            data, starts, ends, firsts[number], span
        ):
            slot = (slot + np.uint64(1)) & mask
            number = min(np.uint32(table[slot]), np.uint32(num_distinct))
        table[slot] = number
        num_distinct += number == num_distinct
        numbers[span] = number
        copies[number] += 1
    return numbers, copies[:num_distinct]


@kernel
def _is_copy(
    data: Bytes, starts: Positions, ends: Positions, first: int, span: int
) -> bool:
    """Return True if a span with the key of an earlier one, or of itself, has its
    bytes.
    """
    start, first_start = starts[span], starts[np.uint32(first)]
    length = ends[span] - start
    same = ends[np.uint32(first)] - first_start == length
    return same and (length <= 8 or equal_bytes(data, first_start, data, start, length))


@kernel
def keep_repeated(
    at: np.ndarray, numbers: np.ndarray, copies: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keep n-grams whose number occurs more than once, and renumber them in the same
    order.
    """
    renumbered = np.empty(len(copies), np.int32)
    groups = 0
    for number in range(len(copies)):
        renumbered[number] = groups if copies[number] > 1 else -1
        groups += copies[number] > 1
    kept = np.empty(groups, np.int32)
    for number in range(len(copies)):
        if renumbered[number] >= 0:
            kept[renumbered[number]] = copies[number]
    kept_at, kept_group = np.empty(len(at), np.int32), np.empty(len(at), np.int32)
    count = 0
    for step in range(len(at)):
        group = renumbered[np.uint32(numbers[step])]
        kept_at[count], kept_group[count] = at[step], group
        count += group >= 0
    return kept_at[:count], kept_group[:count], kept


@kernel
def repeated_words(
    data: Bytes, starts: Positions, ends: Positions
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the repeated words of a text, as n-grams of one word."""
    numbers, copies = number_spans(data, starts, ends)
    return keep_repeated(np.arange(len(starts)).astype(np.int32), numbers, copies)


@kernel
def extend_ngrams(
    at: np.ndarray, group: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the repeated (n+1)-grams from the repeated n-grams, where two overlap in
    all but one word.
    """
    steps, keys = np.empty(len(at), np.int32), np.empty(len(at), np.uint64)
    count = 0
    for step in range(len(at) - 1):  # without a branch, which would be unpredictable
        steps[count], keys[count] = (
            step,
            np.uint64(group[step]) << np.uint64(32) | np.uint64(group[step + 1]),
        )
        count += at[step] + 1 == at[step + 1]
    likely = likely_repeated(keys[:count] * _OTHER_ODD)
    steps, keys = steps[likely], keys[likely]
    table = empty_table(len(steps))
    mask = np.uint64(len(table) - 1)
    longer_at, numbers = np.empty(len(steps), np.int32), np.empty(len(steps), np.int32)
    firsts, copies = np.empty(len(steps), np.uint64), np.zeros(len(steps), np.int32)
    num_groups = 0
    for pair in range(len(steps)):
        key = keys[pair]
        slot = (key * ODD >> np.uint64(32)) & mask
        firsts[num_groups] = key  # as if it were new, as above
        number = min(np.uint32(table[slot]), np.uint32(num_groups))
        while firsts[number] != key:
            slot = (slot + np.uint64(1)) & mask
            number = min(np.uint32(table[slot]), np.uint32(num_groups))
        table[slot] = number
        num_groups += number == num_groups
        copies[number] += 1
        longer_at[pair], numbers[pair] = at[steps[pair]], number
    return keep_repeated(longer_at, numbers, copies[:num_groups])


@kernel
def top_ngram(
    at: np.ndarray,
    group: np.ndarray,
    copies: np.ndarray,
    chars: np.ndarray,
    n: int,
    longest: bool,
) -> tuple[int, int]:
    """Return the most frequent repeated n-gram; of several the one with most code
    points, or else the first in the text.

    Returns:
        the word position of its first copy, and its number of copies; (-1, 0) if no
        n-gram is repeated.
    """
    best_at, best_copies, best_chars, next_group = -1, 0, -1, 0
    for step in range(len(at)):
        if group[step] < next_group:
            continue
        next_group += 1
        number = copies[group[step]]
        if number < best_copies or (number == best_copies and not longest):
            continue
        length = chars[at[step] : at[step] + n].sum()
        if number > best_copies or length > best_chars:
            best_at, best_copies, best_chars = at[step], number, length
    return best_at, best_copies


@kernel
def covered_chars(at: np.ndarray, chars: np.ndarray, n: int) -> int:
    """Return the code points of the words that n-grams at these positions cover,
    counting each word once.
    """
    covered, total = 0, 0
    for start in at:
        for word in range(max(start, covered), start + n):
            total += chars[word]
        covered = start + n
    return total


@kernel
def copied_segments(
    data: Bytes, starts: Positions, ends: Positions, first_counts: bool
) -> tuple[int, int]:
    """Return number and code points of the segments that occur several times.

    Args:
        first_counts: True if the first copy counts too.
    """
    # Most segments differ from all others by length, first or last eight bytes, so that
    # the bytes between are not read.
    values = np.empty(len(starts), np.uint64)
    for segment in range(len(starts)):
        start, size = starts[segment], ends[segment] - starts[segment]
        last = load64(data, ends[segment] - 8) if size > 8 else np.uint64(0)
        values[segment] = (
            (first_bytes(data, start, size) ^ np.uint64(size)) * ODD ^ last
        ) * _OTHER_ODD
    likely = likely_repeated(values)
    starts, ends = starts[likely], ends[likely]
    numbers, copies = number_spans(data, starts, ends)
    count, length, next_number = 0, 0, 0
    for segment in range(len(numbers)):
        number = numbers[segment]
        is_first = number == next_number
        next_number += is_first
        if copies[number] > 1 and (first_counts or not is_first):
            count += 1
            length += count_code_points(data, starts[segment], ends[segment])
    return count, length


MOST_SHARED = 40
"""Number of bytes at the beginning of an n-gram that are compared before the whole of
it.
"""
PADDING = MOST_SHARED
"""Bytes after the last word, so that `MOST_SHARED` bytes can be read at any word."""


@kernel
def join_words(
    data: Bytes, starts: Positions, ends: Positions
) -> tuple[Bytes, Offsets]:
    """Return the bytes of n words without separators.

    Returns:
        joined: uint8, and PADDING zeros; offsets: int64 of shape (n + 1,), the begin of
            each word.
    """
    offsets = np.empty(len(starts) + 1, np.int64)
    offsets[0] = 0
    for word in range(len(starts)):
        offsets[word + 1] = offsets[word] + ends[word] - starts[word]
    joined = np.empty(offsets[-1] + PADDING, np.uint8)
    for word in range(len(starts)):
        start, to = starts[word], offsets[word]
        # the next word overwrites excess bytes
        if ends[word] - start <= 16 and start + 16 <= len(data):
            store64(joined, to, load64(data, start))
            store64(joined, to + 8, load64(data, start + 8))
        else:
            for step in range(ends[word] - start):
                joined[to + step] = data[start + step]
    joined[offsets[-1] :] = 0
    return joined, offsets


@kernel
def shared_starts(joined: np.ndarray, offsets: Offsets) -> np.ndarray:
    """Return how many bytes from each word on probably occur from another word on too.

    Returns:
        uint8, one value per word: 0, 16, 24, 32 or 40 (MOST_SHARED, which may be more);
        never too few.
    """
    words = len(offsets) - 1
    values, shared = np.empty(words, np.uint64), np.zeros(words, np.uint8)
    for word in range(words):
        values[word] = (
            load64(joined, offsets[word]) * ODD ^ load64(joined, offsets[word] + 8)
        ) * _OTHER_ODD
    repeated = likely_repeated(values)
    likely, values = repeated, values[repeated]
    for length in range(24, MOST_SHARED + 1, 8):
        shared[likely] = length - 8
        for number in range(len(likely)):
            value = values[number] ^ values[number] >> np.uint64(32)
            more = load64(joined, offsets[likely[number]] + length - 8)
            values[number] = (value ^ more) * ODD
        repeated = likely_repeated(values)
        likely, values = likely[repeated], values[repeated]
    shared[likely] = MOST_SHARED
    return shared


@kernel
def likely_repeated(values: np.ndarray) -> np.ndarray:
    """Return the indices of the hashes that others probably equal: int32, ascending,
    including all that others do equal.

    Args:
        values: uint64, whose highest bits depend on all of what was hashed.
    """
    bits = 6
    while 1 << bits < 8 * len(values):
        bits += 1
    shift = np.uint64(64 - bits)
    counts, likely = np.zeros(1 << bits, np.uint8), np.empty(len(values), np.int32)
    for value in values:
        counts[value >> shift] = min(counts[value >> shift] + 1, 2)
    number = 0
    for index in range(len(values)):
        likely[number] = index
        number += counts[values[index] >> shift] > 1
    return likely[:number]


@kernel
def likely_copies(
    offsets: Offsets, shared: np.ndarray, before: np.ndarray, n: int
) -> np.ndarray:
    """Return the word positions at which an n-gram may equal that at another position,
    including all that do.

    An n-gram of sixteen bytes or more must share its bytes; shorter ones are rare.

    Args:
        offsets: offsets from `join_words`.
        shared: result of `shared_starts`.
        before: int32 positions, ascending: the result of this function for a smaller n,
            or all positions.
    """
    words = len(offsets) - 1
    positions = np.empty(len(before), np.int32)
    count = 0
    for word in before:
        if word + n > words:
            break
        length = offsets[word + n] - offsets[word]
        positions[count] = word
        count += (length < 16) | (shared[word] >= min(length & ~7, MOST_SHARED))
    return positions[:count]


@kernel
def copied_chars(
    joined: np.ndarray,
    offsets: Offsets,
    candidates: np.ndarray,
    chars: np.ndarray,
    n: int,
) -> int:
    """Return the code points of n-grams that occurred before, in one walk that jumps
    over each of them.

    Args:
        candidates: result of `likely_copies` for this n.
        chars: number of code points of every word.
    """
    values = np.empty(len(candidates), np.uint64)
    for number in range(len(candidates)):  # by length and first sixteen bytes
        start = offsets[candidates[number]]
        length = offsets[candidates[number] + n] - start
        beyond_8, beyond_16 = 8 - min(length, 8), 16 - max(min(length, 16), 8)
        first = load64(joined, start) << np.uint64(8 * beyond_8)
        # a number cannot be shifted by all of its 64 bits at once
        half = np.uint64(4 * beyond_16)
        second = load64(joined, start + 8) << half << half
        values[number] = ((first ^ np.uint64(length)) * ODD ^ second) * _OTHER_ODD
    candidates = candidates[likely_repeated(values)]
    if len(candidates) < 2:
        return 0
    table = empty_table(len(candidates))
    mask = np.uint64(len(table) - 1)
    hashes = np.empty(len(candidates), np.uint64)
    total, next_word = 0, 0
    for number in range(len(candidates)):
        word = candidates[number]
        if word < next_word:
            continue
        start, end = offsets[word], offsets[word + n]
        value = hash_bytes(joined, start, end)
        slot = value & mask
        is_copy = False
        while table[slot] >= 0 and not is_copy:
            earlier = candidates[table[slot]]
            same = (
                hashes[table[slot]] == value
                and offsets[earlier + n] - offsets[earlier] == end - start
            )
            is_copy = same and equal_bytes(
                joined, offsets[earlier], joined, start, end - start
            )
            slot = (slot + np.uint64(1)) & mask
        if is_copy:
            total += chars[word : word + n].sum()
            next_word = word + n
        else:
            table[slot], hashes[number] = number, value
    return total
