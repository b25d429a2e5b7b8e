"""Arrays of numpy and pyarrow."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

Column: TypeAlias = pa.Array | pa.ChunkedArray


def offsets_of(sizes: ArrayLike) -> np.ndarray:
    """Offsets of n consecutive parts and of their end: int64 of shape (n + 1,)."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
