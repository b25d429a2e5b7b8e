"""C4's line rules, as edits (tensorflow/datasets, `text/c4_utils.py`, `clean_page`;
Raffel et al. 2020, section 2.2).

A text is split into lines as by `str.splitlines()`, and each line is stripped. After the
first of these rules, `c4_citations` removes `[]`, `[12]` (decimal digits of any
script), `[edit]` and `[citation needed]` from the line, which counts if the next two
rules keep the line. In this order, a line is removed if

- `c4_long_word`: one of its words (`str.split()`) has more than `max_word_characters`
  code points;
- `c4_no_terminal_punctuation`: it does not end in `.`, `?`, `!` or `"` (in datatrove's
  dialect also `'`), or ends in `...`;
- `c4_few_words`: it has fewer than `min_words` words;
- `c4_javascript`: its lower case contains `javascript`;
- `c4_policy`: its lower case contains one of POLICY_PHRASES.

The remaining lines, joined by newlines and stripped, are the text. Rules by which the
original drops the entire page (`lorem ipsum`, `{`, too few sentences) are not applied
here but in the rule set `c4` of the stage `filter`, which therefore sees only the
remaining lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pyarrow as pa

from gristmill.dataprep.cleaning.line_pieces import (
    BEGIN,
    DECIMAL,
    END,
    character_classes,
    edit_lines,
    line_words,
    new_rows,
    push,
    push_edits,
    rows_array,
    strip_pieces,
)
from gristmill.dataprep.edits import RuleEdits, apply_edits, then
from gristmill.dataprep.text.kernels import Bytes, Flags, Offsets, kernel, text_buffers
from gristmill.dataprep.text.spans import end_of_line, strip
from gristmill.dataprep.text.unicode_tables import (
    SPACE,
    code_point_flags,
    decode,
    skip_flagged,
)
from gristmill.mixtures.steps.clean import C4Lines

POLICY_PHRASES = (
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)
RULES = (
    "c4_long_word",
    "c4_citations",
    "c4_no_terminal_punctuation",
    "c4_few_words",
    "c4_javascript",
    "c4_policy",
)
LONG_WORD, CITATIONS, PUNCTUATION, FEW_WORDS, JAVASCRIPT, POLICY = range(len(RULES))
KEPT = -1

_FIXED_CITATIONS = tuple(
    np.frombuffer(mark, np.uint8) for mark in (b"[edit]", b"[citation needed]")
)


def c4_lines(texts: pa.Array, options: C4Lines) -> RuleEdits:
    """Edits of C4's line rules for n texts.

    Returns:
        edits (EDITS_TYPE); per text and rule of RULES the number of removed lines
        (citations: places), and their bytes without line ends: two int64 arrays of
        shape (n, 6).
    """
    rows, firsts, counts, sizes = _c4_lines(
        *text_buffers(texts),
        code_point_flags(),
        character_classes(),
        options.max_word_characters,
        options.citations,
        options.terminal_punctuation,
        options.dialect == "datatrove",
        options.min_words,
    )
    edits = rows_array(rows, firsts)
    for rule, phrases in (
        (JAVASCRIPT, ("javascript",) if options.javascript else ()),
        (POLICY, POLICY_PHRASES if options.policy else ()),
    ):
        if phrases:
            new_edits = edit_lines(
                apply_edits(texts, edits),
                "|".join(phrases),
                rule,
                partial(_drop_line, phrases=phrases),
                counts,
                sizes,
            )
            edits = then(edits, new_edits)
    return RuleEdits(edits, counts, sizes)


def _drop_line(line: str, phrases: Sequence[str]) -> str | None:
    """None for a line with one of some phrases."""
    lowered = line.lower()
    return None if any(phrase in lowered for phrase in phrases) else line


@kernel
def _c4_lines(
    data: Bytes,
    offsets: Offsets,
    flags: Flags,
    classes: Flags,
    max_word: int,
    citations: bool,
    punctuation: bool,
    apostrophes: bool,
    min_words: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    number = len(offsets) - 1
    edits = new_rows()
    edit_count = 0
    firsts = np.zeros(number + 1, np.int64)
    counts = np.zeros((number, 6), np.int64)
    sizes = np.zeros((number, 6), np.int64)
    pieces = new_rows()
    for text in range(number):
        line_begin = offsets[text]
        end = offsets[text + 1]
        piece_count = 0
        while line_begin < end:
            stop, next_line = end_of_line(data, line_begin, end)
            begin, last = strip(data, line_begin, stop, flags)
            verdict = KEPT
            first_piece = piece_count
            if max_word and has_long_word(data, begin, last, flags, max_word):
                verdict = LONG_WORD
            else:
                pieces, piece_count = _push_line(
                    pieces,
                    piece_count,
                    data,
                    begin,
                    last,
                    classes,
                    citations,
                )
                if punctuation and not ends_in_punctuation(
                    data, pieces[first_piece:piece_count], apostrophes
                ):
                    verdict = PUNCTUATION
                elif (
                    line_words(data, pieces[first_piece:piece_count], flags, min_words)
                    < min_words
                ):
                    verdict = FEW_WORDS
            if verdict != KEPT:
                counts[text, verdict] += 1
                sizes[text, verdict] += stop - line_begin
                piece_count = first_piece
            else:
                counts[text, CITATIONS] += piece_count - first_piece - 1
                sizes[text, CITATIONS] += pieces[piece_count - 1, END] - begin
                for piece in range(first_piece, piece_count):
                    sizes[text, CITATIONS] -= pieces[piece, END] - pieces[piece, BEGIN]
            line_begin = next_line
        first, last = strip_pieces(data, pieces, 0, piece_count, flags)
        edits, edit_count = push_edits(
            edits, edit_count, data, offsets[text], end, pieces, first, last
        )
        firsts[text + 1] = edit_count
    return edits[:edit_count], firsts, counts, sizes


@kernel
def has_long_word(data: Bytes, begin: int, end: int, flags: Flags, most: int) -> bool:
    """Return True if a word has more than `most` code points."""
    if end - begin <= most:  # it has no more code points than bytes
        return False
    length = 0
    position = begin
    while position < end:
        code, width = decode(data, position)
        length = 0 if flags[code] & SPACE else length + 1
        if length > most:
            return True
        position += width
    return False


@kernel
def _push_line(
    pieces: np.ndarray,
    count: int,
    data: Bytes,
    begin: int,
    end: int,
    classes: Flags,
    citations: bool,
) -> tuple[np.ndarray, int]:
    """Add a line without its citations; a line of only citations becomes empty
    pieces.
    """
    is_line_begin = 1
    position = begin
    while citations and position < end:
        if data[position] == 0x5B:
            stop = end_of_citation(data, position, end, classes)
            if stop > position:
                pieces = push(pieces, count, begin, position, is_line_begin)
                count = count + 1
                is_line_begin = 0
                begin = stop
                position = stop
                continue
        position += 1
    return push(pieces, count, begin, end, is_line_begin), count + 1


@kernel
def end_of_citation(data: Bytes, at: int, end: int, classes: Flags) -> int:
    """End of the citation that begins at the `[` at `at`; `at` itself if there is
    none.
    """
    for fixed in _FIXED_CITATIONS:
        if end - at >= len(fixed) and np.all(data[at : at + len(fixed)] == fixed):
            return at + len(fixed)
    stop = skip_flagged(data, at + 1, end, classes, DECIMAL)
    return stop + 1 if stop < end and data[stop] == 0x5D else at


@kernel
def ends_in_punctuation(data: Bytes, pieces: np.ndarray, apostrophes: bool) -> bool:
    """Return True if a line of pieces ends in `.`, `?`, `!`, `"` or, with
    `apostrophes`, `'`, but not in `...`.
    """
    piece = len(pieces) - 1
    dots = 0
    position = pieces[piece, END]
    while dots < 3:
        while position == pieces[piece, BEGIN]:
            piece -= 1
            if piece < 0:
                return dots > 0
            position = pieces[piece, END]
        position -= 1
        byte = data[position]
        if byte != 0x2E:
            return (
                dots > 0
                or byte == 0x3F
                or byte == 0x21
                or byte == 0x22
                or (apostrophes and byte == 0x27)
            )
        dots += 1
    return False
