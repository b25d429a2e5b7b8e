"""Repair of Unicode, as edits of the changed characters.

`fix_unicode` is `ftfy.fix_text` (Speer 2019) with FineWeb-2's settings (datatrove,
`pipeline/formatters/ftfy.py`): encoding errors are repaired, typographic variants stay.
ftfy works line by line; lines that it cannot change (printable ASCII without `&`) skip
it. `normalise` is a Unicode normalisation form (UAX 15), which never crosses a newline.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from gristmill.dataprep.cleaning.line_pieces import new_rows, push
from gristmill.dataprep.edits import Edit, edits_array
from gristmill.dataprep.text.kernels import kernel, text_buffers
from gristmill.dataprep.text.spans import skip_to_newlines

Repair = Callable[[str, bool], str]
"""(line with its newline, True after a `<` in an earlier line of the text) -> the
repaired line.
"""


@lru_cache(maxsize=1)
def ftfy_config() -> Any:
    """Configuration of ftfy: FineWeb-2's options."""
    from ftfy import TextFixerConfig

    return TextFixerConfig(
        unescape_html="auto",
        remove_terminal_escapes=True,
        fix_encoding=True,
        restore_byte_a0=True,
        replace_lossy_sequences=True,
        decode_inconsistent_utf8=True,
        fix_c1_controls=True,
        fix_latin_ligatures=False,
        fix_character_width=False,
        uncurl_quotes=False,
        fix_line_breaks=False,
        fix_surrogates=True,
        remove_control_chars=True,
        normalization=None,
        explain=False,
    )


def fix_unicode(texts: pa.Array) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """Edits that turn each text into its `ftfy.fix_text`; returns as `repair_lines`."""
    import ftfy

    config = ftfy_config()
    # ftfy takes a text with a `<` for HTML, whose entities must stay from there on.
    in_html = config._replace(unescape_html=False)
    return repair_lines(
        texts,
        lambda line, html: ftfy.fix_text(line, in_html if html else config),
        0x20,
        0x7E,
        ord("&"),
    )


def normalise(
    texts: pa.Array, form: Literal["NFC", "NFKC"]
) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """Edits that turn each text into a normalisation form; returns as
    `repair_lines`.
    """
    return repair_lines(
        texts, lambda line, html: unicodedata.normalize(form, line), 0x00, 0x7F, -1
    )


def repair_lines(
    texts: pa.Array, repair: Repair, first_plain: int, last_plain: int, special: int
) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """Edits of n texts by a function of single lines.

    Args:
        texts: n strings.
        repair: must leave every line of plain bytes unchanged.
        first_plain, last_plain: range of plain bytes; newlines are always plain.
        special: a byte in that range that is not plain; -1 for none.

    Returns:
        edits (EDITS_TYPE), one per changed line, without the unchanged characters at
        its ends; per text the number of these lines, and of replaced bytes (int64 of
        shape (n,)).
    """
    data, offsets = text_buffers(texts)
    rows, firsts = _lines_to_repair(data, offsets, first_plain, last_plain, special)
    edits: list[list[Edit]] = [[] for _ in range(len(offsets) - 1)]
    texts_of_rows = np.repeat(np.arange(len(edits)), np.diff(firsts)).tolist()
    sizes = np.zeros(len(edits), np.int64)
    for text, (begin, end, html) in zip(texts_of_rows, rows.tolist(), strict=True):
        line = data[begin:end].tobytes().decode("utf-8")
        repaired = repair(line, bool(html))
        if repaired == line:
            continue
        first, last, replacement = difference(line, repaired)
        edit_begin = begin - int(offsets[text]) + len(line[:first].encode("utf-8"))
        size = len(line[first:last].encode("utf-8"))
        edits[text].append((edit_begin, edit_begin + size, replacement))
        sizes[text] += size
    return edits_array(edits), np.array([*map(len, edits)], np.int64), sizes


def difference(old: str, new: str) -> tuple[int, int, str]:
    """Range of characters in `old` to replace, and the replacement, to get `new`;
    common ends are excluded.
    """
    shorter = min(len(old), len(new))
    first = next(
        (index for index in range(shorter) if old[index] != new[index]), shorter
    )
    remaining = shorter - first
    tail = next(
        (index for index in range(remaining) if old[-1 - index] != new[-1 - index]),
        remaining,
    )
    return first, len(old) - tail, new[first : len(new) - tail]


@kernel
def _lines_to_repair(
    data: np.ndarray,
    offsets: np.ndarray,
    first_plain: int,
    last_plain: int,
    special: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Lines with a byte that is not plain: rows of begin, end (after the newline) and 1
    after a `<` in an earlier line; and per text its first row.
    """
    number = len(offsets) - 1
    firsts = np.zeros(number + 1, np.int64)
    rows = new_rows()
    count = 0
    for text in range(number):
        begin = offsets[text]
        is_html = False
        while begin < offsets[text + 1]:
            end = min(
                skip_to_newlines(data, begin, offsets[text + 1], 1) + 1,
                offsets[text + 1],
            )
            is_plain = True
            opens = False
            for byte in data[begin:end]:
                is_plain &= byte == 0x0A or (
                    first_plain <= byte <= last_plain and byte != special
                )
                opens |= byte == 0x3C
            if not is_plain:
                rows = push(rows, count, begin, end, int(is_html))
                count += 1
            is_html |= opens
            begin = end
        firsts[text + 1] = count
    return rows[:count], firsts
