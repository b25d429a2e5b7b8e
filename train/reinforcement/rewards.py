"""What answers are rewarded with: the built-in checks, and reward models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from gristmill.dataprep.files import as_path
from gristmill.mixtures.reinforcement import AnyReward, ModelReward
from gristmill.train.objectives.chat import Chat
from gristmill.train.reinforcement.prompts import Prompt
from gristmill.train.reinforcement.rollouts import Generated
from gristmill.train.reinforcement.verifiers import Answer, verifier_of

PROBE = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "x"})
"""A conversation that shows what the template writes behind the end of an answer."""
Given = Callable[[Sequence[Prompt], Sequence[Generated]], Tensor]
"""Rewards (n,) float32 of n answers."""


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
    from gristmill.train.models.reward import load_reward_model, scores

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
