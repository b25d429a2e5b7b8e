"""Reader and writer of safetensors files that keep one tensor in memory at a time.

Format: eight bytes with the length of a JSON header, the header (name -> dtype, shape
and offsets of each tensor, and `__metadata__`), and the tensors back to back
(github.com/huggingface/safetensors, README.md, "Format"). A model larger than the shard
limit is split into several files with an index, as in transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np
import torch
from torch import Tensor

from gristmill.core.files import atomic_write, read_json, write_json
from gristmill.train.models.model_config import WeightsError

Tensors = dict[str, Tensor]
"""Tensors by name."""
TensorOf = Callable[[str, torch.Size], Tensor]
"""Function of a parameter's name and full shape that returns its float32 value on the
CPU.
"""
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.float64: "F64",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True)
class Planned:
    """Tensor that is created when it is written.

    Attributes:
        dtype, shape: of the result of `make`.
        make: creates the tensor; called once per stored part.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def ready(tensor: Tensor) -> Planned:
    """Plan of an existing tensor."""
    return Planned(tensor.dtype, tuple(tensor.shape), lambda: tensor)


class TensorEntry(TypedDict):
    """Entry of a tensor in the header of a safetensors file; offsets are in bytes."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class TensorFile:
    """Safetensors file, local or remote, whose tensors are read one at a time.

    Raises:
        WeightsError: the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        size = path.stat().st_size
        try:
            with path.open("rb") as stream:
                self._start = 8 + int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(min(self._start, size) - 8))
            self._entries: dict[str, TensorEntry] = {
                name: entry for name, entry in header.items() if name != "__metadata__"
            }
            ends = [self._start]
            for entry in self._entries.values():
                first, end = entry["data_offsets"]
                item = DTYPES[entry["dtype"]].itemsize
                if end - first != math.prod(entry["shape"]) * item:
                    raise ValueError(f"{entry} does not have the bytes of its shape")
                ends.append(self._start + end)
            if max(ends) != size:
                raise ValueError(f"it has {size} bytes instead of {max(ends)}")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise WeightsError(
                f"{path} is not a safetensors file, or is damaged: {error}"
            ) from error

    def names(self) -> list[str]:
        """Names of all tensors, in the order of the header."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._entries[name]["shape"])

    def read(self, name: str) -> Tensor:
        """Read a tensor into new memory."""
        entry = self._entries[name]
        tensor = torch.empty(tuple(entry["shape"]), dtype=DTYPES[entry["dtype"]])
        data = _bytes_of(tensor)
        done = 0
        with self._path.open("rb") as stream:
            stream.seek(self._start + entry["data_offsets"][0])
            while done < len(data) and (
                count := cast(Any, stream).readinto(data[done:].data)
            ):
                done += count
        if done < len(data):
            raise EOFError(
                f"{self._path} ends within {name}: {done} of its {len(data)} bytes "
                "are there"
            )
        return tensor


class ModelTensors(dict[str, TensorFile]):
    """Tensors of a model's folder, each with its file.

    Raises:
        WeightsError: a file is missing or damaged; a tensor is missing, when it is
            looked up.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, index = folder, folder / INDEX_FILE
        paths = [folder / WEIGHTS_FILE]
        if index.exists():
            try:
                names = set(read_json(index)["weight_map"].values())
                paths = [folder / name for name in sorted(names)]
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise WeightsError(
                    f"{index} has no `weight_map` from the names of tensors to files"
                ) from error
        try:
            files = [TensorFile(path) for path in paths]
        except FileNotFoundError as error:
            raise WeightsError(
                f"{error.filename or error} does not exist; a model is {WEIGHTS_FILE}, "
                f"or {INDEX_FILE} and its parts, as save_pretrained of transformers "
                "writes them"
            ) from error
        super().__init__((name, file) for file in files for name in file.names())

    def __missing__(self, name: str) -> TensorFile:
        raise WeightsError(f"{self._folder} has no tensor {name}, which its model has")

    def read(self, name: str) -> Tensor:
        """Read a tensor into new memory."""
        return self[name].read(name)


def _bytes_of(tensor: Tensor) -> np.ndarray:
    """Memory of a contiguous tensor as uint8 of shape (bytes,)."""
    return (
        tensor.reshape(-1).view(torch.uint8).numpy()
        if tensor.numel()
        else np.empty(0, dtype=np.uint8)
    )


def write_tensors(path: Path, tensors: Mapping[str, Planned]) -> None:
    """Write a file atomically.

    Raises:
        ValueError: a tensor differs from its plan.
    """
    # Wide dtypes first, so that each tensor is aligned to its item size.
    ordered = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    ends = list(accumulate(tensors[name].size for name in ordered))
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},  # required by older readers
            **{
                name: {
                    "dtype": NAMES[tensors[name].dtype],
                    "shape": list(tensors[name].shape),
                    "data_offsets": [end - tensors[name].size, end],
                }
                for name, end in zip(ordered, ends, strict=True)
            },
        },
        separators=(",", ":"),
    ).encode()
    header += b" " * (-len(header) % 8)
    with atomic_write(path) as sink:
        sink.write(len(header).to_bytes(8, "little") + header)
        for name in ordered:
            tensor = tensors[name].make()
            planned = tensors[name]
            if tensor.dtype != planned.dtype or tuple(tensor.shape) != planned.shape:
                raise ValueError(
                    f"{name} is {tuple(tensor.shape)} of {tensor.dtype}, not "
                    f"{planned.shape} of {planned.dtype}"
                )
            sink.write(_bytes_of(tensor.detach().contiguous()).data)


def write_model(
    folder: Path,
    tensors: Mapping[str, Planned],
    most_bytes: int,
) -> int:
    """Write a model as one file, or as several and an index if it is larger than
    `most_bytes`.

    Args:
        folder: destination.
        tensors: by name, in the model's order.
        most_bytes: maximum bytes of a file's tensors; a larger tensor gets a file of
            its own.

    Returns:
        bytes of all files.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda planned: planned.size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=most_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        write_tensors(folder / file, {name: tensors[name] for name in names})
    if split.is_sharded:
        write_json(
            folder / INDEX_FILE,
            {"metadata": split.metadata, "weight_map": split.tensor_to_filename},
        )
    return sum((folder / file).stat().st_size for file in split.filename_to_tensors)
