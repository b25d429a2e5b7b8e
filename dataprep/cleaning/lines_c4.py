"""C4's line rules, as edits (tensorflow/datasets, `text/c4_utils.py`, `clean_page`; Raffel et al. 2020, section 2.2).

A text is cut into lines as `str.splitlines()` does, and each is stripped. In this order, a line goes where

- `c4_long_word`: one of its words (`str.split()`) has more than `max_word_characters` code points;
- after `c4_citations` has taken `[]`, `[12]` (decimal digits of any script), `[edit]` and `[citation needed]` out of
  it:
- `c4_no_terminal_punctuation`: it does not end in `.`, `?`, `!` or `"` (in datatrove's dialect also `'`), or ends in
  `...`;
- `c4_few_words`: it has fewer than `min_words` words;
- `c4_javascript`: its lower case contains `javascript`;
- `c4_policy`: its lower case contains one of POLICY_PHRASES.

The lines that are left, joined by newlines and stripped, are the text. Where the original drops the whole page
(`lorem ipsum`, `{`, too few sentences), this drops nothing: that is for the rule set `c4` of the stage `filter`,
which therefore sees only what the line rules left.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from gristmill.dataprep.cleaning.line_pieces import (
    BEGIN,
    DECIMAL,
    END,
    character_classes,
    new_rows,
    push,
    push_edits,
    rows_array,
    strip_pieces,
)
from gristmill.dataprep.text.kernels import kernel, text_buffers
from gristmill.dataprep.text.spans import strip
from gristmill.dataprep.text.unicode_tables import SPACE, code_point_flags, decode, lower_case
from gristmill.mixtures.steps.clean import C4Lines

POLICY_PHRASES = (
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)
RULES = ("c4_long_word", "c4_citations", "c4_no_terminal_punctuation", "c4_few_words", "c4_javascript", "c4_policy")
LONG_WORD, CITATIONS, PUNCTUATION, FEW_WORDS, JAVASCRIPT, POLICY = range(len(RULES))
KEPT = -1

_PHRASES = [np.frombuffer(phrase.encode(), np.uint8) for phrase in ("javascript", *POLICY_PHRASES)]
_PHRASE_BYTES = np.concatenate(_PHRASES)
_PHRASE_OFFSETS = np.concatenate([[0], np.cumsum([len(phrase) for phrase in _PHRASES])])
_EDIT = np.frombuffer(b"[edit]", np.uint8)
_CITATION_NEEDED = np.frombuffer(b"[citation needed]", np.uint8)


def c4_lines(texts: pa.Array, options: C4Lines) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """The edits that C4's line rules make of n texts.

    Returns:
        edits (EDITS_TYPE); per text and rule of RULES how many lines (citations: places) it took, and their bytes
        without what ended the lines: two int64 arrays of shape (n, 6).
    """
    data, offsets = text_buffers(texts)
    rows, firsts, counts, sizes = _c4_lines(
        data,
        offsets,
        code_point_flags(),
        character_classes(),
        lower_case(),
        options.max_word_characters,
        options.citations,
        options.terminal_punctuation,
        options.dialect == "datatrove",
        options.min_words,
        options.javascript,
        options.policy,
        _PHRASE_BYTES,
        _PHRASE_OFFSETS,
        _EDIT,
        _CITATION_NEEDED,
    )
    return rows_array(rows, firsts), counts, sizes


@kernel
def _c4_lines(
    data: np.ndarray,
    offsets: np.ndarray,
    flags: np.ndarray,
    classes: np.ndarray,
    lower: np.ndarray,
    max_word: int,
    citations: bool,
    punctuation: bool,
    apostrophes: bool,
    min_words: int,
    javascript: bool,
    policy: bool,
    phrases: np.ndarray,
    phrase_offsets: np.ndarray,
    edit: np.ndarray,
    needed: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    number = len(offsets) - 1
    edits, made = new_rows(), 0
    firsts = np.zeros(number + 1, np.int64)
    counts, sizes = np.zeros((number, 6), np.int64), np.zeros((number, 6), np.int64)
    pieces = new_rows()
    for text in range(number):
        at, end, held = offsets[text], offsets[text + 1], 0
        while at < end:
            stop, following = end_of_line(data, at, end)
            begin, last = strip(data, at, stop, flags)
            verdict, before = KEPT, held
            if max_word and has_long_word(data, begin, last, flags, max_word):
                verdict = LONG_WORD
            else:
                pieces, held = _push_line(pieces, held, data, begin, last, classes, citations, edit, needed)
                if punctuation and not ends_in_punctuation(data, pieces[before:held], apostrophes):
                    verdict = PUNCTUATION
                elif min_words and not has_words(data, pieces[before:held], flags, min_words):
                    verdict = FEW_WORDS
                elif javascript or policy:
                    verdict = _phrase_verdict(
                        data, pieces[before:held], lower, phrases, phrase_offsets, javascript, policy
                    )
            if verdict != KEPT:
                counts[text, verdict] += 1
                sizes[text, verdict] += stop - at
                held = before
            else:
                counts[text, CITATIONS] += held - before - 1
                sizes[text, CITATIONS] += pieces[held - 1, END] - begin
                for piece in range(before, held):
                    sizes[text, CITATIONS] -= pieces[piece, END] - pieces[piece, BEGIN]
            at = following
        first, last = strip_pieces(data, pieces, 0, held, flags)
        edits, made = push_edits(edits, made, data, offsets[text], end, pieces, first, last)
        firsts[text + 1] = made
    return edits[:made], firsts, counts, sizes


@kernel
def end_of_line(data: np.ndarray, at: int, end: int) -> tuple[int, int]:
    """Where the line that begins at a byte ends, and where the next begins, as `str.splitlines()` has it."""
    while at < end:
        byte = data[at]
        if byte == 0x0D and at + 1 < end and data[at + 1] == 0x0A:
            return at, at + 2
        if 0x0A <= byte <= 0x0D or 0x1C <= byte <= 0x1E:
            return at, at + 1
        if byte == 0xC2 and data[at + 1] == 0x85:
            return at, at + 2
        if byte == 0xE2 and data[at + 1] == 0x80 and (data[at + 2] == 0xA8 or data[at + 2] == 0xA9):
            return at, at + 3
        at += 1
    return end, end


@kernel
def has_long_word(data: np.ndarray, begin: int, end: int, flags: np.ndarray, most: int) -> bool:
    """Whether a word has more than `most` code points."""
    if end - begin <= most:  # no need to look: it has no more code points than bytes
        return False
    length, at = 0, begin
    while at < end:
        code, width = decode(data, at)
        length = 0 if flags[code] & SPACE else length + 1
        if length > most:
            return True
        at += width
    return False


@kernel
def _push_line(
    pieces: np.ndarray,
    count: int,
    data: np.ndarray,
    begin: int,
    end: int,
    classes: np.ndarray,
    citations: bool,
    edit: np.ndarray,
    needed: np.ndarray,
) -> tuple[np.ndarray, int]:
    """Add a line without its citations; a line of nothing but citations is one empty piece, and more."""
    mark, at = 1, begin
    while citations and at < end:
        if data[at] == 0x5B:
            stop = end_of_citation(data, at, end, classes, edit, needed)
            if stop > at:
                pieces = push(pieces, count, begin, at, mark)
                count, mark, begin, at = count + 1, 0, stop, stop
                continue
        at += 1
    return push(pieces, count, begin, end, mark), count + 1


@kernel
def end_of_citation(
    data: np.ndarray, at: int, end: int, classes: np.ndarray, edit: np.ndarray, needed: np.ndarray
) -> int:
    """Where the citation that begins at a `[` ends; `at` itself where none does."""
    for fixed in (edit, needed):
        if end - at >= len(fixed) and np.all(data[at : at + len(fixed)] == fixed):
            return at + len(fixed)
    stop = at + 1
    while stop < end:
        code, width = decode(data, stop)
        if code == 0x5D:
            return stop + 1
        if classes[code] & DECIMAL == 0:
            return at
        stop += width
    return at


@kernel
def ends_in_punctuation(data: np.ndarray, pieces: np.ndarray, apostrophes: bool) -> bool:
    """Whether a line of pieces ends in `.`, `?`, `!`, `"` or, where asked for, `'`, and not in `...`."""
    piece, dots = len(pieces) - 1, 0
    at = pieces[piece, END]
    while dots < 3:
        while at == pieces[piece, BEGIN]:
            piece -= 1
            if piece < 0:
                return dots > 0
            at = pieces[piece, END]
        at -= 1
        byte = data[at]
        if byte != 0x2E:
            return dots > 0 or byte == 0x3F or byte == 0x21 or byte == 0x22 or (apostrophes and byte == 0x27)
        dots += 1
    return False


@kernel
def has_words(data: np.ndarray, pieces: np.ndarray, flags: np.ndarray, least: int) -> bool:
    """Whether a line of pieces has so many words."""
    words, inside = 0, False
    for piece in range(len(pieces)):
        at = pieces[piece, BEGIN]
        while at < pieces[piece, END]:
            code, width = decode(data, at)
            space = flags[code] & SPACE != 0
            if not space and not inside:
                words += 1
                if words >= least:
                    return True
            inside = not space
            at += width
    return False


@kernel
def _phrase_verdict(
    data: np.ndarray,
    pieces: np.ndarray,
    lower: np.ndarray,
    phrases: np.ndarray,
    phrase_offsets: np.ndarray,
    javascript: bool,
    policy: bool,
) -> int:
    """JAVASCRIPT before POLICY, wherever in the line; the phrases are `javascript` and POLICY_PHRASES."""
    verdict = KEPT
    first, last = 0 if javascript else 1, len(phrase_offsets) - 1 if policy else 1
    for piece in range(len(pieces)):
        at, end = pieces[piece, BEGIN], pieces[piece, END]
        while at < end:
            code, width = decode(data, at)
            letter = lower[code]
            for phrase in range(first, last):
                begin, stop = phrase_offsets[phrase], phrase_offsets[phrase + 1]
                if letter == phrases[begin] and _continues(data, pieces, piece, at, lower, phrases[begin:stop]):
                    if phrase == 0:
                        return JAVASCRIPT
                    verdict, first, last = POLICY, 0, 1 if javascript else 0
                    break
            at += width
    return verdict


@kernel
def _continues(
    data: np.ndarray, pieces: np.ndarray, piece: int, at: int, lower: np.ndarray, phrase: np.ndarray
) -> bool:
    """Whether the lower case of a line of pieces continues with an ASCII phrase at this byte of this piece."""
    for wanted in phrase:
        while at == pieces[piece, END]:
            piece += 1
            if piece == len(pieces):
                return False
            at = pieces[piece, BEGIN]
        code, width = decode(data, at)
        if lower[code] != wanted:
            return False
        at += width
    return True
