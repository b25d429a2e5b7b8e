"""What is not code inside files of code: encoded data, and the markup around the text of HTML.

Encoded data is what matches one of StarCoder2's patterns (Lozhkov et al. 2024, section 2.1), of `str` in Python's `re`:

    [a-zA-Z0-9+/\\n=]{64,}
    (?:\\b(?:0x|\\\\x)?[0-9a-fA-F]{2}(?:,|\\b\\s*)){8,}
    (?:\\\\u[0-9a-fA-F]{4}){8,}

The visible text of HTML is what is left without comments, the elements `script` and `style`, and tags. A tag begins
with `<` and a letter, `/`, `!` or `?`, and ends with the next `>` that is not in the quotes of an attribute's value.
What is never closed reaches to the end. Character references count as they are written. StarCoder has the text from
an HTML parser, which gives the same up to those.
"""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.text.kernels import kernel
from gristmill.dataprep.text.spans import count_code_points
from gristmill.dataprep.text.unicode_tables import SPACE, WORD, decode

LEAST_BASE64, LEAST_GROUPS = 64, 8

_IS_BASE64 = np.array([byte < 128 and (chr(byte).isalnum() or chr(byte) in "+/\n=") for byte in range(256)])
_IS_WORD = np.array([byte < 128 and (chr(byte).isalnum() or chr(byte) == "_") for byte in range(256)])
_IS_HEX = np.array([chr(byte) in "0123456789abcdefABCDEF" for byte in range(256)])
_SCRIPT, _STYLE = np.frombuffer(b"script", np.uint8), np.frombuffer(b"style", np.uint8)


@kernel
def encoded_characters(data: np.ndarray, begin: int, end: int, flags: np.ndarray) -> tuple[int, int]:
    """Code points of the longest match of the three patterns in `data[begin:end]`, and of all their matches."""
    longest, total = _base64(data, begin, end)
    at = begin
    while at < end:
        stop = at
        # In the middle of a word, which is where most hexadecimal digits are, nothing begins.
        if (_IS_HEX[data[at]] and (at == begin or not _IS_WORD[data[at - 1]])) or data[at] == 0x5C:
            stop = _end_of_hexadecimal(data, begin, at, end, flags)
            if stop == at:
                stop = _end_of_escapes(data, at, end)
        if stop > at:
            length = count_code_points(data, at, stop)
            longest, total = max(longest, length), total + length
        at = max(stop, at + 1)
    return longest, total


@kernel
def _base64(data: np.ndarray, begin: int, end: int) -> tuple[int, int]:
    """Of the first pattern alone: a run is looked for from its far end, so that most bytes are never read."""
    longest, total, run = 0, 0, begin
    while run + LEAST_BASE64 <= end:
        at = run + LEAST_BASE64 - 1
        while at >= run and _IS_BASE64[data[at]]:
            at -= 1
        if at >= run:
            run = at + 1
            continue
        stop = run + LEAST_BASE64
        while stop < end and _IS_BASE64[data[stop]]:
            stop += 1
        longest, total, run = max(longest, stop - run), total + stop - run, stop + 1
    return longest, total


@kernel
def _end_of_hexadecimal(data: np.ndarray, begin: int, at: int, end: int, flags: np.ndarray) -> int:
    """Where the match of the second pattern that begins here ends; `at` where none does."""
    start, groups = at, 0
    while at < end and _is_border(data, begin, at, end, flags):
        digits = at
        prefixed = at + 1 < end and data[at + 1] == 0x78 and (data[at] == 0x30 or data[at] == 0x5C)
        if prefixed:
            digits += 2
        if digits + 1 >= end or not (_IS_HEX[data[digits]] and _IS_HEX[data[digits + 1]]):
            break
        behind = digits + 2
        if behind < end and data[behind] == 0x2C:
            behind += 1
        elif _is_border(data, begin, behind, end, flags):
            behind = _skip_spaces(data, behind, end, flags)
        else:
            break
        at, groups = behind, groups + 1
    return at if groups >= LEAST_GROUPS else start


