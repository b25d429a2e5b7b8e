"""Encoder of document columns with gigatoken: the ids of the `tokenizers` library, a
hundred times faster.

gigatoken caches the ids of every pre-token, and splits text with hand-written kernels
where the library runs a regular expression. `known_tokenizers.py` defines its settings;
tokenizers that it does not encode exactly as the library does are encoded by the
library, as are documents with a character that only gigatoken knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from gristmill.core.arrays import Column, offsets_of
from gristmill.core.processes import resident_bytes
from gristmill.dataprep.text.kernels import Bytes, Offsets, text_buffers
from gristmill.dataprep.text.unicode_tables import ranges
from gristmill.tokenize.encoding.known_tokenizers import (
    Known,
    NotKnownError,
    read_known,
)
from gristmill.tokenize.encoding.utf8_counts import (
    NONE_LISTED,
    Listed,
    listed,
    scan_texts,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer


FlatIds = tuple[np.ndarray, np.ndarray]
"""Ids of n texts back to back (uint32), and the number of each text's ids (int64)."""
PROBES = (
    "",
    " ",
    "  a",
    "a  b \n\n c\t",
    "it's they'Re we'll 'd ' 's''t !'s",
    "x1²Ⅷ٣ ½a_b-c",
    "naïve Ångström e\u0301 ß",
    "日本語 テスト。 ไทย 한국어",
    "a\u00a0b\u2003c\u200b\u0085d\u3000",
    "\x00\x01\u2028",
    "🏳️‍🌈 <|endoftext|> [INST]",
    "I'LL 'ſO\r\n\r\n  1234567 !?\n\n\tdef",
    " 12 3  4",
    "water" * 20,
    "CamelCaseWORDS/path//to\n/x",
    "\u2581a \u2581 ",
    # Letters of Unicode 15.0, 15.1 and 16.0, which a library may not know yet.
    "a\U0001e4d0b \U000323af1 a\U0002ebf0b a\U000105c01 a\u1c89b\ua7cbc",
    "ab\ufffdc\ue000d\uffff",
)
"""Texts on which gigatoken must agree with the library before it is used."""
SPELT_TOKENS = 100
"""Number of special tokens, and of other added ones, whose spelling is a probe too."""
CACHE_BYTES = 256 << 20
"""Growth of the process after which the cache is cleared: gigatoken 0.10 keeps every
pre-token.
"""
UNICODE_17 = """
88F C5C CDC 1ACF-1ADD 1AE0-1AEB 20C1 2B96 A7CE-A7CF A7D2 A7D4 A7F1 FBC3-FBD2 FD90-FD91 FDC8-FDCE 10940-10959
10EC5-10EC7 10ED0-10ED8 10EFA-10EFB 11B60-11B67 11DB0-11DDB 11DE0-11DE9 16EA0-16EB8 16EBB-16ED3 16FF2-16FF6 187F8-187FF
18D09-18D1E 18D80-18DF2 1CCFA-1CCFC 1CEBA-1CED0 1CEE0-1CEF0 1E6C0-1E6DE 1E6E0-1E6F5 1E6FE-1E6FF 1F6D8 1F777-1F77A
1F8D0-1F8D8 1FA54-1FA57 1FA8A 1FA8E 1FAC8 1FACD 1FAEA 1FAEF 1FBFA 2B73A-2B73F 2CEA2-2CEAD 323B0-33479
"""
"""The 4,803 characters that Unicode 17 added. gigatoken 0.10 knows their classes
(letters, marks, numbers, symbols) and the regular expressions of `tokenizers` do not,
so the two split text with them at different places.
"""


