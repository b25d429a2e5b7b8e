"""Splitting text into pre-tokens: the patterns that are known here, and kernels that do the same over UTF-8 bytes.

A byte-level BPE never merges across pre-tokens, so the pattern decides what a token can be. The regular expressions
are those of OpenAI's encoder.py (GPT-2; Radford et al. 2019), of OpenAI's tiktoken (`cl100k_base`, taken over by
Llama 3 in Meta's llama3/tokenizer.py), and of Qwen 2, which is the latter with every digit alone.

These patterns match one alternative after the other; so do the kernels, with the same consequences: `\\s+(?!\\S)`
leaves the last white space of a run to what follows it. Which code points are letters, numbers and white space is asked
of the `tokenizers` library, whose regular expressions have a version of Unicode of their own: block by block, where
text has code points of the block, so that the kernels and the library always agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gristmill.dataprep.text.hashing import load64
from gristmill.dataprep.text.kernels import kernel
from gristmill.dataprep.text.unicode_tables import decode

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS_OF_ANY_CASE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CL100K = (r"%s|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3 = _CL100K % (_CONTRACTIONS_OF_ANY_CASE, r"\p{N}{1,3}")
QWEN2 = _CL100K % (_CONTRACTIONS_OF_ANY_CASE, r"\p{N}")


@dataclass(frozen=True)
class Pattern:
    """How text is split.

    Attributes:
        most_digits: longest run of numbers of the patterns like cl100k; 0 stands for GPT-2's pattern.
        digits_alone: whether every numeric character is cut out first (`tokenizers`' Digits).
    """

    most_digits: int = 0
    digits_alone: bool = False


REGEXES = {GPT2: Pattern(), LLAMA3: Pattern(most_digits=3), QWEN2: Pattern(most_digits=1)}


class NotKnownError(ValueError):
    """A tokenizer that only the `tokenizers` library can encode with; the message is the reason."""


def make_pre_tokenizer(name: str) -> PreTokenizer:
    """What splits text before the merges are learnt: `gpt2`, `llama3` or `digits` (`tokenizer.pretokenizer`)."""
    from tokenizers import Regex, pre_tokenizers

    if name == "llama3":
        return pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "digits":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return byte_level


def read_pattern(described: Mapping[str, Any]) -> Pattern:
    """The pattern of a tokenizer.json.

    Args:
        described: the parsed file.

    Raises:
        NotKnownError: its pre-tokenizer is none of those above.
    """
    splitting = described.get("pre_tokenizer") or {"type": "none"}
    steps = splitting["pretokenizers"] if splitting["type"] == "Sequence" else [splitting]
    *before, last = steps or [{"type": "none"}]
    if last["type"] != "ByteLevel" or last.get("add_prefix_space", True) or len(before) > 1:
        raise NotKnownError(f"its pre-tokenizer is {_names(steps)}")
    with_regex = last.get("use_regex", True)
    if not before and with_regex:
        return REGEXES[GPT2]
    if before and before[0]["type"] == "Digits" and before[0].get("individual_digits") and with_regex:
        return Pattern(digits_alone=True)
    if before and before[0]["type"] == "Split" and not with_regex:
        return _read_split(before[0])
    raise NotKnownError(f"its pre-tokenizer is {_names(steps)}")


def _read_split(split: Mapping[str, Any]) -> Pattern:
    regex = split["pattern"].get("Regex")
    if regex not in REGEXES:
        raise NotKnownError(f"its pre-tokenizer splits by another pattern: {regex or split['pattern']}")
    if split["behavior"] != "Isolated" or split.get("invert"):
        raise NotKnownError(f"its pre-tokenizer splits in another way: {split['behavior']}, "
                            f"invert {bool(split.get('invert'))}")
    return REGEXES[regex]


def _names(steps: list[Mapping[str, Any]]) -> str:
    return " + ".join(
        step["type"] + "".join(f" with {key}" for key in ("add_prefix_space",) if step.get(key)) for step in steps)


CODE_POINTS = 0x110000
SURROGATES = range(0xD800, 0xE000)
BLOCK = 256
LETTER, NUMBER, SPACE, OTHER, ALONE, UNKNOWN = 0, 1, 2, 3, 4, 255
"""ALONE: a numeric character that `Digits` cuts out before anything else is looked at."""


class CharacterClasses:
    """The class of every code point that text had so far: `table`, uint8 of shape (0x110000,), UNKNOWN elsewhere."""

    def __init__(self, digits_alone: bool = False) -> None:
        """With `digits_alone`, what `Digits` calls numeric is of the class ALONE."""
        from tokenizers import Regex, pre_tokenizers

        self.table = np.full(CODE_POINTS, UNKNOWN, np.uint8)
        self._removers = [
            (kind, pre_tokenizers.Split(Regex(regex), "removed"))
            for kind, regex in ((LETTER, r"\p{L}"), (NUMBER, r"\p{N}"), (SPACE, r"\s"))
        ]
        self._digits = pre_tokenizers.Digits(individual_digits=True) if digits_alone else None

    def learn(self, code_point: int) -> None:
        """Ask the library for the classes of a code point's block."""
        first = code_point - code_point % BLOCK
        codes = np.array([code for code in range(first, first + BLOCK) if code not in SURROGATES])
        text = "".join(map(chr, codes.tolist()))
        found = np.full(len(codes), OTHER, np.uint8)
        for kind, remover in self._removers:
            removed = np.ones(len(codes), bool)
            for _, (begin, end) in remover.pre_tokenize_str(text):
                removed[begin:end] = False
            found[removed] = kind
        if self._digits is not None:
            found[[self._is_alone(chr(code)) for code in codes.tolist()]] = ALONE
        self.table[codes] = found

    def _is_alone(self, character: str) -> bool:
        assert self._digits is not None
        return len(self._digits.pre_tokenize_str(f"a{character}a")) == 3


_BLANK, _APOSTROPHE, _NEWLINE, _RETURN = 0x20, 0x27, 0x0A, 0x0D
_EIGHT_BLANKS = np.uint64(0x2020202020202020)
_ONES = np.uint64(0x0101010101010101)
_HIGH = np.uint64(0x8080808080808080)
_LOW = np.uint64(0x7F7F7F7F7F7F7F7F)
_FROM_A = np.uint64((0x80 - 0x61) * 0x0101010101010101)
_BEYOND_Z = np.uint64((0x80 - 0x7B) * 0x0101010101010101)


@kernel
def next_piece(data: np.ndarray, at: int, end: int, classes: np.ndarray, most_digits: int) -> int:
    """Where the piece that begins at byte `at` ends; -1 - code point where its class is not known yet.

    Args:
        data: UTF-8; the piece is searched in data[at:end], which is not empty and begins on a code point.
        classes: CharacterClasses.table.
        most_digits: Pattern.most_digits.
    """
    if most_digits == 0:
        return _next_gpt2(data, at, end, classes)
    return _next_cl100k(data, at, end, classes, most_digits)


@kernel
def _next_gpt2(data: np.ndarray, at: int, end: int, classes: np.ndarray) -> int:
    first = data[np.uint64(at)]
    if first == _APOSTROPHE:
        length = _contraction(data, at, end)
        if length:
            return at + length
    code, width = decode(data, at)
    kind = classes[np.uint64(code)]
    start = at + width
    if first == _BLANK and start < end and kind != UNKNOWN:
        code, width = decode(data, start)
        following = classes[np.uint64(code)]
        if following != SPACE and following != ALONE:
            kind = following
            start += width
    if kind == UNKNOWN:
        return -1 - code
    if kind == ALONE:
        return start
    stop = _run(data, start, end, classes, kind)
    return stop if kind != SPACE or stop < 0 else _white_space(data, at, stop, end, classes)


@kernel
def _white_space(data: np.ndarray, at: int, stop: int, end: int, classes: np.ndarray) -> int:
    """`\\s+(?!\\S)|\\s+`: what a run of white space in front of something leaves its last code point to."""
    if stop == end or classes[decode(data, stop)[0]] == ALONE:
        return stop
    last = stop - 1
    while data[np.uint64(last)] & 0xC0 == 0x80:
        last -= 1
    return stop if last == at else last


@kernel
def _next_cl100k(data: np.ndarray, at: int, end: int, classes: np.ndarray, most_digits: int) -> int:
    first = data[np.uint64(at)]
    if first == _APOSTROPHE:
        length = _contraction_of_any_case(data, at, end)
        if length:
            return at + length
    code, width = decode(data, at)
    kind = classes[np.uint64(code)]
    start = at + width
    if kind == UNKNOWN:
        return -1 - code
    if kind == LETTER:
        return _run(data, start, end, classes, LETTER)
    if kind == NUMBER:
        return _digits(data, start, end, classes, most_digits - 1)
    following = UNKNOWN
    if start < end:
        code, width = decode(data, start)
        following = classes[np.uint64(code)]
        if following == UNKNOWN:
            return -1 - code
        if following == LETTER and first != _NEWLINE and first != _RETURN:
            return _run(data, start + width, end, classes, LETTER)
    if kind == OTHER or (first == _BLANK and following == OTHER):
        stop = _run(data, start, end, classes, OTHER)
        return stop if stop < 0 else _line_ends(data, stop, end)
    stop = _run(data, start, end, classes, SPACE)
    if stop < 0:
        return stop
    last = stop
    while last > at and data[np.uint64(last - 1)] != _NEWLINE and data[np.uint64(last - 1)] != _RETURN:
        last -= 1
    return last if last > at else _white_space(data, at, stop, end, classes)


@kernel
def _digits(data: np.ndarray, at: int, end: int, classes: np.ndarray, most: int) -> int:
    """Where up to so many further numbers end; -1 - code point where a class is not known."""
    while at < end and most > 0:
        code, width = decode(data, at)
        kind = classes[np.uint64(code)]
        if kind == UNKNOWN:
            return -1 - code
        if kind != NUMBER:
            break
        at += width
        most -= 1
    return at


@kernel
def _line_ends(data: np.ndarray, at: int, end: int) -> int:
    """`[\\r\\n]*`"""
    while at < end and (data[np.uint64(at)] == _NEWLINE or data[np.uint64(at)] == _RETURN):
        at += 1
    return at


@kernel
def _run(data: np.ndarray, at: int, end: int, classes: np.ndarray, kind: int) -> int:
    """Where a run of one class ends that has begun before byte `at`; -1 - code point where a class is not known."""
    if kind == LETTER:
        at = _latin_letters(data, at, end)
    elif kind == SPACE:
        while at + 8 <= end and load64(data, at) == _EIGHT_BLANKS:
            at += 8
    while at < end:
        byte = data[np.uint64(at)]
        if byte < 0x80:
            code, width = int(byte), 1
        else:
            code, width = decode(data, at)
        found = classes[np.uint64(code)]
        if found != kind:
            return -1 - code if found == UNKNOWN else at
        at += width
    return at


@kernel
def _latin_letters(data: np.ndarray, at: int, end: int) -> int:
    """Where the ASCII letters from byte `at` end, eight bytes at a time; earlier within eight bytes of the data's end.
    """
    while at + 8 <= len(data):
        others = non_letters(load64(data, at))
        if others != 0:
            return min(at + places_before(others & (~others + np.uint64(1))), end)
        at += 8
        if at >= end:
            return end
    return at


@kernel
def non_letters(word: np.uint64) -> np.uint64:
    """Of eight bytes, the highest bit of each that is no ASCII letter.

    In each byte's highest bit: whether it is at least `a`, whether it is beyond `z`, whether it is not ASCII.
    """
    low = (word | _EIGHT_BLANKS) & _LOW
    return ~((low + _FROM_A) & ~(low + _BEYOND_Z) & ~word) & _HIGH


@kernel
def places_before(bit: np.uint64) -> int:
    """How many bytes are before the one whose highest bit this is.

    Below the bit as many bytes have their lowest bit as are before it, and its own; a product adds them up.
    """
    return int(np.int64((((bit - np.uint64(1)) & _ONES) * _ONES) >> np.uint64(56))) - 1


@kernel
def _contraction(data: np.ndarray, at: int, end: int) -> int:
    """Length of 's, 't, 'm, 'd, 're, 've or 'll at byte `at`, else 0."""
    if at + 1 >= end:
        return 0
    one = data[at + 1]
    if one == 0x73 or one == 0x74 or one == 0x6D or one == 0x64:
        return 2
    if at + 2 >= end:
        return 0
    two = data[at + 2]
    if (one == 0x72 or one == 0x76) and two == 0x65:
        return 3
    return 3 if one == 0x6C and two == 0x6C else 0


@kernel
def _contraction_of_any_case(data: np.ndarray, at: int, end: int) -> int:
    """The same in any case; Unicode's other case of `s` is also U+017F, the long s, which is two bytes."""
    if at + 1 >= end:
        return 0
    one = data[at + 1]
    if one < 0x80:
        one |= 0x20
    if one == 0x73 or one == 0x74 or one == 0x6D or one == 0x64:
        return 2
    if at + 2 >= end:
        return 0
    two = data[at + 2]
    if one == 0xC5 and two == 0xBF:
        return 3
    two |= 0x20
    if (one == 0x72 or one == 0x76) and two == 0x65:
        return 3
    return 3 if one == 0x6C and two == 0x6C else 0
