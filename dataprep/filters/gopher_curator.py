"""Gopher's statistics as NeMo Curator counts them
(nemo_curator/stages/text/filters/heuristic/string.py and repetition/repetition.py).

| statistic | definition |
|---|---|
| words | whitespace words (`str.split()`) |
| mean_word_length | code points of all words / words |
| symbol_word_ratio | words that are `...`, `[...]`, `…`, `(...)`, `[…]` or `-»`, or of whose code points more than half are runs of `#` (`#a#` has two runs) / words; 1 without words |
| bullet_line_ratio | lines that begin with one of twelve bullets (no hyphen, no asterisk) / lines; 1 without lines |
| ellipsis_line_ratio | lines that end in one of those marks, `read more..` or `read more` (in any case) / lines; 1 without lines |
| alpha_word_ratio | words with a code point of `[[:alpha:]]` / words |
| stop_words | words that are a stop word in lower case; occurrences (Curator stops counting at its threshold) |
| duplicate_line_ratio, _char_ratio | copies after the first / lines; their code points / those of all lines |
| duplicate_paragraph_... | the same for paragraphs |
| top_n-gram_char_ratio | the most frequent n-gram, joined by single spaces: its occurrences in the *text* (across word borders too, not overlapping) x code points / code points of the text. No n-gram has to be repeated; 1 with fewer than n words |
| duplicate_n-gram_char_ratio | code points of the words that n-grams cover which were there before, each word once, plus the spaces between them / code points of the text; 1 with fewer than n words |

Lines lie between newlines (U+000A); blank ones do not count, the others are compared as
they are, and stripped where bullets and ellipses are looked for. Paragraphs lie between
two newlines (`str.split("\\n\\n")`); empty ones count. Curator asks for the share that
is *left* without copies (0.7, 0.8); here it is the share that goes. Where Curator
divides by zero (a text without lines or of newlines alone) the share is 0. Of equally
frequent n-grams Curator takes one by Python's hash seed; here it is the first in the
text.
"""

from __future__ import annotations

import numpy as np

from gristmill.core.arrays import offsets_of
from gristmill.dataprep.filters.gopher_words import (
    StopWords,
    copy_shares,
    count_flag,
    find_stop_words,
    share,
    text_words,
)
from gristmill.dataprep.filters.lines_and_sentences import (
    EACH_NEWLINE,
    EACH_TWO_NEWLINES,
    code_points,
    drop_blank,
    split_segments,
    starts_with,
)
from gristmill.dataprep.filters.repetition import (
    LONGEST_NGRAM,
    LONGEST_TOP,
    extend_ngrams,
    repeated_words,
    top_ngram,
)
from gristmill.dataprep.text.hashing import first_bytes, load64
from gristmill.dataprep.text.kernels import Bytes, kernel
from gristmill.dataprep.text.spans import count_code_points, strip
from gristmill.dataprep.text.unicode_tables import ALPHABETIC_PROPERTY
from gristmill.dataprep.words.tokenise_words import CutTexts

BULLETS = code_points("•‣⁃⁌⁍∙○●◘◦⦾⦿")
ELLIPSES = ("...", "[...]", "…", "(...)", "[…]", "-»", "read more..", "read more")
_MARKS = np.frombuffer("".join(ELLIPSES).encode(), np.uint8)
_MARK_ENDS = offsets_of([len(mark.encode()) for mark in ELLIPSES])


@kernel
def measure(
    texts: CutTexts,
    stop_words: StopWords,
    quality: np.ndarray,
    repetition: np.ndarray,
) -> None:
    """Measure n texts; the arguments are those of `gopher_dclm.measure`."""
    data = texts.data
    for text in range(len(texts.offsets) - 1):
        begin, end = texts.offsets[text], texts.offsets[text + 1]
        starts, ends, chars, word_flags = text_words(texts, text)
        lines, line_ends = split_segments(data, begin, end, EACH_NEWLINE)
        lines, line_ends = drop_blank(data, lines, line_ends, texts.flags, False)
        if len(quality):
            row = quality[text]
            symbols, bullets, ellipses = 0, 0, 0
            for word in range(len(starts)):
                symbols += _is_symbol(data, starts[word], ends[word], chars[word])
            for line in range(len(lines)):
                first, last = strip(data, lines[line], line_ends[line], texts.flags)
                bullets += starts_with(data, first, last, BULLETS)
                ellipses += _mark_at_end(data, first, last) > 0
            row[0] = len(starts)
            row[1] = share(chars.sum(), len(starts), 0.0)
            row[2] = share(symbols, len(starts), 1.0)
            row[3] = share(bullets, len(lines), 1.0)
            row[4] = share(ellipses, len(lines), 1.0)
            row[5] = share(
                count_flag(word_flags, ALPHABETIC_PROPERTY), len(starts), 0.0
            )
            row[6], _ = find_stop_words(texts, text, stop_words)
        if len(repetition):
            row = repetition[text]
            row[0], row[1] = copy_shares(data, lines, line_ends, False, 0.0)
            paragraphs, paragraph_ends = split_segments(
                data, begin, end, EACH_TWO_NEWLINES
            )
            row[2], row[3] = copy_shares(data, paragraphs, paragraph_ends, False, 0.0)
            _ngram_shares(texts, text, row[4:])


