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

from gristmill.core.arrays import Column
from gristmill.dataprep.filters.lines_and_sentences import (
    count_sentences,
    text_classes,
)
from gristmill.dataprep.filters.listed_words import (
    PLACEHOLDER,
    Phrases,
    count_phrases,
)
from gristmill.dataprep.filters.rule_sets import RuleSet
from gristmill.dataprep.text.kernels import Bytes, Flags, Offsets, kernel, text_buffers
from gristmill.dataprep.text.spans import count_code_points
from gristmill.dataprep.text.swar import count_byte
from gristmill.dataprep.thresholds import Columns

C4_STATISTICS = ("document_characters", "sentences", "lorem_ipsum", "curly_brackets")


def c4_statistics(texts: Column) -> Columns:
    """Measure C4_STATISTICS of every text.

    Args:
        texts: n strings; null counts as empty.

    Returns:
        statistic -> int64 of shape (n,).

    Raises:
        pa.ArrowInvalid: a text is not UTF-8.
    """
    data, offsets = text_buffers(texts)
    values = np.zeros((len(offsets) - 1, len(C4_STATISTICS)), np.int64)
    _measure_texts(data, offsets, text_classes(), PLACEHOLDER, values)
    return dict(zip(C4_STATISTICS, values.T.copy()))


RULE_SET = RuleSet(lambda rows, section: c4_statistics(rows["text"]))


@kernel
def _measure_texts(
    data: Bytes,
    offsets: Offsets,
    classes: Flags,
    placeholder: Phrases,
    values: np.ndarray,
) -> None:
    for text in range(len(offsets) - 1):
        begin, end = offsets[text], offsets[text + 1]
        row = values[text]
        row[0] = count_code_points(data, begin, end)
        row[1] = count_sentences(data, begin, end, classes)
        row[2] = count_phrases(data, begin, end, placeholder)
        row[3] = count_byte(data, begin, end, 0x7B)
