"""Loading of checkpoints without executing code in them.

torch.distributed.checkpoint (2.13) stores the index of a checkpoint as a pickle,
`.metadata`, and loads plain values with `weights_only=False`; either can call any
function. Here the index may refer only to an allowed set of classes, and plain values
are first loaded with `weights_only=True`, as torch itself does for tensors.
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
    ("pathlib._local", "WindowsPath"),  # names in Python 3.13
}
"""Classes in the index of a checkpoint, besides tensor dtypes (torch.float32, ...)."""

if sys.version_info < (3, 13):
    # Alias for checkpoints written by Python 3.13; Python 3.14 keeps the name for the
    # same reason.
    sys.modules.setdefault("pathlib._local", pathlib)


class UnsafeCheckpointError(ValueError):
    """A checkpoint refers to something that it does not need."""


class _Index(pickle.Unpickler):
    """Unpickler of an index."""

    def find_class(self, module: str, name: str) -> Any:
        """Class of an allowed name."""
        is_dtype = module == "torch" and isinstance(
            getattr(torch, name, None), torch.dtype
        )
        if (module, name) not in ALLOWED and not is_dtype:
            raise UnsafeCheckpointError(
                f"names {module}.{name}, which a checkpoint never needs"
            )
        return super().find_class(module, name)


def check_index(checkpoint: Path) -> None:
    """Check that the index of a checkpoint refers only to allowed classes.

    Raises:
        UnsafeCheckpointError: it refers to something else, or is not a pickle.
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
    """Load planner that rejects plain values with code."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Load a plain value, after a trial load that cannot execute code.

        Raises:
            UnsafeCheckpointError: the value is more than numbers, strings, lists,
                mappings and tensors.
        """
        try:
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            reason = str(error).splitlines()[0]
            raise UnsafeCheckpointError(
                f"the value {read_item.dest_index.fqn} of a checkpoint was not loaded, "
                f"since it may run code: {reason}; remove the checkpoint"
            ) from error
        value.seek(0)
        super().load_bytes(read_item, value)
