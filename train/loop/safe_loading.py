"""Loading checkpoints without running what they may carry.

torch.distributed.checkpoint (2.13) keeps an index of a checkpoint's tensors as a pickle, `.metadata`, and loads plain
values with `weights_only=False`; either can call any function. Here the index may name only the classes that an index
is made of, and plain values are loaded with `weights_only=True` first. Tensors are read so by torch itself.
"""

from __future__ import annotations

import io
import pathlib
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

_METADATA = "torch.distributed.checkpoint.metadata"
ALLOWED = {
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("collections", "OrderedDict"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),  # as Python 3.13 names them
}
"""What the index of a checkpoint names, besides the types of tensors (torch.float32, ...)."""

if sys.version_info < (3, 13):
    # So that a checkpoint of Python 3.13 is read here too; 3.14 has the name for this alone.
    sys.modules.setdefault("pathlib._local", pathlib)


class UnsafeCheckpointError(ValueError):
    """A checkpoint names something that loading a checkpoint has no need of."""


class _Index(pickle.Unpickler):
    """Unpickles an index, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """The class of an allowed name."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in ALLOWED and not is_dtype:
            raise UnsafeCheckpointError(f"names {module}.{name}, which a checkpoint never needs")
        return super().find_class(module, name)


def check_index(checkpoint: Path) -> None:
    """Read the index of a checkpoint with nothing but the classes that it is made of.

    Raises:
        UnsafeCheckpointError: it names anything else, or is not a pickle.
    """
    for path in sorted(checkpoint.glob("*.metadata")):
        try:
            with path.open("rb") as stream:
                _Index(stream).load()
        except (UnsafeCheckpointError, pickle.UnpicklingError, EOFError) as error:
            raise UnsafeCheckpointError(
                f"{path} {error}; it was not loaded, since it may run code: remove "
                f"{checkpoint}, and the training resumes from an older one"
            ) from error


class SafePlanner(DefaultLoadPlanner):
    """Fills a state from a checkpoint whose plain values hold no code."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Load a plain value, after a look that can run nothing.

        Raises:
            UnsafeCheckpointError: it is more than numbers, strings, lists, mappings and tensors.
        """
        try:
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            why = str(error).splitlines()[0]
            raise UnsafeCheckpointError(
                f"the value {read_item.dest_index.fqn} of a checkpoint was not loaded, since "
                f"it may run code: {why}; remove the checkpoint"
            ) from error
        value.seek(0)
        super().load_bytes(read_item, value)
