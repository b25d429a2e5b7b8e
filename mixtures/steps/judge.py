"""The section `judge`: a step of `prepare` in which a language model scores documents.

prepare:
  - judge:
      model: {endpoint: "http://127.0.0.1:8000/v1", model: judge}
      rubric: educational
      min: {judge_score: 3}
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field
from pydantic.json_schema import JsonSchemaValue

from gristmill.mixtures.base import (
    Judging,
    Omissible,
    OutsidePath,
    Positive,
    Section,
)
from gristmill.mixtures.columns import Column, check_column
from gristmill.mixtures.steps.asked_model import AskedModel
from gristmill.mixtures.yaml_text import unknown_name

PREFIX = "judge_"
"""Prefix of the judge's columns."""
TYPES = ("number", "integer", "boolean", "string", "array")
SCORE: JsonSchemaValue = {
    "type": "object",
    "properties": {
        "score": {"type": "number", "minimum": 0, "maximum": 5},
        "reason": {"type": "string"},
    },
    "required": ["score"],
}


class Question(Section):
    """The question that a language model answers about a document, and the form of its
    answers.
    """

    rubric: Literal["educational", "quality", "toxicity"] = "educational"
    """The question, with answers from 0 to 5: usefulness for teaching (after
    FineWeb-Edu: Penedo et al. 2024), quality of writing, toxicity.
    """
    template: OutsidePath | None = None
    """A file with your own question instead, as a Jinja template of `text`, `source`,
    `locator`, `url`, `metadata` and `answer_schema`.
    """
    prompt: Omissible[str | None] = None
    """The text of such a template instead of a file."""
    pattern: Omissible[str | None] = None
    """Regular expression with a group for each property (`(?P<verdict>safe|unsafe)`),
    for a model that does not answer in JSON. The whole answer must match.
    """
    answer: JsonSchemaValue = Field(default_factory=lambda: dict(SCORE))
    """JSON schema of the answers. Its properties become columns: `score` is
    `judge_score`; the items of an array are joined by commas. If absent, `score`, a
    number from 0 to 5, and `reason`.
    """
    characters: Positive = 8000
    """Characters of a document that the judge reads, from the beginning."""

    def _problems(self) -> Iterator[str]:
        if self.template is not None and self.prompt is not None:
            yield "`template` and `prompt` are both the question; give one of them"
        properties = self.answer.get("properties")
        if (
            self.answer.get("type") != "object"
            or not isinstance(properties, dict)
            or not properties
        ):
            yield (
                "answer: give a JSON schema with `type: object` and "
                "`properties`, which become columns"
            )
            return
        for name, property_schema in properties.items():
            if name != "reason":
                check_column(name)
            if (
                not isinstance(property_schema, dict)
                or property_schema.get("type") not in TYPES
            ):
                yield (
                    f"answer.properties.{name}: give it a `type`, one "
                    f"of {', '.join(TYPES)}"
                )

    @property
    def scores(self) -> list[str]:
        """Properties of an answer that are numbers or booleans."""
        return [
            name
            for name, of in self.answer["properties"].items()
            if of["type"] not in ("string", "array")
        ]


class Judge(Question, Judging):
    """A question to a language model about every document, with thresholds on its
    answers; see docs/judges.md.
    """

    preset: Omissible[str | None] = Field(default=None, exclude=True)
    """Name of a ready judge (`gristmill annotators`), or `FILE#NAME`, whose settings
    stand for those that are absent here.
    """
    model: AskedModel
    """The model that judges."""
    min: dict[Column, int | float] = Field(default_factory=dict)
    """Drop documents with a smaller value in a column: `{judge_score: 3}`. A null
    passes.
    """
    max: dict[Column, int | float] = Field(default_factory=dict)
    """Drop documents with a larger value in a column. A null passes."""
    unusable: Literal["quarantine", "pass"] = "quarantine"
    """Treatment of a document whose answer does not have the form of `answer`, even
    after one repair request, or that the endpoint refuses: `pass` keeps it, with null
    in its columns.
    """

    def _problems(self) -> Iterator[str]:
        for column in (*self.min, *self.max):
            if column not in self.numeric:
                yield (
                    "no measured column of numbers is called "
                    f"{unknown_name(column, self.numeric)}"
                )

    @property
    def measured(self) -> list[str]:
        """Names of the measured columns."""
        return [PREFIX + name for name in self.answer["properties"]]

    @property
    def numeric(self) -> list[str]:
        """Columns that thresholds can bound."""
        return [PREFIX + name for name in self.scores]
