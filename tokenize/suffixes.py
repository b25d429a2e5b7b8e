"""Kernels over the suffixes of packed rows: what follows a place in a row, up to the end of its document's piece.

A place is a number, row x L + start. Suffixes are ordered token by token, a shorter one before those that it begins
(Manber & Myers 1993), within buckets: those whose first n tokens have hashes with the same leading bits. All places of
a passage of n tokens or more lie in one bucket, side by side. Rows are read where shards are mapped, by addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import carray

from gristmill.dataprep.text.hashing import fmix64, splitmix64
from gristmill.dataprep.text.kernels import kernel, pointer
from gristmill.tokenize.packed import OpenShard
from gristmill.tokenize.packed_files import expect_far_reads, read_ahead

RUN = 8
"""So many suffixes are sorted by insertion, then runs of them are merged."""


class Rows(NamedTuple):
    """Where training rows lie in memory, which a kernel reads as long as the `MappedRows` that has them is held.

    Attributes:
        tokens, offsets, bounds: uint64 (shards,), addresses of the tokens and of what `Boundaries` has.
        ends: int64 (shards,), the first row behind each shard.
        length: tokens per row, L.
        wide: whether tokens are uint32, not uint16.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    bounds: np.ndarray
    ends: np.ndarray
    length: int
    wide: bool


