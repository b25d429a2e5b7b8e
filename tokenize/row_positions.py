"""Positions of tokens within their documents; a separate module, since
`packed_files.py` must not import numba.
"""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.text.kernels import kernel


@kernel
def fill_positions(
    offsets: np.ndarray, bounds: np.ndarray, positions: np.ndarray
) -> None:
    """Write every token's position within its piece, and PADDING after the last (see
    `Boundaries.positions`).
    """
    for row in range(len(offsets) - 1):
        last = offsets[row + 1] - 1
        for entry in range(offsets[row], last):
            start = bounds[entry]
            for at in range(start, bounds[entry + 1]):
                positions[row, at] = at - start
        for at in range(bounds[last], positions.shape[1]):
            positions[row, at] = -1
