"""Text reader: cut texts into windows, run a model on batches of similar length, and
pool one row per text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gristmill.dataprep.encoders.forward_backends import Network
from gristmill.dataprep.encoders.token_windows import (
    WindowTokenizer,
    length_batches,
    pad,
    pool_windows,
)


class Read(NamedTuple):
    """Output of a model for n texts.

    Attributes:
        rows: float32 of shape (n, k).
        tokens, windows: int64 of shape (n,), numbers of tokens and windows read.
        complete: bool of shape (n,), true if the text was read to its end.
    """

    rows: np.ndarray
    tokens: np.ndarray
    windows: np.ndarray
    complete: np.ndarray


TEXTS_AT_ONCE = 1_000
"""Texts whose tokens are held at a time; their windows are batched by length."""


@dataclass(frozen=True)
class TextReader:
    """Model that maps each text to a row of numbers. Threads may share it.

    Attributes:
        tokenizer: cuts texts into windows.
        network: maps windows to rows.
        pool: pooling of the rows of a text's windows, see `token_windows.pool_windows`.
        finish: function applied to the rows of windows before pooling.
    """

    tokenizer: WindowTokenizer
    network: Network
    pool: str
    finish: Callable[[np.ndarray], np.ndarray] = lambda rows: rows

    def read(self, texts: Sequence[str]) -> Read:
        """Read n texts, n > 0."""
        parts = []
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            part = texts[start : start + TEXTS_AT_ONCE]
            windows = self.tokenizer.windows(part)
            rows = np.empty((len(windows.ids), 0), np.float32)
            for batch in length_batches(windows.lengths, self.network.batch_tokens):
                ids = [windows.ids[window] for window in batch]
                outputs = self.network.outputs(*pad(ids, self.tokenizer.padding))
                if not rows.shape[1]:
                    rows = np.empty((len(windows.ids), outputs.shape[1]), np.float32)
                rows[batch] = outputs
            tokens = np.bincount(windows.texts, windows.lengths, len(part))
            parts.append(
                Read(
                    pool_windows(self.finish(rows), windows, self.pool),
                    tokens.astype(np.int64),
                    np.bincount(windows.texts, minlength=len(part)),
                    windows.complete,
                )
            )
        return Read(*map(np.concatenate, zip(*parts, strict=True)))
