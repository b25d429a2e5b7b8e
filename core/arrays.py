"""Arrays of numpy and pyarrow."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike

Column: TypeAlias = pa.Array | pa.ChunkedArray


def offsets_of(sizes: ArrayLike) -> np.ndarray:
    """Offsets of n consecutive parts and of their end: int64 of shape (n + 1,)."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def binary_rows(numbers: np.ndarray) -> pa.Array:
    """Fixed-size binary values from rows of numbers."""
    numbers = np.ascontiguousarray(numbers)
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(numbers.itemsize * numbers.shape[1]),
        len(numbers),
        [None, pa.py_buffer(numbers)],
    )


def binary_numbers(values: Column, kind: DTypeLike = np.uint64) -> np.ndarray:
    """Rows of numbers from fixed-size binary values: shape (n, w)."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    size = values.type.byte_width
    width = size // np.dtype(kind).itemsize
    if not len(values):
        return np.empty((0, width), kind)
    flat = np.frombuffer(
        values.buffers()[1], kind, len(values) * width, offset=size * values.offset
    )
    return flat.reshape(-1, width)


def hex_ids(ids: Column) -> pa.Array:
    """Ids in hexadecimal; null stays null."""
    digits = [
        None if identity is None else identity.hex() for identity in ids.to_pylist()
    ]
    return pa.array(digits, pa.string())


def avoid_pandas() -> None:
    """Keep Arrow from importing pandas for its first array, which takes 0.2 s and 50 MB.

    For processes of our own alone: until `admit_pandas`, or something is converted to
    pandas, Arrow takes objects of pandas for sequences, and NaN for a value.
    """
    if "pandas" not in sys.modules:
        finder = _WithoutPandas()
        sys.meta_path.insert(0, finder)
        try:
            pa.array([])
        finally:
            sys.meta_path.remove(finder)


def admit_pandas() -> None:
    """Let Arrow know the objects of pandas again, for a user's code."""
    with suppress(ImportError):
        pa.nulls(0).to_pandas()


class _WithoutPandas(MetaPathFinder):
    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)
