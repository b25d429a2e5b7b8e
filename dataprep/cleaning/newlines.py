"""At most so many newlines in a row (DCLM, `newline_removal_modifier`), as edits."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from gristmill.dataprep.edits import cuts_array
from gristmill.dataprep.kernels import kernel
from gristmill.dataprep.spans import NEWLINE
from gristmill.dataprep.text_buffers import text_buffers


def cap_newlines(texts: pa.Array, most: int) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """The edits that cut every run of U+000A to its first `most`.

    Returns:
        edits (EDITS_TYPE); per text the number of runs that were cut, and the bytes: two int64 arrays of shape (n,).
    """
    data, offsets = text_buffers(texts)
    begins, ends, firsts, sizes = _long_runs(data, offsets, most)
    return cuts_array(begins, ends, firsts), np.diff(firsts), sizes


@kernel
def _long_runs(
    data: np.ndarray, offsets: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    number = len(offsets) - 1
    firsts, sizes = np.zeros(number + 1, np.int64), np.zeros(number, np.int64)
    room = (offsets[number] - offsets[0]) // (most + 1) + 1
    begins, ends = np.empty(room, np.int64), np.empty(room, np.int64)
    count = 0
    for text in range(number):
        run = 0
        for at in range(offsets[text], offsets[text + 1]):
            run = run + 1 if data[at] == NEWLINE else 0
            if run == most + 1:
                begins[count] = at - offsets[text]
                count += 1
            if run > most:
                ends[count - 1] = at - offsets[text] + 1
                sizes[text] += 1
        firsts[text + 1] = count
    return begins[:count].copy(), ends[:count].copy(), firsts, sizes
