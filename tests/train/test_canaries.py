"""Memorisation of canaries: exposure is log2 of the ranks among references."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gristmill.dataprep.cleaning.canary_texts import draw_canaries
from gristmill.mixtures.schema.evaluation import CanaryTest
from gristmill.mixtures.steps.canaries import Canaries
from gristmill.train.eval.canaries import count_lines, measure_canaries
from gristmill.train.eval.likelihood import Score
from gristmill.train.loop.rows_read import RowsRead

DRAWN = draw_canaries(Canaries(copies=(2, 8), secrets=4, seed=3))
LOGP = {0: -9.0, 2: -7.0, 8: -1.0}
"""Log-probability of a secret by its number of copies; that of references is -2, -3,
...
"""


def language(text_of: dict[tuple[int, ...], str]) -> Any:
    """A language model whose ids are characters, and whose scores are those of LOGP."""
    known = {canary.beginning + canary.code(): canary for canary in DRAWN}
    drawn = Counter[str]()

    def score(requests: Any) -> list[Score]:
        scores = []
        for request in requests:
            text = "".join(map(chr, (*request.context, *request.scored)))
            beginning = "".join(map(chr, request.context))
            text_of[request.context] = beginning
            drawn[beginning] += 1
            if text in known:
                logp = LOGP[known[text].copies]
                scores.append(Score(logp, logp > -2, len(request.scored)))
            else:
                scores.append(Score(-float(drawn[beginning]), False, 10))
        return scores

    return SimpleNamespace(score=score, text_prompt=lambda text: tuple(map(ord, text)))


def test_exposure_is_the_rank_among_references() -> None:
    beginnings: dict[tuple[int, ...], str] = {}
    lines = Counter({canary.line: canary.copies - 1 for canary in DRAWN})
    groups = measure_canaries(
        language(beginnings), DRAWN, lines, CanaryTest(references=15), 1, 50
    )
    assert sorted(beginnings.values()) == sorted(one.beginning for one in DRAWN)
    # References have -2 to -16: -9 is the 9th of 16, -7 the 7th, -1 the first.
    expected = {0: 4 - np.log2(9), 2: 4 - np.log2(7), 8: 4.0}
    for group in groups:
        assert group["exposure"]["value"] == pytest.approx(expected[group["copies"]])
        assert group["loss"] == -LOGP[group["copies"]]
        assert group["secrets"] == 4
    assert [(one["copies"], one["extracted"], one["read"]) for one in groups] == [
        (0, 0.0, -1.0),
        (2, 0.0, 1.0),
        (8, 1.0, 7.0),
    ]


def test_lines_are_counted_in_the_rows_read() -> None:
    rows = [f"x\n{DRAWN[5].line}\n{DRAWN[5].line} {DRAWN[9].line[:-1]}", "y", "z"]
    packed: Any = SimpleNamespace(read=lambda numbers: np.stack([numbers, numbers], 1))
    order: Any = SimpleNamespace(rows=lambda places: places % 3)
    trained = RowsRead(packed, order, 600)
    lines = count_lines(trained, lambda ids: [rows[row[0]] for row in ids])
    assert lines == Counter({DRAWN[5].line: 2 * 200})
