"""What the kernels of all Gopher dialects are given, and the counts that several of them share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gristmill.dataprep.filtering.word_cuts import Words
from gristmill.dataprep.kernels import kernel
from gristmill.dataprep.unicode_tables import decode


class Texts(NamedTuple):
    """n texts and their words."""

    data: np.ndarray
    """uint8, the UTF-8 bytes of all texts."""
    offsets: np.ndarray
    """int64 of shape (n + 1,)."""
    flags: np.ndarray
    """`unicode_tables.code_point_flags()`."""
    words: Words
    """The words of all texts, in any order of the texts."""
    places: np.ndarray
    """int64 of shape (n,): the place of each text among those of `words`."""
    per_word: np.ndarray
    """uint8 of shape (n,): how many of its words n-grams take for one; n-grams of such texts have no spaces inside."""


class StopWords(NamedTuple):
    """The stop words of several languages, and the language of each of n texts."""

    languages: np.ndarray
    """int32 of shape (n,): index of the text's language, or -1 without one."""
    begins: np.ndarray
    """int32, one more than languages: which stop words are a language's (at most 63)."""
    offsets: np.ndarray
    """int32, one more than stop words: which code points are a word's."""
    codes: np.ndarray
    """uint32, the code points of all stop words."""
    lengths: np.ndarray
    """uint64, one per language: bit k is set where a stop word has k code points."""
    initials: np.ndarray
    """uint64, one per language: bit k is set where a stop word's first code point is k modulo 64."""


@kernel
def text_words(texts: Texts, text: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The words of a text: starts, ends (int64), chars (int32), seen (uint16); see `word_cuts.Words`."""
    words, place = texts.words, texts.places[text]
    first, last = words.offsets[place], words.offsets[place + 1]
    return words.starts[first:last], words.ends[first:last], words.chars[first:last], words.seen[first:last]


@kernel
def find_stop_words(
    data: np.ndarray, starts: np.ndarray, ends: np.ndarray, chars: np.ndarray, stop_words: StopWords, text: int,
    lower: np.ndarray,
) -> tuple[int, int]:
    """Count the stop words among the words of a text.

    Args:
        lower: the lower-case form of every code point, uint32; empty to compare words as they are.

    Returns:
        occurrences, and how many different ones occur.
    """
    language = stop_words.languages[text]
    if language < 0:
        return 0, 0
    count, distinct = 0, np.uint64(0)
    lengths, initials = stop_words.lengths[language], stop_words.initials[language]
    one = np.uint64(1)
    for word in range(len(starts)):
        if chars[word] > 63 or lengths >> np.uint64(chars[word]) & one == 0:
            continue
        code = int(data[starts[word]])
        if code >= 0x80:
            code, _ = decode(data, starts[word])
        if len(lower):
            code = int(lower[code])
        if initials >> np.uint64(code & 63) & one == 0:
            continue
        for number in range(stop_words.begins[language], stop_words.begins[language + 1]):
            first, last = stop_words.offsets[number], stop_words.offsets[number + 1]
            if last - first == chars[word] and _spells(data, starts[word], stop_words.codes, first, last, lower):
                count += 1
                distinct |= one << np.uint64(number - stop_words.begins[language])
                break
    different = 0
    while distinct:
        distinct &= distinct - one
        different += 1
    return count, different


@kernel
def _spells(data: np.ndarray, at: int, wanted: np.ndarray, first: int, last: int, lower: np.ndarray) -> bool:
    for step in range(first, last):
        code, width = decode(data, at)
        if len(lower):
            code = int(lower[code])
        if code != wanted[step]:
            return False
        at += width
    return True


@kernel
def count_flag(seen: np.ndarray, flag: int) -> int:
    """How many words have a code point with this flag."""
    count = 0
    for found in seen:
        count += found & flag != 0
    return count


@kernel
def count_hashes(data: np.ndarray, begin: int, end: int) -> int:
    """Occurrences of `#`."""
    count = 0
    for byte in data[begin:end]:
        count += byte == 0x23
    return count


@kernel
def count_ellipses(data: np.ndarray, begin: int, end: int) -> int:
    """Occurrences of `...` (from the left, not overlapping) and of `…`."""
    count, dots = 0, 0
    for at in range(begin, end):
        byte = data[at]
        if byte == 0x2E:
            dots += 1
            if dots == 3:
                count, dots = count + 1, 0
        else:
            dots = 0
            if byte == 0xE2 and data[at + 1] == 0x80 and data[at + 2] == 0xA6:  # U+2026
                count += 1
    return count


@kernel
def share(part: float, whole: float, of_nothing: float) -> float:
    """Part / whole, or a given value where there is no whole."""
    return part / whole if whole else of_nothing
