"""Rows copied out of shards into a batch, wherever they lie."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gristmill.dataprep.kernels import kernel


def by_shard(shards: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Each shard that occurs, ascending, with the places (int64, ascending) where it does."""
    places = np.argsort(shards, kind="stable")
    numbers, first = np.unique(shards[places], return_index=True)
    for number, start, end in zip(numbers.tolist(), first, [*first[1:], len(places)], strict=False):
        yield number, places[start:end]


@kernel
def gather_rows(shard, rows, places, out):  # type: ignore[no-untyped-def]
    """Copy rows of a shard (n, L) to places of a batch: out[places[k]] = shard[rows[k]], in one pass without the GIL.

    Args:
        shard: (n, L).
        rows: int64 (k,), in [0, n).
        places: int64 (k,).
        out: (m, L), filled at `places`.
    """
    for number in range(len(rows)):
        source, target = shard[rows[number]], out[places[number]]
        for token in range(len(source)):
            target[token] = source[token]
