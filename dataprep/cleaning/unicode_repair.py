"""Repair of Unicode, as edits of the changed characters.

`fix_unicode` is `ftfy.fix_text` (Speer 2019) with FineWeb-2's settings (datatrove,
`pipeline/formatters/ftfy.py`): encoding errors are repaired, typographic variants stay.
ftfy works line by line; lines that it cannot change (printable ASCII without `&`) skip
it. `normalise` is a Unicode normalisation form (UAX 15), which never crosses a newline.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from gristmill.dataprep.edits import Edit, RuleEdits, edits_array
from gristmill.dataprep.text.kernels import text_buffers

NOT_PLAIN = re.compile(rb"[^\n\x20-\x7e]|&")
"""Bytes of lines that ftfy can change."""
BEYOND_ASCII = re.compile(rb"[\x80-\xff]")
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


def fix_unicode(texts: pa.Array) -> RuleEdits:
    """Edits that turn each text into its `ftfy.fix_text`; returns as `repair_lines`."""
    import ftfy

    config = ftfy_config()
    # ftfy takes a text with a `<` for HTML, whose entities must stay from there on.
    in_html = config._replace(unescape_html=False)
    return repair_lines(
        texts,
        lambda line, html: ftfy.fix_text(line, in_html if html else config),
        NOT_PLAIN,
    )


def normalise(texts: pa.Array, form: Literal["NFC", "NFKC"]) -> RuleEdits:
    """Edits that turn each text into a normalisation form; returns as
    `repair_lines`.
    """
    return repair_lines(
        texts, lambda line, html: unicodedata.normalize(form, line), BEYOND_ASCII
    )


def repair_lines(
    texts: pa.Array, repair: Repair, special: re.Pattern[bytes]
) -> RuleEdits:
    """Edits of n texts by a function of single lines.

    Args:
        texts: n strings.
        repair: must leave every line without special bytes unchanged.
        special: pattern of a special byte; never matches a newline.

    Returns:
        edits (EDITS_TYPE), one per changed line, without the unchanged characters at
        its ends; per text the number of these lines, and of replaced bytes (int64 of
        shape (n,)).
    """
    data, offsets = text_buffers(texts)
    content = data[offsets[0] : offsets[-1]].tobytes()
    edits: list[list[Edit]] = [[] for _ in range(len(offsets) - 1)]
    sizes = np.zeros(len(edits), np.int64)
    for text, (begin, end) in enumerate(pairwise((offsets - offsets[0]).tolist())):
        first_tag = content.find(b"<", begin, end)
        line_end = begin
        while (match := special.search(content, line_end, end)) is not None:
            # without a newline before the match the line begins where the last one ended
            line_begin = content.rfind(b"\n", line_end, match.start()) + 1 or line_end
            line_end = content.find(b"\n", match.start(), end) + 1 or end
            line = content[line_begin:line_end].decode("utf-8")
            repaired = repair(line, 0 <= first_tag < line_begin)
            if repaired == line:
                continue
            first, last, replacement = difference(line, repaired)
            edit_begin = line_begin - begin + len(line[:first].encode("utf-8"))
            size = len(line[first:last].encode("utf-8"))
            edits[text].append((edit_begin, edit_begin + size, replacement))
            sizes[text] += size
    counts = np.array([*map(len, edits)], np.int64)
    return RuleEdits(edits_array(edits), counts, sizes)


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
