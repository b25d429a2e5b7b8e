"""Repeated segments and word n-grams of a text: what the Gopher dialects count in their different ways.

A word, segment or n-gram is repeated if the text has it at least twice, byte for byte. Nothing here can collide:
equal hashes are compared byte by byte, and an n-gram is named by the exact numbers of the two (n-1)-grams that it
consists of. Only where both of those are repeated can it be repeated, so each n looks at what is left of the one
before. Time is linear in the words, whatever the text.

The repeated n-grams of a text are three int32 arrays: `at`, the word positions where one begins, ascending; `group`,
which one it is, numbered from 0 in the order of first copies; `copies`, how often the text has each.

datatrove finds repeated n-grams by the text of their words without anything between them: `to day x y z` and
`today x y z !` are then the same, so these exact numbers cannot serve. But equal n-grams begin with the same bytes, so
that only positions which share their first bytes with another one have to be looked at; and what is looked at is
compared byte by byte.
"""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.filtering.rule_columns import DUPLICATE_NGRAMS, TOP_NGRAMS
from gristmill.dataprep.text.hashing import first_bytes, hash_bytes, load64, same_bytes, store64
from gristmill.dataprep.text.kernels import kernel
from gristmill.dataprep.text.spans import count_code_points

LONGEST_TOP, LONGEST_NGRAM = TOP_NGRAMS[-1], DUPLICATE_NGRAMS[-1]

_ODD = np.uint64(0x9E3779B97F4A7C15)
_OTHER_ODD = np.uint64(0xD6E8FEB86659FD93)


@kernel
def table_size(entries: int) -> int:
    """The power of two that so many entries fill by half at most."""
    size = 4
    while size < 2 * entries:
        size *= 2
    return size


@kernel
def empty_table(entries: int) -> np.ndarray:
    """A hash table (open addressing, int32 entry numbers, -1 is free) that so many entries fill by half at most."""
    return np.full(table_size(entries), -1, np.int32)


