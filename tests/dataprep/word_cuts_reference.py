"""Plain Python reference of `tokenise_words.py`, for tests and `bench`."""

from __future__ import annotations

import re
import string
import unicodedata
from functools import cache

from gristmill.dataprep.text.unicode_tables import UNSPACED_RANGES, ranges
from gristmill.dataprep.words.spacy_words import load_tokenizer
from gristmill.dataprep.words.word_breaks import EXTENDED_PICTOGRAPHIC, WORD_BREAK


def word_punct(text: str) -> list[str]:
    """`word_cuts.word_punct_words` of one text."""
    return re.findall(r"\w+|[^\w\s]+", text)


def unspaced(text: str) -> list[str]:
    """`word_cuts.unspaced_words` of one text."""
    words: list[str] = []
    for run in text.split():
        word = ""
        for character in run:
            letters = [
                character_before
                for character_before in word
                if is_word(character_before)
            ]
            if (
                is_word(character)
                and letters
                and (is_unspaced(character) or is_unspaced(letters[-1]))
            ):
                words.append(word)
                word = ""
            word += character
        words.append(word)
    return words


LETTERS = ("ALetter", "Hebrew_Letter")
ATTACHED = ("Extend", "Format", "ZWJ")
BREAKING = ("CR", "LF", "Newline")


def segmented(text: str) -> list[str]:
    """`word_breaks.segmented_words` of one text: a cut before each code point that no
    rule of UAX #29 joins.
    """
    values = [word_breaks().get(ord(character), "Other") for character in text]
    following = [""] * len(text)
    for at in range(len(text) - 2, -1, -1):
        following[at] = (
            following[at + 1] if values[at + 1] in ATTACHED else values[at + 1]
        )
    segments: list[str] = []
    second_last = last = ""
    for at, character in enumerate(text):
        value = values[at]
        is_pictograph = ord(character) in pictographs()
        joined = at > 0 and is_joined(
            second_last, last, values[at - 1], value, following[at], is_pictograph
        )
        if joined:
            segments[-1] += character
        else:
            segments.append(character)
        if value not in ATTACHED:
            second_last, last = last, value
    return [segment for segment in segments if segment[0].isalnum()]


def is_joined(
    second_last: str,
    last: str,
    before: str,
    value: str,
    following: str,
    is_pictograph: bool,
) -> bool:
    """Return True if no boundary lies before a code point, by the rules WB3a to WB13b
    of UAX #29.

    Args:
        second_last, last, following: values of its neighbours, without characters
            attached to them (WB4).
        before: value of the code point right before it.
        value: its own value.
    """
    if value in BREAKING or before in BREAKING:
        return False
    if value in ATTACHED or (before == "ZWJ" and is_pictograph):
        return True
    return (
        is_pair(last, value)
        or is_bridge(last, value, following)
        or is_bridge(second_last, last, value)
    )


def is_pair(last: str, value: str) -> bool:
    """Return True if two neighbours belong together (WB5, WB7a, WB8 to WB10, WB13 to
    WB13b).
    """
    if value == "ExtendNumLet":
        return last in (*LETTERS, "Numeric", "Katakana", "ExtendNumLet")
    if last == "ExtendNumLet":
        return value in (*LETTERS, "Numeric", "Katakana")
    if last == "Hebrew_Letter" and value == "Single_Quote":
        return True
    if last == "Katakana":
        return value == "Katakana"
    return last in (*LETTERS, "Numeric") and value in (*LETTERS, "Numeric")


def is_bridge(left: str, mark: str, right: str) -> bool:
    """Return True if a mark joins its two sides (WB6, WB7, WB7b, WB7c, WB11, WB12)."""
    if (
        left in LETTERS
        and right in LETTERS
        and mark in ("MidLetter", "MidNumLet", "Single_Quote")
    ):
        return True
    if left == right == "Hebrew_Letter" and mark == "Double_Quote":
        return True
    return left == right == "Numeric" and mark in (
        "MidNum",
        "MidNumLet",
        "Single_Quote",
    )


@cache
def word_breaks() -> dict[int, str]:
    """Word_Break value of every code point that has one."""
    return {
        code: value
        for value, code_ranges in WORD_BREAK.items()
        for first, last in ranges(code_ranges)
        for code in range(first, last + 1)
    }


@cache
def pictographs() -> frozenset[int]:
    """Code points that are Extended_Pictographic."""
    return frozenset(
        code
        for first, last in ranges(EXTENDED_PICTOGRAPHIC)
        for code in range(first, last + 1)
    )


def normalized(text: str) -> str:
    """RedPajama's normal form: no ASCII punctuation, lower case, NFD."""
    return unicodedata.normalize(
        "NFD", text.translate(str.maketrans("", "", string.punctuation)).lower()
    )


def spacy_english(text: str) -> list[str]:
    """`spacy_words.spacy_words` of one text."""
    return [token.text for run in text.split() for token in load_tokenizer()(run)]


def is_word(character: str) -> bool:
    """Return True if `\\w` in a regular expression matches."""
    return character.isalnum() or character == "_"


def is_unspaced(character: str) -> bool:
    """Return True if a character's script has no spaces between words."""
    return any(first <= ord(character) <= last for first, last in UNSPACED_RANGES)
