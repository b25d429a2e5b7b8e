"""Windows of tokens: cutting texts into windows, batching windows by length, and
pooling their values per text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.dataprep.encoders.model_folders import (
    TOKENIZER_FILE,
    ModelFolderError,
    is_static,
    most_tokens,
    needed,
    read_config,
)
from gristmill.mixtures.schema.encoder_settings import ReadingModel


@dataclass(frozen=True)
class Windows:
    """Windows of n texts in order; every text has at least one.

    Attributes:
        ids: token ids of each window, int64 of shape (tokens,).
        texts: int64, index of each window's text, ascending.
        complete: bool of shape (n,), true if the windows cover the text to its end.
    """

    ids: Sequence[np.ndarray]
    texts: np.ndarray
    complete: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each window, int64."""
        return np.array([len(ids) for ids in self.ids], np.int64)


class WindowTokenizer:
    """Tokenizer that cuts texts into windows of tokens. Threads may share it.

    Attributes:
        window_tokens: maximum number of tokens per window.
        padding: id of the padding token.
    """

    def __init__(self, folder: Path, section: ReadingModel) -> None:
        """Load a folder's tokenizer.

        Raises:
            ModelFolderError: the tokenizer is missing, or windows would overlap by more
                than half.
        """
        from tokenizers import Tokenizer

        self._tokenizer: Any
        if (folder / TOKENIZER_FILE).is_file():
            self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        else:
            try:
                # transformers converts other formats
                tokenizer = needed("transformers").AutoTokenizer.from_pretrained(
                    str(folder), local_files_only=True
                )
                self._tokenizer = tokenizer.backend_tokenizer
            except ModelFolderError:
                raise
            except (AttributeError, ImportError, OSError, ValueError) as error:
                raise ModelFolderError(
                    f"{folder} has no {TOKENIZER_FILE}, and its tokenizer cannot be "
                    f"made otherwise: {error}"
                ) from error
        self._tokenizer.no_padding()
        # a static vector of [CLS] does not depend on the text
        self._adds = not is_static(folder)
        self.padding = int(read_config(folder).get("pad_token_id") or 0)
        self.window_tokens = min(
            section.window_tokens or MOST_WINDOW, most_tokens(folder)
        )
        self._most = 1 if section.pool == "first" else section.max_windows
        added = self._tokenizer.num_special_tokens_to_add(False) if self._adds else 0
        if 2 * (section.overlap_tokens + added) > self.window_tokens:
            raise ModelFolderError(
                f"{folder}: windows of {self.window_tokens} tokens, of which the "
                f"tokenizer adds {added}, cannot have {section.overlap_tokens} in "
                "common; set a smaller overlap_tokens"
            )
        self._tokenizer.enable_truncation(
            self.window_tokens, stride=section.overlap_tokens
        )

    def windows(self, texts: Sequence[str]) -> Windows:
        """Cut n texts into windows, at most the first `max_windows` of each."""
        ids: list[np.ndarray] = []
        numbers: list[int] = []
        encodings = self._tokenizer.encode_batch_fast(
            list(texts), add_special_tokens=self._adds
        )
        for encoding in encodings:
            windows = [encoding, *encoding.overflowing]
            numbers.append(len(windows))
            ids += [np.array(window.ids, np.int64) for window in windows[: self._most]]
        counts = np.array(numbers, np.int64)
        return Windows(
            ids,
            np.repeat(np.arange(len(counts)), np.minimum(counts, self._most)),
            counts <= self._most,
        )


MOST_WINDOW = 1 << 20
"""Default of `window_tokens`."""


def length_batches(lengths: np.ndarray, batch_tokens: int) -> Iterator[np.ndarray]:
    """Batch windows by length, longest first: int64 positions per batch.

    A batch has as many windows as fit in `batch_tokens`, each padded to the longest,
    and at least one. The batches depend only on the lengths.

    Args:
        lengths: number of tokens of each window.
        batch_tokens: tokens per batch, padding included.
    """
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        rows = max(1, batch_tokens // int(max(lengths[order[start]], 1)))
        yield order[start : start + rows]
        start += rows


def pad(windows: Sequence[np.ndarray], padding: int) -> tuple[np.ndarray, np.ndarray]:
    """Pad windows at the end to one array, with its mask, 1 for a token: both int64 of
    shape (n, longest).
    """
    longest = max(1, max(len(ids) for ids in windows))
    filled = np.full((len(windows), longest), padding)
    mask = np.zeros((len(windows), longest), np.int64)
    for row, ids in enumerate(windows):
        filled[row, : len(ids)] = ids
        mask[row, : len(ids)] = 1
    return filled, mask


def pool_windows(values: np.ndarray, windows: Windows, how: str) -> np.ndarray:
    """Pool the values of windows per text: float32 of shape (n, k).

    Args:
        values: float32 of shape (windows, k).
        windows: the windows of the values.
        how: `first`, `mean`, `max`, or `tokens`, the mean weighted by the windows'
            numbers of tokens.
    """
    if not len(values):
        return values
    starts = np.flatnonzero(np.diff(windows.texts, prepend=-1))
    if how == "first":
        return values[starts]
    if how == "max":
        return np.maximum.reduceat(values, starts, axis=0)
    weights = np.maximum(windows.lengths, 1)
    if how != "tokens":
        weights = np.ones_like(weights)
    weighted = np.add.reduceat(
        values.astype(np.float64) * weights[:, None], starts, axis=0
    )
    return (weighted / np.add.reduceat(weights, starts)[:, None]).astype(np.float32)
