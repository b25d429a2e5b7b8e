"""Which rows of a fastText model n-grams stand for, of characters and of words: buckets of hashes, found before use."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gristmill.dataprep.judges.fasttext.fasttext_files import WORD_BITS
from gristmill.dataprep.judges.fasttext.float_rows import FLOAT_BYTES, fetch_floats, high_half
from gristmill.dataprep.text.kernels import inlined_kernel, inner_kernel

WORD_STEP = np.uint64(116_049_371)
"""By which the hash of an n-gram of words is multiplied for each further word (`Dictionary::addWordNgrams`)."""
WORD_SIZE = np.uint64(WORD_BITS)


class Ngrams(NamedTuple):
    """What says which rows n-grams have; see Weights."""

    kept: np.ndarray
    kept_before: np.ndarray
    words: int
    shortest: int
    longest: int
    buckets: np.uint64
    reciprocal: np.uint64
    """Of `buckets`."""


@inlined_kernel
def find_rows(ngrams: Ngrams, found: np.ndarray, number: np.uint64, first_at: int, d: int) -> np.uint64:
    """Find the rows of so many buckets of n-grams, and have them brought near.

    They lie anywhere in a large matrix: all are asked for before the first of them is added.

    Args:
        found: the buckets, which become the addresses of their rows.
        first_at: the address of the first bucket's row.

    Returns:
        how many rows they have: not those that a pruned model dropped (`Dictionary::pushHash`).
    """
    if len(ngrams.kept):
        left = np.uint64(0)
        for at in range(number):
            bucket = found[at]
            found[left] = bucket
            left += is_kept(ngrams, bucket)
        number = left
        for at in range(number):
            found[at] = place_of(ngrams, found[at])
    for at in range(number):
        found[at] = np.uint64(first_at) + np.uint64(FLOAT_BYTES * d) * found[at]
        fetch_floats(int(np.int64(found[at])), d)
    return number


@inlined_kernel
def ask_for_ngrams(
    ngrams: Ngrams,
    longest: np.uint64,
    hashes: np.ndarray,
    found: np.ndarray,
    first: np.uint64,
    number: np.uint64,
    filled: np.uint64,
    first_at: int,
    d: int,
) -> np.uint64:
    """Find the rows of the n-grams of two words and more that begin at a word of a line, and have them brought near.

    Args:
        longest: words of the longest ones.
        hashes: uint32, those of the line's words.
        found: uint64; receives the addresses of the rows.
        first: the word.
        number: how many words of the line have their hashes.
        filled: how many addresses `found` has already.
        first_at: the address of the first bucket's row.

    Returns:
        how many addresses there are now.
    """
    one, pruned = np.uint64(1), len(ngrams.kept) > 0
    value = np.uint64(np.int64(np.int32(hashes[first])))
    for last in range(first + one, min(first + longest, number)):
        value = value * WORD_STEP + np.uint64(np.int64(np.int32(hashes[last])))
        bucket = bucket_of(ngrams, value)
        if pruned and not is_kept(ngrams, bucket):
            continue
        row = place_of(ngrams, bucket) if pruned else bucket
        found[filled] = np.uint64(first_at) + np.uint64(FLOAT_BYTES * d) * row
        fetch_floats(int(np.int64(found[filled])), d)
        filled += one
    return filled


@inlined_kernel
def is_kept(ngrams: Ngrams, bucket: np.uint64) -> np.uint64:
    """1 if a pruned model kept a bucket, else 0."""
    return ngrams.kept[bucket // WORD_SIZE] >> bucket % WORD_SIZE & np.uint64(1)


@inlined_kernel
def place_of(ngrams: Ngrams, bucket: np.uint64) -> np.uint64:
    """How many buckets a pruned model kept before one."""
    bits = ngrams.kept[bucket // WORD_SIZE] & ((np.uint64(1) << bucket % WORD_SIZE) - np.uint64(1))
    return np.uint64(ngrams.kept_before[bucket // WORD_SIZE]) + count_bits(bits)


@inner_kernel
def reciprocal(number: np.uint64) -> np.uint64:
    """2^64 divided by a number, rounded down; of 1, where that is too large, one less."""
    most = ~np.uint64(0)
    return most if number <= np.uint64(1) else most // number + np.uint64(most % number == number - np.uint64(1))


@inlined_kernel
def bucket_of(ngrams: Ngrams, value: np.uint64) -> np.uint64:
    """The remainder of a hash by the buckets, without a division: the quotient is at most one too small."""
    left = value - high_half(value, ngrams.reciprocal) * ngrams.buckets
    return left - ngrams.buckets if left >= ngrams.buckets else left


@inner_kernel
def count_bits(number: np.uint64) -> np.uint64:
    """How many bits are set (Warren, Hacker's Delight, section 5-1)."""
    number -= number >> np.uint64(1) & np.uint64(0x5555555555555555)
    number = (number & np.uint64(0x3333333333333333)) + (number >> np.uint64(2) & np.uint64(0x3333333333333333))
    number = (number + (number >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return number * np.uint64(0x0101010101010101) >> np.uint64(56)
