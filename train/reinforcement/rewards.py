"""What answers are rewarded with: the built-in checks, reward models, and functions of the user's."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gristmill.dataprep.files import as_path
from gristmill.dataprep.own_functions import blaming, call_own, check_call, load_function, taken_by_name
from gristmill.mixtures.own_code import OwnCodeError, OwnFunction
from gristmill.mixtures.reinforcement import (
    ANSWER,
    GIVEN,
    MESSAGES,
    AnyReward,
    Contains,
    Exact,
    Format,
    Length,
    ModelReward,
    Number,
    OwnReward,
    Regex,
)
from gristmill.train.data.conversation_tokens import Chat
from gristmill.train.parallel.world import World, on_first, sum_over_ranks
from gristmill.train.reinforcement.prompts import Prompt
from gristmill.train.reinforcement.rollouts import Generated

PROBE = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "x"})
"""A conversation that shows what the template writes behind the end of an answer."""
Given = Callable[[Sequence[Prompt], Sequence[Generated]], Tensor]
"""Rewards (n,) float32 of n answers."""
EXCERPT = 100
"""Characters of an answer in a message."""
NUMBER = re.compile(r"(?:(?<![\w)])[-\u2212])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")
"""A decimal number, perhaps with commas between thousands; a hyphen right behind a word or digit is not a sign."""


class RewardModelError(ValueError):
    """A reward model is missing, or has another vocabulary."""


def text_of(chat: Chat, answer: Generated) -> str:
    """An answer as checks see it: without the token that ends it, and without special tokens."""
    return chat.decode(answer.tokens[:-1] if answer.ended else answer.tokens)


def rewards_of(
    section: Sequence[AnyReward], inputs: Mapping[str, Path], chat: Chat, vocab_size: int, world: World, rows: int
) -> Given:
    """What gives answers (n) all their rewards, (n, k) float32 on the CPU, without weights; called on all ranks.

    Args:
        section: which rewards.
        inputs: of the stage, among them the stage `reward` if it is there.
        chat: tokenizer and template.
        vocab_size: of the policy.
        world: the processes; reward models compute on their devices.
        rows: answers per forward pass of a reward model.

    Raises:
        RewardModelError: a reward model is asked for, but there is none, or it knows other ids.
        OwnCodeError: a function of the user's cannot be loaded or called.
    """
    def part_of(one: AnyReward) -> Given:
        if isinstance(one, OwnReward):
            return _on_first(_by_own(one, chat), world)
        if isinstance(one, ModelReward):
            return _shared(_by_model(_reward_folder(one, inputs), chat, vocab_size, world.device, rows), world)
        return _shared(_by_check(one, chat), world)

    parts = [part_of(one) for one in section]
    return lambda prompts, answers: torch.stack([part(prompts, answers) for part in parts], dim=1)


def _shared(given: Given, world: World) -> Given:
    """The same of all answers, of which every rank works out its share."""
    def whole(prompts: Sequence[Prompt], answers: Sequence[Generated]) -> Tensor:
        own = slice(world.data_rank, None, world.data_size)
        found = torch.zeros(len(answers), device=world.device)
        found[own] = given(prompts[own], answers[own]).to(found.device)
        return sum_over_ranks(found, world).cpu()

    return whole


def _on_first(given: Given, world: World) -> Given:
    """The same, worked out on the first rank: a function that compares answers sees all of them, however many ranks."""
    return lambda prompts, answers: on_first(lambda: given(prompts, answers), world)


def _by_own(reward: OwnReward, chat: Chat) -> Given:
    """What a function of the user's gives.

    Raises:
        OwnCodeError: it cannot be called with what it is given.
    """
    own, function = reward.use, load_function(reward.use)
    takes = taken_by_name(function, GIVEN)
    check_call(own, function, (), {**dict.fromkeys((*takes, *reward.columns)), **reward.options})

    def given(prompts: Sequence[Prompt], answers: Sequence[Generated]) -> Tensor:
        if not answers:
            return torch.zeros(0)
        texts = {"prompts": [prompt.example["prompt"][-1]["content"] for prompt in prompts],
                 "completions": [text_of(chat, answer) for answer in answers]}
        columns = {name: [_column(prompt, name) for prompt in prompts] for name in reward.columns}
        found = call_own(reward, function, **{name: texts[name] for name in takes}, **columns, **reward.options)
        with blaming(own):
            values = list(found) if isinstance(found, Iterable) and not isinstance(found, str) else found
        if not isinstance(values, list) or len(values) != len(answers):
            said = f"{len(values)} rewards" if isinstance(values, list) else f"{type(found).__name__}"
            raise OwnCodeError(f"{own.place}: {own.name} returned {said} for {len(answers)} completions; return a list "
                               "with a number for each")
        return torch.tensor([_number(own, value, texts["completions"][place]) for place, value in enumerate(values)],
                            dtype=torch.float32)

    return given


def _column(prompt: Prompt, name: str) -> Any:
    if name == ANSWER:
        return prompt.answer
    return prompt.example["prompt"] if name == MESSAGES else prompt.example["columns"][name]


def _number(own: OwnFunction, value: Any, completion: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise OwnCodeError(f"{own.place}: {own.name} returned {value!r} for the completion {completion[:EXCERPT]!r}; "
                           "return a finite number")
    return number


def _by_check(reward: AnyReward, chat: Chat) -> Given:
    check = verifier_of(reward)

    def given(prompts: Sequence[Prompt], answers: Sequence[Generated]) -> Tensor:
        return torch.tensor([check(Answer(text_of(chat, answer), len(answer.tokens) - answer.ended, prompt.answer))
                             for prompt, answer in zip(prompts, answers, strict=True)], dtype=torch.float32)

    return given


def _reward_folder(reward: ModelReward, inputs: Mapping[str, Path]) -> Path:
    if reward.path is not None:
        return as_path(reward.path)
    if "reward" not in inputs:
        raise RewardModelError("rl.rewards: a reward of kind model has no `path`, and the manifest has no section "
                               "`reward:` whose model could be taken; give one of the two")
    return inputs["reward"] / "model"


def _by_model(folder: Path, chat: Chat, vocab_size: int, device: torch.device, rows: int) -> Given:
    from gristmill.train.models.reward_model import load_reward_model, scores

    model = load_reward_model(folder, str(device))
    if model.shape.vocab_size != vocab_size:
        raise RewardModelError(f"{folder}: the reward model has {model.shape.vocab_size} ids, the policy {vocab_size}: "
                               "it reads the policy's own tokens, so both need the same tokenizer")
    tail = chat_tail(chat)

    @torch.no_grad()
    def given(prompts: Sequence[Prompt], answers: Sequence[Generated]) -> Tensor:
        texts = [[*prompt.ids, *answer.tokens, *(tail if answer.ended else [])][: model.shape.sequence_length]
                 for prompt, answer in zip(prompts, answers, strict=True)]
        found = []
        for start in range(0, len(texts), rows):
            part = texts[start : start + rows]
            ids = torch.full((len(part), max(map(len, part))), chat.pad, dtype=torch.int64)
            for row, tokens in enumerate(part):
                ids[row, : len(tokens)] = torch.tensor(tokens)
            found.append(scores(model, ids.to(device), chat.pad).float().cpu())
        return torch.cat(found) if found else torch.zeros(0)

    return given


def chat_tail(chat: Chat) -> list[int]:
    """What a conversation has behind the end of its last answer, which a reward model was trained to see."""
    tokens = chat.encode(PROBE)
    last = int((tokens.turns > 0).nonzero()[0][-1])
    tail: list[int] = tokens.ids[last + 1 :].tolist()
    return tail


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
        TypeError: it is a model or a function of the user's, which is none.
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
        case ModelReward() | OwnReward():
            raise TypeError(f"{reward.kind} is not a check: `rewards_of` asks it")


def _right(answer: Answer) -> str:
    """The prompt's own answer; that there is one is seen to before any training (see rewards.check_answers)."""
    assert answer.right is not None
    return answer.right
