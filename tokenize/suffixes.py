"""Kernels over the suffixes of packed rows: the tokens from a place in a row to the end
of its document's piece.

A place is a number, row x L + start. Suffixes are ordered token by token, a prefix
before its extensions (Manber & Myers 1993), within buckets: suffixes whose first n
tokens have hashes with the same leading bits. All places of a passage of at least n
tokens are contiguous in one bucket. Rows are read from mapped shards, by address.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import carray

from gristmill.dataprep.text.hashing import fmix64, splitmix64
from gristmill.dataprep.text.kernels import inner_kernel, kernel, pointer
from gristmill.tokenize.packed import OpenShard
from gristmill.tokenize.packed_files import expect_far_reads, read_ahead

RUN = 8
"""Suffixes sorted by insertion before runs are merged."""


class Rows(NamedTuple):
    """Addresses of training rows, valid for kernels while their `MappedRows` is alive.

    Attributes:
        tokens, offsets, bounds: uint64 (shards,), addresses of the tokens and of the
            arrays of `Boundaries`.
        ends: int64 (shards,), end of each shard in rows.
        length: tokens per row, L.
        wide: tokens are uint32, not uint16.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    bounds: np.ndarray
    ends: np.ndarray
    length: int
    wide: bool


class MappedRows:
    """Memory-mapped training rows of a set.

    Args:
        shards: all of them, in order.
        length: tokens per row, L.
        dtype: of the tokens.

    Attributes:
        rows: argument of the kernels.
        dtype: of the tokens.
    """

    def __init__(
        self, shards: Sequence[OpenShard], length: int, dtype: np.dtype
    ) -> None:
        self._kept = [
            (
                np.ascontiguousarray(shard.tokens),
                np.ascontiguousarray(shard.boundaries.offsets),
                np.ascontiguousarray(shard.boundaries.bounds),
            )
            for shard in shards
        ]
        tokens, offsets, bounds = (
            np.array([kept[part].ctypes.data for kept in self._kept], np.uint64)
            for part in range(3)
        )
        ends = np.cumsum([len(kept[0]) for kept in self._kept], dtype=np.int64)
        self.rows = Rows(tokens, offsets, bounds, ends, length, dtype.itemsize == 4)
        self.dtype = dtype

    def expect_far_reads(self) -> None:
        """See `packed_files.expect_far_reads`."""
        for arrays in self._kept:
            for array in arrays:
                expect_far_reads(array)

    def read_ahead(self, places: np.ndarray, tokens: int) -> None:
        """Prefetch `tokens` tokens from each place on (int64), and the bounds of their
        pieces.
        """
        length = self.rows.length
        by_shard = []
        numbers = np.searchsorted(self.rows.ends, places // length, side="right")
        for number, arrays in enumerate(self._kept):
            first = self.rows.ends[number - 1] * length if number else 0
            by_shard.append((arrays, places[numbers == number] - first))
        for (shard_tokens, offsets, _), within in by_shard:
            lasts = np.minimum(within + tokens, shard_tokens.size)
            read_ahead(shard_tokens, within, lasts)
            read_ahead(offsets, within // length, within // length + 2)
        for (_, offsets, bounds), within in by_shard:
            rows = within // length
            read_ahead(bounds, offsets[rows], offsets[rows + 1])


@kernel
def _load(address, at, kind):  # type: ignore[no-untyped-def]
    """Number at an index of an array at an address."""
    return np.int64(carray(pointer(address), (at + 1,), kind)[np.uint64(at)])


@kernel
def _token(address, at, wide):  # type: ignore[no-untyped-def]
    return _load(address, at, np.uint32) if wide else _load(address, at, np.uint16)


@kernel
def _address(place, rows):  # type: ignore[no-untyped-def]
    """Address of the tokens from a place on."""
    shard = np.searchsorted(rows.ends, place // rows.length, side="right")
    first = rows.ends[shard - 1] * rows.length if shard else np.int64(0)
    return rows.tokens[shard] + np.uint64((place - first) * (4 if rows.wide else 2))


@kernel
def _tokens_left(place, rows):  # type: ignore[no-untyped-def]
    """Tokens from a place to the end of its document's piece."""
    row = place // rows.length
    shard = np.searchsorted(rows.ends, row, side="right")
    within = row - (rows.ends[shard - 1] if shard else 0)
    low = _load(rows.offsets[shard], within, np.int64)
    high = _load(rows.offsets[shard], within + 1, np.int64) - 1
    start = place - row * rows.length
    while low < high:  # the first bound after the place
        middle = (low + high) // 2
        if _load(rows.bounds[shard], middle, np.int32) <= start:
            low = middle + 1
        else:
            high = middle
    return _load(rows.bounds[shard], low, np.int32) - start


@kernel
def _is_before(place, other_place, n, rows):  # type: ignore[no-untyped-def]
    """Return whether the suffix of a place precedes that of another; both have at least
    n tokens.
    """
    first, second = _address(place, rows), _address(other_place, rows)
    for at in range(n):  # most differ here, without looking up their ends
        token, other_token = _token(first, at, rows.wide), _token(second, at, rows.wide)
        if token != other_token:
            return token < other_token
    ends, end = _tokens_left(place, rows), _tokens_left(other_place, rows)
    for at in range(n, min(ends, end)):
        token, other_token = _token(first, at, rows.wide), _token(second, at, rows.wide)
        if token != other_token:
            return token < other_token
    return ends < end


@inner_kernel
def _precedes(key, place, other_key, other_place, n, rows):  # type: ignore[no-untyped-def]
    """`_is_before`, decided by the first tokens (`_key`) if they differ."""
    if key != other_key:
        return key < other_key
    return _is_before(np.int64(place), np.int64(other_place), n, rows)


@kernel
def _hash(address, n, wide):  # type: ignore[no-untyped-def]
    """Hash of n tokens at an address: the leading bits are the bucket, the last eight
    the print.
    """
    value = np.uint64(n)
    for at in range(n):
        value = splitmix64(value ^ np.uint64(_token(address, at, wide)))
    return fmix64(value)


@kernel
def _print(hashed):  # type: ignore[no-untyped-def]
    return np.uint8(hashed & np.uint64(255))


@kernel
def list_places(first, last, withheld, n, bits, rows, buckets, places):  # type: ignore[no-untyped-def]
    """List the places in some rows that have n tokens of their document's piece, with
    their buckets.

    Args:
        first, last: rows [first, last), of one shard.
        withheld: bool (last - first,), rows to skip.
        n, bits: of the index; 1 <= bits <= 32.
        rows: see Rows.
        buckets: uint32, filled.
        places: uint32 or uint64, filled.

    Returns:
        the number of places.
    """
    count = 0
    for row in range(first, last):
        place, end = np.int64(row) * rows.length, np.int64(row + 1) * rows.length
        while place < end and not withheld[row - first]:
            # The last piece is followed by padding, which has no remaining tokens.
            remaining = _tokens_left(place, rows)
            if remaining <= 0:
                break
            address = _address(place, rows)
            for at in range(remaining - n + 1):
                hashed = _hash(
                    address + np.uint64(at * (4 if rows.wide else 2)), n, rows.wide
                )
                buckets[count] = hashed >> np.uint64(64 - bits)
                places[count] = place + at
                count += 1
            place += remaining
    return count


@kernel
def deal_out(buckets, places, first, filled, dealt):  # type: ignore[no-untyped-def]
    """Write each place to the next free slot of its bucket in `dealt`: `filled`
    (int64), by bucket.
    """
    for number in range(len(buckets)):
        bucket = np.int64(buckets[number]) - first
        dealt[filled[bucket]] = places[number]
        filled[bucket] += 1


@kernel
def _key(place, rows):  # type: ignore[no-untyped-def]
    """First tokens of a suffix as one number in suffix order: eight bytes, which every
    suffix has.
    """
    address, key = _address(place, rows), np.uint64(0)
    for at in range(2 if rows.wide else 4):
        key = key << np.uint64(32 if rows.wide else 16) | np.uint64(
            _token(address, at, rows.wide)
        )
    return key


@kernel
def sort_buckets(places, starts, n, rows, spare, prints):  # type: ignore[no-untyped-def]
    """Sort the places of each bucket by suffix, stable, and compute their prints.

    Args:
        places: uint32 or uint64, sorted in place.
        starts: int64 (buckets + 1,), first place of each bucket.
        n: least tokens of a suffix, at least 4.
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
                place, key, slot = sorted_[at], keys[at], at
                while slot > first and _precedes(
                    key, place, keys[slot - 1], sorted_[slot - 1], n, rows
                ):
                    sorted_[slot], keys[slot] = sorted_[slot - 1], keys[slot - 1]
                    slot -= 1
                sorted_[slot], keys[slot] = place, key
        width = RUN
        while width < end - begin:
            for first in range(0, end - begin - width, 2 * width):
                _merge(
                    sorted_,
                    keys,
                    first,
                    first + width,
                    min(first + 2 * width, end - begin),
                    n,
                    rows,
                    spare,
                    spare_keys,
                )
            width *= 2
        for at in range(begin, end):
            prints[at] = _print(
                _hash(_address(np.int64(places[at]), rows), n, rows.wide)
            )


@kernel
def _merge(places, keys, first, middle, last, n, rows, spare, spare_keys):  # type: ignore[no-untyped-def]
    """Merge two adjacent sorted runs."""
    for at in range(middle - first):
        spare[at], spare_keys[at] = places[first + at], keys[first + at]
    spare_slot, run_slot, target = 0, middle, first
    while spare_slot < middle - first:
        if run_slot < last and _precedes(
            keys[run_slot],
            places[run_slot],
            spare_keys[spare_slot],
            spare[spare_slot],
            n,
            rows,
        ):
            places[target], keys[target] = places[run_slot], keys[run_slot]
            run_slot += 1
        else:
            places[target], keys[target] = spare[spare_slot], spare_keys[spare_slot]
            spare_slot += 1
        target += 1


@kernel
def _shared(text, size, place, rows):  # type: ignore[no-untyped-def]
    """Common prefix length of a text (`size` tokens at an address) and a suffix, and
    whether the suffix sorts first.
    """
    address, remaining = _address(place, rows), _tokens_left(place, rows)
    for at in range(min(size, remaining)):
        token, suffix_token = (
            _token(text, at, rows.wide),
            _token(address, at, rows.wide),
        )
        if token != suffix_token:
            return at, suffix_token < token
    return min(size, remaining), remaining < size


@kernel
def hash_text(text, size, n, bits, wide, buckets, prints):  # type: ignore[no-untyped-def]
    """Compute bucket (int64) and print (uint8) of every n tokens of a text at an
    address: (size - n + 1,).
    """
    for at in range(size - n + 1):
        hashed = _hash(text + np.uint64(at * (4 if wide else 2)), n, wide)
        buckets[at] = np.int64(hashed >> np.uint64(64 - bits))
        prints[at] = _print(hashed)


@kernel
def keep_alike(prints, wanted, most, firsts, lasts):  # type: ignore[no-untyped-def]
    """Narrow ranges of a partition to places with a matching print; empty if there is
    none.

    Args:
        prints: uint8, of the partition.
        wanted: uint8 (k,), a print for each range.
        most: longer ranges are left unchanged.
        firsts, lasts: int64 (k,), the ranges [first, last), updated.
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
def _bound(text, size, places, low, high, after, rows):  # type: ignore[no-untyped-def]
    """First of the sorted places [low, high) whose suffix does not precede a text; with
    `after`, the first that also does not begin with it.
    """
    while low < high:
        middle = (low + high) // 2
        common, is_before = _shared(text, size, np.int64(places[middle]), rows)
        if is_before or (after and common == size):
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def find_longest(text, size, begins, firsts, lasts, places, n, rows, passages):  # type: ignore[no-untyped-def]
    """Find the longest passage of the rows that begins at each of some places of a
    text, and its occurrences.

    Args:
        text, size: address and number of the text's tokens.
        begins: int64 (k,), places in the text, n tokens or more before its end.
        firsts, lasts: int64 (k,), the part [first, last) of the partition in which all
            places are that have the same n tokens, in the order of what follows them.
        places: of the partition.
        n: tokens of the shortest passage.
        rows: see Rows.
        passages: int64 (k, 3), filled with the passage's tokens (0: there is none), and
            [first, last) of its places.
    """
    for number in range(len(begins)):
        begin = begins[number]
        address = text + np.uint64(begin * (4 if rows.wide else 2))
        remaining = size - begin
        first, last = firsts[number], lasts[number]
        here = _bound(address, remaining, places, first, last, False, rows)
        # Those that share most stand beside where the text itself would.
        longest = 0
        for place in range(max(here - 1, first), min(here + 1, last)):
            common = _shared(address, remaining, np.int64(places[place]), rows)[0]
            longest = max(longest, common)
        passages[number] = 0
        if longest < n:
            continue
        passages[number, 0] = longest
        passages[number, 1] = _bound(address, longest, places, first, here, False, rows)
        passages[number, 2] = _bound(address, longest, places, here, last, True, rows)
