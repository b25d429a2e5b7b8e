"""How well a tokenizer fits the documents: bytes per token, tokens per word, and what of the vocabulary is used.

A word is a run of bytes above U+0020, so blanks, tabs and line breaks separate words and nothing else does; for scripts
that are written without spaces, characters per token says more than tokens per word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.dataprep.text.kernels import kernel
from gristmill.tokenize.encoding.pretokens import byte_characters
from gristmill.tokenize.encoding.tokenizer import TextTokenizer
from gristmill.tokenize.encoding.vocabulary import BLANK

UNKNOWN_LANGUAGE = "unknown"
SHOWN_TOKENS = 20
MEASURES = ("documents", "tokens", "bytes", "characters", "words")


def measure(names: pa.ChunkedArray, sizes: Mapping[str, np.ndarray]) -> dict[str, dict[str, int]]:
    """Sum what was counted of n documents by group.

    Args:
        names: strings, maybe as a dictionary; n, the group of each.
        sizes: all of MEASURES but `documents`; int64 of shape (n,) each.
    """
    column = names.combine_chunks()
    coded = column if isinstance(column, pa.DictionaryArray) else column.dictionary_encode()
    members, groups = coded.indices.to_numpy(), coded.dictionary.to_pylist()
    sums = {"documents": np.bincount(members, minlength=len(groups))}
    # Sums of whole numbers below 2^53 are exact in float64, which bincount adds in.
    sums |= {name: np.bincount(members, sizes[name], len(groups)) for name in MEASURES[1:]}
    return {
        group: {name: int(sums[name][place]) for name in MEASURES}
        for group, place in sorted(zip(groups, range(len(groups)), strict=True))
        if sums["documents"][place]
    }


def describe_groups(counted: Iterable[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, Any]]:
    """Add up the groups of all shards, and how their text and tokens compare; None where there is nothing to divide."""
    sums: dict[str, dict[str, int]] = {}
    for shard in counted:
        for name, group in shard.items():
            known = sums.setdefault(name, dict.fromkeys(MEASURES, 0))
            for measure_name in MEASURES:
                known[measure_name] += group[measure_name]
    return {
        name: {
            **group,
            "bytes_per_token": _ratio(group["bytes"], group["tokens"]),
            "characters_per_token": _ratio(group["characters"], group["tokens"]),
            "tokens_per_word": _ratio(group["tokens"], group["words"]),
        }
        for name, group in sorted(sums.items())
    }


def describe_vocabulary(counts: np.ndarray, tokenizer: TextTokenizer) -> dict[str, Any]:
    """What of a vocabulary the documents use.

    Args:
        counts: int64 of shape (vocab_size,), how often the documents have each id.
        tokenizer: theirs.

    Returns:
        `size` of the vocabulary without special tokens (text never has them), how many of these ids are `used` and
        `never_used`, `used_share`; `single_byte_share` of all tokens in the documents; and the `most_frequent` and the
        `longest` tokens that were used (id, text, bytes, count).
    """
    plain = np.ones(len(counts), bool)
    plain[list(tokenizer.special_ids.values())] = False
    plain &= tokenizer.token_bytes > 0
    used, total = np.flatnonzero(counts), int(counts.sum())
    sizes = tokenizer.token_bytes.astype(np.int64)
    by_count = used[np.lexsort((used, -counts[used]))][:SHOWN_TOKENS]
    by_size = used[np.lexsort((used, -counts[used], -sizes[used]))][:SHOWN_TOKENS]
    return {
        "size": int(plain.sum()),
        "used": len(used),
        "never_used": int(plain.sum()) - len(used),
        "used_share": _ratio(len(used), int(plain.sum())),
        "single_byte_share": _ratio(int(counts[sizes == 1].sum()), total),
        "most_frequent": _tokens(by_count, counts, tokenizer),
        "longest": _tokens(by_size, counts, tokenizer),
    }


@kernel
def count_ids(ids: np.ndarray, counts: np.ndarray, narrow: np.ndarray) -> None:
    """Count ids, and copy them into fewer bits.

    Args:
        ids: uint32 of shape (n,), below the size of the vocabulary.
        counts: int64 of shape (vocabulary,), is added to.
        narrow: uint16 or uint32, the first n are set.
    """
    # Two at a time in counts of their own: an addition waits for the one before where both are to the same number.
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
"""So many are counted while the processor still has at hand what was copied."""


def _tokens(ids: np.ndarray, counts: np.ndarray, tokenizer: TextTokenizer) -> list[dict[str, Any]]:
    return [
        {
            "id": int(number),
            "text": token_text(int(number), tokenizer),
            "bytes": int(tokenizer.token_bytes[number]),
            "count": int(counts[number]),
        }
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
    return bytes(values[character] for character in spelt).decode(errors="backslashreplace")


def _ratio(over: int, under: int) -> float | None:
    return round(over / under, 4) if under else None