NONCHARACTERS = "FFFE-FFFF"
"""Code points of `known_tokenizers.NEVER_TEXT`."""
NFC_SINCE_UNICODE_9 = """
7FD 897-89F 8CA-8D3 9FE C3C D3B-D3C EBA 1715 1ABF-1ADD 1AE0-1AEB 1DF6-1DFA A82C 105D2 105DA 10D24-10D27 10D69-10D6D
10EAB-10EAC 10EFA-10EFB 10EFD-10EFF 10F46-10F50 10F82-10F85 11070 1133B 11382 11384 1138B 11390 113B8 113BB 113C2 113C5
113C7-113C9 113CE-113D0 1145E 11839-1183A 11930 11935 1193D-1193E 11943 119E0 11A34 11A47 11A99 11D42 11D44-11D45 11D97
11F41-11F42 1611E-16129 1612F 16D63 16D67-16D69 16FF0-16FF1 1E08F 1E130-1E136 1E2AE 1E2EC-1E2EF 1E4EC-1E4EF 1E5EE-1E5EF
1E6E3 1E6E6 1E6EE-1E6EF 1E6F5
"""
"""Characters that NFC reorders or composes, unlike the NFC of `tokenizers`, which is
that of Unicode 9.
"""


class FastEncoder:
    """Encoder of document batches on the calling thread; not thread-safe.

    Attributes:
        known: gigatoken's settings for the tokenizer. Other threads create their
            encoders from it without repeating the comparison with the library
            (`for_tokenizer`).
        unlike: characters whose documents are encoded by the library; empty if
            character classes do not matter.
    """

    def __init__(self, tokenizer: Tokenizer, specification: Known) -> None:
        self._tokenizer = tokenizer
        self.known = specification
        self.unlike = (
            unlike(specification.nfc) if specification.byte_level else NONE_LISTED
        )
        self.forget()

    def forget(self) -> None:
        """Clear the cache of pre-tokens."""
        import gigatoken

        self._gigatoken: Any = None  # frees the old memory before allocating anew
        self._gigatoken = gigatoken.Tokenizer.from_json(self.known.json)
        self._least_bytes = resident_bytes()

    @classmethod
    def for_tokenizer(cls, tokenizer: Tokenizer) -> FastEncoder:
        """Create an encoder with the ids of `tokenizer.encode_batch(...,
        add_special_tokens=False)`.

        The tokenizer must treat special tokens as text (`encode_special_tokens`).

        Raises:
            NotKnownError: only the library can encode with it; the message is the
                reason.
        """
        specification = read_known(tokenizer)
        try:
            encoder = cls(tokenizer, specification)
        except BaseException as error:
            # gigatoken raises arbitrary errors for unknown settings
            if not isinstance(error, Exception) and not _is_panic(error):
                raise
            raise NotKnownError(
                f"gigatoken does not know it: {' '.join(str(error).split())}"
            ) from error
        added = tokenizer.get_added_tokens_decoder().values()
        probes = list(PROBES)
        for special in (True, False):
            tokens = [token.content for token in added if token.special == special]
            for token in tokens[:SPELT_TOKENS]:
                probes += (token, f"a{token}{token} b {token} c\n{token}1")
        ids, lengths = encoder.encode(pa.array(probes, pa.large_string()))
        expected, expected_lengths = encoder.encode_with_library(probes)
        if not (
            np.array_equal(ids, expected) and np.array_equal(lengths, expected_lengths)
        ):
            raise NotKnownError("its ids differ from the library's on probes")
        return encoder

    def encode(self, texts: Column) -> FlatIds:
        """Encode n documents.

        Returns:
            ids: uint32, of all documents back to back; lengths: int64 of shape (n,), ids
                per document.

        Raises:
            pa.ArrowInvalid: a text is not UTF-8.
        """
        return self.encode_buffers(*text_buffers(texts))

    def encode_buffers(
        self, data: Bytes, offsets: Offsets, theirs: np.ndarray | None = None
    ) -> FlatIds:
        """Encode documents from `kernels.text_buffers`, or a part of the offsets.

        Args:
            theirs: bool of shape (n,), texts with a character of `unlike`; computed if
                None.
        """
        if offsets[-1] == offsets[0]:
            return np.empty(0, np.uint32), np.zeros(len(offsets) - 1, np.int64)
        if theirs is None:
            theirs = np.zeros(len(offsets) - 1, bool)
            counts = np.empty((2, len(theirs)), np.int64)
            scan_texts(data, offsets, self.unlike, *counts, theirs)
        library_rows = np.flatnonzero(theirs)
        try:
            ids, lengths = self._encode(data, offsets)
        except BaseException as error:
            if not _is_panic(error):
                raise
            ids = np.empty(0, np.uint32)
            lengths = np.zeros(len(offsets) - 1, np.int64)
            library_rows = np.arange(len(offsets) - 1)
        finally:
            now = resident_bytes()
            self._least_bytes = min(self._least_bytes, now)
            if now - self._least_bytes > CACHE_BYTES:
                self.forget()
        if not len(library_rows):
            return ids, lengths
        library_ids, library_lengths = self.encode_with_library(
            texts_of(data, offsets, library_rows)
        )
        ends = np.cumsum(lengths)[library_rows]
        begins = ends - lengths[library_rows]
        pieces = np.split(ids, np.stack([begins, ends], 1).ravel())
        pieces[1::2] = np.split(library_ids, np.cumsum(library_lengths)[:-1])
        lengths[library_rows] = library_lengths
        return np.concatenate(pieces), lengths

    def encode_with_library(self, texts: Sequence[str]) -> FlatIds:
        """Encode documents with `tokenizers`; see `encode`."""
        encodings = self._tokenizer.encode_batch_fast(
            list(texts), add_special_tokens=False
        )
        return flat_ids([encoding.ids for encoding in encodings])

    def _encode(self, data: Bytes, offsets: Offsets) -> FlatIds:
        from gristmill.tokenize.encoding.gigatoken_input import as_awkward

        rows = self._gigatoken.encode_batch(
            as_awkward(data, offsets), parallel=False
        ).layout
        ids = np.asarray(rows.content.data)
        bounds = np.asarray(rows.offsets.data)
        lengths = np.diff(bounds)
        if self.known.stand_ins:
            ids, lengths = replace_stand_ins(
                ids, lengths, self.known.first_stand_in, self.known.stand_ins
            )
        return ids, lengths


