"""A teacher's distributions over the trained tokens of a packed set, as files that are read by row.

`logps.npy` (tokens, k) float32; unless all ids are kept `ids.npy` (tokens, k) int32 and `rest.npy` (tokens,) float32;
tokens row by row. `key.json`: what these depend on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gristmill.dataprep.files import canonical_json, read_json, sha256_file
from gristmill.tokenize.loss_masks import LossMasks
from gristmill.train.models.weights import SHAPE_FILE
from gristmill.train.objectives.chat import Chat
from gristmill.train.objectives.distillation import Taught
from gristmill.train.objectives.reference import KEY, StaleReferenceError

LOGPS, IDS, REST = "logps.npy", "ids.npy", "rest.npy"


def teacher_key(
    teacher: Path, chat: Chat, rows: str, dtype: torch.dtype, temperature: float, top_k: int | None, vocab_size: int
) -> dict[str, Any]:
    """What a teacher's distributions depend on, by name: weights, template, tokenizer, precision, rows, kept ids.

    Args:
        teacher: its folder.
        chat: tokenizer and template.
        rows: fingerprint of the packed set and its loss masks.
        dtype: of matrix products.
        temperature, top_k: of what is kept; None keeps all ids.
        vocab_size: ids that it predicts.
    """
    files = sorted(path for path in teacher.iterdir() if path.suffix == ".safetensors" or path.name == SHAPE_FILE)
    weights = hashlib.sha256(canonical_json({path.name: sha256_file(path) for path in files})).hexdigest()
    return {"weights": weights, "chat template and tokenizer": chat.digest,
            "precision": str(dtype).removeprefix("torch."), "rows": rows, "temperature": temperature,
            "top_k": "all" if top_k is None else top_k, "vocabulary": vocab_size}


def check_teacher_key(folder: Path, key: Mapping[str, Any]) -> None:
    """Refuse distributions that depend on something else than the key says.

    Raises:
        gristmill.train.objectives.reference.StaleReferenceError: the message names what differs.
    """
    found = read_json(folder / KEY)
    if differing := [f"{name} was {found.get(name)} and is {wanted}" for name, wanted in key.items()
                     if found.get(name) != wanted]:
        raise StaleReferenceError(f"{folder}: the teacher's distributions there are of something else: "
                                  f"{'; '.join(differing)}. Run again with `--force teacher`, on the kind of device "
                                  "that trains")


class TeacherFiles:
    """The files while they are written, by several processes, each its own rows.

    Args:
        folder: of the files, which `create` has made.
        masks: which tokens are trained.
    """

    def __init__(self, folder: Path, masks: LossMasks) -> None:
        self._starts = token_starts(masks)
        self._parts = {name: np.load(folder / name, mmap_mode="r+") for name in (LOGPS, IDS, REST)
                       if (folder / name).exists()}

    @staticmethod
    def create(folder: Path, masks: LossMasks, kept: int, with_ids: bool) -> None:
        """Make files of the right size, by one process."""
        tokens = int(masks.trained_per_row.sum())
        sizes: dict[str, tuple[Any, tuple[int, ...]]] = {LOGPS: (np.float32, (tokens, kept))}
        if with_ids:
            sizes |= {IDS: (np.int32, (tokens, kept)), REST: (np.float32, (tokens,))}
        folder.mkdir(parents=True, exist_ok=True)
        for name, (dtype, size) in sizes.items():
            np.lib.format.open_memmap(folder / name, mode="w+", dtype=dtype, shape=size)

    def write(self, rows: np.ndarray, taught: Taught) -> None:
        """Put what was kept of some rows, in their order, into its places."""
        places = token_places(self._starts, rows)
        for name, part in ((LOGPS, taught.logps), (IDS, taught.ids), (REST, taught.rest)):
            if part is not None:
                self._parts[name][places] = part.cpu().numpy()

    def close(self) -> None:
        """Hand everything to the disk."""
        for part in self._parts.values():
            part.flush()


class TeacherRows:
    """What a teacher thinks of a packed set's trained tokens, memory-mapped.

    Args:
        folder: of the files.
        masks: which tokens are trained.
    """

    def __init__(self, folder: Path, masks: LossMasks) -> None:
        self._starts = token_starts(masks)
        self._logps = np.load(folder / LOGPS, mmap_mode="r")
        whole = not (folder / IDS).exists()
        self._ids = None if whole else np.load(folder / IDS, mmap_mode="r")
        self._rest = None if whole else np.load(folder / REST, mmap_mode="r")

    def read(self, rows: np.ndarray) -> Taught:
        """Of the trained tokens of some rows, in the order asked for."""
        places = token_places(self._starts, rows)
        logps = torch.from_numpy(self._logps[places])
        if self._ids is None or self._rest is None:
            return Taught(logps)
        return Taught(logps, torch.from_numpy(self._ids[places].astype(np.int64)),
                      torch.from_numpy(self._rest[places]))


def token_starts(masks: LossMasks) -> np.ndarray:
    """How many trained tokens there are before each row, (rows + 1,) int64."""
    return np.concatenate([[0], np.cumsum(masks.trained_per_row)]).astype(np.int64)


def token_places(starts: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The numbers, (m,) int64, of the trained tokens of some rows, in the order of the rows."""
    return np.concatenate([np.empty(0, np.int64), *(np.arange(starts[row], starts[row + 1]) for row in rows)])
