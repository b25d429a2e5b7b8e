"""Gopher dialects: kernels agree with the plain definitions and with values derived by
hand.
"""

from __future__ import annotations

import math
import sys
from itertools import islice, product
from string import ascii_lowercase
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.dataprep.filters import gopher
from gristmill.dataprep.filters.rule_sets import measure
from gristmill.dataprep.thresholds import failures
from gristmill.dataprep.words import spacy_words
from gristmill.mixtures.steps.rules import (
    GopherQuality,
    GopherRepetition,
    GopherRules,
    Rules,
)
from tests.dataprep import gopher_reference

PIECES = [
    "the",
    "Be",
    "TO",
    "of",
    "that",
    "İ",
    "ΟΔΟΣ",
    "Å",
    "é",
    "e\u0301",
    "東京",
    "123",
    "#",
    "##",
    "#a#",
    "...",
    "....",
    "…",
    "(...)",
    "[…]",
    "-»",
    "Read More",
    "read more..",
    "•",
    "●",
    "▶",
    "–",
    "-",
    "*",
    "ⅷ",
    "\u093c",
    "a",
    "bc",
    "to",
    "day",
    "today",
    "don't",
    "CAN’T",
    "cannot",
    "we'll",
    "U.S.",
    "J.",
    "ab.Cd",
    "1-2",
    "a--b",
    "5$",
    "10%",
    "+",
    ",",
    ":",
    "/",
    "_",
    "\u200d",
    "\n",
    "\n\n",
    "\n \n",
    "\n\n\n",
    " ",
    "\t",
    "\r",
    "\r\n",
    "\x0b",
    "\x1c",
    "\x85",
    "\u2028",
    "\u00a0",
    "\u3000",
    "😀",
    "\u0000",
    "",
]
any_text = st.text(st.characters(codec="utf-8"), max_size=60)
pieces = st.lists(st.sampled_from(PIECES), max_size=80)
few_words = st.lists(
    st.sampled_from(["a", "b", "ab", "cc", "bcc", "\n", "\n\n"]), max_size=120
)
texts_of_all_kinds = st.lists(
    st.one_of(
        any_text, pieces.map("".join), pieces.map(" ".join), few_words.map(" ".join)
    ),
    max_size=4,
)
EDGES = [
    "",
    " ",
    "\n",
    "\n\n\n",
    "\n \n\n \n",
    "\u3000",
    "word",
    "a\n",
    "\na",
    "a\n\n",
    "a\n\n\na",
    "東京",
    "#",
]


def measured(texts: list[str], dialect: str, **options: Any) -> list[dict[str, float]]:
    counting = GopherRules.model_validate({"dialect": dialect, **options})
    columns = gopher.statistics(pa.array(texts, pa.large_string()), counting)
    return [
        {name: values[row].item() for name, values in columns.items()}
        for row in range(len(texts))
    ]


def same(left: dict[str, float], right: dict[str, float]) -> bool:
    pairs = [(left[name], right[name]) for name in left]
    return list(left) == list(right) and all(
        a == b or (math.isnan(a) and math.isnan(b)) for a, b in pairs
    )


@pytest.mark.parametrize("dialect", gopher.DIALECTS)
@settings(max_examples=60, deadline=None)
@given(texts=texts_of_all_kinds)
def test_kernels_agree_exactly_with_the_plain_definitions(
    dialect: str, texts: list[str]
) -> None:
    for text, values in zip(texts, measured(texts, dialect), strict=True):
        assert same(values, gopher_reference.all_statistics(text, dialect))


@pytest.mark.parametrize("dialect", gopher.DIALECTS)
def test_empty_and_tiny_texts_are_measured(dialect: str) -> None:
    for text, values in zip(EDGES, measured(EDGES, dialect), strict=True):
        assert same(values, gopher_reference.all_statistics(text, dialect)), text
    assert measured([], dialect) == []


TEXT = "The cat ... sat # on\n  • THE mat…\n\n- 42 to be...\n"
# Whitespace words, 13 of 33 code points: The cat ... sat # on | • THE mat… | - 42 to
# be... With marks taken off, 15: The cat ... sat # on | • THE mat … | - 42 to be ...
# RedPajama's normalised ones, 10 of 25 code points: the cat sat on • the mat… 42 to be
BY_HAND = {
    # Of the 13 words 9 begin with a letter or digit.
    "dclm": (9, 33 / 13, 4 / 13, 2 / 3, 2 / 3, 8 / 13, 3),
    # All but ... # … - ... are words, of 24 code points. Three ellipses outnumber one
    # hash. Four lines, one empty.
    "datatrove": (10, 24 / 10, 3 / 15, 2 / 4, 2 / 4, 8 / 15, 2),
    # The median length is 3; `#` and `mat…` have symbols; five lines, of which one
    # begins with `-` and one ends in `…`.
    "dolma": (13, 3.0, 2 / 13, 1 / 5, 1 / 5, 8 / 13, 1),
    # `...` and `#` are marks; of three lines one begins with `•`, and `-` is no bullet.
    "curator": (13, 33 / 13, 2 / 13, 1 / 3, 2 / 3, 8 / 13, 1),
    "redpajama": (10, 2.5, 0.26666667, 1 / 4, 2 / 4, 0.53333333, 2),
}


