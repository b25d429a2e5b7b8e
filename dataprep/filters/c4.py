"""Statistics of C4's rules for documents (Raffel et al. 2020, section 2.2).

The definitions are those of the released code (TensorFlow Datasets, text/c4_utils.py),
which applies all but the first after its rules for lines: so run the stage `clean` with
`lines: [c4]` before `filter`.

- document_characters: code points. C4's code applies this rule to the page as it was
  read.
- sentences: as `lines_and_sentences.py` counts them; C4's code adds up Punkt's
  sentences of each line.
- lorem_ipsum: occurrences of that phrase, ASCII letters in any case.
- curly_brackets: occurrences of `{`.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from gristmill.dataprep.filters.lines_and_sentences import count_sentences, text_classes
from gristmill.dataprep.filters.listed_words import PLACEHOLDER, count_matches
from gristmill.dataprep.filters.rule_sets import RuleSet, measure_by_kernel
from gristmill.dataprep.text.kernels import Bytes, Flags, Offsets, kernel
from gristmill.dataprep.text.spans import count_code_points
from gristmill.dataprep.text.swar import count_byte
from gristmill.dataprep.thresholds import Columns
from gristmill.mixtures.steps.rules import C4

C4_STATISTICS = ("document_characters", "sentences", "lorem_ipsum", "curly_brackets")


def measure(rows: pa.Table, section: C4) -> Columns:
    """Measure C4_STATISTICS of n rows: int64 of shape (n,)."""
    columns = measure_by_kernel(
        C4_STATISTICS, _measure_texts, rows["text"], text_classes(), fill=0
    )
    columns["lorem_ipsum"] = count_matches(rows["text"], PLACEHOLDER)
    return columns


RULE_SET = RuleSet(measure)


@kernel
def _measure_texts(
    data: Bytes, offsets: Offsets, classes: Flags, values: np.ndarray
) -> None:
    for text in range(len(values)):
        begin, end = offsets[text], offsets[text + 1]
        row = values[text]
        row[0] = count_code_points(data, begin, end)
        row[1] = count_sentences(data, begin, end, classes)
        row[3] = count_byte(data, begin, end, 0x7B)
