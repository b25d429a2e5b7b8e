"""Predictors with fastText models: our kernels, or fastText itself for models that the
kernels do not support.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gristmill.core.files import as_path, is_local, sha256_file
from gristmill.dataprep.fasttext.fasttext_files import (
    DamagedModelError,
    UnknownModelError,
    Weights,
    path_to,
    read_model,
)
from gristmill.dataprep.fasttext.fasttext_predict import (
    find_shares,
    find_tops,
    multiply_rows,
)
from gristmill.dataprep.fasttext.fasttext_words import (
    Cache,
    Lines,
    average_rows,
    make_cache,
)

BATCH_LINES = 4096
"""Lines whose averaged rows are in memory at once."""


class Predictor(Protocol):
    """Supervised model that threads may share."""

    labels: tuple[str, ...]
    fallback: str
    """Reason for predicting with fastText itself; empty for our kernels."""

    def tops(self, lines: Lines) -> tuple[np.ndarray, np.ndarray]:
        """Likeliest label's index, int32, and its probability, float64, for n lines; -1
        and 0 if there is none.
        """

    def shares(self, lines: Lines, label: str) -> np.ndarray:
        """Probability of one label for n lines: float64 of shape (n,)."""


class KernelPredictor:
    """Predictor with our kernels; every thread has a cache of at most
    `fasttext_words.MOST_CACHE_BYTES`.

    `shares` is for classifiers, mostly of two labels: products with the outputs replace
    their rows (`multiply_rows`).
    """

    fallback = ""

    def __init__(self, weights: Weights, labels: tuple[str, ...]) -> None:
        self.labels = labels
        self._rows = _Rows(weights)

    def tops(self, lines: Lines) -> tuple[np.ndarray, np.ndarray]:
        """See Predictor."""
        labels = np.empty(len(lines.begins), np.int32)
        shares = np.empty(len(lines.begins), np.float64)
        for batch, hidden, counts in self._rows.averages(lines):
            find_tops(self._rows.weights, hidden, counts, labels[batch], shares[batch])
        return labels, shares

    def shares(self, lines: Lines, label: str) -> np.ndarray:
        """See Predictor."""
        shares = np.empty(len(lines.begins), np.float64)
        number = self.labels.index(label)
        rows = self._outputs
        path = path_to(rows.weights, number)
        for batch, hidden, counts in rows.averages(lines):
            find_shares(rows.weights, hidden, counts, number, path, shares[batch])
        return shares

    @cached_property
    def _outputs(self) -> _Rows:
        products = multiply_rows(self._rows.weights)
        return self._rows if products is self._rows.weights else _Rows(products)


class _Rows:
    """Rows of a model, and a cache of their sums per thread."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self._of_thread = threading.local()

    def averages(self, lines: Lines) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        """Yield averaged rows batch by batch: the slice of lines, and the arrays that
        `average_rows` fills.
        """
        if not hasattr(self._of_thread, "cache"):
            self._of_thread.cache = make_cache(self.weights)
        cache: Cache = self._of_thread.cache
        for first in range(0, len(lines.begins), BATCH_LINES):
            batch_slice = slice(first, first + BATCH_LINES)
            batch = Lines(
                lines.data, lines.begins[batch_slice], lines.ends[batch_slice]
            )
            hidden = np.empty(
                (len(batch.begins), self.weights.rows.shape[1]), np.float32
            )
            counts = np.empty(len(batch.begins), np.int64)
            average_rows(self.weights, cache, batch, hidden, counts)
            yield batch_slice, hidden, counts


class FastTextPredictor:
    """Predictor with fastText, holding the GIL."""

    def __init__(self, model: Any, fallback: str) -> None:
        self.labels = tuple(model.get_labels())
        self.fallback = fallback
        self._model = model

    def tops(self, lines: Lines) -> tuple[np.ndarray, np.ndarray]:
        """See Predictor."""
        labels, shares = (
            np.full(len(lines.begins), -1, np.int32),
            np.zeros(len(lines.begins)),
        )
        for line, (names, probabilities) in enumerate(self._predict(lines, 1)):
            if names:
                labels[line], shares[line] = (
                    self.labels.index(names[0]),
                    probabilities[0],
                )
        return labels, shares

    def shares(self, lines: Lines, label: str) -> np.ndarray:
        """See Predictor."""
        predictions = self._predict(lines, len(self.labels))
        shares = [dict(zip(*each, strict=True)).get(label, 0.0) for each in predictions]
        return np.array(shares, np.float64)

    def _predict(self, lines: Lines, k: int) -> list[tuple[Any, Any]]:
        texts = [
            lines.data[begin:end].tobytes().decode("utf-8").replace("\n", " ")
            for begin, end in zip(lines.begins, lines.ends, strict=True)
        ]
        # with one string, 0.9.3 fails on NumPy 2
        return list(zip(*self._model.predict(texts, k), strict=True))


@lru_cache(maxsize=4)
def load_model(path: str, sha256: str) -> Predictor:
    """Load a fastText model once per process; threads share it.

    Args:
        path: of the file.
        sha256: of its content, so that the cache does not serve a replaced file.
    """
    location = as_path(path)
    if is_local(location):
        return _load(Path(str(location)))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "model.bin"
        copy.write_bytes(location.read_bytes())
        return _load(copy)


def _load(path: Path) -> Predictor:
    try:
        return KernelPredictor(*read_model(path))
    except DamagedModelError:
        raise
    except UnknownModelError as error:
        try:
            import fasttext
        except ImportError as missing:
            raise UnknownModelError(
                f"{error}; fastText itself may know it, which is not installed; "
                "install it, with a "
                "C++ compiler at hand, with: pip install 'gristmill[fasttext]'"
            ) from missing

        return FastTextPredictor(fasttext.load_model(str(path)), str(error))


@lru_cache(maxsize=8)
def model_at(path: str) -> Predictor:
    """Load the fastText model of a file once per process, by its content; threads share
    it.
    """
    return load_model(path, sha256_file(as_path(path)))