@kernel
def _is_border(data: np.ndarray, begin: int, at: int, end: int, flags: np.ndarray) -> bool:
    """Whether `\\b` matches here."""
    before = after = False
    if at > begin:
        last = at - 1
        while data[last] & 0xC0 == 0x80:
            last -= 1
        code, _ = decode(data, last)
        before = flags[code] & WORD != 0
    if at < end:
        code, _ = decode(data, at)
        after = flags[code] & WORD != 0
    return before != after


@kernel
def _skip_spaces(data: np.ndarray, at: int, end: int, flags: np.ndarray) -> int:
    while at < end:
        code, width = decode(data, at)
        if flags[code] & SPACE == 0:
            break
        at += width
    return at


@kernel
def _end_of_escapes(data: np.ndarray, at: int, end: int) -> int:
    """Where the match of the third pattern that begins here ends; `at` where none does."""
    start, groups = at, 0
    while at + 5 < end and data[at] == 0x5C and data[at + 1] == 0x75:
        for digit in range(at + 2, at + 6):
            if not _IS_HEX[data[digit]]:
                return at if groups >= LEAST_GROUPS else start
        at, groups = at + 6, groups + 1
    return at if groups >= LEAST_GROUPS else start


@kernel
def visible_characters(data: np.ndarray, begin: int, end: int) -> int:
    """Code points of the visible text of `data[begin:end]`, HTML."""
    count, at = 0, begin
    while at < end:
        if data[at] != 0x3C or at + 1 == end or not _opens_tag(data[at + 1]):
            count += data[at] & 0xC0 != 0x80
            at += 1
        elif end - at >= 4 and data[at + 1] == 0x21 and data[at + 2] == 0x2D and data[at + 3] == 0x2D:
            at = _skip_past(data, at + 4, end, 0x2D, 0x2D)
        elif _is_element(data, at + 1, end, _SCRIPT):
            at = _skip_element(data, at, end, _SCRIPT)
        elif _is_element(data, at + 1, end, _STYLE):
            at = _skip_element(data, at, end, _STYLE)
        else:
            at = _skip_tag(data, at, end)
    return count


@kernel
def _opens_tag(byte: int) -> bool:
    return 0x61 <= (byte | 0x20) <= 0x7A or byte == 0x2F or byte == 0x21 or byte == 0x3F


@kernel
def _skip_past(data: np.ndarray, at: int, end: int, first: int, second: int) -> int:
    """Behind the next `>` that has two given bytes before it, all from `at` on; `end` if there is none."""
    for close in range(at + 2, end):
        if data[close] == 0x3E and data[close - 1] == second and data[close - 2] == first:
            return close + 1
    return end


@kernel
def _is_element(data: np.ndarray, at: int, end: int, name: np.ndarray) -> bool:
    """Whether a tag's name is this one, in any case."""
    if at + len(name) >= end:
        return False
    for step in range(len(name)):
        if data[at + step] | 0x20 != name[step]:
            return False
    behind = data[at + len(name)]
    return behind == 0x3E or behind == 0x2F or _is_html_space(behind)


@kernel
def _is_html_space(byte: int) -> bool:
    return byte == 0x20 or byte == 0x09 or byte == 0x0A or byte == 0x0C or byte == 0x0D


@kernel
def _skip_element(data: np.ndarray, at: int, end: int, name: np.ndarray) -> int:
    """Behind the end tag of an element whose content is no markup."""
    at = _skip_tag(data, at, end)
    while at + 1 < end:
        if data[at] == 0x3C and data[at + 1] == 0x2F and _is_element(data, at + 2, end, name):
            return _skip_tag(data, at, end)
        at += 1
    return end


@kernel
def _skip_tag(data: np.ndarray, at: int, end: int) -> int:
    """Behind the `>` of the tag that begins here."""
    value = False
    while at < end:
        byte = data[at]
        if value and (byte == 0x22 or byte == 0x27):
            at += 1
            while at < end and data[at] != byte:
                at += 1
        elif byte == 0x3E:
            return at + 1
        value = byte == 0x3D or (value and _is_html_space(byte))
        at += 1
    return end