@pytest.mark.parametrize("dialect", gopher.DIALECTS)
def test_quality_statistics_counted_by_hand(dialect: str) -> None:
    values = measured([TEXT], dialect)[0]
    assert tuple(values[name] for name in gopher.QUALITY_STATISTICS) == BY_HAND[dialect]


def distinct_words(lengths: list[int]) -> list[str]:
    """Different words of the given lengths, which share no prefix."""
    combinations = ("".join(letters) for letters in product(ascii_lowercase, repeat=4))
    return [
        code + "x" * (length - 4)
        for code, length in zip(islice(combinations, 7, None), lengths, strict=False)
    ]


def block_twice(words: int, block: int, block_chars: int, chars: int) -> str:
    """Text of `words` words and `chars` letters in which one block of words occurs
    twice.
    """
    fillers, filler_chars = words - 2 * block, chars - 2 * block_chars
    extra_in_block, extra_in_fillers = (
        block_chars - 4 * block,
        filler_chars - 4 * fillers,
    )
    lengths = [
        4 + extra_in_block * (step + 1) // block - extra_in_block * step // block
        for step in range(block)
    ]
    lengths += [
        4
        + extra_in_fillers * (step + 1) // fillers
        - extra_in_fillers * step // fillers
        for step in range(fillers)
    ]
    distinct = distinct_words(lengths)
    copied, unique = distinct[:block], distinct[block:]
    third = fillers // 3
    return " ".join(
        [
            *unique[:third],
            *copied,
            *unique[third : 2 * third],
            *copied,
            *unique[2 * third :],
        ]
    )


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        # 100 words of 546 letters twice in 600 words of 3330, with 599 spaces.
        # datatrove counts the second copy in the whole text, DCLM both in the letters,
        # Curator the second with its 99 spaces. Dolma: of 596 5-grams 2 x 96.
        (
            block_twice(600, 100, 546, 3330),
            {
                "datatrove": 546 / 3929,
                "dclm": 1092 / 3330,
                "redpajama": round(1092 / 3330, 8),
                "curator": 645 / 3929,
                "dolma": pytest.approx(192 / 596 * 5.46 / 5.55, abs=5e-4),
            },
        ),
        # 60 words of 293 letters twice in 540 words of 2790.
        (
            block_twice(540, 60, 293, 2790),
            {
                "datatrove": 293 / 3329,
                "dclm": 586 / 2790,
                "redpajama": round(586 / 2790, 8),
                "curator": 352 / 3329,
                "dolma": pytest.approx(112 / 536 * (293 / 60) / (2790 / 540), abs=5e-4),
            },
        ),
    ],
)
def test_one_repeated_block_has_five_shares(
    text: str, shares: dict[str, float]
) -> None:
    assert {
        dialect: measured([text], dialect)[0]["duplicate_5gram_char_ratio"]
        for dialect in shares
    } == shares


def test_verdict_on_a_repeated_block_depends_on_the_dialect() -> None:
    large, small = block_twice(600, 100, 546, 3330), block_twice(540, 60, 293, 2790)
    shares = {
        dialect: [
            round(row["duplicate_5gram_char_ratio"], 3)
            for row in measured([large, small], dialect)
        ]
        for dialect in gopher.DIALECTS
    }
    assert shares == {
        "datatrove": [0.139, 0.088],
        "dclm": [0.328, 0.210],
        "redpajama": [0.328, 0.210],
        "dolma": [0.317, 0.198],
        "curator": [0.164, 0.106],
    }
    kept = {
        dialect: [
            share <= GopherRepetition().max_duplicate_5gram_char_ratio for share in row
        ]
        for dialect, row in shares.items()
    }
    assert kept == {
        "datatrove": [True, True],
        "dclm": [False, False],
        "redpajama": [False, False],
        "dolma": [False, False],
        "curator": [False, True],
    }


def test_datatrove_compares_joined_words() -> None:
    text = "to day we walk along the river then today we walk along the stony river"
    share = measured([text], "datatrove")[0]["duplicate_5gram_char_ratio"]
    # "today we walk along the" differs from "to day we walk along": not a copy.
    assert share == 0.0
    text = "to day we walk along and today we walk al ong"
    assert measured([text], "datatrove")[0]["duplicate_5gram_char_ratio"] == len(
        "todaywewalkalong"
    ) / len(text)
    assert measured([text], "dclm")[0]["duplicate_5gram_char_ratio"] == 0.0


def test_dclm_ngrams_ignore_punctuation() -> None:
    block = "we can't walk the well-known 3.5 miles"
    text = f"({block}) and then, again, \u201c{block}\u201d!"
    measures = measured([text], "dclm")[0]
    assert measures["duplicate_7gram_char_ratio"] == 2 * 31 / (2 * 31 + 12)
    # tokens: all but (we and \u201cwe begin with a letter or digit
    assert measures["words"] == 15


