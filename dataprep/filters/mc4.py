"""Statistic of mC4's rule for documents (Xue et al. 2021, section 3.1).

- long_paragraphs: lines, between newlines alone and not stripped, of at least
  `paragraph_characters` code points.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from gristmill.dataprep.filters.rule_sets import RuleSet
from gristmill.dataprep.text.kernels import Bytes, Offsets, kernel, text_buffers
from gristmill.dataprep.text.spans import count_code_points, skip_to_newlines
from gristmill.dataprep.thresholds import Columns
from gristmill.mixtures.steps.rules import MC4


def measure(rows: pa.Table, section: MC4) -> Columns:
    """Measure `long_paragraphs` of n rows, int64 of shape (n,)."""
    return {
        "long_paragraphs": _count_long_lines(
            *text_buffers(rows["text"]), section.paragraph_characters
        )
    }


RULE_SET = RuleSet(measure)


@kernel
def _count_long_lines(data: Bytes, offsets: Offsets, min_characters: int) -> np.ndarray:
    counts = np.zeros(len(offsets) - 1, np.int64)
    for text in range(len(counts)):
        line, end = offsets[text], offsets[text + 1]
        while line <= end:
            stop = skip_to_newlines(data, line, end, 1)
            # A line has at most as many code points as bytes.
            counts[text] += (
                stop - line >= min_characters
                and count_code_points(data, line, stop) >= min_characters
            )
            line = stop + 1
    return counts