class MappedRows:
    """The training rows of a set, mapped.

    Args:
        shards: all of them, in their order.
        length: tokens per row, L.
        dtype: of the tokens.

    Attributes:
        rows: what the kernels take.
        dtype: of the tokens.
    """

    def __init__(self, shards: Sequence[OpenShard], length: int, dtype: np.dtype[Any]) -> None:
        self._kept = [
            (
                np.ascontiguousarray(shard.tokens),
                np.ascontiguousarray(shard.boundaries.offsets),
                np.ascontiguousarray(shard.boundaries.bounds),
            )
            for shard in shards
        ]
        tokens, offsets, bounds = (
            np.array([kept[part].ctypes.data for kept in self._kept], np.uint64) for part in range(3)
        )
        ends = np.cumsum([len(kept[0]) for kept in self._kept], dtype=np.int64)
        self.rows, self.dtype = Rows(tokens, offsets, bounds, ends, length, dtype.itemsize == 4), dtype

    def expect_far_reads(self) -> None:
        """See `packed_files.expect_far_reads`."""
        for arrays in self._kept:
            for one in arrays:
                expect_far_reads(one)

    def read_ahead(self, places: np.ndarray, tokens: int) -> None:
        """Have the system read so many tokens from some places on (int64), and where their pieces end."""
        length = self.rows.length
        numbers = np.searchsorted(self.rows.ends, places // length, side="right")
        of_shard = [
            places[numbers == number] - (self.rows.ends[number - 1] * length if number else 0)
            for number in range(len(self._kept))
        ]
        for (held, offsets, _), found in zip(self._kept, of_shard, strict=True):
            read_ahead(held, found, np.minimum(found + tokens, held.size))
            read_ahead(offsets, found // length, found // length + 2)
        for (_, offsets, bounds), found in zip(self._kept, of_shard, strict=True):
            read_ahead(bounds, offsets[found // length], offsets[found // length + 1])


@kernel
def _token(address, at, wide):  # type: ignore[no-untyped-def]
    if wide:
        return np.int64(carray(pointer(address + np.uint64(4 * at)), (1,), np.uint32)[0])
    return np.int64(carray(pointer(address + np.uint64(2 * at)), (1,), np.uint16)[0])


@kernel
def _address(place, rows):  # type: ignore[no-untyped-def]
    """Where the tokens from a place on lie."""
    shard = np.searchsorted(rows.ends, place // rows.length, side="right")
    first = rows.ends[shard - 1] * rows.length if shard else np.int64(0)
    return rows.tokens[shard] + np.uint64((place - first) * (4 if rows.wide else 2))


@kernel
def _tokens_left(place, rows):  # type: ignore[no-untyped-def]
    """Tokens from a place to the end of its document's piece."""
    row = place // rows.length
    shard = np.searchsorted(rows.ends, row, side="right")
    within = row - (rows.ends[shard - 1] if shard else 0)
    entries = carray(pointer(rows.offsets[shard] + np.uint64(8 * within)), (2,), np.int64)
    low, high, start = entries[0], entries[1] - 1, place - row * rows.length
    while low < high:  # the first bound behind the place
        middle = (low + high) // 2
        if carray(pointer(rows.bounds[shard] + np.uint64(4 * middle)), (1,), np.int32)[0] <= start:
            low = middle + 1
        else:
            high = middle
    return np.int64(carray(pointer(rows.bounds[shard] + np.uint64(4 * low)), (1,), np.int32)[0]) - start


@kernel
def _is_before(one, other, n, rows):  # type: ignore[no-untyped-def]
    """Whether the suffix of a place stands before that of another; both have n tokens or more."""
    first, second = _address(one, rows), _address(other, rows)
    for at in range(n):  # most differ here, and where they end need not be looked up
        left, right = _token(first, at, rows.wide), _token(second, at, rows.wide)
        if left != right:
            return left < right
    ends, end = _tokens_left(one, rows), _tokens_left(other, rows)
    for at in range(n, min(ends, end)):
        left, right = _token(first, at, rows.wide), _token(second, at, rows.wide)
        if left != right:
            return left < right
    return ends < end


@kernel
def _hash(address, n, wide):  # type: ignore[no-untyped-def]
    """A hash of the n tokens at an address: its first bits are their bucket, its last eight their print."""
    value = np.uint64(n)
    for at in range(n):
        value = splitmix64(value ^ np.uint64(_token(address, at, wide)))
    return fmix64(value)


@kernel
def _print(hashed):  # type: ignore[no-untyped-def]
    return np.uint8(hashed & np.uint64(255))


@kernel
def list_places(first, last, withheld, n, bits, rows, buckets, places):  # type: ignore[no-untyped-def]
    """Every place in some rows that has n tokens of its document's piece, and its bucket.

    Args:
        first, last: rows [first, last), of one shard.
        withheld: bool (last - first,), rows that are left out.
        n, bits: of the index; 1 <= bits <= 32.
        rows: see Rows.
        buckets: uint32, filled.
        places: uint32 or uint64, filled.

    Returns:
        how many there are.
    """
    found = 0
    for row in range(first, last):
        place, end = np.int64(row) * rows.length, np.int64(row + 1) * rows.length
        while place < end and not withheld[row - first]:
            # Behind the last piece is padding, of which no tokens are left.
            left = _tokens_left(place, rows)
            if left <= 0:
                break
            address = _address(place, rows)
            for at in range(left - n + 1):
                hashed = _hash(address + np.uint64(at * (4 if rows.wide else 2)), n, rows.wide)
                buckets[found] = hashed >> np.uint64(64 - bits)
                places[found] = place + at
                found += 1
            place += left
    return found


@kernel
def count_buckets(buckets, first, counts):  # type: ignore[no-untyped-def]
    """Add to `counts` (int64) how many of `buckets` (uint32) there are of each number from `first` on."""
    for bucket in buckets:
        counts[np.int64(bucket) - first] += 1


@kernel
def deal_out(buckets, places, first, filled, dealt):  # type: ignore[no-untyped-def]
    """Put each place where its bucket is filled up to: `filled` (int64), by bucket, in `dealt`."""
    for number in range(len(buckets)):
        bucket = np.int64(buckets[number]) - first
        dealt[filled[bucket]] = places[number]
        filled[bucket] += 1


@kernel
def _key(place, rows):  # type: ignore[no-untyped-def]
    """The first tokens of a suffix as one number in their order: eight bytes, which every suffix has."""
    address, key = _address(place, rows), np.uint64(0)
    for at in range(2 if rows.wide else 4):
        key = key << np.uint64(32 if rows.wide else 16) | np.uint64(_token(address, at, rows.wide))
    return key


@kernel
def sort_buckets(places, starts, n, rows, spare, prints):  # type: ignore[no-untyped-def]
    """Sort the places of each bucket by their suffixes, and take their prints; equal ones stay in their order.

    Args:
        places: uint32 or uint64, sorted in place.
        starts: int64 (buckets + 1,), where each bucket begins.
        n: tokens that every suffix has at the least, 4 or more.
        rows: see Rows.
        spare: like places, as large as the largest bucket.
        prints: uint8, like places, filled.
    """
    keys, spare_keys = np.empty(len(spare), np.uint64), np.empty(len(spare), np.uint64)
    for bucket in range(len(starts) - 1):
        begin, end = starts[bucket], starts[bucket + 1]
        sorted_ = places[begin:end]
        for at in range(end - begin):
            keys[at] = _key(np.int64(sorted_[at]), rows)
        for first in range(0, end - begin, RUN):
            for at in range(first + 1, min(first + RUN, end - begin)):
                moved, key, to = sorted_[at], keys[at], at
                while to > first and (
                    key < keys[to - 1]
                    or (key == keys[to - 1] and _is_before(np.int64(moved), np.int64(sorted_[to - 1]), n, rows))
                ):
                    sorted_[to], keys[to] = sorted_[to - 1], keys[to - 1]
                    to -= 1
                sorted_[to], keys[to] = moved, key
        width = RUN
        while width < end - begin:
            for first in range(0, end - begin - width, 2 * width):
                _merge(
                    sorted_, keys, first, first + width, min(first + 2 * width, end - begin), n, rows, spare, spare_keys
                )
            width *= 2
        for at in range(begin, end):
            prints[at] = _print(_hash(_address(np.int64(places[at]), rows), n, rows.wide))


@kernel
def _merge(places, keys, first, middle, last, n, rows, spare, spare_keys):  # type: ignore[no-untyped-def]
    """Merge two sorted runs that lie side by side."""
    for at in range(middle - first):
        spare[at], spare_keys[at] = places[first + at], keys[first + at]
    left, right, to = 0, middle, first
    while left < middle - first:
        if right < last and (
            keys[right] < spare_keys[left]
            or (keys[right] == spare_keys[left] and _is_before(np.int64(places[right]), np.int64(spare[left]), n, rows))
        ):
            places[to], keys[to] = places[right], keys[right]
            right += 1
        else:
            places[to], keys[to] = spare[left], spare_keys[left]
            left += 1
        to += 1


@kernel
def _shared(text, size, place, rows):  # type: ignore[no-untyped-def]
    """How many tokens a text (`size` tokens at an address) and a suffix begin with alike, and whether the suffix
    stands before the text."""
    address, left = _address(place, rows), _tokens_left(place, rows)
    for at in range(min(size, left)):
        own, other = _token(text, at, rows.wide), _token(address, at, rows.wide)
        if own != other:
            return at, other < own
    return min(size, left), left < size


@kernel
def hash_text(text, size, n, bits, wide, buckets, prints):  # type: ignore[no-untyped-def]
    """The buckets (int64) and the prints (uint8) of every n tokens of a text at an address, of (size - n + 1,)."""
    for at in range(size - n + 1):
        hashed = _hash(text + np.uint64(at * (4 if wide else 2)), n, wide)
        buckets[at], prints[at] = np.int64(hashed >> np.uint64(64 - bits)), _print(hashed)


@kernel
def keep_alike(prints, wanted, most, firsts, lasts):  # type: ignore[no-untyped-def]
    """Narrow parts of a partition to where places with the same print may be, to nothing where there is none.

    Args:
        prints: uint8, of the partition.
        wanted: uint8 (k,), a print for each part.
        most: parts that are longer are left as they are.
        firsts, lasts: int64 (k,), the parts [first, last), changed.
    """
    for number in range(len(wanted)):
        first, last = firsts[number], lasts[number]
        if last - first > most:
            continue
        while first < last and prints[first] != wanted[number]:
            first += 1
        while first < last and prints[last - 1] != wanted[number]:
            last -= 1
        firsts[number], lasts[number] = first, last


@kernel
def find_longest(text, size, begins, firsts, lasts, places, n, rows, found):  # type: ignore[no-untyped-def]
    """The longest passage from each of some places of a text on that stands in the rows, and where.

    Args:
        text, size: address of the text's tokens, and how many there are.
        begins: int64 (k,), places in the text, n tokens or more before its end.
        firsts, lasts: int64 (k,), the part [first, last) of the partition in which all places are that have the same n
            tokens, in the order of what follows them.
        places: of the partition.
        n: tokens of the shortest passage.
        rows: see Rows.
        found: int64 (k, 3), filled with the passage's tokens (0: there is none), and [first, last) of its places.
    """
    for number in range(len(begins)):
        begin = begins[number]
        address, left = text + np.uint64(begin * (4 if rows.wide else 2)), size - begin
        first, last = firsts[number], lasts[number]
        low, high = first, last
        while low < high:
            middle = (low + high) // 2
            if _shared(address, left, np.int64(places[middle]), rows)[1]:
                low = middle + 1
            else:
                high = middle
        # Those that share most stand beside where the text itself would.
        longest = 0
        if low > first:
            longest = _shared(address, left, np.int64(places[low - 1]), rows)[0]
        if low < last:
            longest = max(longest, _shared(address, left, np.int64(places[low]), rows)[0])
        found[number] = 0
        if longest < n:
            continue
        begins_at, ends_at, high = first, low, low
        while begins_at < high:
            middle = (begins_at + high) // 2
            if _shared(address, left, np.int64(places[middle]), rows)[0] < longest:
                begins_at = middle + 1
            else:
                high = middle
        high = last
        while ends_at < high:
            middle = (ends_at + high) // 2
            if _shared(address, left, np.int64(places[middle]), rows)[0] >= longest:
                ends_at = middle + 1
            else:
                high = middle
        found[number, 0], found[number, 1], found[number, 2] = longest, begins_at, ends_at
