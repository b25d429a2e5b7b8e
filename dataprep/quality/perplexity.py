"""Perplexity of documents under an n-gram model.

Ten to the power of minus the mean log10 probability, over the words of all lines and
one end per line, as in CCNet (Wenzek et al. 2020, cc_net/perplexity.py); lines without
words are ignored (CCNet counts an end for each).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from gristmill.core.files import as_path, is_local

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
    """Load the scoring function of a KenLM model (ARPA or binary) once per process.

    Args:
        path: of the file.
        sha256: of its content, so that the cache does not serve a replaced file.

    Raises:
        PerplexityError: KenLM is not installed, or cannot read the file.
    """
    if not is_local(as_path(path)):
        raise PerplexityError(f"{path}: KenLM reads local files; copy the model here")
    try:
        import kenlm
    except ImportError as error:
        raise PerplexityError(
            f"{path} is scored by the package kenlm, which is not installed; install "
            "it, on Python 3.12 or older, with: pip install 'gristmill[kenlm]'"
        ) from error
    config = kenlm.Config()
    config.show_progress = False
    config.arpa_complain = kenlm.ARPALoadComplain.NONE
    try:
        score = kenlm.Model(str(Path(path)), config).score
    except (OSError, RuntimeError) as error:
        raise PerplexityError(
            f"{path} is not an n-gram model that KenLM can read (an ARPA file or its "
            f"own binary): {error}"
        ) from error

    def score_texts(texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        logs = np.zeros(len(texts))
        ends = np.zeros(len(texts), np.int64)
        for row, text in enumerate(texts.cast(pa.large_binary()).to_pylist()):
            # In bytes only ASCII whitespace separates words, for Python and for KenLM,
            # which adds <s> and </s>.
            scores = [
                score(line) for line in text.split(b"\n") if line and not line.isspace()
            ]
            logs[row], ends[row] = sum(scores), len(scores) + len(text.split())
        return logs, ends

    return score_texts
