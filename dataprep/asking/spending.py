"""What is spent on answers, and the budget that ends it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gristmill.mixtures.steps.asked_model import AskedModel

MILLION = 1_000_000
BESIDE_TOKENS = 64
"""Of a prompt, for what a chat template puts around its messages."""


@dataclass(frozen=True)
class Spending:
    """So many answers, with so many tokens of prompts and answers."""

    requests: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0

    def __add__(self, other: Spending) -> Spending:
        return Spending(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.answer_tokens + other.answer_tokens,
        )

    @property
    def tokens(self) -> int:
        """Of prompts and answers."""
        return self.prompt_tokens + self.answer_tokens

    def money(self, model: AskedModel) -> float:
        """What it costs at the prices of a model."""
        return (self.prompt_tokens * model.prompt_price + self.answer_tokens * model.answer_price) / MILLION


def spending_of(answers: Iterable[Mapping[str, int]]) -> Spending:
    """What some answers have cost."""
    total = Spending()
    for one in answers:
        total += Spending(1, one["prompt_tokens"], one["answer_tokens"])
    return total


def most_spent(model: AskedModel, body: bytes) -> Spending:
    """The most that one request can cost: a token has a byte at the least."""
    return Spending(1, len(body) + BESIDE_TOKENS, model.max_tokens)


def exceeded(model: AskedModel, spending: Spending) -> str | None:
    """The key of the budget that a spending would exceed, or None."""
    budget = model.budget
    for key, limit, value in (
        ("requests", budget.requests, spending.requests),
        ("tokens", budget.tokens, spending.tokens),
        ("money", budget.money, spending.money(model)),
    ):
        if limit is not None and value > limit:
            return key
    return None
