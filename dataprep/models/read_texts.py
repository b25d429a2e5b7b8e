"""Reading texts with a model: cut into windows, read in batches of like lengths, put together to a row each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from gristmill.dataprep.models.networks import Network
from gristmill.dataprep.models.token_windows import WindowTokenizer, length_batches, pad, pool_windows


@dataclass(frozen=True)
class Read:
    """What a model made of n texts.

    Attributes:
        rows: float32 of shape (n, k).
        tokens, windows: int64 of shape (n,), what was read of each.
        whole: whether that was all of it.
    """

    rows: np.ndarray
    tokens: np.ndarray
    windows: np.ndarray
    whole: np.ndarray


TEXTS_AT_ONCE = 1_000
"""Whose tokens are held at once; among them windows of like lengths are found."""


class TextReader:
    """A model that gives each text a row of numbers. Threads may share it.

    Attributes:
        tokenizer: cuts texts.
        network: reads windows.
        pool: how the rows of a text's windows are put together, see `token_windows.pool_windows`.
        finish: what is made of the rows of windows before that.
    """

    def __init__(
        self,
        tokenizer: WindowTokenizer,
        network: Network,
        pool: str,
        finish: Callable[[np.ndarray], np.ndarray] = lambda rows: rows,
    ) -> None:
        self.tokenizer, self.network, self.pool, self.finish = tokenizer, network, pool, finish

    def read(self, texts: Sequence[str]) -> Read:
        """Read n texts, n > 0."""
        parts = [self._read_some(texts[start : start + TEXTS_AT_ONCE]) for start in range(0, len(texts), TEXTS_AT_ONCE)]
        return (
            parts[0]
            if len(parts) == 1
            else Read(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Read)))
        )

    def _read_some(self, texts: Sequence[str]) -> Read:
        windows = self.tokenizer.windows(texts)
        rows: np.ndarray | None = None
        for places in length_batches(windows.lengths, self.network.batch_tokens):
            ids, mask = pad([windows.ids[place] for place in places], self.tokenizer.padding)
            found = self.network.outputs(ids, mask)
            if rows is None:
                rows = np.empty((len(windows.ids), found.shape[1]), np.float32)
            rows[places] = found
        assert rows is not None
        of_texts = np.bincount(windows.texts, minlength=len(texts))
        tokens = np.bincount(windows.texts, windows.lengths, len(texts)).astype(np.int64)
        return Read(pool_windows(self.finish(rows), windows, self.pool), tokens, of_texts, windows.whole)
