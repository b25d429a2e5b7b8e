"""Predictors with fastText models, by our kernels."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from gristmill.core.files import as_path, is_local, sha256_file
from gristmill.dataprep.fasttext.fasttext_files import Weights, path_to, read_model
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


class Predictor:
    """Supervised model that threads may share; every thread has a cache of at most
    `fasttext_words.MOST_CACHE_BYTES`.

    `shares` is for classifiers, mostly of two labels: products with the outputs replace
    their rows (`multiply_rows`).
    """

    def __init__(self, weights: Weights, labels: tuple[str, ...]) -> None:
        self.labels = labels
        self._rows = _Rows(weights)

    def tops(self, lines: Lines) -> tuple[np.ndarray, np.ndarray]:
        """Likeliest label's index, int32, and its probability, float64, for n lines; -1
        and 0 if there is none.
        """
        labels = np.empty(len(lines.begins), np.int32)
        shares = np.empty(len(lines.begins), np.float64)
        for batch, hidden, counts in self._rows.averages(lines):
            find_tops(self._rows.weights, hidden, counts, labels[batch], shares[batch])
        return labels, shares

    def shares(self, lines: Lines, label: str) -> np.ndarray:
        """Probability of one label for n lines: float64 of shape (n,)."""
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


@lru_cache(maxsize=4)
def load_model(path: str, sha256: str) -> Predictor:
    """Load a fastText model once per process; threads share it.

    Args:
        path: of the file.
        sha256: of its content, so that the cache does not serve a replaced file.

    Raises:
        UnknownModelError: the kernels do not support the model, or it is damaged.
    """
    location = as_path(path)
    if is_local(location):
        return Predictor(*read_model(Path(str(location))))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "model.bin"
        copy.write_bytes(location.read_bytes())
        return Predictor(*read_model(copy))


@lru_cache(maxsize=8)
def model_at(path: str) -> Predictor:
    """Load the fastText model of a file once per process, by its content; threads share
    it.
    """
    return load_model(path, sha256_file(as_path(path)))