@kernel
def _is_symbol(data: Bytes, begin: int, end: int, chars: int) -> bool:
    byte = data[end - 1]
    # runs are more than half only if they alternate with single other characters, at
    # both ends
    if byte == 0x23:
        runs = 0
        for at in range(begin, end):
            runs += data[at] == 0x23 and (at == begin or data[at - 1] != 0x23)
        return 2 * runs > chars
    return (
        byte == 0x2E or byte >= 0x80 or byte == 0x29 or byte == 0x5D
    ) and _mark_at_end(data, begin, end) == (end - begin)


@kernel
def _mark_at_end(data: Bytes, begin: int, end: int) -> int:
    """Return the bytes of the longest ellipsis mark with which a range ends; 0 without
    one.
    """
    longest = 0
    for mark in range(len(_MARK_ENDS) - 1):
        length = _MARK_ENDS[mark + 1] - _MARK_ENDS[mark]
        if length <= longest or length > end - begin:
            continue
        same = True
        for step in range(length):
            byte = data[end - length + step]
            byte = byte | 0x20 if 0x41 <= byte <= 0x5A else byte
            same &= byte == _MARKS[_MARK_ENDS[mark] + step]
        longest = length if same else longest
    return longest


@kernel
def _ngram_shares(texts: CutTexts, text: int, shares: np.ndarray) -> None:
    data, per_word = texts.data, texts.per_word[text]
    begin, end = texts.offsets[text], texts.offsets[text + 1]
    starts, ends, chars, _ = text_words(texts, text)
    total = count_code_points(data, begin, end)
    at, group, copies = repeated_words(data, starts, ends)
    size, spaces = 1, 1 if per_word == 1 else 0
    for n in range(2, LONGEST_NGRAM + 1):
        if len(starts) < n * per_word:
            shares[n - 2] = 1.0
            continue
        while size < n * per_word:
            at, group, copies = extend_ngrams(at, group)
            size += 1
        if n <= LONGEST_TOP:
            top, number = top_ngram(at, group, copies, chars, size, False)
            top = 0 if number == 0 else top
            length = chars[top : top + size].sum() + spaces * (size - 1)
            num_bytes = (ends[top : top + size] - starts[top : top + size]).sum()
            joined = np.empty(num_bytes + spaces * (size - 1), np.uint8)
            place = 0
            for word in range(top, top + size):
                if word > top and spaces > 0:
                    joined[place] = 0x20
                    place += 1
                for step in range(starts[word], ends[word]):
                    joined[place] = data[step]
                    place += 1
            shares[n - 2] = length * count_occurrences(data, begin, end, joined) / total
            continue
        duplicated, last, next_group = 0, -size, 0
        for step in range(len(at)):
            if group[step] == next_group:  # the first copy
                next_group += 1
                continue
            overlap = max(size - (at[step] - last), 0)
            duplicated += chars[at[step] + overlap : at[step] + size].sum()
            duplicated += spaces * min(size - overlap, size - 1)
            last = at[step]
        shares[n - 2] = duplicated / total


@kernel
def count_occurrences(data: Bytes, begin: int, end: int, pattern: np.ndarray) -> int:
    """Return the number of occurrences of a byte pattern, from the left and not
    overlapping, like `str.count`.

    Knuth, Morris and Pratt (1977): linear in the bytes for every pattern.
    """
    back = np.zeros(len(pattern), np.int64)
    matched = 0
    for step in range(1, len(pattern)):
        while matched > 0 and pattern[step] != pattern[matched]:
            matched = back[matched - 1]
        matched += pattern[step] == pattern[matched]
        back[step] = matched
    count, matched, at = 0, 0, begin
    opening, bits = (
        first_bytes(pattern, 0, len(pattern)),
        np.uint64(64 - 8 * min(len(pattern), 8)),
    )
    while at < end:
        # Most places are skipped, since the bytes there differ from the beginning of
        # the pattern.
        while (
            matched == 0
            and at + 8 <= len(data)
            and at < end
            and (load64(data, at) ^ opening) << bits != 0
        ):
            at += 1
        if at == end:
            break
        byte = data[at]
        at += 1
        while matched > 0 and byte != pattern[matched]:
            matched = back[matched - 1]
        matched += byte == pattern[matched]
        if matched == len(pattern):
            count, matched = count + 1, 0
    return count
