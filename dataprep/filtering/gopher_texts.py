"""What the kernels of all Gopher dialects are given, and the counts that several of them share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gristmill.dataprep.filtering.word_cuts import Words
from gristmill.dataprep.text.eight_bytes import count_byte, equal_to
from gristmill.dataprep.text.hashing import first_bytes, load64
from gristmill.dataprep.text.kernels import kernel
from gristmill.dataprep.text.unicode_tables import decode

PLACES = 128
"""Places of a language's table of short stop words: more than twice as many as it has of them."""
_HIGH_BITS = np.uint64(0x8080808080808080)
_BELOW_A, _BEYOND_Z = np.uint64(0x3F3F3F3F3F3F3F3F), np.uint64(0x2525252525252525)


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
    keys: np.ndarray
    """uint64 of shape (languages, PLACES): a hash table of the stop words of up to eight bytes, by `first_bytes`."""
    numbers: np.ndarray
    """int32 of the same shape: which stop word is there, or -1."""


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
    lengths, one = stop_words.lengths[language], np.uint64(1)
    for word in range(len(starts)):
        start, size = starts[word], ends[word] - starts[word]
        key = first_bytes(data, start, size)
        if size <= 8 and (len(lower) == 0 or key & _HIGH_BITS == 0):
            number = _look_up(lower_ascii(key) if len(lower) else key, chars[word], stop_words, language)
        elif chars[word] > 63 or lengths >> np.uint64(chars[word]) & one == 0:
            continue
        else:
            number = _compare(data, start, chars[word], stop_words, language, lower)
        if number >= 0:
            count += 1
            distinct |= one << np.uint64(number - stop_words.begins[language])
    different = 0
    while distinct:
        distinct &= distinct - one
        different += 1
    return count, different


@kernel
def _look_up(key: np.uint64, chars: int, stop_words: StopWords, language: int) -> int:
    """The number of the stop word of so many code points whose bytes are this key; -1 where there is none."""
    keys, numbers = stop_words.keys[language], stop_words.numbers[language]
    place = table_place(key)
    number = numbers[place]
    while number >= 0 and keys[place] != key:
        place = (place + np.uint64(1)) & np.uint64(PLACES - 1)
        number = numbers[place]
    if number < 0:
        return -1
    # A word may end in zero bytes, which the key does not show.
    return number if stop_words.offsets[number + 1] - stop_words.offsets[number] == chars else -1


@kernel
def table_place(key: np.uint64) -> np.uint64:
    """Where the search for a key begins in a table of PLACES."""
    return (key ^ key >> np.uint64(29)) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(57)


@kernel
def lower_ascii(key: np.uint64) -> np.uint64:
    """Eight bytes of ASCII in lower case."""
    capitals = (key + _BELOW_A) & ~(key + _BEYOND_Z) & _HIGH_BITS
    return key | capitals >> np.uint64(2)


@kernel
def _compare(
    data: np.ndarray, start: int, chars: int, stop_words: StopWords, language: int, lower: np.ndarray
) -> int:
    """The number of the stop word that a word of so many code points spells; -1 where it is none."""
    code, _ = decode(data, start)
    if len(lower):
        code = int(lower[code])
    if stop_words.initials[language] >> np.uint64(code & 63) & np.uint64(1) == 0:
        return -1
    for number in range(stop_words.begins[language], stop_words.begins[language + 1]):
        first, last = stop_words.offsets[number], stop_words.offsets[number + 1]
        if last - first == chars and _spells(data, start, stop_words.codes, first, last, lower):
            return number
    return -1


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
    return count_byte(data, begin, end, 0x23)


@kernel
def count_ellipses(data: np.ndarray, begin: int, end: int) -> int:
    """Occurrences of `...` (from the left, not overlapping) and of `…`."""
    if not _has_ellipsis(data, begin, end):
        return 0
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
def _has_ellipsis(data: np.ndarray, begin: int, end: int) -> bool:
    """Whether there is any ellipsis."""
    one, two = np.uint64(8), np.uint64(16)
    at, stop = np.uint64(begin), np.uint64(end)
    while at + one <= stop:  # the first six of eight bytes may begin one
        eight = load64(data, at)
        dots, leads = equal_to(eight, 0x2E), equal_to(eight, 0xE2)
        if dots & dots >> one & dots >> two != 0:
            return True
        if leads != 0 and leads & equal_to(eight, 0x80) >> one & equal_to(eight, 0xA6) >> two != 0:
            return True
        at += np.uint64(6)
    for place in range(np.int64(at), end - 2):
        dots = data[place] == data[place + 1] == data[place + 2] == 0x2E
        if dots or (data[place] == 0xE2 and data[place + 1] == 0x80 and data[place + 2] == 0xA6):
            return True
    return False


@kernel
def share(part: float, whole: float, of_nothing: float) -> float:
    """Part / whole, or a given value where there is no whole."""
    return part / whole if whole else of_nothing
