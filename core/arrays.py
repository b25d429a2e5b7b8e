"""Arrays of numpy and pyarrow."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

Column: TypeAlias = pa.Array | pa.ChunkedArray
_HEX = np.frombuffer(b"".join(b"%02x" % byte for byte in range(256)), np.uint8).reshape(
    256, 2
)


def offsets_of(sizes: ArrayLike) -> np.ndarray:
    """Offsets of n consecutive parts and of their end: int64 of shape (n + 1,)."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def hex_ids(ids: Column) -> pa.Array:
    """Ids in hexadecimal; null stays null."""
    valid = pc.fill_null(ids, bytes(ids.type.byte_width)) if ids.null_count else ids
    width = 2 * ids.type.byte_width
    digits = _HEX[np.frombuffer(b"".join(valid.to_pylist()), np.uint8)]
    offsets = np.arange(0, (len(ids) + 1) * width, width, dtype=np.int32)
    texts = pa.StringArray.from_buffers(
        len(ids), pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(digits))
    )
    return pc.if_else(ids.is_valid(), texts, None) if ids.null_count else texts


def avoid_pandas() -> None:
    """Keep Arrow from importing pandas for its first array, which takes 0.2 s and 50 MB.

    For processes of our own alone: until something is converted to pandas, Arrow takes
    objects of pandas for sequences, with NaN for null unless it is told otherwise.
    """
    if "pandas" not in sys.modules:
        finder = _WithoutPandas()
        sys.meta_path.insert(0, finder)
        try:
            pa.array([])
        finally:
            sys.meta_path.remove(finder)


class _WithoutPandas(MetaPathFinder):
    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)
