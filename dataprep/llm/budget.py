"""Spending on answers, and the budget that limits it."""

from __future__ import annotations

from dataclasses import dataclass

from gristmill.dataprep.conservation import add_counts
from gristmill.dataprep.llm.response_parsing import Completion
from gristmill.mixtures.steps.asked_model import AskedModel

MILLION = 1_000_000
BESIDE_TOKENS = 64
"""Tokens per prompt that a chat template adds around the messages."""


@dataclass(frozen=True)
class Spending:
    """Numbers of requests, and of tokens in prompts and answers."""

    requests: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0

    def __add__(self, other: Spending) -> Spending:
        return Spending(**add_counts([vars(self), vars(other)]))

    @property
    def tokens(self) -> int:
        """Tokens of prompts and answers."""
        return self.prompt_tokens + self.answer_tokens

    def money(self, model: AskedModel) -> float:
        """Cost at the prices of a model."""
        return (
            self.prompt_tokens * model.prompt_price
            + self.answer_tokens * model.answer_price
        ) / MILLION


def spending_on(answer: Completion) -> Spending:
    """Spending on an answer."""
    return Spending(1, answer["prompt_tokens"], answer["answer_tokens"])


def exceeded(model: AskedModel, spending: Spending) -> str | None:
    """First key of the budget that a spending exceeds, or None."""
    values = {
        "requests": spending.requests,
        "tokens": spending.tokens,
        "money": spending.money(model),
    }
    for key, value in values.items():
        limit = getattr(model.budget, key)
        if limit is not None and value > limit:
            return key
    return None
