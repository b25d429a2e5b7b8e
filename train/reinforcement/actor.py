"""What happens before the updates of a batch: prompts are answered, answers rewarded, and advantages worked out.

What is drawn depends on seed, batch, prompt and the place in the batch alone: neither on the number of processes nor on
who is answered together (but for rounding, where a product's shape changes it). What tools answer may depend on more: a
training that was killed takes a batch that it has kept as it was kept, so that it goes on as it would have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gristmill.mixtures.reinforcement import Rl, name_of
from gristmill.tokenize.order import Order
from gristmill.train.adapters.lora import without_adapters
from gristmill.train.data.conversation_tokens import Chat
from gristmill.train.generation.sampling import Sampling
from gristmill.train.generation.scheduler import Request
from gristmill.train.loop.row_plan import micro_batches
from gristmill.train.parallel.sharding import evaluating
from gristmill.train.parallel.world import World, on_first, sum_over_ranks
from gristmill.train.reinforcement.curriculum import PromptChoice
from gristmill.train.reinforcement.dialogue import Asked
from gristmill.train.reinforcement.kept_answers import keep_batch, read_batch
from gristmill.train.reinforcement.policy import opinion_of
from gristmill.train.reinforcement.policy_gradient import (
    generalised_advantages,
    group_advantages,
    groups_without_variance,
    kl_estimate,
    token_rewards,
    token_weights,
    whitened,
)
from gristmill.train.reinforcement.prompts import Prompt
from gristmill.train.reinforcement.rewards import text_of
from gristmill.train.reinforcement.rollouts import Generated, Rollouts
from gristmill.train.reinforcement.sampler import Sampler, sampling_of
from gristmill.train.reinforcement.tools.used import Used
from gristmill.train.reinforcement.vllm_engine import check_agreement


@dataclass
class Actor:
    """Fills the rollouts, batch after batch.

    Attributes:
        section: the stage's.
        prompts: to train on.
        order: in which they are answered.
        model: the policy, sharded.
        reference: the frozen model, sharded; None where the policy without adapters is it, or none is needed.
        sampler: draws from the policy.
        reward: (prompts, answers) -> (n, k) float32 on the CPU, every rank together (see rewards.rewards_of).
        rollouts: filled.
        choice: which prompts are asked, where a curriculum says so.
        chat: tokenizer and template.
        world: the processes.
        folder: where each batch's answers are kept.
        drawn_tokens, seconds: of all answers so far, and how long they took.
        agreement: how far the engine that drew the last batch is from our own log-probabilities, where that is another.
    """

    section: Rl
    prompts: Sequence[Prompt]
    order: Order
    model: nn.Module
    reference: nn.Module | None
    sampler: Sampler
    reward: Callable[[Sequence[Prompt], Sequence[Generated]], Tensor]
    rollouts: Rollouts
    chat: Chat
    world: World
    folder: Path
    choice: PromptChoice | None = None
    drawn_tokens: int = field(default=0, init=False)
    agreement: dict[str, float] = field(default_factory=dict, init=False)
    seconds: float = field(default=0.0, init=False)

    def before_step(self, step: int) -> None:
        """Let the policy answer the prompts of a step (counted from 0), unless their answers are there."""
        batch = step // self.section.updates_per_batch
        if int(self.rollouts.batch) == batch:
            return
        section, rollouts = self.section, self.rollouts
        prompts = self._prompts(batch)
        chosen = [self.prompts[number] for number in prompts]
        answers = self._kept(batch, chosen) or self.draw(
            chosen,
            [
                sampling_of(section.temperature, section.key_seed, batch, prompt.example["id"], place)
                for place, prompt in enumerate(chosen)
            ],
        )
        rollouts.put(prompts, [prompt.ids for prompt in chosen], answers)
        rollouts.rewards.copy_(self.reward(chosen, answers))
        weights = torch.tensor([reward.weight for reward in section.rewards])
        rollouts.totals.copy_(rollouts.rewards @ weights)
        if self.choice is not None and section.curriculum is not None:
            passed = (rollouts.totals >= section.curriculum.passed_at).view(-1, section.group_size)
            self.choice.learn(prompts[:: section.group_size].tolist(), passed.float().mean(dim=1))
        self._ask_models()
        self.agreement = check_agreement(answers, rollouts.old, rollouts.mask, section.rollouts_agree)
        learn_from(rollouts, section)
        rollouts.batch.fill_(batch)
        if self.world.is_first:
            advantages = rollouts.advantages.sum(dim=1) / rollouts.mask.sum(dim=1).clamp(min=1)
            shown = self.shown(chosen, answers, rollouts.rewards, rollouts.totals)
            keep_batch(
                self.folder,
                batch,
                [
                    {**one, "advantage": advantage, **tokens}
                    for one, advantage, tokens in zip(
                        shown, advantages.tolist(), rollouts.tokens_of_answers(bool(section.kl_weight)), strict=True
                    )
                ],
                [name_of(reward) for reward in section.rewards],
                bool(section.tools),
            )

    def _kept(self, batch: int, prompts: Sequence[Prompt]) -> list[Generated] | None:
        """The answers of a batch as an attempt before this one has kept them; None of a batch that was never drawn."""
        found = on_first(lambda: read_batch([self.folder.parent], batch, with_tokens=True), self.world)
        if found is None or [one["id"] for one in found] != [prompt.example["id"] for prompt in prompts]:
            return None
        return [
            Generated(
                one["answer_ids"],
                one["ended"],
                tuple(one["drawn"]) if one.get("drawn") is not None else None,
                tuple(Used(**used) for used in one.get("used") or ()),
            )
            for one in found
        ]

    def _prompts(self, batch: int) -> np.ndarray:
        """The numbers of the prompts of the next batch, one for each answer: those of a group side by side, (N,) int64."""
        count = self.section.rollouts_per_batch // self.section.group_size
        numbers = (
            self.order.rows(np.arange(batch * count, (batch + 1) * count, dtype=np.int64))
            if (self.choice is None)
            else self.choice.choose(count)
        )
        return np.repeat(numbers, self.section.group_size)

    def draw(self, prompts: Sequence[Prompt], samplings: Sequence[Sampling]) -> list[Generated]:
        """An answer to each prompt."""
        started = time.perf_counter()
        answers = self.sampler.answer(
            [
                Asked(Request(prompt.ids, self.section.max_new_tokens, self.chat.stops, sampling), prompt.offered)
                for prompt, sampling in zip(prompts, samplings, strict=True)
            ]
        )
        self.seconds += time.perf_counter() - started
        self.drawn_tokens += sum(answer.num_drawn for answer in answers)
        return answers

    def shown(
        self, prompts: Sequence[Prompt], answers: Sequence[Generated], rewards: Tensor, totals: Tensor
    ) -> list[dict[str, Any]]:
        """Answers as they are kept: the prompt, the text, and what each reward gave."""
        names = [name_of(reward) for reward in self.section.rewards]
        return [
            {
                "id": prompt.example["id"],
                "prompt": prompt.example["prompt"][-1]["content"],
                "answer": text_of(self.chat, answer),
                "right": prompt.answer,
                "ended": answer.ended,
                "tokens": answer.num_drawn,
                **self._turns(answer),
                "reward": float(total),
                "rewards": dict(zip(names, one, strict=True)),
            }
            for prompt, answer, one, total in zip(prompts, answers, rewards.tolist(), totals.tolist(), strict=True)
        ]

    def _turns(self, answer: Generated) -> dict[str, Any]:
        """Of an answer with tools, how many turns it has, and its calls."""
        return {"turns": len(answer.turns), "used": [asdict(one) for one in answer.used]} if self.section.tools else {}

    def measure(self, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        """The policy's likeliest answer to each prompt with its rewards, as in `shown`."""
        answers = self.draw(prompts, [Sampling()] * len(prompts))
        rewards = self.reward(prompts, answers)
        totals = rewards @ torch.tensor([reward.weight for reward in self.section.rewards])
        return self.shown(prompts, answers, rewards, totals)

    def _ask_models(self) -> None:
        """What policy, critic and reference say of the answers, in the very parts that updates have."""
        found = self._opinions(self.model)
        self.rollouts.old.copy_(found[0])
        if found[1] is not None:
            self.rollouts.values.copy_(found[1])
        if self.section.kl_weight:
            with nullcontext() if self.reference is not None else without_adapters(self.model):
                self.rollouts.reference.copy_(self._opinions(self.reference or self.model)[0])

    def _opinions(self, model: nn.Module) -> tuple[Tensor, Tensor | None]:
        section, world = self.section, self.world
        shape = self.rollouts.old.shape
        logps, values = (torch.zeros(shape, dtype=torch.float32, device=world.device) for _ in range(2))
        with evaluating(model):
            for first in range(0, len(logps), section.global_batch_size):
                rows = np.arange(first, first + section.global_batch_size)
                for part in micro_batches(rows, world.data_rank, world.data_size, section.micro_batch_size):
                    # An empty share still takes part in the collectives of the forward pass.
                    own = part if len(part) else rows[:1]
                    found = opinion_of(model, self.rollouts.part(own).to(world.device), section.temperature)
                    if not len(part):
                        continue
                    where = torch.from_numpy(part).to(world.device), slice(found.logps.shape[1])
                    logps[where[0], where[1]] = found.logps
                    if found.values is not None:
                        values[where[0], where[1]] = found.values
        whole = sum_over_ranks(logps, world).cpu()
        has_critic = section.algorithm == "ppo" and model is self.model
        return whole, sum_over_ranks(values, world).cpu() if has_critic else None


def learn_from(rollouts: Rollouts, section: Rl) -> None:
    """Work out advantages, returns and weights from rewards and opinions."""
    mask = rollouts.mask
    rollouts.flat.copy_(groups_without_variance(rollouts.totals, section.group_size))
    if section.algorithm == "grpo":
        advantages = group_advantages(rollouts.totals, section.group_size, section.advantage_scale)
        rollouts.advantages.copy_(advantages[:, None] * mask)
    else:
        divergence = kl_estimate(rollouts.old, rollouts.reference, section.kl_kind)
        given = token_rewards(rollouts.totals, divergence, section.kl_weight, mask)
        found, returns = generalised_advantages(
            given, rollouts.values, mask, section.critic.discount, section.critic.gae_lambda
        )
        rollouts.returns.copy_(returns)
        rollouts.advantages.copy_(whitened(found, mask))
    counted = mask & rollouts.ended[:, None] if section.mask_truncated else mask
    for weights, of_step in zip(
        rollouts.weights.split(section.global_batch_size), counted.split(section.global_batch_size), strict=True
    ):
        weights.copy_(token_weights(of_step, section.normalisation, section.max_new_tokens))
