"""What answers are rewarded with: the built-in checks, reward models, and functions of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gristmill.dataprep.files import as_path
from gristmill.dataprep.judges.answer_checks import Answer, own_reward, record_columns, verifier_of
from gristmill.mixtures.reinforcement import AnyReward, ModelReward, OwnReward
from gristmill.train.data.conversation_tokens import Chat
from gristmill.train.models.reward_model import RewardModel, load_reward_model, scores
from gristmill.train.parallel.world import World, on_first, sum_over_ranks
from gristmill.train.reinforcement.prompts import Prompt
from gristmill.train.reinforcement.rollouts import Generated

PROBE = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "x"})
"""A conversation that shows what the template writes behind the end of an answer."""
Given = Callable[[Sequence[Prompt], Sequence[Generated]], Tensor]
"""Rewards (n,) float32 of n answers."""
ROWS = 16
"""Conversations per forward pass of a reward model that scores texts."""


class RewardModelError(ValueError):
    """A reward model is missing, or has another vocabulary."""


def text_of(chat: Chat, answer: Generated) -> str:
    """An answer as checks see it, its last turn: without the token that ends it, and without special tokens."""
    last = answer.turns[-1]
    return chat.decode(last[:-1] if answer.ended else last)


def turns_of(chat: Chat, answer: Generated) -> list[dict[str, Any]]:
    """The messages that an answer consists of: what the assistant says, and what the tools that it calls answer."""
    *earlier, _ = answer.turns
    found: list[dict[str, Any]] = []
    for number, turn in enumerate(earlier, start=1):
        used = [one for one in answer.used if one.turn == number]
        found.append(
            {
                "role": "assistant",
                "content": chat.decode(turn, special=True),
                "tool_calls": [
                    {"type": "function", "function": {"name": one.name, "arguments": one.arguments}} for one in used
                ],
            }
        )
        found += [{"role": "tool", "name": one.name, "content": one.answer} for one in used]
    return [*found, {"role": "assistant", "content": text_of(chat, answer)}]


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
    ask = own_reward(reward)

    def given(prompts: Sequence[Prompt], answers: Sequence[Generated]) -> Tensor:
        examples = [prompt.example for prompt in prompts]
        columns = record_columns(reward, examples, [example["prompt"] for example in examples])
        return torch.tensor(
            ask(
                [prompt.example["prompt"][-1]["content"] for prompt in prompts],
                [text_of(chat, answer) for answer in answers],
                columns,
                [turns_of(chat, answer) for answer in answers],
            ),
            dtype=torch.float32,
        )

    return given


def _by_check(reward: AnyReward, chat: Chat) -> Given:
    check = verifier_of(reward)

    def given(prompts: Sequence[Prompt], answers: Sequence[Generated]) -> Tensor:
        return torch.tensor(
            [
                check(Answer(text_of(chat, answer), answer.num_drawn - answer.ended, prompt.answer))
                for prompt, answer in zip(prompts, answers, strict=True)
            ],
            dtype=torch.float32,
        )

    return given


def _reward_folder(reward: ModelReward, inputs: Mapping[str, Path]) -> Path:
    if reward.path is not None:
        return as_path(reward.path)
    if "reward" not in inputs:
        raise RewardModelError(
            "rl.rewards: a reward of kind model has no `path`, and the manifest has no section "
            "`reward:` whose model could be taken; give one of the two"
        )
    return inputs["reward"] / "model"


def _by_model(folder: Path, chat: Chat, vocab_size: int, device: torch.device, rows: int) -> Given:
    model = load_reward_model(folder, str(device))
    if model.shape.vocab_size != vocab_size:
        raise RewardModelError(
            f"{folder}: the reward model has {model.shape.vocab_size} ids, the policy {vocab_size}: "
            "it reads the policy's own tokens, so both need the same tokenizer"
        )
    tail = chat_tail(chat)

    def given(prompts: Sequence[Prompt], answers: Sequence[Generated]) -> Tensor:
        return _score(
            model,
            [
                [*prompt.ids, *answer.tokens, *(tail if answer.ended else [])]
                for prompt, answer in zip(prompts, answers, strict=True)
            ],
            chat.pad,
            rows,
        )

    return given


@torch.no_grad()
def _score(model: RewardModel, conversations: Sequence[Sequence[int]], pad: int, rows: int) -> Tensor:
    """What a reward model gives n conversations, (n,) float32 on the CPU; what is beyond its context is cut off."""
    found, device = [torch.zeros(0)], model.score.weight.device
    for start in range(0, len(conversations), rows):
        part = [one[: model.shape.sequence_length] for one in conversations[start : start + rows]]
        ids = torch.full((len(part), max(map(len, part))), pad, dtype=torch.int64)
        for row, tokens in enumerate(part):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        found.append(scores(model, ids.to(device), pad).float().cpu())
    return torch.cat(found)


def load_answer_scorer(folder: str) -> Callable[[Sequence[Sequence[Mapping[str, Any]]]], list[float]]:
    """What gives n conversations, messages that end with an answer, the scores of a reward model.

    Args:
        folder: as the stage `reward` writes it: the model with its tokenizer and chat template.

    Raises:
        gristmill.train.data.conversation_tokens.ChatError: it has no chat template, or that refuses a conversation.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chat, model = Chat(as_path(folder)), load_reward_model(as_path(folder), device)
    return lambda conversations: _score(
        model, [chat.encode(one).ids.tolist() for one in conversations], chat.pad, ROWS
    ).tolist()


def chat_tail(chat: Chat) -> list[int]:
    """What a conversation has behind the end of its last answer, which a reward model was trained to see."""
    tokens = chat.encode(PROBE)
    last = int((tokens.turns > 0).nonzero()[0][-1])
    tail: list[int] = tokens.ids[last + 1 :].tolist()
    return tail
