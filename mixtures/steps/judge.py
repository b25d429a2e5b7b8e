"""The section `judge`: a step of `prepare` in which a language model scores documents.

prepare:
  - judge:
      model: {endpoint: "http://127.0.0.1:8000/v1", model: judge}
      rubric: educational
      min: {judge_score: 3}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from gristmill.mixtures.base import Judging, OutsidePath, Positive, Section
from gristmill.mixtures.columns import Column, check_column
from gristmill.mixtures.steps.asked_model import AskedModel
from gristmill.mixtures.yaml_text import did_you_mean

FIRST, SECOND = "judge_", "second_"
"""What stands before the names of the columns of either judge."""
TYPES = ("number", "integer", "boolean", "string")
SCORE: Mapping[str, Any] = {
    "type": "object",
    "properties": {"score": {"type": "number", "minimum": 0, "maximum": 5}, "reason": {"type": "string"}},
    "required": ["score"],
}


class Question(Section):
    """What a language model is asked about a document, and the form of its answers."""

    rubric: Literal["educational", "quality", "toxicity"] = "educational"
    """The question, from 0 to 5: how useful for teaching (after FineWeb-Edu: Penedo et al. 2024), how well written, how
    toxic."""
    template: OutsidePath | None = None
    """A file with a question of your own instead, as a Jinja template of `text`, `source`, `locator`, `url`, `metadata`
    and `answer_schema`."""
    answer: dict[str, Any] = Field(default_factory=lambda: dict(SCORE))
    """JSON schema of the answers. Its properties become columns: `score` is `judge_score`, and `second_score` of the
    second judge. If absent `score`, a number from 0 to 5, and `reason`."""
    characters: Positive = 8000
    """Of a document, from its beginning, that the judge reads."""

    @model_validator(mode="after")
    def _answers_are_columns(self) -> Self:
        properties = self.answer.get("properties")
        if self.answer.get("type") != "object" or not isinstance(properties, dict) or not properties:
            raise ValueError("answer: give a JSON schema with `type: object` and `properties`, which become columns")
        for name, of in properties.items():
            check_column(name) if name != "reason" else None
            if not isinstance(of, dict) or of.get("type") not in TYPES:
                raise ValueError(f"answer.properties.{name}: give it a `type`, one of {', '.join(TYPES)}")
        return self

    @property
    def scores(self) -> list[str]:
        """The properties of an answer that are numbers, or true and false."""
        return [name for name, of in self.answer["properties"].items() if of["type"] != "string"]


class Judge(Question, Judging):
    """A language model answers a question about every document, and thresholds decide; see docs/judges.md."""

    model: AskedModel
    """Who judges."""
    second: AskedModel | None = None
    """Another judge of the same documents: the summary says how far both agree."""
    min: dict[Column, int | float] = Field(default_factory=dict)
    """Drop documents of which a column is smaller: `{judge_score: 3}`. A null passes."""
    max: dict[Column, int | float] = Field(default_factory=dict)
    """Drop documents of which a column is larger. A null passes."""
    unusable: Literal["quarantine", "pass"] = "quarantine"
    """What happens to a document whose answer has not the form of `answer`, after one repair request too, or that the
    endpoint refuses: `pass` keeps it, its columns null."""

    @model_validator(mode="after")
    def _fits_its_answers(self) -> Self:
        for column in (*self.min, *self.max):
            if column not in self.numeric:
                raise ValueError(
                    f"{column!r} is no column of numbers that is measured"
                    f"{did_you_mean(column, self.numeric)}; there are {', '.join(self.numeric)}"
                )
        return self

    @property
    def models(self) -> list[AskedModel]:
        """Those that are asked."""
        return [self.model] if self.second is None else [self.model, self.second]

    @property
    def measured(self) -> list[str]:
        """The columns."""
        return [prefix + name for prefix in self.prefixes for name in self.answer["properties"]]

    @property
    def prefixes(self) -> tuple[str, ...]:
        """What stands before the columns of each judge."""
        return (FIRST,) if self.second is None else (FIRST, SECOND)

    @property
    def numeric(self) -> list[str]:
        """The columns that thresholds can bound."""
        return [prefix + name for prefix in self.prefixes for name in self.scores]
