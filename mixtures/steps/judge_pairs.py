"""The section `judge_pairs`: a step of `dpo.prepare` in which a language model compares
the two answers of pairs.

    dpo:
      prepare:
        - judge_pairs:
            model: {endpoint: "http://127.0.0.1:8000/v1", model: judge}
            principles: ./principles.txt
"""

from __future__ import annotations

from typing import Final, Literal

from gristmill.mixtures.base import Judging, OutsidePath, Positive, Section
from gristmill.mixtures.steps.asked_model import AskedModel

REJECTED: Final = "rejected"
UNDECIDED: Final = "undecided"


class Comparison(Section):
    """A comparison of two answers by a language model."""

    model: AskedModel
    """The model that compares."""
    template: OutsidePath | None = None
    """A file with your own question, as a Jinja template of `prompt`, `first`,
    `second`, `principle`, `source` and `answer_schema`.
    """
    principles: tuple[str, ...] | OutsidePath = ()
    """Criteria for the better answer, of which each pair draws one by hash (Bai et al.
    2022, section 4.1): a list, or a file with one per line. If absent: helpful, honest
    and harmless.
    """
    characters: Positive = 4000
    """Characters of the prompt and of each answer that the judge reads, from the
    beginning.
    """


class JudgePairs(Comparison, Judging):
    """Comparison of the two answers of pairs by a language model, in both orders; see
    docs/judges.md.
    """

    drop: tuple[Literal["rejected", "undecided"], ...] = (REJECTED, UNDECIDED)
    """Pairs to drop: those of which the judge prefers the rejected answer, and those of
    which it prefers neither, or each time the first (or the second) in order. `[]`
    keeps all pairs, and only measures.
    """