@kernel
def number_spans(data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number spans so that equal bytes have equal numbers, from 0 in the order of first copies.

    Returns:
        numbers: int32, one per span; copies: int32, one per number.
    """
    spans = len(starts)
    table = empty_table(spans)
    mask = np.uint64(len(table) - 1)
    numbers, copies = np.empty(spans, np.int32), np.zeros(spans, np.int32)
    keys, firsts = np.empty(spans, np.uint64), np.empty(spans, np.int32)
    found = 0
    for span in range(spans):
        start, length = starts[span], ends[span] - starts[span]
        # Up to eight bytes are their own key; longer spans are compared.
        key = first_bytes(data, start, length) if length <= 8 else hash_bytes(data, start, start + length)
        value = (key ^ np.uint64(length)) * _ODD
        slot = (value ^ value >> np.uint64(32)) & mask
        # Written down as if it were new: then a free place, which stands for it, needs no branch that half of the
        # words of a text would take.
        keys[found], firsts[found] = key, span
        number = min(np.uint32(table[slot]), np.uint32(found))
        while keys[number] != key or not _is_copy(data, starts, ends, firsts[number], span):
            slot = (slot + np.uint64(1)) & mask
            number = min(np.uint32(table[slot]), np.uint32(found))
        table[slot] = number
        found += number == found
        numbers[span] = number
        copies[number] += 1
    return numbers, copies[:found]


@kernel
def _is_copy(data: np.ndarray, starts: np.ndarray, ends: np.ndarray, first: int, span: int) -> bool:
    """Whether a span with the key of an earlier one, or of itself, has its bytes."""
    start, other = starts[span], starts[np.uint32(first)]
    length = ends[span] - start
    same = ends[np.uint32(first)] - other == length
    return same and (length <= 8 or same_bytes(data, other, start, length))


@kernel
def keep_repeated(at: np.ndarray, numbers: np.ndarray, copies: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of n-grams at some positions, those whose number occurs more than once; renumbered, in the same order."""
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
def repeated_words(data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The repeated words of a text, as n-grams of one word."""
    numbers, copies = number_spans(data, starts, ends)
    return keep_repeated(np.arange(len(starts)).astype(np.int32), numbers, copies)


@kernel
def extend_ngrams(at: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From the repeated n-grams of a text to its repeated (n+1)-grams: where two overlap in all but one word."""
    steps, keys = _likely_pairs(at, group)
    table = empty_table(len(steps))
    mask = np.uint64(len(table) - 1)
    longer_at, numbers = np.empty(len(steps), np.int32), np.empty(len(steps), np.int32)
    firsts, copies = np.empty(len(steps), np.uint64), np.zeros(len(steps), np.int32)
    found = 0
    for pair in range(len(steps)):
        key = keys[pair]
        slot = (key * _ODD >> np.uint64(32)) & mask
        firsts[found] = key  # as if it were new, as above
        number = min(np.uint32(table[slot]), np.uint32(found))
        while firsts[number] != key:
            slot = (slot + np.uint64(1)) & mask
            number = min(np.uint32(table[slot]), np.uint32(found))
        table[slot] = number
        found += number == found
        copies[number] += 1
        longer_at[pair], numbers[pair] = at[steps[pair]], number
    return keep_repeated(longer_at, numbers, copies[:found])


@kernel
def _likely_pairs(at: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The n-grams that overlap with the next in all but one word, as another two might do: none that do are left out.

    Without a branch that depends on the text, since nobody could foretell where it goes.

    Returns:
        steps: int32, indices of the first of two; keys: uint64, their two groups.
    """
    steps, keys = np.empty(len(at), np.int32), np.empty(len(at), np.uint64)
    count = 0
    for step in range(len(at) - 1):
        steps[count], keys[count] = step, np.uint64(group[step]) << np.uint64(32) | np.uint64(group[step + 1])
        count += at[step] + 1 == at[step + 1]
    counts = np.zeros(table_size(4 * count), np.uint8)
    mask = np.uint64(len(counts) - 1)
    for pair in range(count):
        slot = (keys[pair] * _OTHER_ODD >> np.uint64(32)) & mask
        counts[slot] = min(counts[slot] + 1, 2)
    likely = 0
    for pair in range(count):
        step, key = steps[pair], keys[pair]
        steps[likely], keys[likely] = step, key
        likely += counts[(key * _OTHER_ODD >> np.uint64(32)) & mask] > 1
    return steps[:likely], keys[:likely]


@kernel
def top_ngram(
    at: np.ndarray, group: np.ndarray, copies: np.ndarray, chars: np.ndarray, n: int, longest: bool
) -> tuple[int, int]:
    """The most frequent of repeated n-grams; of several the one with most code points, or else the first in the text.

    Returns:
        the word position of its first copy, and its number of copies; (-1, 0) where no n-gram is repeated.
    """
    best_at, best_copies, best_chars, seen = -1, 0, -1, 0
    for step in range(len(at)):
        if group[step] < seen:
            continue
        seen += 1
        number = copies[group[step]]
        if number < best_copies or (number == best_copies and not longest):
            continue
        length = chars[at[step] : at[step] + n].sum()
        if number > best_copies or length > best_chars:
            best_at, best_copies, best_chars = at[step], number, length
    return best_at, best_copies


@kernel
def covered_chars(at: np.ndarray, chars: np.ndarray, n: int) -> int:
    """Code points of the words that n-grams at these positions cover, each word once."""
    covered, total = 0, 0
    for start in at:
        for word in range(max(start, covered), start + n):
            total += chars[word]
        covered = start + n
    return total


@kernel
def copied_segments(data: np.ndarray, starts: np.ndarray, ends: np.ndarray, first_counts: bool) -> tuple[int, int]:
    """Number and code points of segments of which the text has several copies.

    Args:
        first_counts: whether the first copy counts too.
    """
    starts, ends = likely_copied(data, starts, ends)
    numbers, copies = number_spans(data, starts, ends)
    count, length, seen = 0, 0, 0
    for segment in range(len(numbers)):
        number = numbers[segment]
        is_first = number == seen
        seen += is_first
        if copies[number] > 1 and (first_counts or not is_first):
            count += 1
            length += count_code_points(data, starts[segment], ends[segment])
    return count, length


@kernel
def likely_copied(data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The spans that might equal another one: it has their length, their first and their last eight bytes.

    None that does equal another is left out. Most are, and so nobody has to read the bytes between.
    """
    table = np.zeros(table_size(4 * len(starts)), np.uint8)
    mask = np.uint64(len(table) - 1)
    slots = np.empty(len(starts), np.uint32)
    for span in range(len(starts)):
        start, length = starts[span], ends[span] - starts[span]
        last = load64(data, ends[span] - 8) if length > 8 else np.uint64(0)
        value = ((first_bytes(data, start, length) ^ np.uint64(length)) * _ODD ^ last) * _OTHER_ODD
        slot = (value ^ value >> np.uint64(32)) & mask
        slots[span] = slot
        table[slot] = min(table[slot] + 1, 2)
    likely_starts, likely_ends = np.empty_like(starts), np.empty_like(ends)
    count = 0
    for span in range(len(starts)):
        if table[slots[span]] > 1:
            likely_starts[count], likely_ends[count] = starts[span], ends[span]
            count += 1
    return likely_starts[:count], likely_ends[:count]


MOST_SHARED = 40
"""So many bytes at the beginning of an n-gram are compared with others before the whole of it is."""
PADDING = MOST_SHARED
"""Bytes after the last word, so that so many can be read at any."""


@kernel
def join_words(data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of n words without anything between them.

    Returns:
        joined: uint8, and PADDING zeros; offsets: int64 of shape (n + 1,), where each word begins.
    """
    offsets = np.empty(len(starts) + 1, np.int64)
    offsets[0] = 0
    for word in range(len(starts)):
        offsets[word + 1] = offsets[word] + ends[word] - starts[word]
    joined = np.empty(offsets[-1] + PADDING, np.uint8)
    for word in range(len(starts)):
        start, to = starts[word], offsets[word]
        if ends[word] - start <= 16 and start + 16 <= len(data):  # what is too much, the next word overwrites
            store64(joined, to, load64(data, start))
            store64(joined, to + 8, load64(data, start + 8))
        else:
            for step in range(ends[word] - start):
                joined[to + step] = data[start + step]
    joined[offsets[-1] :] = 0
    return joined, offsets


@kernel
def shared_starts(joined: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """How many bytes from each word on are likely to be those from another word on too.

    Returns:
        uint8, one value per word: 0, 16, 24, 32 or 40 (MOST_SHARED, which may be more); never too few.
    """
    words = len(offsets) - 1
    shift = np.uint64(_shift(words))
    counts, values = np.zeros(1 << 64 - shift, np.uint8), np.empty(words, np.uint64)
    for word in range(words):
        value = (load64(joined, offsets[word]) * _ODD ^ load64(joined, offsets[word] + 8)) * _OTHER_ODD
        values[word] = value
        counts[value >> shift] = min(counts[value >> shift] + 1, 2)
    shared, likely = np.zeros(words, np.uint8), np.empty(words, np.int32)
    number = 0
    for word in range(words):
        likely[number] = word
        number += counts[values[word] >> shift] > 1
    likely = likely[:number]
    for length in range(24, MOST_SHARED + 1, 8):
        shared[likely] = length - 8
        likely = _share_more(joined, offsets, likely, values, length)
    shared[likely] = MOST_SHARED
    return shared


@kernel
def _share_more(
    joined: np.ndarray, offsets: np.ndarray, words: np.ndarray, values: np.ndarray, length: int
) -> np.ndarray:
    """Of words that share eight bytes less, those that are likely to share so many; `values` are their hashes."""
    shift = np.uint64(_shift(len(words)))
    counts = np.zeros(1 << 64 - shift, np.uint8)
    for word in words:
        value = values[word] ^ values[word] >> np.uint64(32) ^ load64(joined, offsets[word] + length - 8)
        values[word] = value * _ODD
        counts[values[word] >> shift] = min(counts[values[word] >> shift] + 1, 2)
    likely = np.empty(len(words), np.int32)
    number = 0
    for word in words:
        likely[number] = word
        number += counts[values[word] >> shift] > 1
    return likely[:number]


@kernel
def _shift(entries: int) -> int:
    """By how many bits a 64-bit hash is shifted for a table of at least eight places per entry."""
    bits = 6
    while 1 << bits < 8 * entries:
        bits += 1
    return 64 - bits


@kernel
def likely_copies(offsets: np.ndarray, shared: np.ndarray, before: np.ndarray, n: int) -> np.ndarray:
    """The word positions at which an n-gram might equal that at another position; none that does is left out.

    An n-gram of sixteen bytes or more has to share its bytes; shorter ones are rare.

    Args:
        offsets: what `join_words` returns.
        shared: what `shared_starts` returns.
        before: int32 positions, ascending: what this function returned for a smaller n, or all.
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
def _alike(joined: np.ndarray, offsets: np.ndarray, candidates: np.ndarray, n: int) -> np.ndarray:
    """Of positions of n-grams those whose length and first bytes (sixteen at most) are likely to be another's too."""
    shift = np.uint64(_shift(len(candidates)))
    counts, values = np.zeros(1 << 64 - shift, np.uint8), np.empty(len(candidates), np.uint64)
    for number in range(len(candidates)):
        start = offsets[candidates[number]]
        length = offsets[candidates[number] + n] - start
        beyond_8, beyond_16 = 8 - min(length, 8), 16 - max(min(length, 16), 8)
        first = load64(joined, start) << np.uint64(8 * beyond_8)
        half = np.uint64(4 * beyond_16)  # a number cannot be shifted by all of its 64 bits at once
        second = load64(joined, start + 8) << half << half
        value = ((first ^ np.uint64(length)) * _ODD ^ second) * _OTHER_ODD
        values[number] = value
        counts[value >> shift] = min(counts[value >> shift] + 1, 2)
    alike, found = np.empty(len(candidates), np.int32), 0
    for number in range(len(candidates)):
        alike[found] = candidates[number]
        found += counts[values[number] >> shift] > 1
    return alike[:found]


@kernel
def copied_chars(joined: np.ndarray, offsets: np.ndarray, candidates: np.ndarray, chars: np.ndarray, n: int) -> int:
    """Code points of the n-grams that were there before, in one walk that jumps over each of them.

    Args:
        candidates: what `likely_copies` returns for this n.
        chars: code points of every word.
    """
    candidates = _alike(joined, offsets, candidates, n)
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
        found = False
        while table[slot] >= 0 and not found:
            other = candidates[table[slot]]
            same = hashes[table[slot]] == value and offsets[other + n] - offsets[other] == end - start
            found = same and same_bytes(joined, offsets[other], start, end - start)
            slot = (slot + np.uint64(1)) & mask
        if found:
            total += chars[word : word + n].sum()
            next_word = word + n
        else:
            table[slot], hashes[number] = number, value
    return total
