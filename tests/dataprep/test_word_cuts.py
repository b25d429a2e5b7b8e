"""Word segmentation kernels agree with the plain rules."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.dataprep.filters.lines_and_sentences import (
    EACH_NEWLINE,
    EACH_TWO_NEWLINES,
    NEWLINE_RUNS,
    TWO_NEWLINE_RUNS,
    split_lines,
    split_segments,
)
from gristmill.dataprep.text.kernels import text_buffers
from gristmill.dataprep.text.unicode_tables import code_point_flags
from gristmill.dataprep.words.spacy_words import spacy_words
from gristmill.dataprep.words.tokenise_words import (
    characters_per_word,
    unspaced_words,
    whitespace_words,
    word_punct_words,
)
from gristmill.dataprep.words.word_breaks import segmented_words
from tests.dataprep import word_cuts_reference

RULES = {
    spacy_words: word_cuts_reference.spacy_english,
    unspaced_words: word_cuts_reference.unspaced,
    word_punct_words: word_cuts_reference.word_punct,
    whitespace_words: str.split,
}
PIECES = [
    "word",
    "Word",
    "WORD",
    "a",
    "I",
    "can't",
    "CAN’T",
    "cannot",
    "n't",
    "'s",
    "’S",
    "'ll",
    "'VE",
    "'d",
    "'",
    "’",
    ".",
    "..",
    "...",
    "…",
    "U.S.",
    "J.",
    "3.14",
    "1,000",
    ",",
    "-",
    "--",
    "–",
    "~",
    "1-2",
    ":",
    "/",
    "<",
    "=",
    "(",
    ")",
    '"',
    "$",
    "5$",
    "%",
    "+",
    "_",
    "\\",
    "@",
    "é",
    "e\u0301",
    "\u200d",
    "東",
    "京",
    "。",
    "ไ",
    "นี้",
    "😀",
    " ",
    "\n",
    "\u3000",
    "e.g.",
    "Mr.",
    "Mr",
    "a.",
    ":)",
    "):",
    "(:",
    "''",
    "em",
    "ol",
    "and/or",
    "8",
    "mm",
    "GB",
    "x.de",
    "http://",
    "a@",
    ":80",
    "?q",
    "#",
]


def buffers(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    encoded = [text.encode() for text in texts]
    data = np.frombuffer(b"xx " + b"".join(encoded) + b" yy", np.uint8)
    return data, np.cumsum([3, *map(len, encoded)]).astype(np.int64)


def cut(rule: object, texts: list[str]) -> list[list[str]]:
    data, offsets = buffers(texts)
    words = rule(data, offsets, code_point_flags(), np.arange(len(texts)))  # type: ignore[operator]
    texts_of_words = [
        data[begin:end].tobytes().decode()
        for begin, end in zip(words.starts, words.ends, strict=True)
    ]
    assert words.chars.tolist() == [len(word) for word in texts_of_words]
    return [
        texts_of_words[begin:end]
        for begin, end in zip(words.offsets, words.offsets[1:])
    ]


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=200, deadline=None)
@given(
    texts=st.lists(
        st.one_of(
            st.lists(st.sampled_from(PIECES), max_size=8).map("".join),
            st.text(st.characters(codec="utf-8"), max_size=20),
        ),
        max_size=4,
    )
)
def test_words_equal_the_plain_rule(rule: object, texts: list[str]) -> None:
    assert cut(rule, texts) == [RULES[rule](text) for text in texts]  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("東京、Tokyo「都」 and", ["東", "京、", "Tokyo「", "都」", "and"]),
        ("「日本」語 123ก", ["「日", "本」", "語", "123", "ก"]),
        ("ที่นี่", ["ที่", "นี่"]),
        ("한국어 word", ["한국어", "word"]),
    ],
)
def test_characters_of_unspaced_scripts_are_words_with_their_marks(
    text: str, words: list[str]
) -> None:
    assert cut(unspaced_words, [text]) == [words]


def test_characters_per_word_of_unspaced_scripts() -> None:
    texts = ["東京都 ab", "東京 ab", "", "東京 abc", "ภาษา ab", "ภาษา東京都日本"]
    data, offsets = buffers(texts)
    assert characters_per_word(
        data, offsets, code_point_flags(), np.arange(6)
    ).tolist() == [2, 1, 1, 1, 3, 2]


def spans(text: str, find: object, *arguments: int) -> list[str]:
    data, offsets = buffers([text])
    starts, ends = find(data, offsets[0], offsets[1], *arguments)  # type: ignore[operator]
    return [
        data[begin:end].tobytes().decode()
        for begin, end in zip(starts, ends, strict=True)
    ]


@settings(max_examples=300, deadline=None)
@given(
    st.text(
        st.sampled_from("\n\n\na \r\x0b\x0c\x1c\x1d\x1e\x1f\x85é\u2028\u2029\u2030"),
        max_size=12,
    )
)
def test_segments_and_lines_equal_python(text: str) -> None:
    assert spans(text, split_segments, EACH_NEWLINE) == text.split("\n")
    assert spans(text, split_segments, NEWLINE_RUNS) == re.split("\n+", text)
    assert spans(text, split_segments, EACH_TWO_NEWLINES) == text.split("\n\n")
    assert spans(text, split_segments, TWO_NEWLINE_RUNS) == re.split("\n\n+", text)
    assert spans(text, split_lines) == text.splitlines()


BREAKABLE = st.text(
    st.sampled_from("ab1_.':;,\" \n\réß’·\u0308\u200d\u00ad\ufeff東ターאב٣😀ℹﾞ\u2028"),
    max_size=14,
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        BREAKABLE | st.text(st.characters(codec="utf-8"), max_size=10),
        min_size=1,
        max_size=20,
    )
)
def test_segmented_words_equal_the_plain_rules(texts: list[str]) -> None:
    data, offsets = text_buffers(pa.array(texts, pa.large_string()))
    words = segmented_words(data, offsets, code_point_flags(), np.arange(len(texts)))
    cuts = [
        data[begin:end].tobytes().decode()
        for begin, end in zip(words.starts, words.ends, strict=True)
    ]
    assert words.chars.tolist() == list(map(len, cuts))
    for number, text in enumerate(texts):
        expected = word_cuts_reference.segmented(text)
        assert cuts[words.offsets[number] : words.offsets[number + 1]] == expected


@pytest.mark.parametrize(
    ("text", "segments"),
    [
        # The example of UAX #29, section 4, and words as uniseg 0.10.1 cuts them.
        (
            "The quick (“brown”) fox can’t jump 32.3 feet, right?",
            ["The", "quick", "brown", "fox", "can’t", "jump", "32.3", "feet", "right"],
        ),
        (
            "a.b 1.2 a.1 1,2 a,b e.g. U.S.A. 10:30",
            "a.b 1.2 a 1 1,2 a b e.g U.S.A 10 30",
        ),
        ("snake_case _private x__ __init__", ["snake_case", "x__"]),
        (
            "well-known jane@example.com C++ it's",
            ["well", "known", "jane", "example.com", "C", "it's"],
        ),
        ("東京タワー ひら", ["東", "京", "タワー", "ひ", "ら"]),
        ("cafe\u0301 a\u200d😀b ½", ["cafe\u0301", "a\u200d😀", "b", "½"]),
    ],
)
def test_segmented_words_follow_uax29(text: str, segments: list[str] | str) -> None:
    data, offsets = text_buffers(pa.array([text], pa.large_string()))
    words = segmented_words(data, offsets, code_point_flags(), np.array([0]))
    cuts = [
        data[begin:end].tobytes().decode()
        for begin, end in zip(words.starts, words.ends, strict=True)
    ]
    assert cuts == (segments.split() if isinstance(segments, str) else segments)
