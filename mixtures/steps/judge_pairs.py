"""The section `judge_pairs`: a step of `dpo.prepare` in which a language model compares the two answers of pairs.

dpo:
  prepare:
    - judge_pairs: {model: {endpoint: "http://127.0.0.1:8000/v1", model: judge}, principles: ./principles.txt}
"""

from __future__ import annotations

from typing import Final, Literal

from gristmill.mixtures.base import Judging, OutsidePath, Positive, Section
from gristmill.mixtures.steps.asked_model import AskedModel

REJECTED: Final = "rejected"
UNDECIDED: Final = "undecided"


class Comparison(Section):
    """How a language model says which of two answers is better."""

    model: AskedModel
    """Who compares."""
    template: OutsidePath | None = None
    """A file with a question of your own, as a Jinja template of `prompt`, `first`, `second`, `principle`, `source` and
    `answer_schema`."""
    principles: tuple[str, ...] | OutsidePath = ()
    """By what the better answer is told, one of them by the hash of each pair (Bai et al. 2022, section 4.1): a list,
    or a file with one a line. By how helpful, honest and harmless it is if absent."""
    characters: Positive = 4000
    """Of the prompt and of each answer, from its beginning, that the judge reads."""


class JudgePairs(Comparison, Judging):
    """A language model says which of two answers is better, asked in both orders; see docs/judges.md."""

    second: AskedModel | None = None
    """Another judge of the same pairs: the summary says how far both agree."""
    drop: tuple[Literal["rejected", "undecided"], ...] = (REJECTED, UNDECIDED)
    """Which pairs go: those of which the judge prefers the rejected answer, and those of which it prefers neither, or
    each time the one that stands first (or second). `[]` keeps all, and only measures."""

    @property
    def models(self) -> list[AskedModel]:
        """Those that are asked."""
        return [self.model] if self.second is None else [self.model, self.second]
