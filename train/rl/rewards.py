"""Rewards of answers: built-in checks, reward models, and user functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gristmill.core.files import as_path
from gristmill.dataprep.documents import Inputs
from gristmill.dataprep.examples.conversations import Message
from gristmill.dataprep.rewards.answer_checks import (
    Answer,
    own_reward,
    record_columns,
    verifier_of,
)
from gristmill.mixtures.schema.rl import AnyReward, ModelReward, OwnReward
from gristmill.tokenize.chat_template import PROBE
from gristmill.train.data.conversation_tokens import Chat
from gristmill.train.distributed.process_groups import World, on_first, sum_over_ranks
from gristmill.train.loop.batch_plan import slices
from gristmill.train.loop.objective import JsonObject
from gristmill.train.models.reward_model import RewardModel, load_reward_model, scores
from gristmill.train.rl.prompts import Prompt
from gristmill.train.rl.rollout import Generated

Given = Callable[[Sequence[Prompt], Sequence[Generated]], Tensor]
"""Function from prompts and answers to rewards (n,) float32."""
ROWS = 16
"""Conversations per forward pass of a reward model on texts."""


class RewardModelError(ValueError):
    """A reward model is missing, or has another vocabulary."""


def text_of(chat: Chat, answer: Generated) -> str:
    """Text of an answer's last turn for checks, without the stop token and special
    tokens.
    """
    last = answer.turns[-1]
    return chat.decode(last[:-1] if answer.ended else last)


def turns_of(chat: Chat, answer: Generated) -> list[JsonObject]:
    """Messages of an answer for a user's reward: the assistant's turns, with arguments
    of calls as JSON, and the tools' answers.
    """
    *earlier, _ = answer.turns
    messages: list[JsonObject] = []
    for number, turn in enumerate(earlier, start=1):
        used = [call for call in answer.used if call.turn == number]
        messages.append(
            {
                "role": "assistant",
                "content": chat.decode(turn, special=True),
                "tool_calls": [
                    {
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                    for call in used
                ],
            }
        )
        messages += [
            {"role": "tool", "name": call.name, "content": call.answer} for call in used
        ]
    return [*messages, {"role": "assistant", "content": text_of(chat, answer)}]


def rewards_of(
    section: Sequence[AnyReward],
    inputs: Inputs,
    chat: Chat,
    vocab_size: int,
    world: World,
    rows: int,
) -> Given:
    """Function from n answers to all rewards, (n, k) float32 on the CPU, without
    weights; called on all ranks.

    Args:
        section: the rewards.
        inputs: of the stage, including the stage `reward` if it exists.
        chat: tokenizer and template.
        vocab_size: of the policy.
        world: the processes; reward models compute on their devices.
        rows: answers per forward pass of a reward model.

    Raises:
        RewardModelError: a reward model is missing, or has another vocabulary.
        OwnCodeError: a function of the user's cannot be loaded or called.
    """

    def part_of(reward: AnyReward) -> Given:
        if isinstance(reward, OwnReward):
            by_own = _by_own(reward, chat)
            # A function that compares answers must see all of them.
            return lambda prompts, answers: on_first(
                lambda: by_own(prompts, answers), world
            )
        if isinstance(reward, ModelReward):
            if reward.path is None and "reward" not in inputs:
                raise RewardModelError(
                    "rl.rewards: a reward of kind model has no `path`, and the "
                    "manifest has no section `reward:` whose model could be taken; "
                    "give one of the two"
                )
            folder = (
                inputs["reward"] / "model"
                if reward.path is None
                else as_path(reward.path)
            )
            model_reward = _by_model(folder, chat, vocab_size, world.device, rows)
            return _shared(model_reward, world)
        check = verifier_of(reward)
        return _shared(
            lambda prompts, answers: torch.tensor(
                [
                    check(
                        Answer(
                            text_of(chat, answer),
                            answer.num_drawn - answer.ended,
                            prompt.answer,
                        )
                    )
                    for prompt, answer in zip(prompts, answers, strict=True)
                ],
                dtype=torch.float32,
            ),
            world,
        )

    parts = [part_of(entry) for entry in section]
    return lambda prompts, answers: torch.stack(
        [part(prompts, answers) for part in parts], dim=1
    )


def _shared(reward: Given, world: World) -> Given:
    """Distribute a reward of all answers over the ranks."""

    def all_rewards(prompts: Sequence[Prompt], answers: Sequence[Generated]) -> Tensor:
        rank_share = slice(world.data_rank, None, world.data_size)
        rewards = torch.zeros(len(answers), device=world.device)
        rewards[rank_share] = reward(prompts[rank_share], answers[rank_share]).to(
            rewards.device
        )
        return sum_over_ranks(rewards, world).cpu()

    return all_rewards


def _by_own(reward: OwnReward, chat: Chat) -> Given:
    """Reward by a user's function.

    Raises:
        OwnCodeError: it cannot be called with its arguments.
    """
    ask = own_reward(reward)

    def rewards(prompts: Sequence[Prompt], answers: Sequence[Generated]) -> Tensor:
        examples = [prompt.example for prompt in prompts]
        columns = record_columns(
            reward, examples, [example["prompt"] for example in examples]
        )
        return torch.tensor(
            ask(
                [prompt.example["prompt"][-1]["content"] for prompt in prompts],
                [text_of(chat, answer) for answer in answers],
                columns,
                [turns_of(chat, answer) for answer in answers],
            ),
            dtype=torch.float32,
        )

    return rewards


def _by_model(
    folder: Path, chat: Chat, vocab_size: int, device: torch.device, rows: int
) -> Given:
    model = load_reward_model(folder, str(device))
    if model.shape.vocab_size != vocab_size:
        raise RewardModelError(
            f"{folder}: the reward model has {model.shape.vocab_size} ids, the "
            f"policy {vocab_size}: "
            "it reads the policy's own tokens, so both need the same tokenizer"
        )
    tokens = chat.encode(PROBE[1:3])
    last = int((tokens.turns > 0).nonzero()[0][-1])
    tail = tokens.ids[last + 1 :].tolist()

    return lambda prompts, answers: _score(
        model,
        [
            [*prompt.ids, *answer.tokens, *(tail if answer.ended else [])]
            for prompt, answer in zip(prompts, answers, strict=True)
        ],
        chat.pad,
        rows,
    )


@torch.no_grad()
def _score(
    model: RewardModel, conversations: Sequence[Sequence[int]], pad: int, rows: int
) -> Tensor:
    """Scores of a reward model for n conversations, (n,) float32 on the CPU; truncates
    to its context.
    """
    chunks = [torch.zeros(0)]
    device = model.score.weight.device
    for part in slices(len(conversations), rows):
        batch = [
            conversation[: model.shape.sequence_length]
            for conversation in conversations[part]
        ]
        ids = pad_sequence(list(map(torch.tensor, batch)), True, padding_value=pad)
        chunks.append(scores(model, ids.to(device), pad).float().cpu())
    return torch.cat(chunks)


def load_answer_scorer(
    folder: str,
) -> Callable[[Sequence[Sequence[Message]]], list[float]]:
    """Function from n conversations, messages that end with an answer, to scores of a
    reward model.

    Args:
        folder: output of the stage `reward`: the model with its tokenizer and chat
            template.

    Raises:
        gristmill.train.data.conversation_tokens.ChatError: it has no chat template, or
            the template rejects a conversation.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chat = Chat(as_path(folder))
    model = load_reward_model(as_path(folder), device)
    return lambda conversations: _score(
        model,
        [chat.encode(messages).ids.tolist() for messages in conversations],
        chat.pad,
        ROWS,
    ).tolist()
