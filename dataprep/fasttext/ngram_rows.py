"""Rows of a fastText model for character and word n-grams: hash buckets, and
prefetching of their rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gristmill.dataprep.fasttext.fasttext_files import WORD_BITS
from gristmill.dataprep.fasttext.float_rows import FLOAT_BYTES, fetch_floats
from gristmill.dataprep.text.kernels import inlined_kernel, inner_kernel
from gristmill.dataprep.text.simd import high_half, ones

WORD_STEP = np.uint64(116_049_371)
"""Factor of a word n-gram's hash for each further word
(`Dictionary::addWordNgrams`).
"""
WORD_SIZE = np.uint64(WORD_BITS)


class Ngrams(NamedTuple):
    """Settings that map n-grams to rows; see Weights."""

    kept: np.ndarray
    kept_before: np.ndarray
    words: int
    shortest: int
    longest: int
    buckets: np.uint64
    reciprocal: np.uint64
    """Reciprocal of `buckets`."""


@inlined_kernel
def find_rows(
    ngrams: Ngrams, buckets: np.ndarray, number: np.uint64, first_at: int, d: int
) -> np.uint64:
    """Find the rows of n-gram buckets, and prefetch them.

    Rows are scattered over a large matrix: all are prefetched before the first of them
    is added.

    Args:
        buckets: the buckets; replaced by the addresses of their rows.
        first_at: address of the first bucket's row.

    Returns:
        number of rows, without the buckets that a pruned model dropped
        (`Dictionary::pushHash`).
    """
    if len(ngrams.kept):
        kept_number = np.uint64(0)
        for index in range(number):
            bucket = buckets[index]
            buckets[kept_number] = bucket
            kept_number += is_kept(ngrams, bucket)
        number = kept_number
        for index in range(number):
            buckets[index] = place_of(ngrams, buckets[index])
    for index in range(number):
        buckets[index] = (
            np.uint64(first_at) + np.uint64(FLOAT_BYTES * d) * buckets[index]
        )
        fetch_floats(int(np.int64(buckets[index])), d)
    return number


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
    pruned = len(ngrams.kept) > 0
    value = np.uint64(np.int64(np.int32(hashes[first])))
    for last in range(first + single, min(first + longest, number)):
        value = value * WORD_STEP + np.uint64(np.int64(np.int32(hashes[last])))
        bucket = bucket_of(ngrams, value)
        if pruned and not is_kept(ngrams, bucket):
            continue
        row = place_of(ngrams, bucket) if pruned else bucket
        addresses[filled] = np.uint64(first_at) + np.uint64(FLOAT_BYTES * d) * row
        fetch_floats(int(np.int64(addresses[filled])), d)
        filled += single
    return filled


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


@inner_kernel
def reciprocal(number: np.uint64) -> np.uint64:
    """2^64 divided by a number, rounded down; for 1, which would overflow, one less."""
    largest = ~np.uint64(0)
    return (
        largest
        if number <= np.uint64(1)
        else largest // number + np.uint64(largest % number == number - np.uint64(1))
    )


@inlined_kernel
def bucket_of(ngrams: Ngrams, value: np.uint64) -> np.uint64:
    """Remainder of a hash by the number of buckets, without a division: the quotient is
    at most one too small.
    """
    remainder = value - high_half(value, ngrams.reciprocal) * ngrams.buckets
    return remainder - ngrams.buckets if remainder >= ngrams.buckets else remainder
