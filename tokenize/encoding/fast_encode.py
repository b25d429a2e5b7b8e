"""Encoding documents many times faster than one by one: a piece that was seen before keeps its ids.

A byte-level BPE gives each pre-token its ids independently of its neighbours. So one pass over the text finds where
each piece ends (`pretokens.py`), looks it up (`piece_cache.py`), merges it where it is new (`merges.py`), and writes
its ids. They are the library's, for every text. A tokenizer whose pre-tokenizer, model or added tokens are not known
here, or that normalizes, is left to the library altogether.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from gristmill.dataprep.text.hashing import load64
from gristmill.dataprep.text.kernels import kernel, text_buffers
from gristmill.tokenize.encoding.merges import Merges, byte_characters, merge_piece, read_merges
from gristmill.tokenize.encoding.piece_cache import (
    IDS_INSIDE,
    LONGEST_PIECE,
    PieceCache,
    empty_cache,
    find_cell,
    first_cell,
    piece_key,
    remember,
)
from gristmill.tokenize.encoding.pretokens import (
    CharacterClasses,
    NotKnownError,
    Pattern,
    next_piece,
    non_letters,
    places_before,
    read_pattern,
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


DONE = 0
DOCUMENT, AT, TO = 0, 1, 2
BLOCK_PIECES = 32
_BLANK = np.uint64(0x20)
_LOWEST_BYTE = np.uint64(0xFF)
_ONE, _TWO, _THREE, _SEVEN, _HALF, _LENGTH_AT = map(np.uint64, (1, 2, 3, 7, 32, 56))
_LOW_HALF = np.uint64(2**32 - 1)


@kernel
def encode_texts(
    data: np.ndarray, offsets: np.ndarray, classes: np.ndarray, most_digits: int, cache: PieceCache,
    whole: PieceCache, merges: Merges, out: np.ndarray, ends: np.ndarray, state: np.ndarray,
) -> int:  # fmt: skip
    """Encode texts from where `state` says.

    Args:
        data, offsets: `text_buffers.text_buffers`, n texts.
        classes, most_digits: see `pretokens.next_piece`.
        cache: pieces that were seen; grows.
        whole: pieces that are tokens as they are, and not merged.
        merges: how others are merged.
        out: uint16 or uint32, receives the ids; longer by two than there are bytes.
        ends: int64 of shape (n,), receives where the ids of each text end in `out`.
        state: int64, the text, the byte and the place in `out` to continue from; updated.

    Returns:
        DONE, or -1 - code point whose class is to be learnt before the next call.
    """
    stops = np.empty(BLOCK_PIECES + 1, np.int64)
    lows, highs = np.empty(BLOCK_PIECES, np.uint64), np.empty(BLOCK_PIECES, np.uint64)
    places = np.empty(BLOCK_PIECES, np.uint64)
    cells, arena, many_ids = cache.cells, cache.arena, cache.ids
    at, to = state[AT], state[TO]
    for document in range(state[DOCUMENT], len(offsets) - 1):
        end = offsets[document + 1]
        while at < end:
            pieces, unknown = _find_pieces(
                data, at, end, classes, most_digits, len(cells), stops, lows, highs, places)
            piece, to = _write_known(data, 0, pieces, stops, lows, highs, places, cells, arena, many_ids, out, to)
            while piece < pieces:
                to = _encode_new(data, stops[piece], stops[piece + 1], lows[piece], highs[piece], places[piece],
                                 cache, whole, merges, out, to)
                piece, to = _write_known(data, piece + 1, pieces, stops, lows, highs, places, cells, arena, many_ids,
                                         out, to)
            at = stops[pieces]
            if unknown < 0:
                state[DOCUMENT], state[AT], state[TO] = document, at, to
                return int(unknown)
        ends[document] = to
    state[DOCUMENT], state[AT], state[TO] = len(offsets) - 1, at, to
    return DONE


@kernel
def _find_pieces(
    data: np.ndarray, at: int, end: int, classes: np.ndarray, most_digits: int, words: int, stops: np.ndarray,
    lows: np.ndarray, highs: np.ndarray, places: np.ndarray,
) -> tuple[int, int]:  # fmt: skip
    """The next pieces of a text: where each ends (behind where the first begins), its key and its first cell.

    Returns:
        how many were found; and -1 - code point where a class that is not known put an end to it, else 0.
    """
    count = 0
    stops[0] = at
    last = len(data) - 16
    while at < end and count < BLOCK_PIECES:
        stop, low, high = at, np.uint64(0), np.uint64(0)
        if at <= last:
            stop, low, high = _latin_word(data, at)
        if stop == at or stop > end:
            stop = next_piece(data, at, end, classes, most_digits)
            if stop < 0:
                return count, stop
            low, high = piece_key(data, at, stop)
        lows[count], highs[count], places[count] = low, high, first_cell(low, high, words)
        count += 1
        stops[count] = at = stop
    return count, 0


@kernel
def _latin_word(data: np.ndarray, at: int) -> tuple[int, np.uint64, np.uint64]:
    """ASCII letters, maybe behind a blank, with something else of ASCII after them: a piece of every pattern.

    Args:
        at: at least 16 bytes in front of the end of `data`.

    Returns:
        where the word ends and its key (`piece_cache.piece_key`); `at` where there is no such word of up to 15 bytes.
    """
    low = load64(data, at)
    blank = np.uint64(low & _LOWEST_BYTE == _BLANK)
    others = non_letters(low) & ~(blank << _SEVEN)
    if others != 0:
        bit = others & (~others + _ONE)
        length = places_before(bit)
        if length <= np.int64(blank) or low & bit != 0:
            return at, low, low
        return at + length, low & ((bit >> _SEVEN) - _ONE), np.uint64(length) << _LENGTH_AT
    high = load64(data, at + 8)
    others = non_letters(high)
    bit = others & (~others + _ONE)
    if others == 0 or high & bit != 0:
        return at, low, low
    length = places_before(bit) + 8
    return at + length, low, high & ((bit >> _SEVEN) - _ONE) | np.uint64(length) << _LENGTH_AT


@kernel
def _write_known(
    data: np.ndarray, first: int, pieces: int, stops: np.ndarray, lows: np.ndarray, highs: np.ndarray,
    places: np.ndarray, cells: np.ndarray, arena: np.ndarray, many_ids: np.ndarray, out: np.ndarray, to: int,
) -> tuple[int, int]:  # fmt: skip
    """Look pieces up from `first` on, and write the ids of those that are remembered.

    This is where the time goes, so the function is one loop over plain arrays: numba counts references to every array
    around every call that it does not inline.

    Returns:
        the first piece that is new (its place is the free cell for it), or `pieces`; and where the ids end.
    """
    for piece in range(first, pieces):
        place = places[piece]
        if cells[place] != lows[piece] or cells[place + _ONE] != highs[piece]:
            place = find_cell(data, stops[piece], place, lows[piece], highs[piece], cells, arena)
            if cells[place + _ONE] == 0:
                places[piece] = place
                return piece, to
        one_two, three_count = cells[place + _TWO], cells[place + _THREE]
        count = int(np.int64(three_count >> _HALF))
        if count > IDS_INSIDE:
            start = np.int64(one_two)
            for step in range(count):
                out[to + step] = many_ids[start + step]
        else:
            # All three, whether it has them or not: the next piece overwrites what is too much.
            out[np.uint64(to)] = one_two & _LOW_HALF
            out[np.uint64(to + 1)] = one_two >> _HALF
            out[np.uint64(to + 2)] = three_count & _LOW_HALF
        to += count
    return pieces, to


@kernel
def _encode_new(
    data: np.ndarray, at: int, stop: int, low: np.uint64, high: np.uint64, place: np.uint64, cache: PieceCache,
    whole: PieceCache, merges: Merges, out: np.ndarray, to: int,
) -> int:  # fmt: skip
    """Encode a piece that is not remembered, and remember it unless it is very long."""
    ids = np.empty(stop - at, np.uint32)
    count = 0
    if whole.used[0] > 0:
        words = len(whole.cells)
        token = find_cell(data, at, first_cell(low, high, words), low, high, whole.cells, whole.arena)
        if whole.cells[token + _ONE] != 0:
            ids[0] = np.uint32(whole.cells[token + _TWO])
            count = 1
    if count == 0:
        count = merge_piece(data, at, stop, merges, ids)
    if stop - at <= LONGEST_PIECE:
        remember(data, at, place, low, high, ids, count, cache)
    for step in range(count):
        out[to + step] = ids[step]
    return to + count
