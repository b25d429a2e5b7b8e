"""Perplexity of documents under an n-gram model: how surprised the model is by a word on average.

Ten to the power of minus the mean log10 probability, over the words of all lines and an end per line, as CCNet has it
(Wenzek et al. 2020, cc_net/perplexity.py); lines without words do not count (CCNet counts an end for each).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from gristmill.dataprep.files import as_path, is_local
from gristmill.dataprep.judges.arpa import read_arpa
from gristmill.dataprep.judges.ngram_tables import NgramTables, make_tables, read_entries, score_texts
from gristmill.dataprep.text.hashing import hash_bytes
from gristmill.dataprep.text.kernels import kernel, text_buffers

KENLM_MAGIC = b"mmap lm http://kheafield.com/code"
"""How KenLM's binary models begin."""
NGRAM_FILES = ("ngram-0.parquet", "ngram-1.parquet")
"""The models that are trained here, each on one half of the documents."""
Normalisation = Literal["ccnet", "lower", "none"]
LogScores = Callable[[pa.Array], tuple[np.ndarray, np.ndarray]]
"""n texts -> their log10 probabilities (float64), and words with ends of lines that these are of (int64)."""

_PUNCTUATION = {
    "，": ",", "。": ".", "、": ",", "„": '"', "”": '"', "“": '"', "«": '"', "»": '"', "」": '"', "「": '"', "《": '"',
    "》": '"', "´": "'", "∶": ":", "：": ":", "？": "?", "！": "!", "（": "(", "）": ")", "；": ";", "–": "-",
    "—": " - ", "．": ". ", "～": "~", "’": "'", "…": "...", "━": "-", "〈": "<", "〉": ">", "【": "[", "】": "]",
    "％": "%", "►": "-",
}  # fmt: skip
"""Marks that CCNet writes in ASCII (cc_net/text_normalizer.py)."""


class PerplexityError(ValueError):
    """A language model that cannot be used."""


def perplexities(scores: LogScores, texts: pa.Array) -> np.ndarray:
    """The perplexity of n texts: float64 of shape (n,), NaN for a text without words."""
    logs, sizes = scores(texts)
    return np.where(sizes > 0, np.power(10.0, -logs / np.maximum(sizes, 1)), np.nan)


def halves(texts: pa.Array) -> np.ndarray:
    """Which half each of n texts is in, by a hash of it: int64 of shape (n,), 0 or 1."""
    return _halves(*text_buffers(texts))


def score_by_other_half(
    models: Sequence[LogScores], half: np.ndarray, texts: pa.Array
) -> tuple[np.ndarray, np.ndarray]:
    """Score each text by the model of the half that it is not in: what it was trained on would not surprise it.

    Without this, documents of the model's own sources have perplexities of a few where others have thousands.

    Args:
        models: of half 0 and half 1.
        half: of each text, see `halves`.
        texts: n strings.
    """
    logs, sizes = np.zeros(len(texts)), np.zeros(len(texts), np.int64)
    for number in (0, 1):
        own = np.flatnonzero(half == number)
        logs[own], sizes[own] = models[1 - number](texts.take(pa.array(own)))
    return logs, sizes


@kernel
def _halves(data: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    result = np.empty(len(offsets) - 1, np.int64)
    for text in range(len(result)):
        result[text] = np.int64(hash_bytes(data, offsets[text], offsets[text + 1]) & np.uint64(1))
    return result


def normalise(texts: Sequence[str], rule: Normalisation, max_characters: int | None = None) -> list[str]:
    """The texts as the model reads them; line breaks stay.

    `ccnet`: lower case, no accents (no combining marks after decomposition), every digit a 0, typographical marks in
    ASCII, no control characters, no white space at the ends of lines. `lower`: lower case alone. `none`: as they are.
    """
    cut = [text[:max_characters] for text in texts]
    if rule == "none":
        return cut
    lowered = [text.lower() for text in cut]
    return lowered if rule == "lower" else [_like_ccnet(text) for text in lowered]


def _like_ccnet(text: str) -> str:
    lines = text.split("\n")
    stripped = "\n".join(line.strip() for line in lines)
    if not stripped.isascii():
        stripped = unicodedata.normalize("NFD", stripped)
    return stripped.translate(_ccnet_table())


@lru_cache(maxsize=1)
def _ccnet_table() -> dict[int, str | None]:
    table: dict[int, str | None] = {ord(mark): plain for mark, plain in _PUNCTUATION.items()}
    for code in range(0x110000):
        category = unicodedata.category(chr(code))
        if category == "Mn":
            table[code] = None
        elif category == "Nd":
            table[code] = "0"
    table.update({code: None for code in (*range(32), *range(127, 160)) if chr(code) != "\n"})
    return table


def load_scores(path: str, sha256: str) -> LogScores:
    """The scoring function of a model: one that was trained here, an ARPA file, or a binary of KenLM's.

    Args:
        path: where it lies.
        sha256: what it holds, so that another file at the same place is not taken for it.

    Raises:
        PerplexityError: a binary model cannot be loaded here.
        gristmill.dataprep.judges.arpa.ArpaError: it is neither, or not whole.
    """
    file = as_path(path)
    with file.open("rb") as stream:
        binary = stream.read(len(KENLM_MAGIC)) == KENLM_MAGIC
    if binary:
        model = _load_kenlm(path, sha256)
        return lambda texts: _score_with_kenlm(model, texts)
    tables = _load_tables(path, sha256)
    return lambda texts: score_texts(tables, texts)


@lru_cache(maxsize=2)
def _load_tables(path: str, sha256: str) -> NgramTables:
    file = as_path(path)
    return make_tables(read_entries(file)) if file.name in NGRAM_FILES else read_arpa(file)


@lru_cache(maxsize=2)
def _load_kenlm(path: str, sha256: str) -> Any:
    if not is_local(as_path(path)):
        raise PerplexityError(f"{path}: KenLM maps a binary model into memory, which takes a local file; copy it here")
    try:
        import kenlm
    except ImportError as error:
        raise PerplexityError(
            f"{path} is a binary model of KenLM's, and the package kenlm is not installed: install gristmill[kenlm], "
            "or give the model as ARPA, which needs nothing"
        ) from error
    return kenlm.Model(str(Path(path)))


def _score_with_kenlm(model: Any, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    logs, sizes = np.zeros(len(texts)), np.zeros(len(texts), np.int64)
    for row, text in enumerate(texts.to_pylist()):
        for line in text.encode("utf-8").split(b"\n"):
            words = len(line.split())
            if words:
                logs[row] += model.score(line.decode("utf-8"), bos=True, eos=True)
                sizes[row] += words + 1
    return logs, sizes
