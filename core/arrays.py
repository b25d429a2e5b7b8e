"""Arrays of numpy and pyarrow."""

from __future__ import annotations

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
