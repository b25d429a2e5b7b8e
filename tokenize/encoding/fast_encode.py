"""Encoding documents many times faster than one by one: a piece that was seen before keeps its ids.

A byte-level BPE gives each pre-token its ids independently of its neighbours. So text is split by a kernel
(`pretokens.py`), known pieces are looked up (`piece_cache.py`), and new ones are merged once (`merges.py`; very long
ones by the `tokenizers` library). The ids are the library's, for every text. A tokenizer whose pre-tokenizer or model
is not known here, or that normalizes, is left to the library altogether.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from gristmill.dataprep.text_buffers import text_buffers
from gristmill.tokenize.encoding.merges import Merges, merge_entries, read_merges
from gristmill.tokenize.encoding.piece_cache import PieceCache, copy_ids, count_ids, find_entries
from gristmill.tokenize.encoding.pretokens import CharacterClasses

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PROBES = (
    "", " ", "  a", "a  b \n\n c\t", "it's they'Re we'll 'd ' 's''t !'s", "x1²Ⅷ٣ ½a_b-c", "naïve Ångström e\u0301 ß",
    "日本語 テスト。 ไทย 한국어", "a\u00a0b\u2003c\u200b\u0085d\u3000", "\x00\x01\u2028", "🏳️‍🌈 <|endoftext|> [INST]",
)
"""Texts on which a tokenizer must agree with the library before it is used."""


class FastEncoder:
    """Encodes batches of documents; not to be shared by threads."""

    def __init__(self, tokenizer: Tokenizer, merges: Merges, cache: PieceCache | None = None) -> None:
        """See `for_tokenizer`, which checks that the tokenizer is of the right kind."""
        self._merges = merges
        self._unsplit = _without_splitting(tokenizer)
        self._classes = CharacterClasses()
        self._cache = cache or PieceCache()

    @classmethod
    def for_tokenizer(cls, tokenizer: Tokenizer) -> FastEncoder | None:
        """An encoder that gives the ids of `tokenizer.encode_batch(..., add_special_tokens=False)`, or None.

        The tokenizer must treat special tokens as text (`encode_special_tokens`).
        """
        merges = read_merges(tokenizer) if _is_known(tokenizer) else None
        if merges is None:
            return None
        encoder = cls(tokenizer, merges)
        ids, lengths = encoder.encode(pa.array(PROBES, pa.large_string()))
        expected = [one.ids for one in tokenizer.encode_batch(list(PROBES), add_special_tokens=False)]
        same = ids.tolist() == [number for one in expected for number in one]
        return encoder if same and lengths.tolist() == list(map(len, expected)) else None

    def encode(self, texts: pa.Array | pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
        """Encode n documents.

        Returns:
            ids: uint32, of all documents one after the other; lengths: int64 of shape (n,), ids of each.

        Raises:
            pa.ArrowInvalid: a text is not UTF-8.
        """
        data, offsets = text_buffers(texts)
        size = int(offsets[-1] - offsets[0])
        self._cache.make_room(size)
        try:
            found, pieces = self._find(data, offsets, np.empty(size, np.int32))
        except BaseException:
            self._cache.forget()  # entries without ids must not be found again
            raise
        starts, ids = self._cache.id_starts, self._cache.ids
        lengths = np.array([count_ids(found[begin:end], starts) for begin, end in pairwise(pieces)], np.int64)
        out = np.empty(int(lengths.sum()), np.uint32)
        copy_ids(found, starts, ids, out)
        return out, lengths

    def _find(self, data: np.ndarray, offsets: np.ndarray, found: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """The entries of all pieces, and where those of each text begin; new ones get their ids."""
        cache, first = self._cache, self._cache.entries
        pieces = [0]
        for begin, end in pairwise(offsets.tolist()):
            pieces.append(pieces[-1] + self._look_up(data, begin, end, found[pieces[-1] :]))
        while first < cache.entries:
            first = merge_entries(
                first, cache.entries, cache.starts, cache.arena, cache.id_starts, cache.ids, *self._merges)
            if first < cache.entries:
                cache.add_ids(first, self._unsplit.encode(cache.piece(first), add_special_tokens=False).ids)
                first += 1
        return found[: pieces[-1]], pieces

    def _look_up(self, data: np.ndarray, begin: int, end: int, found: np.ndarray) -> int:
        cache = self._cache
        while True:
            count, cache.entries, unknown = find_entries(
                data, begin, end, self._classes.table, cache.slots, cache.hashes, cache.starts, cache.arena,
                cache.entries, found,
            )  # fmt: skip
            if unknown == 0:
                return int(count)
            self._classes.learn(-1 - unknown)


def _is_known(tokenizer: Tokenizer) -> bool:
    """Whether each pre-token of GPT-2's pattern has its ids whatever stands beside it."""
    described = json.loads(tokenizer.to_str())
    splitting, model = described.get("pre_tokenizer") or {}, described["model"]
    return (
        described.get("normalizer") is None
        and splitting.get("type") == "ByteLevel" and splitting.get("use_regex", True)
        and not splitting.get("add_prefix_space", True)
        and model.get("type") == "BPE" and not model.get("dropout")
        and not model.get("continuing_subword_prefix") and not model.get("end_of_word_suffix")
        and all(token["special"] for token in described.get("added_tokens", []))
    )


def _without_splitting(tokenizer: Tokenizer) -> Tokenizer:
    """The same model for texts that are one pre-token each."""
    from tokenizers import Tokenizer, pre_tokenizers

    unsplit = Tokenizer.from_str(tokenizer.to_str())
    unsplit.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    unsplit.encode_special_tokens = True
    unsplit.no_truncation()
    unsplit.no_padding()
    return unsplit
