"""Each token's number within its document, row by row; apart from `packed_files.py`, which is read without numba."""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.text.kernels import kernel


@kernel
def fill_positions(offsets: np.ndarray, bounds: np.ndarray, positions: np.ndarray) -> None:
    """Write every token's number within its piece, and PADDING behind the last (see `Boundaries.positions`)."""
    for row in range(len(offsets) - 1):
        last = offsets[row + 1] - 1
        for entry in range(offsets[row], last):
            start = bounds[entry]
            for at in range(start, bounds[entry + 1]):
                positions[row, at] = at - start
        for at in range(bounds[last], positions.shape[1]):
            positions[row, at] = -1