def flat_ids(ids: Sequence[Sequence[int]]) -> FlatIds:
    """Ids of documents back to back (uint32), and the number of each (int64)."""
    lengths = np.array([*map(len, ids)], np.int64)
    return np.fromiter(chain.from_iterable(ids), np.uint32, lengths.sum()), lengths


def texts_of(
    data: Bytes, offsets: Offsets, rows: np.ndarray | None = None
) -> list[str]:
    """Texts of some rows, or of all, from `kernels.text_buffers`."""
    bounds = np.stack([offsets[:-1], offsets[1:]], axis=1)
    if rows is not None:
        bounds = bounds[rows]
    return [data[begin:end].tobytes().decode() for begin, end in bounds.tolist()]


def replace_stand_ins(
    ids: np.ndarray, lengths: np.ndarray, first: int, stand_ins: Sequence[Sequence[int]]
) -> FlatIds:
    """Replace each id from `first` on by its sequence of ids; returns ids and lengths
    of documents.
    """
    places = np.flatnonzero(ids >= first)
    if not len(places):
        return ids, lengths
    numbers = [stand_ins[number] for number in (ids[places] - first).tolist()]
    more = offsets_of([len(several) - 1 for several in numbers])
    longer = more[np.searchsorted(places, offsets_of(lengths))]
    pieces = np.split(ids, np.stack([places, places + 1], 1).ravel())
    pieces[1::2] = [np.array(several, ids.dtype) for several in numbers]
    return np.concatenate(pieces), lengths + np.diff(longer)


def _is_panic(error: BaseException) -> bool:
    """Return whether an error is a Rust panic, which is not an Exception."""
    return type(error).__name__ == "PanicException"


@lru_cache
def unlike(nfc: bool) -> Listed:
    """Characters whose texts the library encodes; `nfc`: text is normalized."""
    every = ranges(NONCHARACTERS + UNICODE_17 + (NFC_SINCE_UNICODE_9 if nfc else ""))
    return listed(np.concatenate([np.arange(first, last + 1) for first, last in every]))