def test_spaced_dots_are_symbols_only_in_dclm() -> None:
    text = "so it goes . . . and on . . . . . .\nends . . ."
    assert measured([text], "dclm")[0]["symbol_word_ratio"] == 4 / 18
    assert measured([text], "dclm")[0]["ellipsis_line_ratio"] == 1
    assert measured([text], "datatrove")[0]["ellipsis_line_ratio"] == 0


def test_ngrams_of_a_text_of_four_words() -> None:
    text = "four words of text"
    rows = {dialect: measured([text], dialect)[0] for dialect in gopher.DIALECTS}
    top = {dialect: row["top_4gram_char_ratio"] for dialect, row in rows.items()}
    assert top == {"dclm": 0, "datatrove": 1, "dolma": 1, "curator": 1, "redpajama": 0}
    duplicate = {
        dialect: row["duplicate_5gram_char_ratio"] for dialect, row in rows.items()
    }
    assert duplicate == {
        "dclm": 0,
        "datatrove": 0,
        "dolma": 0,
        "curator": 1,
        "redpajama": 0,
    }


def test_ties_of_top_ngrams_go_to_the_longest_in_dclm_and_the_first_elsewhere() -> None:
    text = "a b x long longer y a b z long longer"
    chars = len(text.replace(" ", ""))
    shares = {
        dialect: measured([text], dialect)[0]["top_2gram_char_ratio"]
        for dialect in gopher.DIALECTS
    }
    assert shares == {
        "dclm": 2 * 10 / chars,
        "datatrove": 2 * 3 / len(text),
        "dolma": 2 * 2 / chars,
        "curator": 2 * 3 / len(text),
        "redpajama": round(2 * 2 / chars, 8),
    }


def test_rules_that_a_dialect_lacks_pass() -> None:
    text = "\n\n".join(["the same line of text"] * 9)
    failed = {
        dialect: {
            rule.split("/")[1]
            for rule, mask in failures(
                gopher.statistics(
                    pa.array([text]), GopherRules.model_validate({"dialect": dialect})
                ),
                {"gopher_repetition": GopherRepetition()},
            ).items()
            if mask[0] and "gram" not in rule
        }
        for dialect in gopher.DIALECTS
    }
    lines = {"max_duplicate_line_ratio", "max_duplicate_line_char_ratio"}
    paragraphs = {"max_duplicate_paragraph_ratio", "max_duplicate_paragraph_char_ratio"}
    assert failed == {
        "dclm": lines | paragraphs,
        "datatrove": lines | paragraphs,
        "dolma": lines,
        "curator": lines | paragraphs,
        "redpajama": set(),
    }


def test_long_pattern_that_almost_repeats_takes_linear_time() -> None:
    text = " ".join(["ab" * 5000 + end for end in ("", "c") * 30])
    assert measured([text], "curator")[0]["words"] == 60


def test_rule_sets_can_have_different_dialects() -> None:
    rows = pa.table({"text": [TEXT, TEXT * 3], "language": pa.nulls(2, pa.string())})
    rules = Rules(
        gopher_quality=GopherQuality(dialect="dolma"),
        gopher_repetition=GopherRepetition(dialect="curator"),
    )
    columns = measure(rows, rules)
    for row, text in enumerate([TEXT, TEXT * 3]):
        expected = {
            **gopher_reference.quality(text, "dolma"),
            **gopher_reference.repetition(text, "curator"),
        }
        assert {
            name: values[row].item() for name, values in columns.items()
        } == expected


@pytest.mark.parametrize("dialect", gopher.DIALECTS)
def test_batches_do_not_change_statistics(
    dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [TEXT * times for times in (1, 0, 5, 2, 9, 0)]
    unbatched = measured(texts, dialect)
    monkeypatch.setattr(gopher, "BATCH_BYTES", 1)
    assert all(map(same, unbatched, measured(texts, dialect)))


def test_words_by_language_are_rejected_outside_datatrove() -> None:
    with pytest.raises(ValueError, match=r"words: language .*datatrove.*dolma"):
        GopherQuality(dialect="dolma", words="language")


def test_datatroves_dialect_needs_spacy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "spacy", None)
    spacy_words.load_tokenizer.cache_clear()
    with pytest.raises(
        spacy_words.NoSpacyError, match=r"datatrove .*gristmill\[spacy\]"
    ):
        measured([TEXT], "datatrove")


@pytest.mark.parametrize("dialect", gopher.DIALECTS)
def test_one_rule_set_is_measured_like_both(dialect: str) -> None:
    texts, counting = (
        pa.array([TEXT, "", TEXT * 4]),
        GopherRules.model_validate({"dialect": dialect}),
    )
    joint = gopher.statistics(texts, counting)
    separate = gopher.statistics(texts, counting, repetition=False) | gopher.statistics(
        texts, counting, quality=False
    )
    assert list(joint) == list(separate)
    for name, values in joint.items():
        np.testing.assert_array_equal(values, separate[name])
