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
        return np.empty(0, np.uint8), np.zeros(1, np.int64)
    _, offsets, data = texts.buffers()
    view = np.frombuffer(offsets, np.int64, len(texts) + 1, offset=8 * texts.offset)
    return (np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)), view
