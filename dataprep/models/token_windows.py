"""Texts as a model reads them: windows of tokens, batches of windows of like lengths, and values put together again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.dataprep.models.model_folders import (
    TOKENIZER_FILE,
    ModelFolderError,
    is_static,
    most_tokens,
    needed,
    read_config,
)
from gristmill.mixtures.reading_model import ReadingModel


@dataclass(frozen=True)
class Windows:
    """The windows of n texts, in the order of the texts; every text has one at least.

    Attributes:
        ids: of each window, int64 of shape (its tokens,).
        texts: int64, the number of the text that each window is of, ascending.
        whole: bool of shape (n,), whether a text's windows hold all of it.
    """

    ids: Sequence[np.ndarray]
    texts: np.ndarray
    whole: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each window, int64."""
        return np.array([len(ids) for ids in self.ids], np.int64)


class WindowTokenizer:
    """Cuts texts into windows of tokens. Threads may share it.

    Attributes:
        window_tokens: of a window at the most.
        padding: the id that fills windows up.
    """

    def __init__(self, folder: Path, section: ReadingModel) -> None:
        """Load a folder's tokenizer.

        Raises:
            ModelFolderError: there is none, or windows would not move on.
        """
        self._tokenizer = _load_tokenizer(folder)
        self._tokenizer.no_padding()
        self._adds = not is_static(folder)  # a vector of [CLS] would say nothing of the text
        self.padding = int(read_config(folder).get("pad_token_id") or 0)
        self.window_tokens = min(section.window_tokens or MOST_WINDOW, most_tokens(folder))
        self._most = 1 if section.pool == "first" else section.max_windows
        added = self._tokenizer.num_special_tokens_to_add(False) if self._adds else 0
        if 2 * (section.overlap_tokens + added) > self.window_tokens:
            raise ModelFolderError(
                f"{folder}: windows of {self.window_tokens} tokens, of which the tokenizer adds "
                f"{added}, cannot have {section.overlap_tokens} in common; set a smaller "
                "overlap_tokens"
            )
        self._tokenizer.enable_truncation(self.window_tokens, stride=section.overlap_tokens)

    def windows(self, texts: Sequence[str]) -> Windows:
        """The windows of n texts, of each the first ones up to `max_windows`."""
        ids: list[np.ndarray] = []
        owners: list[int] = []
        whole: list[bool] = []
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=self._adds)
        for number, encoding in enumerate(encodings):
            others = encoding.overflowing
            whole.append(len(others) < self._most)
            for window in (encoding, *others[: self._most - 1]):
                ids.append(np.array(window.ids, np.int64))
                owners.append(number)
        return Windows(ids, np.array(owners, np.int64), np.array(whole, bool))


MOST_WINDOW = 1 << 20
"""Where the section does not limit windows."""


def _load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer.json, or what transformers makes of the files of a tokenizer without one."""
    from tokenizers import Tokenizer

    if (folder / TOKENIZER_FILE).is_file():
        return Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    try:
        made = needed("transformers").AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        return made.backend_tokenizer
    except (AttributeError, ImportError, OSError, ValueError) as error:
        if isinstance(error, ModelFolderError):
            raise
        raise ModelFolderError(
            f"{folder} has no {TOKENIZER_FILE}, and its tokenizer cannot be made otherwise: {error}"
        ) from error


def length_batches(lengths: np.ndarray, batch_tokens: int) -> Iterator[np.ndarray]:
    """Windows in batches of like lengths: int64 places, of the longest first.

    A batch has as many windows as fill `batch_tokens` where all are as long as its longest; one at least. Which
    windows are in it depends on the lengths alone.

    Args:
        lengths: tokens of each window.
        batch_tokens: of a batch, padding included.
    """
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        rows = max(1, batch_tokens // int(max(lengths[order[start]], 1)))
        yield order[start : start + rows]
        start += rows


def pad(windows: Sequence[np.ndarray], padding: int) -> tuple[np.ndarray, np.ndarray]:
    """Windows as one array, filled up at their ends, and its mask, 1 for a token: int64 of shape (n, longest)."""
    longest = max(1, max(len(ids) for ids in windows))
    filled, mask = np.full((len(windows), longest), padding), np.zeros((len(windows), longest), np.int64)
    for row, ids in enumerate(windows):
        filled[row, : len(ids)] = ids
        mask[row, : len(ids)] = 1
    return filled, mask


def pool_windows(values: np.ndarray, windows: Windows, how: str) -> np.ndarray:
    """The values of windows put together to those of their texts: float32 of shape (n, k).

    Args:
        values: float32 of shape (windows, k).
        windows: which texts they are of.
        how: `first`, `mean`, `max`, or `tokens`, the mean weighted by the windows' tokens.
    """
    if not len(values):
        return values
    starts = np.flatnonzero(np.diff(windows.texts, prepend=-1))
    if how == "first":
        return values[starts]
    if how == "max":
        return np.maximum.reduceat(values, starts, axis=0)
    weights = np.maximum(windows.lengths, 1) if how == "tokens" else np.ones(len(values), np.int64)
    weighted = np.add.reduceat(values.astype(np.float64) * weights[:, None], starts, axis=0)
    return (weighted / np.add.reduceat(weights, starts)[:, None]).astype(np.float32)
