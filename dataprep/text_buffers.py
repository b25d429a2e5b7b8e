"""Arrow string columns as the two plain arrays that the kernels read: UTF-8 bytes and offsets."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def text_buffers(texts: pa.Array | pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """View a column of strings without copying it (slices included; nulls count as empty text).

    Args:
        texts: `string` or `large_string`, n values.

    Returns:
        data: uint8, the UTF-8 bytes of the values (and maybe more: it is the whole buffer).
        offsets: int64 of shape (n + 1,); value i is `data[offsets[i]:offsets[i + 1]]`.
        Both are read-only wherever their buffers come from, since numba compiles a kernel once for arrays that may be
        written to and once for those that may not.

    Raises:
        pa.ArrowInvalid: a value is not UTF-8. The kernels rely on this check.
    """
    if isinstance(texts, pa.ChunkedArray):
        texts = texts.combine_chunks()
    texts = texts.cast(pa.large_string())
    if texts.null_count:
        texts = pc.fill_null(texts, "")
    texts.validate(full=True)
    if len(texts) == 0:
        return _read_only(np.empty(0, np.uint8)), _read_only(np.zeros(1, np.int64))
    _, offsets, data = texts.buffers()
    bounds = np.frombuffer(offsets, np.int64, len(texts) + 1, offset=8 * texts.offset)
    return _read_only(np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)), _read_only(bounds)


def _read_only(values: np.ndarray) -> np.ndarray:
    values.flags.writeable = False
    return values
