"""Statistics of GneissWeb's heuristics for English (Gohari et al. 2025;
recipes/GneissWeb of data-prep-kit). NaN for texts in other languages.

- readability: McAlpine's EFLAW score as textstat computes it (`mcalpine_eflaw`), which
  data-prep-kit calls: (words + words of at most three code points) / sentences, rounded
  to a tenth. Words are between whitespace, without code points that are neither word
  characters nor whitespace (an apostrophe stays in `don't`, `it's` and the like). A
  sentence begins at a word character and ends after the next run of `.`, `?` and `!`;
  those of at most two words do not count, and a text has at least one.
- tokens_per_character: tokens of `tokenizer` / code points; NaN without a tokenizer and
  for an empty text. GneissWeb calls texts beyond the range extreme-tokenized.
- gneissweb_votes: how many of the two are within the limits of the text's category.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.files import as_path
from gristmill.dataprep.conservation import SHARE_EDGES
from gristmill.dataprep.fasttext.fasttext_predict import model_at
from gristmill.dataprep.fasttext.normalise_lines import one_line_each
from gristmill.dataprep.filters.rule_sets import RuleSet, is_english, spread
from gristmill.dataprep.text.kernels import Bytes, Flags, Offsets, kernel, text_buffers
from gristmill.dataprep.text.unicode_tables import (
    SPACE,
    WORD,
    byte_table,
    code_point_flags,
    decode,
)
from gristmill.dataprep.thresholds import Columns
from gristmill.mixtures.steps.rules import GneissWeb

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONGEST_MINI_WORD = 3
LONGEST_FRAGMENT = 2
"""Words of a sentence that does not count."""
APOSTROPHE = ord("'")
D, E, L, R, S, T, V = (ord(letter) for letter in "delrstv")
_IS_TERMINAL = byte_table(".?!")


def measure(rows: pa.Table, section: GneissWeb) -> Columns:
    """Measure the columns of the rule set `gneissweb` of n rows: float64 of shape
    (n,).
    """
    in_english = is_english(rows["language"].to_pylist())
    rows = rows.filter(in_english)
    readability = np.empty(len(rows))
    _measure_texts(*text_buffers(rows["text"]), code_point_flags(), readability)
    density = np.full(len(rows), np.nan)
    if section.tokenizer is not None:
        texts = pc.fill_null(rows["text"], "")
        encodings = _load_tokenizer(section.tokenizer).encode_batch_fast(
            texts.to_pylist(), add_special_tokens=False
        )
        characters = pc.utf8_length(texts).to_numpy()
        tokens = np.array([len(encoding) for encoding in encodings], np.float64)
        np.divide(tokens, characters, out=density, where=characters > 0)
    # texts that any classifier gives another label than the general one
    in_category = np.zeros(len(rows), bool)
    if section.categories:
        text = rows["text"].combine_chunks()
        lines, _ = one_line_each(text, None, lower=False, marks=True)
        for path in section.categories:
            model = model_at(path)
            general = [-1]
            if section.general_label in model.labels:
                general.append(model.labels.index(section.general_label))
            in_category |= ~np.isin(model.tops(lines)[0], general)
    limit = np.where(
        in_category, section.category_readability_limit, section.readability_limit
    )
    lowest, highest = np.where(
        in_category[:, None], section.category_token_range, section.token_range
    ).T
    measured = {
        "readability": readability,
        "tokens_per_character": density,
        "gneissweb_votes": (readability < limit)
        + ((lowest <= density) & (density <= highest)).astype(np.float64),
    }
    return spread(measured, in_english)


RULE_SET = RuleSet(measure, ("language",), {"tokens_per_character": SHARE_EDGES})


@lru_cache(maxsize=4)
def _load_tokenizer(path: str) -> Tokenizer:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(as_path(path).read_text(encoding="utf-8"))


@kernel
def _measure_texts(
    data: Bytes, offsets: Offsets, flags: Flags, readability: np.ndarray
) -> None:
    for text in range(len(readability)):
        begin, end = offsets[text], offsets[text + 1]
        words, mini_words = _count_words(data, begin, end, flags)
        sentences, at = 0, begin
        while at < end:
            code, width = decode(data, at)
            if flags[code] & WORD == 0:
                at += width
                continue
            start = at
            while at < end and not _IS_TERMINAL[data[at]]:
                at += 1
            while at < end and _IS_TERMINAL[data[at]]:
                at += 1
            sentences += _count_words(data, start, at, flags)[0] > LONGEST_FRAGMENT
        score = (words + mini_words) / max(sentences, 1)
        readability[text] = np.floor(score * 10 + 0.5) / 10


@kernel
def _count_words(data: Bytes, begin: int, end: int, flags: Flags) -> tuple[int, int]:
    """Return the number of words, and of mini-words."""
    words, mini_words, length, at = 0, 0, 0, begin
    while at < end:
        code, width = decode(data, at)
        if flags[code] & SPACE != 0:
            words += length > 0
            mini_words += 0 < length <= LONGEST_MINI_WORD
            length = 0
        elif flags[code] & WORD != 0 or (
            code == APOSTROPHE and _ends_contraction(data, at + 1, end, flags)
        ):
            length += 1
        at += width
    words += length > 0
    mini_words += 0 < length <= LONGEST_MINI_WORD
    return words, mini_words


@kernel
def _ends_contraction(data: Bytes, at: int, end: int, flags: Flags) -> bool:
    r"""Return True if the text goes on with `[tsd]\b|ve\b|ll\b|re\b`."""
    if at >= end:
        return False
    first, second = data[at], data[at + 1] if at + 1 < end else np.uint8(0)
    stop = at
    if first in (T, S, D):
        stop += 1
    elif (second == E and (first in (V, R))) or (first == L and second == L):
        stop += 2
    else:
        return False
    if stop == end:
        return True
    code, _ = decode(data, stop)
    return flags[code] & WORD == 0
