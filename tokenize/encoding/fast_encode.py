"""Encoding documents many times faster than one by one: a piece that was seen before keeps its ids.

A byte-level BPE gives each pre-token its ids independently of its neighbours. So one pass over the text finds where
each piece ends (`pretokens.py`), looks it up (`piece_cache.py`), merges it where it is new (`merging.py`), and writes
its ids. They are the library's, for every text. A tokenizer whose pre-tokenizer, model or added tokens are not known
here, or that normalizes, is left to the library altogether.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from gristmill.dataprep.kernels import kernel
from gristmill.dataprep.text_buffers import text_buffers
from gristmill.tokenize.encoding.character_classes import CharacterClasses
from gristmill.tokenize.encoding.encode_kernel import DONE, TO, encode_texts
from gristmill.tokenize.encoding.merges import Merges, byte_characters, read_merges
from gristmill.tokenize.encoding.patterns import NotKnownError, Pattern, read_pattern
from gristmill.tokenize.encoding.piece_cache import (
    IDS_INSIDE,
    PieceCache,
    empty_cache,
    find_cell,
    first_cell,
    piece_key,
    remember,
)
from gristmill.tokenize.packed_files import DTYPES, dtype_name

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PROBES = (
    "", " ", "  a", "a  b \n\n c\t", "it's they'Re we'll 'd ' 's''t !'s", "x1²Ⅷ٣ ½a_b-c", "naïve Ångström e\u0301 ß",
    "日本語 テスト。 ไทย 한국어", "a\u00a0b\u2003c\u200b\u0085d\u3000", "\x00\x01\u2028", "🏳️‍🌈 <|endoftext|> [INST]",
    "I'LL 'ſo\r\n\r\n  1234567 !?\n\n\tdef", " 12 3  4", "water" * 20,
)
"""Texts on which a tokenizer must agree with the library before it is used."""


class FastEncoder:
    """Encodes batches of documents; not to be shared by threads."""

    def __init__(
        self, pattern: Pattern, merges: Merges, dtype: np.dtype[Any], whole: PieceCache, cache: PieceCache | None = None
    ) -> None:
        """See `for_tokenizer`, which checks that the tokenizer is of the right kind.

        Args:
            pattern: how text is split.
            merges: how a piece is merged.
            dtype: of the ids.
            whole: pieces that are not merged but are tokens (`ignore_merges`); mostly none.
            cache: memory of pieces; a new one by default.
        """
        self._pattern, self._merges, self._dtype, self._whole = pattern, merges, dtype, whole
        self._classes = CharacterClasses(pattern.digits_alone)
        self._cache = cache or empty_cache()

    @classmethod
    def for_tokenizer(cls, tokenizer: Tokenizer, cache: PieceCache | None = None) -> FastEncoder:
        """An encoder that gives the ids of `tokenizer.encode_batch(..., add_special_tokens=False)`.

        The tokenizer must treat special tokens as text (`encode_special_tokens`).

        Raises:
            NotKnownError: only the library can encode with it; the message says why.
        """
        described = json.loads(tokenizer.to_str())
        _check_model(described)
        pattern, merges = read_pattern(described), read_merges(described["model"])
        dtype = DTYPES[dtype_name(max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1)]
        whole = whole_tokens(described["model"]["vocab"]) if described["model"].get("ignore_merges") else empty_cache(0)
        encoder = cls(pattern, merges, dtype, whole, cache)
        ids, lengths = encoder.encode(pa.array(PROBES, pa.large_string()))
        expected = [one.ids for one in tokenizer.encode_batch(list(PROBES), add_special_tokens=False)]
        if ids.tolist() != [number for one in expected for number in one] or lengths.tolist() != [*map(len, expected)]:
            raise NotKnownError("its ids differ from the library's on probes")
        return encoder

    def encode(self, texts: pa.Array | pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
        """Encode n documents.

        Returns:
            ids: of all documents one after the other, in the dtype of the vocabulary; lengths: int64 of shape (n,),
            ids of each.

        Raises:
            pa.ArrowInvalid: a text is not UTF-8.
        """
        data, offsets = text_buffers(texts)
        if offsets[-1] == offsets[0]:
            return np.empty(0, self._dtype), np.zeros(len(texts), np.int64)
        # A byte is one id at most; a cell's three ids are written at once, whether it has them or not.
        out = np.empty(int(offsets[-1] - offsets[0]) + IDS_INSIDE, self._dtype)
        ends = np.empty(len(offsets) - 1, np.int64)
        state = np.array([0, offsets[0], 0])
        while (unknown := encode_texts(data, offsets, self._classes.table, self._pattern.most_digits, self._cache,
                                  self._whole, self._merges, out, ends, state)) != DONE:
            self._classes.learn(-1 - unknown)
        return out[: state[TO]], np.diff(ends, prepend=0)


def whole_tokens(vocabulary: Mapping[str, int]) -> PieceCache:
    """The tokens that stand for a piece as they are: those that are spelt in bytes."""
    spelt = {character: byte for byte, character in enumerate(byte_characters())}
    tokens = {bytes(spelt[character] for character in token): number for token, number in vocabulary.items()
              if token and all(character in spelt for character in token)}
    data = np.frombuffer(b"".join(tokens), np.uint8)
    # A quarter of the memory is for the bytes of long tokens, half of it for cells of 32 bytes.
    cache = empty_cache(max(4 * len(data), 256 * len(tokens)))
    ends = np.cumsum([len(token) for token in tokens])
    _remember_whole(data, ends, np.array([*tokens.values()], np.uint32), cache)
    return cache


@kernel
def _remember_whole(data: np.ndarray, ends: np.ndarray, numbers: np.ndarray, cache: PieceCache) -> None:
    at = 0
    for token in range(len(ends)):
        low, high = piece_key(data, at, ends[token])
        place = find_cell(data, at, first_cell(low, high, len(cache.cells)), low, high, cache.cells, cache.arena)
        remember(data, at, place, low, high, numbers[token : token + 1], 1, cache)
        at = ends[token]


def _check_model(described: Mapping[str, Any]) -> None:
    """Whether each pre-token has its ids whatever stands beside it, and nothing else is done to the text.

    Raises:
        NotKnownError: not so.
    """
    model = described["model"]
    if described.get("normalizer") is not None:
        raise NotKnownError(f"its normalizer is {described['normalizer']['type']}")
    if model.get("type") != "BPE":
        raise NotKnownError(f"its model is {model.get('type')}")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback"):
        if model.get(key):
            raise NotKnownError(f"its model has {key}")
    added = [token["content"] for token in described.get("added_tokens", []) if not token["special"]]
    if added:
        raise NotKnownError(f"{len(added)} added tokens are found in text before it is split ({added[0]!r}, ...)")
