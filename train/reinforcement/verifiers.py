"""The built-in checks that answers are rewarded by: pure functions of an answer, each giving 0 to 1."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from gristmill.mixtures.reinforcement import AnyReward, Contains, Exact, Format, Length, ModelReward, Number, Regex

NUMBER = re.compile(r"(?:(?<![\w)])[-\u2212])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")
"""A decimal number, perhaps with commas between thousands; a hyphen right behind a word or digit is no sign."""


@dataclass(frozen=True)
class Answer:
    """What a check looks at.

    Attributes:
        text: without the token that ends it.
        tokens: how many it has, the one that ends it not counted.
        right: the prompt's own answer, if there is one.
    """

    text: str
    tokens: int
    right: str | None = None


def exact(answer: Answer, reward: Exact) -> float:
    """Whether the answer is the right one."""
    given, right = answer.text.strip(), _right(answer).strip()
    return float(given.casefold() == right.casefold() if reward.ignore_case else given == right)


def contains(answer: Answer, reward: Contains) -> float:
    """Whether the answer contains a text."""
    wanted = _right(answer).strip() if reward.text is None else reward.text
    given = answer.text
    return float(wanted.casefold() in given.casefold() if reward.ignore_case else wanted in given)


def number(answer: Answer, reward: Number) -> float:
    """Whether the last numbers of the answer and of the right one are the same."""
    given, right = last_number(answer.text), last_number(_right(answer))
    if given is None or right is None:
        return 0.0
    return float(abs(given - right) <= reward.tolerance * abs(right))


def last_number(text: str) -> float | None:
    """The last number in a text, or None."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


def regex(answer: Answer, reward: Regex) -> float:
    """Whether a regular expression is found, and perhaps what its first group holds last is the right answer."""
    found = list(re.finditer(reward.pattern, answer.text, re.DOTALL))
    if not found or not reward.captures_answer:
        return float(bool(found))
    captured = found[-1].group(1)
    return float(captured is not None and captured.strip() == _right(answer).strip())


def length(answer: Answer, reward: Length) -> float:
    """How near the answer's length is to the wanted one."""
    return max(0.0, 1.0 - abs(answer.tokens - reward.target_tokens) / reward.target_tokens)


def tagged(answer: Answer, reward: Format) -> float:
    """Whether the answer is tagged parts in their order, each there once and not empty, with blanks between at most."""
    parts = r"\s*".join(rf"<{tag}>(?P<p{place}>.*?)</{tag}>" for place, tag in enumerate(reward.tags))
    found = re.fullmatch(rf"\s*{parts}\s*", answer.text, re.DOTALL)
    if found is None or any(not part.strip() for part in found.groups()):
        return 0.0
    return float(all(answer.text.count(mark) == 1 for tag in reward.tags for mark in (f"<{tag}>", f"</{tag}>")))


def verifier_of(reward: AnyReward) -> Callable[[Answer], float]:
    """The check that a section asks for.

    Raises:
        TypeError: it is a model, which is none.
    """
    match reward:
        case Exact():
            return lambda answer: exact(answer, reward)
        case Contains():
            return lambda answer: contains(answer, reward)
        case Number():
            return lambda answer: number(answer, reward)
        case Regex():
            return lambda answer: regex(answer, reward)
        case Length():
            return lambda answer: length(answer, reward)
        case Format():
            return lambda answer: tagged(answer, reward)
        case ModelReward():
            raise TypeError("a reward model is no check; see train/reinforcement/rewards.py")


def _right(answer: Answer) -> str:
    """The prompt's own answer; that there is one is seen to before any training (see rewards.check_answers)."""
    assert answer.right is not None
    return answer.right
