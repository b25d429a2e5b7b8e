"""Report on a tokenizer: bytes per token and tokens per word.

A word is a run of bytes above U+0020: blanks, tabs and line breaks alone separate
words. For scripts written without spaces, characters per token is more informative than
tokens per word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

UNKNOWN_LANGUAGE = "unknown"
MEASURES = ("documents", "tokens", "bytes", "characters", "words")


@dataclass(frozen=True)
class GroupTokens:
    """Text and tokens of a source or language; ratios are None for a zero divisor."""

    documents: int
    tokens: int
    bytes: int
    characters: int
    words: int
    bytes_per_token: float | None
    characters_per_token: float | None
    tokens_per_word: float | None


def measure(
    names: pa.ChunkedArray, sizes: Mapping[str, np.ndarray]
) -> dict[str, dict[str, int]]:
    """Sum the counts of n documents by group.

    Args:
        names: group of each document; n strings, optionally dictionary-encoded.
        sizes: all of MEASURES but `documents`; int64 of shape (n,) each.
    """
    column = names.combine_chunks()
    coded = (
        column if isinstance(column, pa.DictionaryArray) else column.dictionary_encode()
    )
    members = coded.indices.to_numpy()
    groups = coded.dictionary.to_pylist()
    sums = {"documents": np.bincount(members, minlength=len(groups))}
    # bincount adds in float64: sums of integers below 2^53 are exact.
    sums |= {
        name: np.bincount(members, sizes[name], len(groups)) for name in MEASURES[1:]
    }
    return {
        group: {name: int(sums[name][place]) for name in MEASURES}
        for group, place in sorted(zip(groups, range(len(groups)), strict=True))
        if sums["documents"][place]
    }


def describe_groups(
    counted: Iterable[Mapping[str, Mapping[str, int]]],
) -> dict[str, GroupTokens]:
    """Sum the groups of all shards and add the ratios of text and tokens."""
    sums: dict[str, dict[str, int]] = {}
    for shard in counted:
        for name, group in shard.items():
            totals = sums.setdefault(name, dict.fromkeys(MEASURES, 0))
            for measure_name in MEASURES:
                totals[measure_name] += group[measure_name]
    return {
        name: GroupTokens(
            **group,
            bytes_per_token=_ratio(group["bytes"], group["tokens"]),
            characters_per_token=_ratio(group["characters"], group["tokens"]),
            tokens_per_word=_ratio(group["tokens"], group["words"]),
        )
        for name, group in sorted(sums.items())
    }


def _ratio(over: int, under: int) -> float | None:
    return round(over / under, 4) if under else None
