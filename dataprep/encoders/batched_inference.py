"""Text reader: cut texts into windows, run a model on batches of similar length, and
pool one row per text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from gristmill.dataprep.encoders.forward_backends import Network
from gristmill.dataprep.encoders.token_windows import (
    WindowTokenizer,
    length_batches,
    pad,
    pool_windows,
)


@dataclass(frozen=True)
class Read:
    """Output of a model for n texts.

    Attributes:
        rows: float32 of shape (n, k).
        tokens, windows: int64 of shape (n,), numbers of tokens and windows read.
        whole: bool of shape (n,), true if the text was read to its end.
    """

    rows: np.ndarray
    tokens: np.ndarray
    windows: np.ndarray
    whole: np.ndarray


TEXTS_AT_ONCE = 1_000
"""Texts whose tokens are held at a time; their windows are batched by length."""


class TextReader:
    """Model that maps each text to a row of numbers. Threads may share it.

    Attributes:
        tokenizer: cuts texts into windows.
        network: maps windows to rows.
        pool: pooling of the rows of a text's windows, see `token_windows.pool_windows`.
        finish: function applied to the rows of windows before pooling.
    """

    def __init__(
        self,
        tokenizer: WindowTokenizer,
        network: Network,
        pool: str,
        finish: Callable[[np.ndarray], np.ndarray] = lambda rows: rows,
    ) -> None:
        self.tokenizer = tokenizer
        self.network = network
        self.pool = pool
        self.finish = finish

    def read(self, texts: Sequence[str]) -> Read:
        """Read n texts, n > 0."""
        parts = [
            self._read_some(texts[start : start + TEXTS_AT_ONCE])
            for start in range(0, len(texts), TEXTS_AT_ONCE)
        ]
        return (
            parts[0]
            if len(parts) == 1
            else Read(
                *(
                    np.concatenate([getattr(part, field.name) for part in parts])
                    for field in fields(Read)
                )
            )
        )

    def _read_some(self, texts: Sequence[str]) -> Read:
        windows = self.tokenizer.windows(texts)
        rows: np.ndarray | None = None
        for batch in length_batches(windows.lengths, self.network.batch_tokens):
            ids, mask = pad(
                [windows.ids[window] for window in batch], self.tokenizer.padding
            )
            outputs = self.network.outputs(ids, mask)
            if rows is None:
                rows = np.empty((len(windows.ids), outputs.shape[1]), np.float32)
            rows[batch] = outputs
        assert rows is not None
        num_windows = np.bincount(windows.texts, minlength=len(texts))
        tokens = np.bincount(windows.texts, windows.lengths, len(texts)).astype(
            np.int64
        )
        return Read(
            pool_windows(self.finish(rows), windows, self.pool),
            tokens,
            num_windows,
            windows.whole,
        )
