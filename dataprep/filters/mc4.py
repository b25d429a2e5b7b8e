"""Statistic of mC4's rule for documents (Xue et al. 2021, section 3.1).

- long_paragraphs: lines, between newlines alone and not stripped, of at least
  `paragraph_characters` code points.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from gristmill.dataprep.filters.lines_and_sentences import (
    EACH_NEWLINE,
    segment_chars,
    split_segments,
)
from gristmill.dataprep.filters.rule_sets import RuleSet
from gristmill.dataprep.text.kernels import Bytes, Offsets, kernel, text_buffers
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
        starts, ends = split_segments(
            data, offsets[text], offsets[text + 1], EACH_NEWLINE
        )
        counts[text] = (segment_chars(data, starts, ends) >= min_characters).sum()
    return counts
