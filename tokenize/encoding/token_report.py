"""Report on a tokenizer: bytes per token, tokens per word, and the used part of the
vocabulary.

A word is a run of bytes above U+0020: blanks, tabs and line breaks alone separate
words. For scripts written without spaces, characters per token is more informative than
tokens per word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from gristmill.dataprep.text.kernels import kernel
from gristmill.tokenize.encoding.pretokens import byte_characters
from gristmill.tokenize.encoding.tokenizer import BLANK, TextTokenizer

UNKNOWN_LANGUAGE = "unknown"
SHOWN_TOKENS = 20
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


@dataclass(frozen=True)
class TokenCount:
    """A token and its number in the documents.

    Attributes:
        id: of the vocabulary.
        text: bytes that are not whole characters as \\xNN.
        bytes: of its text.
        count: in the documents.
    """

    id: int
    text: str
    bytes: int
    count: int


@dataclass(frozen=True)
class VocabularyUse:
    """Usage of a vocabulary by the documents.

    Attributes:
        size: ids without special tokens, which text never has.
        used: ids in the documents.
        never_used: the other ids.
        used_share: of `size`.
        single_byte_share: of all tokens in the documents.
        most_frequent: SHOWN_TOKENS tokens.
        longest: SHOWN_TOKENS tokens in the documents.
    """

    size: int
    used: int
    never_used: int
    used_share: float | None
    single_byte_share: float | None
    most_frequent: Sequence[TokenCount]
    longest: Sequence[TokenCount]


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


def describe_vocabulary(counts: np.ndarray, tokenizer: TextTokenizer) -> VocabularyUse:
    """Usage of a vocabulary by the documents.

    Args:
        counts: int64 of shape (vocab_size,), count of each id in the documents.
        tokenizer: of the documents.
    """
    plain = np.ones(len(counts), bool)
    plain[list(tokenizer.special_ids.values())] = False
    plain &= tokenizer.token_bytes > 0
    size = int(plain.sum())
    used = np.flatnonzero(counts)
    sizes = tokenizer.token_bytes.astype(np.int64)
    by_count = used[np.lexsort((used, -counts[used]))][:SHOWN_TOKENS]
    by_size = used[np.lexsort((used, -counts[used], -sizes[used]))][:SHOWN_TOKENS]
    return VocabularyUse(
        size=size,
        used=len(used),
        never_used=size - len(used),
        used_share=_ratio(len(used), size),
        single_byte_share=_ratio(int(counts[sizes == 1].sum()), int(counts.sum())),
        most_frequent=_tokens(by_count, counts, tokenizer),
        longest=_tokens(by_size, counts, tokenizer),
    )


@kernel
def count_ids(ids: np.ndarray, counts: np.ndarray, narrow: np.ndarray) -> None:
    """Count ids, and copy them into a narrower dtype.

    Args:
        ids: uint32 of shape (n,), below the size of the vocabulary.
        counts: int64 of shape (vocabulary,), updated.
        narrow: uint16 or uint32, the first n are set.
    """
    # Separate counts for even and odd positions: consecutive additions to the same
    # count would wait for each other.
    even, odd = np.zeros(len(counts), np.uint32), np.zeros(len(counts), np.uint32)
    at, end = np.uint64(0), np.uint64(len(ids))
    while at < end:
        stop = min(end, at + FEW_IDS)
        for place in range(at, stop):
            narrow[place] = ids[place]
        for pair in range(at >> _ONE, stop >> _ONE):
            even[narrow[pair << _ONE]] += np.uint32(1)
            odd[narrow[pair << _ONE | _ONE]] += np.uint32(1)
        at = stop
    if len(ids) % 2:
        even[narrow[len(ids) - 1]] += np.uint32(1)
    counts += even
    counts += odd


_ONE = np.uint64(1)
FEW_IDS = np.uint64(1024)
"""Ids counted at a time, while their copy is still in the processor's cache."""


def _tokens(
    ids: np.ndarray, counts: np.ndarray, tokenizer: TextTokenizer
) -> list[TokenCount]:
    return [
        TokenCount(
            int(number),
            token_text(int(number), tokenizer),
            int(tokenizer.token_bytes[number]),
            int(counts[number]),
        )
        for number in ids
    ]


def token_text(number: int, tokenizer: TextTokenizer) -> str:
    """The text of a token; bytes that are not whole characters as \\xNN."""
    spelt = tokenizer.tokenizer.id_to_token(number) or ""
    if tokenizer.token_bytes[number] != len(spelt) or BLANK in spelt:
        return spelt.replace(BLANK, " ")  # its characters are not bytes
    values = {character: byte for byte, character in enumerate(byte_characters())}
    if not all(character in values for character in spelt):
        return spelt
    return bytes(values[character] for character in spelt).decode(
        errors="backslashreplace"
    )


def _ratio(over: int, under: int) -> float | None:
    return round(over / under, 4) if under else None
