r"""Splitting of texts into words. Numba kernels over UTF-8 bytes.

- `whitespace_words`: maximal runs of code points that are not whitespace
  (`str.split()`).
- `unspaced_words`: the same, but within such a run a new word starts before each letter
  or digit that belongs to a script without spaces (`unicode_tables.UNSPACED_RANGES`),
  or that follows one. Punctuation and combining marks belong to the word before them;
  at the start of a run they belong to the word after them. So `東京、Tokyo「都」` is
  東 / 京、 / Tokyo「 / 都」.
- `word_punct_words`: maximal runs of letters, digits and underscores, and maximal runs
  of other code points that are not whitespace: `\w+|[^\w\s]+`, NLTK's
  WordPunctTokenizer.
- `spacy_words` (`spacy_words.py`): spaCy's blank English tokenizer.
- `language_words` (`language_words.py`): the tokenizer that datatrove assigns to each
  text's language.

All take the numbers of the texts to split, and take time linear in the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gristmill.dataprep.text.kernels import (
    Bytes,
    Flags,
    Offsets,
    Positions,
    inner_kernel,
    kernel,
)
from gristmill.dataprep.text.unicode_tables import ALONE, SPACE, WORD, decode

FIRST_EASTERN = 0x3040
"""First code point of Han and Kana; other scripts without spaces are below it."""

BEGINS = 4
"""Flag of a transition: a word begins."""
UNSPACED = np.array([[0, 5, 6, 7], [0, 1, 2, 3], [0, 2, 2, 7], [0, 3, 6, 7]])
"""State and kind of a code point (whitespace, punctuation, letter or digit, one of a
script without spaces) -> next state, of shape (4, 4). The states are outside of a word,
and in one without letters, after a letter, and after one of those scripts.
"""
WORD_PUNCT = np.array([[0, 5, 6, 6], [0, 1, 6, 6], [0, 5, 2, 2]])
"""The same; the states are outside of a word, in punctuation, and in a word."""


class Words(NamedTuple):
    """Words of m texts."""

    offsets: np.ndarray
    """int64 of shape (m + 1,): bounds of each text's words."""
    starts: Positions
    """int64, byte position of each word's start."""
    ends: Positions
    """int64, byte position of each word's end."""
    chars: np.ndarray
    """int32, code points of each word."""
    seen: np.ndarray
    """uint16, union of the flags of each word's code points."""


class CutTexts(NamedTuple):
    """n texts and their words."""

    data: Bytes
    """uint8: the UTF-8 bytes of all texts, and of words that are not part of them."""
    offsets: Offsets
    """int64 of shape (n + 1,): bounds of the texts."""
    flags: Flags
    """`unicode_tables.code_point_flags()`."""
    words: Words
    """The words of all texts, in any order of the texts."""
    places: np.ndarray
    """int64 of shape (n,): the position of each text in `words`."""
    per_word: np.ndarray
    """uint8 of shape (n,): number of words that n-grams count as one; with more than
    one they contain no spaces.
    """


def join_parts(parts: Sequence[Words]) -> Words:
    """Concatenate the words of one or more groups of texts."""
    if len(parts) == 1:
        return parts[0]
    sizes = np.concatenate([[0], *(np.diff(part.offsets) for part in parts)])
    columns = zip(*(part[1:] for part in parts), strict=True)
    return Words(np.cumsum(sizes), *map(np.concatenate, columns))


@kernel
def whitespace_words(
    data: Bytes, offsets: Offsets, flags: Flags, which: np.ndarray
) -> Words:
    """Split texts at whitespace.

    Args:
        data, offsets: the texts (`kernels.text_buffers`).
        flags: `unicode_tables.code_point_flags()`.
        which: int64, numbers of the texts to split.
    """
    capacity = total_bytes(offsets, which) // 2 + len(which)
    starts = np.empty(capacity, np.int64)
    ends = np.empty(capacity, np.int64)
    chars = np.empty(capacity, np.int32)
    flag_unions = np.empty(capacity, np.uint16)
    word_offsets = np.zeros(len(which) + 1, np.int64)
    count = 0
    for number in range(len(which)):
        pos = offsets[which[number]]
        end = offsets[which[number] + 1]
        length = 0
        flag_union = np.uint16(0)
        while pos < end:
            code = int(data[pos])
            width = 1
            if code >= 0x80:
                code, width = decode(data, pos)
            flag = flags[code]
            if flag & SPACE == 0:
                if length == 0:
                    starts[count], flag_union = pos, np.uint16(0)
                length += 1
                flag_union |= flag
            elif length > 0:
                ends[count], chars[count], flag_unions[count] = pos, length, flag_union
                count = count + 1
                length = 0
            pos += width
        if length > 0:
            ends[count], chars[count], flag_unions[count] = end, length, flag_union
            count += 1
        word_offsets[number + 1] = count
    return Words(
        word_offsets, starts[:count], ends[:count], chars[:count], flag_unions[:count]
    )


