"""Statistic of the rule set `toxicity`.

- toxicity: probability that a fastText model gives a label, of the text with each run
  of whitespace as one space; NaN for a text without a word.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from gristmill.dataprep.conservation import SHARE_EDGES
from gristmill.dataprep.fasttext.fasttext_predict import model_at
from gristmill.dataprep.fasttext.normalise_lines import one_line_each
from gristmill.dataprep.filters.rule_sets import RuleSet
from gristmill.dataprep.thresholds import Columns
from gristmill.mixtures.steps.rules import Toxicity


class ToxicityModelError(ValueError):
    """The model of the rule set `toxicity` does not have the label."""


def toxicity_statistics(rows: pa.Table, options: Toxicity) -> Columns:
    """Measure `toxicity` of n documents (column `text`): float64 of shape (n,), NaN for
    a text without a word.

    Raises:
        ToxicityModelError: the model does not have the label.
    """
    model = model_at(options.model)
    if options.label not in model.labels:
        raise ToxicityModelError(
            f"{options.model} has no label {options.label!r}; it has "
            f"{', '.join(sorted(model.labels)[:10])}; "
            "name one of them as toxicity.label"
        )
    lines, _ = one_line_each(
        rows["text"].combine_chunks(), None, lower=False, marks=True
    )
    values = np.clip(model.shares(lines, options.label), 0.0, 1.0)
    return {"toxicity": np.where(lines.ends > lines.begins, values, np.nan)}


RULE_SET = RuleSet(toxicity_statistics, edges={"toxicity": SHARE_EDGES})
