"""What answers are rewarded for (`rl.rewards`): built-in checks whose outcome is a number from 0 to 1, or a model.

A manifest is data: no reward runs code that it names. The checks are defined in train/reinforcement/verifiers.py.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gristmill.mixtures.section import NAME_PATTERN, OutsidePath, Positive, Section


class AnswerReward(Section):
    """What all rewards have in common. An answer's reward is the sum of all of them, each times its weight."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)] | None = None
    """What the metrics call it; its kind if absent. No two may have the same."""
    weight: float = 1.0
    """What it is multiplied with; below zero it punishes."""


class Exact(AnswerReward):
    """1 where the answer is the prompt's own answer, blanks at both ends left out."""

    kind: Literal["exact"]
    """Names this reward."""
    ignore_case: bool = False
    """Whether upper and lower case are the same."""


class Contains(AnswerReward):
    """1 where the answer contains a text."""

    kind: Literal["contains"]
    """Names this reward."""
    text: Annotated[str, Field(min_length=1)] | None = None
    """Which; the prompt's own answer if absent."""
    ignore_case: bool = False
    """Whether upper and lower case are the same."""


class Number(AnswerReward):
    """1 where the last number in the answer is the last number of the prompt's own answer; 1,234.50 is 1234.5."""

    kind: Literal["number"]
    """Names this reward."""
    tolerance: Annotated[float, Field(ge=0.0)] = 1e-6
    """How far they may be apart, as a share of the right one."""


class Regex(AnswerReward):
    """1 where a regular expression (Python's `re`) is found in the answer."""

    kind: Literal["regex"]
    """Names this reward."""
    pattern: Annotated[str, Field(min_length=1)]
    """Searched for anywhere; `.` matches line ends too."""
    captures_answer: bool = False
    """Whether the last match's first group must also be the prompt's own answer, blanks at both ends left out."""

    @model_validator(mode="after")
    def _compiles(self) -> Self:
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"pattern is no regular expression: {error}") from error
        if self.captures_answer and not groups:
            raise ValueError("captures_answer needs a group in the pattern, as in `answer is (.+)`")
        return self


class Length(AnswerReward):
    """1 at a target length, falling in proportion to the distance from it: 0 at no tokens and from twice as many on."""

    kind: Literal["length"]
    """Names this reward."""
    target_tokens: Positive
    """The length that is wanted."""


class Format(AnswerReward):
    """1 where the answer is nothing but certain tagged parts, in their order, each there once and not empty.

    As DeepSeek-R1's format reward (2025): `<think>...</think> <answer>...</answer>`.
    """

    kind: Literal["format"]
    """Names this reward."""
    tags: Annotated[tuple[Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")], ...], Field(min_length=1)] = (
        "think", "answer")
    """Names of the tags."""


class ModelReward(AnswerReward):
    """What a reward model thinks of the conversation; not between 0 and 1."""

    kind: Literal["model"]
    """Names this reward."""
    path: OutsidePath | None = None
    """Its folder, which transformers would load as LlamaForSequenceClassification with one label; that of the stage
    `reward` if absent."""


AnyReward = Annotated[Exact | Contains | Number | Regex | Length | Format | ModelReward, Field(discriminator="kind")]


def name_of(reward: AnswerReward) -> str:
    """What the metrics call a reward."""
    return reward.name or str(reward.kind)  # type: ignore[attr-defined]


def wants_answer(reward: AnswerReward) -> bool:
    """Whether a reward compares with a prompt's own answer."""
    match reward:
        case Exact() | Number():
            return True
        case Contains():
            return reward.text is None
        case Regex():
            return reward.captures_answer
    return False
