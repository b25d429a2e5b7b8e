"""How much of a text repeats itself: duplicate lines and paragraphs, top and duplicate word n-grams.

The rules are those of Gopher (Rae et al. 2021, section A1.1 and table A1); where the paper leaves room, the
definitions are DCLM's (`repetition_filter` in baselines/mappers/filters/content_filters.py), on whitespace words:

- A line, paragraph or n-gram is repeated if the text has it at least twice, byte for byte, case included.
- Duplicate lines and paragraphs: all copies count, the first included, as a share of all lines (paragraphs), or of
  the code points of all lines (paragraphs). Both are stripped, and empty ones do not count.
- Top n-gram: of the most frequent n-grams the one with the most code points; its count times its code points, as a
  share of the code points of all words. Copies that overlap all count, so that the share can exceed 1; it is 0 where
  no n-gram is repeated.
- Duplicate n-grams: the code points of all words that any repeated n-gram covers, the first copy included and no
  word counted twice, as a share of the code points of all words.

Nothing here can collide: equal hashes are compared byte by byte, and an n-gram is named by the exact numbers of the
two (n-1)-grams that it consists of. Only where both of those are repeated can it be repeated, so each n looks at
what is left of the one before. Time is linear in the words, whatever the text.
"""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.hashing import fmix64, hash_bytes, same_bytes
from gristmill.dataprep.kernels import kernel

TOP_NGRAMS = (2, 3, 4)
DUPLICATE_NGRAMS = (5, 6, 7, 8, 9, 10)
LONGEST_TOP, LONGEST_NGRAM = TOP_NGRAMS[-1], DUPLICATE_NGRAMS[-1]


@kernel
def empty_table(entries: int) -> np.ndarray:
    """A hash table (open addressing, int32 entry numbers, -1 is free) that so many entries fill by half at most."""
    size = 4
    while size < 2 * entries:
        size *= 2
    return np.full(size, -1, np.int32)


@kernel
def first_copies(data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """For each span, the number of the first span with the same bytes (int32)."""
    table = empty_table(len(starts))
    mask = np.uint64(len(table) - 1)
    hashes = np.empty(len(starts), np.uint64)
    first = np.empty(len(starts), np.int32)
    for span in range(len(starts)):
        start, length = starts[span], ends[span] - starts[span]
        value = hash_bytes(data, start, start + length)
        hashes[span] = value
        slot = value & mask
        while True:
            other = table[slot]
            if other < 0:
                table[slot] = first[span] = span
                break
            if (
                hashes[other] == value
                and ends[other] - starts[other] == length
                and same_bytes(data, starts[other], start, length)
            ):
                first[span] = other
                break
            slot = (slot + np.uint64(1)) & mask
    return first


@kernel
def first_pairs(first: np.ndarray) -> np.ndarray:
    """From n-grams to (n+1)-grams: for each position, the first position with the same (n+1)-gram (int32).

    It is -1 where the n-gram there or at the next position is marked -1, which means not repeated.
    """
    total = max(len(first) - 1, 0)
    pairs = np.full(total, -1, np.int32)
    candidates = 0
    for at in range(total):
        candidates += first[at] >= 0 and first[at + 1] >= 0
    table = empty_table(candidates)
    mask = np.uint64(len(table) - 1)
    for at in range(total):
        left, right = first[at], first[at + 1]
        if left < 0 or right < 0:
            continue
        slot = fmix64(np.uint64(left) << np.uint64(32) | np.uint64(right)) & mask
        while True:
            other = table[slot]
            if other < 0:
                table[slot] = pairs[at] = at
                break
            if first[other] == left and first[other + 1] == right:
                pairs[at] = other
                break
            slot = (slot + np.uint64(1)) & mask
    return pairs


@kernel
def count_copies(first: np.ndarray) -> np.ndarray:
    """How many copies each first copy has, itself included (int32, at its own position).

    Entries of `first` that have no other copy are marked -1.
    """
    counts = np.zeros(len(first), np.int32)
    for at in range(len(first)):
        if first[at] >= 0:
            counts[first[at]] += 1
    for at in range(len(first)):
        if first[at] >= 0 and counts[first[at]] < 2:
            first[at] = -1
    return counts


@kernel
def top_chars(first: np.ndarray, counts: np.ndarray, chars: np.ndarray, n: int) -> int:
    """Count times code points of the most frequent repeated n-gram, the longest of them; 0 without any."""
    best_count, best_length = 0, 0
    for at in range(len(first)):
        if first[at] != at or counts[at] < best_count:
            continue
        length = chars[at : at + n].sum()
        if counts[at] > best_count or length > best_length:
            best_count, best_length = counts[at], length
    return best_count * best_length


@kernel
def covered_chars(first: np.ndarray, chars: np.ndarray, n: int) -> int:
    """Code points of the words that repeated n-grams cover, each word once."""
    covered, total = 0, 0
    for at in range(len(first)):
        if first[at] < 0:
            continue
        for word in range(max(at, covered), at + n):
            total += chars[word]
        covered = at + n
    return total


@kernel
def segment_repetition(
    data: np.ndarray, starts: np.ndarray, ends: np.ndarray, chars: np.ndarray
) -> tuple[float, float]:
    """Share of segments that are repeated, by number and by code points; (0, 0) without segments."""
    if len(starts) == 0:
        return 0.0, 0.0
    first = first_copies(data, starts, ends)
    count_copies(first)
    number, length = 0, 0
    for segment in range(len(first)):
        if first[segment] >= 0:
            number += 1
            length += chars[segment]
    return number / len(starts), length / chars.sum()


@kernel
def ngram_repetition(
    data: np.ndarray, starts: np.ndarray, ends: np.ndarray, chars: np.ndarray, shares: np.ndarray
) -> None:
    """Write the shares of top (2 to 4) and duplicate (5 to 10) n-grams of one text's words.

    Args:
        shares: float64 of shape (9,), zeros; n-gram n goes to shares[n - 2].
    """
    if len(starts) == 0:
        return
    total = chars.sum()
    first = first_copies(data, starts, ends)
    counts = count_copies(first)
    for n in range(2, LONGEST_NGRAM + 1):
        first = first_pairs(first)
        counts = count_copies(first)
        if not np.any(first >= 0):
            return
        if n <= LONGEST_TOP:
            shares[n - 2] = top_chars(first, counts, chars, n) / total
        else:
            shares[n - 2] = covered_chars(first, chars, n) / total
