"""Rewards of answers without a model: built-in checks and users' functions. Does not
import torch.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gristmill.dataprep.examples.conversations import Example, Message
from gristmill.dataprep.rewards.math import same_answer
from gristmill.dataprep.user_functions import (
    blaming,
    call_own,
    check_call,
    load_function,
    taken_by_name,
)
from gristmill.mixtures.schema.rl import (
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
    wants_answer,
)
from gristmill.mixtures.user_code import OwnCodeError, name_of

EXCERPT = 100
"""Characters of an answer quoted in a message."""
NUMBER = re.compile(
    r"(?:(?<![\w)])[-\u2212])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
)
"""Decimal number, optionally with thousands commas; a hyphen right after a word or
digit is not a sign.
"""


class Rewarded(Protocol):
    """Function that returns the rewards of n answers."""

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        turns: Sequence[Sequence[Mapping[str, object]]] | None = None,
    ) -> list[float]:
        """Args: texts of prompts and answers, name of a column -> its values, and the
        messages of each answer; if None, each answer is one assistant message.
        """


class NoAnswerError(ValueError):
    """A reward compares with a reference answer, but prompts have none."""


def check_answers(
    where: str,
    examples: Sequence[Example],
    rewards: Sequence[AnswerReward],
    key: str,
) -> None:
    """Raise NoAnswerError if a reward compares with reference answers that some prompts
    lack.
    """
    comparing = [name_of(reward) for reward in rewards if wants_answer(reward)]
    unanswered = [example["id"] for example in examples if "answer" not in example]
    if comparing and unanswered:
        raise NoAnswerError(
            f"{where}: {len(unanswered)} of {len(examples)} prompts have no {key!r}, "
            f"which the reward {comparing[0]} compares with (the first: "
            f"{unanswered[0]}); add it, name its key as `answer:` of the set, or "
            "remove the reward"
        )


def record_columns(
    reward: OwnReward,
    examples: Sequence[Example],
    prompts: Sequence[Sequence[Message]],
) -> dict[str, list[Any]]:
    """Columns of prompts' records by name, a list of values each, as TRL's GRPOTrainer
    passes them to rewards.

    Args:
        reward: may take `answer` and `messages`, which records need not have as
            columns.
        examples: n prompts from `prompt_example`.
        prompts: their messages.
    """
    kept = [example.get("columns", {}) for example in examples]
    names = dict.fromkeys(name for columns in kept for name in columns)
    values_by_column = {name: [columns.get(name) for columns in kept] for name in names}
    if ANSWER in reward.needed_columns:
        values_by_column.setdefault(
            ANSWER, [example.get("answer") for example in examples]
        )
    if MESSAGES in reward.needed_columns:
        values_by_column[MESSAGES] = list(prompts)
    return values_by_column


def own_reward(reward: OwnReward) -> Rewarded:
    """Load a user's reward function.

    Raises:
        OwnCodeError: it cannot be loaded, or its parameters do not match; or, when
            called, it raises or does not return a number for each answer.
    """
    code = reward.use
    function = load_function(reward.use)
    takes = taken_by_name(function, GIVEN)
    if TURNS in inspect.signature(function).parameters and TURNS not in {
        *reward.columns,
        *reward.options,
    }:
        takes.append(TURNS)
    check_call(
        code,
        function,
        (),
        {**dict.fromkeys((*takes, *reward.needed_columns)), **reward.options},
    )

    def given(
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        turns: Sequence[Sequence[Mapping[str, object]]] | None = None,
    ) -> list[float]:
        if not completions:
            return []
        texts: dict[str, object] = {
            "prompts": list(prompts),
            "completions": list(completions),
            TURNS: [
                [{"role": "assistant", "content": completion}]
                for completion in completions
            ]
            if turns is None
            else list(turns),
        }
        reserved_names = {*takes, *reward.options}
        passed_columns = [
            name
            for name in taken_by_name(function, list(columns))
            if name not in reserved_names
        ]
        returned = call_own(
            reward,
            function,
            **{name: texts[name] for name in takes},
            **{name: columns[name] for name in passed_columns},
            **reward.options,
        )
        values: list[Any] | None = None
        if isinstance(returned, Iterable) and not isinstance(returned, str):
            with blaming(code):
                values = list(returned)
        if values is None or len(values) != len(completions):
            description = (
                type(returned).__name__ if values is None else f"{len(values)} rewards"
            )
            raise OwnCodeError(
                f"{code.place}: {code.name} returned {description} for "
                f"{len(completions)} completions; return a list with a number for each"
            )
        numbers = []
        for value, completion in zip(values, completions, strict=True):
            try:
                numbers.append(float(value))
            except (TypeError, ValueError):
                numbers.append(math.nan)
            if not math.isfinite(numbers[-1]):
                raise OwnCodeError(
                    f"{code.place}: {code.name} returned {value!r} for the completion "
                    f"{completion[:EXCERPT]!r}; return a finite number"
                )
        return numbers

    return given


@dataclass(frozen=True)
class Answer:
    """Answer to check.

    Attributes:
        text: without the end token.
        tokens: number of tokens, without the end token.
        right: reference answer of the prompt, if any.
    """

    text: str
    tokens: int
    right: str | None = None


def exact(answer: Answer, reward: Exact) -> float:
    """Return 1 if the answer equals the reference answer, else 0."""
    text = _cased(answer.text.strip(), reward)
    return float(text == _cased(_right(answer).strip(), reward))


def contains(answer: Answer, reward: Contains) -> float:
    """Return 1 if the answer contains a text, else 0."""
    substring = _right(answer).strip() if reward.text is None else reward.text
    return float(_cased(substring, reward) in _cased(answer.text, reward))


def _cased(text: str, reward: Exact | Contains) -> str:
    return text.casefold() if reward.ignore_case else text


def number(answer: Answer, reward: Number) -> float:
    """Return 1 if the last numbers of the answer and of the reference answer are equal
    within the tolerance, else 0.
    """
    value = last_number(answer.text)
    reference = last_number(_right(answer))
    if value is None or reference is None:
        return 0.0
    return float(abs(value - reference) <= reward.tolerance * abs(reference))


def last_number(text: str) -> float | None:
    """Last number in a text, or None."""
    numbers = NUMBER.findall(text)
    return (
        float(numbers[-1].replace(",", "").replace("\u2212", "-")) if numbers else None
    )


def regex(answer: Answer, reward: Regex) -> float:
    """Return 1 if a regular expression matches and, if required, its last first group
    is the reference answer, else 0.
    """
    matches = list(re.finditer(reward.pattern, answer.text, re.DOTALL))
    if not matches or not reward.captures_answer:
        return float(bool(matches))
    captured = matches[-1].group(1)
    return float(captured is not None and captured.strip() == _right(answer).strip())


def length(answer: Answer, reward: Length) -> float:
    """Closeness of the answer's length to the target: 1 at the target, falling linearly
    to 0.
    """
    return max(
        0.0, 1.0 - abs(answer.tokens - reward.target_tokens) / reward.target_tokens
    )


def tagged(answer: Answer, reward: Format) -> float:
    """Return 1 if the answer is the tagged parts in order, each exactly once and not
    empty, else 0.
    """
    parts = r"\s*".join(
        rf"<{tag}>(?P<p{place}>.*?)</{tag}>" for place, tag in enumerate(reward.tags)
    )
    match = re.fullmatch(rf"\s*{parts}\s*", answer.text, re.DOTALL)
    if match is None or any(not part.strip() for part in match.groups()):
        return 0.0
    marks = [mark for tag in reward.tags for mark in (f"<{tag}>", f"</{tag}>")]
    return float(all(answer.text.count(mark) == 1 for mark in marks))


def verifier_of(reward: AnswerReward) -> Callable[[Answer], float]:
    """Check that a reward section describes.

    Raises:
        TypeError: the reward is a model or a user's function, not a check.
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
    raise TypeError(
        f"{name_of(reward)} is not a check: a model or a function of the "
        "user's gives it"
    )


def _right(answer: Answer) -> str:
    """Reference answer of the prompt, which `check_answers` has ensured."""
    assert answer.right is not None
    return answer.right