@inner_kernel
def total_bytes(offsets: Offsets, which: np.ndarray) -> int:
    """Number of bytes of some texts: at least that of their words."""
    total = 0
    for text in which:
        total += offsets[text + 1] - offsets[text]
    return total


@kernel
def describe_words(
    data: Bytes,
    flags: Flags,
    offsets: Offsets,
    starts: Positions,
    ends: Positions,
) -> Words:
    """Add code points and flags to words found elsewhere."""
    chars = np.empty(len(starts), np.int32)
    flag_unions = np.empty(len(starts), np.uint16)
    for word in range(len(starts)):
        chars[word], flag_unions[word] = describe_word(
            data, starts[word], ends[word], flags
        )
    return Words(offsets, starts, ends, chars, flag_unions)


@inner_kernel
def describe_word(
    data: Bytes, pos: int, end: int, flags: Flags
) -> tuple[int, np.uint16]:
    """Number of code points of a word, and the union of their flags."""
    length = 0
    flag_union = np.uint16(0)
    while pos < end:
        code, width = decode(data, pos)
        flag_union |= flags[code]
        length += 1
        pos += width
    return length, flag_union


def unspaced_words(
    data: Bytes, offsets: Offsets, flags: Flags, which: np.ndarray
) -> Words:
    """Split texts at whitespace and between the characters of scripts without
    spaces.
    """
    return _transduced_words(data, offsets, flags, which, UNSPACED)


def word_punct_words(
    data: Bytes, offsets: Offsets, flags: Flags, which: np.ndarray
) -> Words:
    """Split texts into runs of letters, digits and underscores, and runs of
    punctuation.
    """
    return _transduced_words(data, offsets, flags, which, WORD_PUNCT)


@kernel
def _transduced_words(
    data: Bytes,
    offsets: Offsets,
    flags: Flags,
    which: np.ndarray,
    transitions: np.ndarray,
) -> Words:
    """Split texts by a finite-state machine (UNSPACED or WORD_PUNCT)."""
    capacity = total_bytes(offsets, which)
    starts = np.empty(capacity, np.int64)
    ends = np.empty(capacity, np.int64)
    word_offsets = np.zeros(len(which) + 1, np.int64)
    count = 0
    for number in range(len(which)):
        pos = offsets[which[number]]
        end = offsets[which[number] + 1]
        state = 0
        while pos < end:
            code, width = decode(data, pos)
            flag = flags[code]
            kind = 0
            if flag & SPACE == 0:
                kind = 1 + (flag & WORD != 0) * (1 + (flag & ALONE != 0))
            entry = transitions[state, kind]
            if state > 0 and (entry == 0 or entry & BEGINS):
                ends[count] = pos
                count += 1
            if entry & BEGINS:
                starts[count] = pos
            state = entry & ~BEGINS
            pos += width
        if state > 0:
            ends[count] = end
            count += 1
        word_offsets[number + 1] = count
    return describe_words(data, flags, word_offsets, starts[:count], ends[:count])


@kernel
def characters_per_word(
    data: Bytes, offsets: Offsets, flags: Flags, which: np.ndarray
) -> np.ndarray:
    """Number of characters of scripts without spaces per word of another script, by
    text.

    It is 1 if at most half of a text's letters and digits are of such scripts;
    otherwise 2 if most of those are Han or Kana, and 3 if they are Thai, Lao, Khmer or
    Burmese, whose words are longer. Measured on the Universal Declaration of Human
    Rights: with these numbers its n-grams repeat about as often as in English.

    Returns:
        uint8, one per text of `which`.
    """
    characters = np.ones(len(which), np.uint8)
    for number in range(len(which)):
        pos = offsets[which[number]]
        end = offsets[which[number] + 1]
        num_letters = 0
        num_alone = 0
        num_eastern = 0
        while pos < end:
            code, width = decode(data, pos)
            num_letters += flags[code] & WORD != 0
            if flags[code] & (WORD | ALONE) == WORD | ALONE:
                num_alone += 1
                num_eastern += code >= FIRST_EASTERN
            pos += width
        if 2 * num_alone > num_letters:
            characters[number] = 2 if 2 * num_eastern > num_alone else 3
    return characters
