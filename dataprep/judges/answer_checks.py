"""Rewards of answers that need no model: the built-in checks, and functions of the user's. Without torch."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gristmill.dataprep.judges.math_answers import same_answer
from gristmill.dataprep.own_functions import blaming, call_own, check_call, load_function, taken_by_name
from gristmill.mixtures.own_code import OwnCodeError, OwnFunction
from gristmill.mixtures.reinforcement import (
    ANSWER,
    GIVEN,
    MESSAGES,
    TURNS,
    AnswerReward,
    Contains,
    Exact,
    Format,
    Length,
    Mathematics,
    Number,
    OwnReward,
    Regex,
    name_of,
    wants_answer,
)

EXCERPT = 100
"""Characters of an answer in a message."""
NUMBER = re.compile(r"(?:(?<![\w)])[-\u2212])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")
"""A decimal number, perhaps with commas between thousands; a hyphen right behind a word or digit is not a sign."""


class Rewarded(Protocol):
    """Gives n answers their rewards."""

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        turns: Sequence[Sequence[Mapping[str, Any]]] | None = None,
    ) -> list[float]:
        """Args: texts of prompts and answers, name of a column -> its values, the messages of each answer; one of the
        assistant where they are absent."""


class NoAnswerError(ValueError):
    """A reward compares with the right answer, but prompts have none."""


def check_answers(where: str, examples: Sequence[Mapping[str, Any]], rewards: Sequence[AnswerReward], key: str) -> None:
    """Raise NoAnswerError where a reward compares with answers that some prompts do not have."""
    asking = [name_of(reward) for reward in rewards if wants_answer(reward)]
    without = [example["id"] for example in examples if "answer" not in example]
    if asking and without:
        raise NoAnswerError(
            f"{where}: {len(without)} of {len(examples)} prompts have no {key!r}, which the reward "
            f"{asking[0]} compares with (the first: {without[0]}); add it, name its key as `answer:` "
            "of the set, or remove the reward"
        )


def record_columns(
    reward: OwnReward, examples: Sequence[Mapping[str, Any]], prompts: Sequence[Sequence[Mapping[str, Any]]]
) -> dict[str, list[Any]]:
    """The columns of prompts' records by name, a list of values each, as TRL's GRPOTrainer gives them to rewards.

    Args:
        reward: which may take `answer` and `messages` though records have no such keys.
        examples: n of them, as of `prompt_example`.
        prompts: their messages.
    """
    kept = [example.get("columns", {}) for example in examples]
    names = dict.fromkeys(name for columns in kept for name in columns)
    found = {name: [columns.get(name) for columns in kept] for name in names}
    if ANSWER in reward.needed_columns:
        found.setdefault(ANSWER, [example.get(ANSWER) for example in examples])
    if MESSAGES in reward.needed_columns:
        found[MESSAGES] = list(prompts)
    return found


def own_reward(reward: OwnReward) -> Rewarded:
    """A function of the user's, loaded once.

    Raises:
        OwnCodeError: it cannot be loaded, or called with what it is given; when it is called, what it raised, or what
            it returned that is no number for each answer.
    """
    own, function = reward.use, load_function(reward.use)
    takes = taken_by_name(function, GIVEN)
    if TURNS in inspect.signature(function).parameters and TURNS not in {*reward.columns, *reward.options}:
        takes.append(TURNS)
    check_call(own, function, (), {**dict.fromkeys((*takes, *reward.needed_columns)), **reward.options})

    def given(
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        turns: Sequence[Sequence[Mapping[str, Any]]] | None = None,
    ) -> list[float]:
        if not completions:
            return []
        texts: dict[str, Any] = {
            "prompts": list(prompts),
            "completions": list(completions),
            TURNS: [[{"role": "assistant", "content": one}] for one in completions] if turns is None else list(turns),
        }
        own_names = {*takes, *reward.options}
        taken = [name for name in taken_by_name(function, list(columns)) if name not in own_names]
        found = call_own(
            reward,
            function,
            **{name: texts[name] for name in takes},
            **{name: columns[name] for name in taken},
            **reward.options,
        )
        with blaming(own):
            values = list(found) if isinstance(found, Iterable) and not isinstance(found, str) else found
        if not isinstance(values, list) or len(values) != len(completions):
            said = f"{len(values)} rewards" if isinstance(values, list) else f"{type(found).__name__}"
            raise OwnCodeError(
                f"{own.place}: {own.name} returned {said} for {len(completions)} completions; return a "
                "list with a number for each"
            )
        return [_number(own, value, completions[place]) for place, value in enumerate(values)]

    return given


def _number(own: OwnFunction, value: Any, completion: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise OwnCodeError(
            f"{own.place}: {own.name} returned {value!r} for the completion {completion[:EXCERPT]!r}; "
            "return a finite number"
        )
    return number


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


def verifier_of(reward: AnswerReward) -> Callable[[Answer], float]:
    """The check that a section asks for.

    Raises:
        TypeError: it is a model or a function of the user's, which is none.
    """
    match reward:
        case Exact():
            return lambda answer: exact(answer, reward)
        case Contains():
            return lambda answer: contains(answer, reward)
        case Number():
            return lambda answer: number(answer, reward)
        case Mathematics():
            return lambda answer: float(same_answer(answer.text, _right(answer)))
        case Regex():
            return lambda answer: regex(answer, reward)
        case Length():
            return lambda answer: length(answer, reward)
        case Format():
            return lambda answer: tagged(answer, reward)
    raise TypeError(f"{name_of(reward)} is not a check: a model or a function of the user's gives it")


def _right(answer: Answer) -> str:
    """The prompt's own answer; that there is one is seen to before any is asked for (`check_answers`)."""
    assert answer.right is not None
    return answer.right
