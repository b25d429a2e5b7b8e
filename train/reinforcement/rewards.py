"""What answers are rewarded with: the built-in checks, and reward models."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gristmill.dataprep.files import as_path
from gristmill.mixtures.reinforcement import AnyReward, Contains, Exact, Format, Length, ModelReward, Number, Regex
from gristmill.train.data.conversation_tokens import Chat
from gristmill.train.reinforcement.prompts import Prompt
from gristmill.train.reinforcement.rollouts import Generated

PROBE = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "x"})
"""A conversation that shows what the template writes behind the end of an answer."""
Given = Callable[[Sequence[Prompt], Sequence[Generated]], Tensor]
"""Rewards (n,) float32 of n answers."""
NUMBER = re.compile(r"(?:(?<![\w)])[-\u2212])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")
"""A decimal number, perhaps with commas between thousands; a hyphen right behind a word or digit is not a sign."""


class RewardModelError(ValueError):
    """A reward model is missing, or has another vocabulary."""


def text_of(chat: Chat, answer: Generated) -> str:
    """An answer as checks see it: without the token that ends it, and without special tokens."""
    return chat.decode(answer.tokens[:-1] if answer.ended else answer.tokens)


def rewards_of(
    section: Sequence[AnyReward], inputs: Mapping[str, Path], chat: Chat, vocab_size: int, device: torch.device,
    rows: int,
) -> Callable[[Sequence[Prompt], Sequence[Generated]], Tensor]:
    """What gives answers (n) all their rewards, (n, k) float32 on the CPU, without weights.

    Args:
        section: which rewards.
        inputs: of the stage, among them the stage `reward` if it is there.
        chat: tokenizer and template.
        vocab_size: of the policy.
        device: where reward models compute.
        rows: answers per forward pass of a reward model.

    Raises:
        RewardModelError: a reward model is asked for, but there is none, or it knows other ids.
    """
    parts = [_by_model(_reward_folder(one, inputs), chat, vocab_size, device, rows) if isinstance(one, ModelReward)
             else _by_check(one, chat) for one in section]
    return lambda prompts, answers: torch.stack([part(prompts, answers) for part in parts], dim=1)


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
            raise TypeError("a reward model is not a check: `rewards_of` asks it")


def _right(answer: Answer) -> str:
    """The prompt's own answer; that there is one is seen to before any training (see rewards.check_answers)."""
    assert answer.right is not None
    return answer.right
