"""Kernels that find the words, lines and paragraphs of UTF-8 text.

A span is a range of bytes and its length in code points. All functions take the text as
`data[begin:end]`, valid UTF-8, and the flags of `unicode_tables.code_point_flags`; all
take time linear in the bytes. `tokenise_words.py` splits batches of texts into words,
also by other rules.
"""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.text.hashing import ODD, fmix64, load64
from gristmill.dataprep.text.kernels import Bytes, Flags, Positions, kernel
from gristmill.dataprep.text.swar import (
    HIGH_BITS,
    controls_of,
    equal_to,
    first_of,
    number_of,
)
from gristmill.dataprep.text.unicode_tables import (
    ALONE,
    LONE,
    NOTHING,
    SPACE,
    WORD,
    decode,
    decode_before,
    skip_flagged,
)

NEWLINE = np.uint8(0x0A)


@kernel
def skip_to_newlines(data: Bytes, begin: int, end: int, newlines: int) -> int:
    """First position of so many newlines in a row (1 or 2); `end` if there is none."""
    text = data[begin:end]
    for pos in range(len(text) - newlines + 1):
        if text[pos] == NEWLINE and (newlines == 1 or text[pos + 1] == NEWLINE):
            return begin + pos
    return end


@kernel
def strip(data: Bytes, begin: int, end: int, flags: Flags) -> tuple[int, int]:
    """Range of bytes without whitespace at both ends, like `str.strip()`."""
    begin = skip_flagged(data, begin, end, flags, SPACE)
    while begin < end:
        code, last = decode_before(data, end)
        if flags[code] & SPACE == 0:
            break
        end = last
    return begin, end


@kernel
def end_of_line(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """End of the line that begins at `at`, and start of the next line, as for
    `str.splitlines()`: lines end at LF, VT, FF, CR, CR LF, FS, GS, RS, U+0085, U+2028
    and U+2029.
    """
    while at < end:
        if at + 8 <= end:
            eight = load64(data, at)
            likely = controls_of(eight) | equal_to(eight, 0xC2) | equal_to(eight, 0xE2)
            if likely == 0:
                at += 8
                continue
            at += int(np.int64(first_of(likely)))
        byte = data[at]
        width = 0
        if byte == 0x0D:
            width = 2 if at + 1 < end and data[at + 1] == NEWLINE else 1
        elif byte < 0x20:
            width = 1 if 0x0A <= byte < 0x0D or 0x1C <= byte <= 0x1E else 0
        elif byte == 0xC2:
            width = 2 if data[at + 1] == 0x85 else 0
        elif byte == 0xE2 and data[at + 1] == 0x80:
            width = 3 if data[at + 2] == 0xA8 or data[at + 2] == 0xA9 else 0
        if width > 0:
            return at, at + width
        at += 1
    return end, end


@kernel
def count_code_points(data: Bytes, begin: int, end: int) -> int:
    """Number of code points: bytes that do not continue one."""
    pos = np.uint64(begin)
    stop = np.uint64(end)
    continuing = np.uint64(0)
    while pos + np.uint64(8) <= stop:
        eight = load64(data, pos)
        continuing += number_of(eight & ~(eight << np.uint64(1)) & HIGH_BITS)
        pos += np.uint64(8)
    while pos < stop:
        continuing += np.uint64(data[pos] & 0xC0 == 0x80)
        pos += np.uint64(1)
    return end - begin - int(np.int64(continuing))


@kernel
def word_spans(
    data: Bytes, begin: int, end: int, flags: Flags
) -> tuple[Positions, Positions]:
    """Find the words of `data[begin:end]`, valid UTF-8.

    Args:
        flags: `unicode_tables.code_point_flags`.

    Returns:
        starts, ends: int64 byte positions in `data`, one entry per word.
    """
    # adjacent words without a space have a character of three bytes
    capacity = (end - begin) // 2 + 1
    starts = np.empty(capacity, np.int64)
    ends = np.empty(capacity, np.int64)
    count = 0
    in_word = False
    pos = begin
    while pos < end:
        code, width = decode(data, pos)
        flag = flags[code]
        if in_word and (flag & WORD == 0 or flag & ALONE != 0):
            ends[count] = pos
            count = count + 1
            in_word = False
        if flag & WORD != 0 and not in_word:
            starts[count], in_word = pos, True
        pos += width
        if flag & ALONE != 0 and in_word:
            ends[count] = pos
            count = count + 1
            in_word = False
    if in_word:
        ends[count] = end
        count += 1
    return starts[:count], ends[:count]


@kernel
def hashed_words(
    data: Bytes, begin: int, end: int, letters: np.ndarray
) -> tuple[Positions, Positions, np.ndarray]:
    r"""Find the words like `word_spans`, and hash the lower-cased code points of each
    to 64 bits.

    Invisible code points neither end a word nor count: `ex\u00adample` is the word
    `example`.

    Args:
        letters: `unicode_tables.word_letters`.

    Returns:
        starts, ends: int64; hashes: uint64, one entry per word.
    """
    capacity = (end - begin) // 2 + 1
    starts = np.empty(capacity, np.int64)
    ends = np.empty(capacity, np.int64)
    hashes = np.empty(capacity, np.uint64)
    count = 0
    length = np.uint64(0)
    value = np.uint64(0)
    pos = begin
    while pos < end:
        code, width = decode(data, pos)
        letter = letters[code]
        is_joined = 0 < letter < LONE
        if is_joined or letter == NOTHING:
            if is_joined:
                if length == 0:
                    starts[count] = pos
                value = (value ^ np.uint64(letter)) * ODD
                value ^= value >> np.uint64(32)
                length += np.uint64(1)
            pos += width
            continue
        if length > 0:
            ends[count], hashes[count] = pos, fmix64(value + length)
            count = count + 1
            length = np.uint64(0)
            value = np.uint64(0)
        if letter != 0:
            starts[count], ends[count] = pos, pos + width
            lone = np.uint64(letter & ~LONE) * ODD
            hashes[count] = fmix64((lone ^ lone >> np.uint64(32)) + np.uint64(1))
            count = count + 1
        pos += width
    if length > 0:
        ends[count], hashes[count] = end, fmix64(value + length)
        count += 1
    return starts[:count], ends[:count], hashes[:count]
