"""Perplexity of documents under an n-gram model.

Ten to the power of minus the mean log10 probability, over the words of all lines and
one end per line, as in CCNet (Wenzek et al. 2020, cc_net/perplexity.py); lines without
words are ignored (CCNet counts an end for each).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from gristmill.core.files import as_path, is_local
from gristmill.dataprep.quality.ngram_tables import (
    make_tables,
    read_entries,
    score_texts,
)
from gristmill.dataprep.text.hashing import hash_texts
from gristmill.dataprep.text.kernels import text_buffers

NGRAM_FILES = ("ngram-0.parquet", "ngram-1.parquet")
"""Models trained here, each on one half of the documents."""
Normalisation = Literal["ccnet", "lower", "none"]
LogScores = Callable[[pa.Array], tuple[np.ndarray, np.ndarray]]
"""n texts -> their log10 probabilities (float64), and their numbers of words and ends
of lines (int64).
"""

_PUNCTUATION: dict[int, int | str | None] = {
    **str.maketrans(
        "，。、„”“«»」「《》´∶：？！（）；–～’━〈〉【】％►",
        ',.,"""""""""\'::?!();-~\'-<>[]%-',
    ),
    ord("—"): " - ",
    ord("．"): ". ",
    ord("…"): "...",
}
"""Marks that CCNet converts to ASCII (cc_net/text_normalizer.py)."""


class PerplexityError(ValueError):
    """A language model cannot be used."""


def perplexities(scores: LogScores, texts: pa.Array) -> np.ndarray:
    """Perplexity of n texts: float64 of shape (n,), NaN for a text without words."""
    logs, sizes = scores(texts)
    return np.where(sizes > 0, np.power(10.0, -logs / np.maximum(sizes, 1)), np.nan)


def halves(texts: pa.Array) -> np.ndarray:
    """Half of each of n texts, by a hash of the text: int64 of shape (n,), 0 or 1."""
    hashes: np.ndarray = hash_texts(*text_buffers(texts))
    return (hashes & np.uint64(1)).astype(np.int64)


def score_by_other_half(
    models: Sequence[LogScores], half: np.ndarray, texts: pa.Array
) -> tuple[np.ndarray, np.ndarray]:
    """Score each text by the model of the other half, which was not trained on it.

    Otherwise documents of the model's training sources would have perplexities of a few
    instead of thousands.

    Args:
        models: of half 0 and half 1.
        half: of each text, see `halves`.
        texts: n strings.
    """
    logs = np.zeros(len(texts))
    sizes = np.zeros(len(texts), np.int64)
    for number in (0, 1):
        half_rows = np.flatnonzero(half == number)
        logs[half_rows], sizes[half_rows] = models[1 - number](
            texts.take(pa.array(half_rows))
        )
    return logs, sizes


def normalise(
    texts: Sequence[str], rule: Normalisation, max_characters: int | None = None
) -> list[str]:
    """Normalise texts for the model; line breaks stay.

    `ccnet`: lower case, no combining marks after decomposition, every digit a 0,
    typographical marks in ASCII, no control characters, no whitespace at the ends of
    lines. `lower`: only lower case. `none`: unchanged.
    """
    truncated = [text[:max_characters] for text in texts]
    if rule == "none":
        return truncated
    lowered = [text.lower() for text in truncated]
    if rule == "lower":
        return lowered
    normalised = []
    for text in lowered:
        stripped = "\n".join(line.strip() for line in text.split("\n"))
        if not stripped.isascii():
            stripped = unicodedata.normalize("NFD", stripped)
        normalised.append(stripped.translate(_ccnet_table()))
    return normalised


@lru_cache(maxsize=1)
def _ccnet_table() -> dict[int, int | str | None]:
    table = dict(_PUNCTUATION)
    for code in range(0x110000):
        category = unicodedata.category(chr(code))
        if category == "Mn":
            table[code] = None
        elif category == "Nd":
            table[code] = "0"
    table.update(
        {code: None for code in (*range(32), *range(127, 160)) if chr(code) != "\n"}
    )
    return table


@lru_cache(maxsize=4)
def load_scores(path: str, sha256: str) -> LogScores:
    """Load the scoring function of a model once per process: one trained here, or a
    file that KenLM reads (ARPA or binary).

    Args:
        path: of the file.
        sha256: of its content, so that the cache does not serve a replaced file.

    Raises:
        PerplexityError: KenLM is needed and not installed, or cannot read the file.
    """
    if as_path(path).name in NGRAM_FILES:
        return partial(score_texts, make_tables(read_entries(as_path(path))))
    if not is_local(as_path(path)):
        raise PerplexityError(f"{path}: KenLM reads local files; copy the model here")
    try:
        import kenlm
    except ImportError as error:
        raise PerplexityError(
            f"{path} is scored by the package kenlm, which is not installed; install "
            "it, on Python 3.12 or older, with: pip install 'gristmill[kenlm]', or "
            "train a model instead (`ngram`)"
        ) from error
    config = kenlm.Config()
    config.show_progress = False
    config.arpa_complain = kenlm.ARPALoadComplain.NONE
    try:
        return partial(_score_with_kenlm, kenlm.Model(str(Path(path)), config))
    except (OSError, RuntimeError) as error:
        raise PerplexityError(
            f"{path} is not an n-gram model that KenLM can read (an ARPA file or its "
            f"own binary): {error}"
        ) from error


def _score_with_kenlm(model: Any, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    logs = np.zeros(len(texts))
    ends = np.zeros(len(texts), np.int64)
    score = model.score
    for row, text in enumerate(texts.cast(pa.large_binary()).to_pylist()):
        # In bytes only ASCII whitespace separates words, for Python and for KenLM,
        # which adds <s> and </s>.
        scores = [
            score(line) for line in text.split(b"\n") if line and not line.isspace()
        ]
        logs[row], ends[row] = sum(scores), len(scores) + len(text.split())
    return logs, ends
