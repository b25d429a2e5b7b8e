"""One pass over UTF-8 texts agrees with Python, character by character."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import awkward as ak
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.dataprep.text.kernels import text_buffers
from gristmill.tokenize.encoding.gigatoken_input import as_awkward
from gristmill.tokenize.encoding.utf8_counts import (
    NONE_LISTED,
    Listed,
    listed,
    scan_texts,
)

LONGER, SHORTER = "\u20c1\ufffe\U0001fac8", "\u07fd"
PIECES = [
    "a" * 7,
    "b" * 63,
    " ",
    "\n\t",
    "\x00",
    "é",
    "\u07fd",
    "\u07fc",
    "日",
    "\u20c1",
    "\u20c0",
    "\ufffe",
    "😀",
    "\U0001fac8",
    "\u0800",
    "\ud7ff",
    "\ue000",
    "\U00010000",
    "\U0010ffff",
    "c" * 256,
]
NOT_UTF8 = [
    bytes.fromhex(text)
    for text in (
        "80",
        "bf",
        "c080",
        "c1bf",
        "c3",
        "e282",
        "e09fbf",
        "eda080",
        "f09f98",
        "f08fbfbf",
        "f4908080",
        "f5808080",
        "ff",
        "c328",
        "e28228",
        "f09f288c",
    )
]


def codes(characters: str) -> Listed:
    return listed(np.array([*map(ord, characters)]))


def scanned(texts: Sequence[bytes], characters: Listed) -> tuple[bool, list[list[Any]]]:
    column = pa.array(texts, pa.large_binary()).view(pa.large_string())
    filled = [np.full(len(texts), 1, kind) for kind in (np.int64, np.int64, np.bool_)]
    valid = scan_texts(*text_buffers(column, checked=False), characters, *filled)
    return valid, [values.tolist() for values in filled]


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(
    texts=st.lists(
        st.lists(st.sampled_from(PIECES), max_size=12).map("".join), max_size=5
    ),
    listed_characters=st.sampled_from(["", LONGER, LONGER + SHORTER]),
)
def test_characters_words_and_listed_characters_are_counted(
    texts: list[str], listed_characters: str
) -> None:
    valid, (characters, words, flags) = scanned(
        [text.encode() for text in texts], codes(listed_characters + "\uffff")
    )
    assert valid
    assert characters == [len(text) for text in texts]
    assert words == [len(re.findall(r"[^\x00- ]+", text)) for text in texts]
    expected = [not set(listed_characters).isdisjoint(text) for text in texts]
    assert flags == expected


@pytest.mark.slow
@settings(deadline=None, max_examples=500)
@given(
    texts=st.lists(
        st.lists(
            st.sampled_from([*(piece.encode() for piece in PIECES), *NOT_UTF8]),
            max_size=6,
        ).map(b"".join),
        max_size=3,
    )
)
def test_invalid_utf8_is_detected_in_any_text(texts: list[bytes]) -> None:
    def decodes(text: bytes) -> bool:
        try:
            return text.decode() is not None
        except UnicodeDecodeError:
            return False

    assert scanned(texts, NONE_LISTED)[0] == all(map(decodes, texts))


@pytest.mark.slow
def test_utf8_validation_agrees_with_python_at_the_edges_of_the_standard() -> None:
    """Tries characters at the edges of Unicode's table 3-7, and the bytes that its
    rules name, at each position.
    """
    characters = [
        chr(code).encode()
        for code in (
            0x41,
            0x80,
            0x7FF,
            0x800,
            0xFFF,
            0x1000,
            0xD7FF,
            0xE000,
            0xFFFF,
            0x10000,
            0x3FFFF,
            0x40000,
            0x10FFFF,
        )
    ]
    edges = bytes.fromhex(
        "00 7f 80 8f 90 9f a0 bf c0 c1 c2 df e0 e1 ec ed ee ef f0 f1 f3 f4 f5 ff"
    )
    source, num_invalid = random.Random(6), 0
    for _ in range(20_000):
        sample = bytearray(b"".join(source.choices(characters, k=2)))
        if source.random() < 0.7:
            sample[source.randrange(len(sample))] = source.choice(edges)
        text = (
            b"a" * source.randint(0, 130) + sample + b"b" * source.choice([0, 1, 100])
        )
        try:
            text.decode()
            expected = True
        except UnicodeDecodeError:
            expected, num_invalid = False, num_invalid + 1
        assert scanned([b"before", text, b"\xc3\xa9"], NONE_LISTED)[0] == expected, text
    assert 5000 < num_invalid < 15_000


def test_texts_behave_like_an_awkward_array() -> None:
    texts = as_awkward(
        *text_buffers(pa.array(["of all", "", "é", "b"], pa.large_string())[1:])
    )
    plain = ak.Array([[], [0xC3, 0xA9], [0x62]])
    assert ak.to_numpy(ak.flatten(ak.without_parameters(texts))).tolist() == [
        0xC3,
        0xA9,
        0x62,
    ]
    assert ak.to_numpy(ak.num(texts)).tolist() == [0, 2, 1]
    assert ak.num(texts, axis=0) == 3
    assert ak.to_list(ak.flatten(texts, axis=None)) == ak.to_list(
        ak.flatten(plain, axis=None)
    )
    assert ak.to_list(ak.max(texts, axis=1)) == [None, 0xC3, 0x62]
    assert ak.to_list(ak.sum(ak.flatten(texts), axis=0)) == 0xC3 + 0xA9 + 0x62


def test_invalid_utf8_fails_the_shard() -> None:
    from gristmill.tokenize.encoding.encode import _counted

    column = pa.array([b"good", b"\xe2\x82"], pa.large_binary()).view(pa.large_string())
    with pytest.raises(pa.ArrowInvalid, match="not UTF-8"):
        next(_counted(iter([column]), NONE_LISTED))
