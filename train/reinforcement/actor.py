"""What happens before the updates of a batch: prompts are answered, answers rewarded, and advantages worked out.

Every process gets the whole of the weights as they are now, adapters merged, in the dtype that the training computes
in, and answers its share of the prompts. What is drawn depends on seed, batch, prompt and the place in the batch
alone: neither on the number of processes nor on who is answered together (but for rounding, where a product's shape
changes it).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gristmill.dataprep.seeds import seeded_key
from gristmill.mixtures.posttraining import Lora
from gristmill.mixtures.reinforcement import Rl, name_of
from gristmill.tokenize.order import Order
from gristmill.train.adapters.lora import DOWN, merged, rounded_weights, without_adapters
from gristmill.train.data.conversation_tokens import Chat
from gristmill.train.generation.sampling import Sampling
from gristmill.train.generation.scheduler import Request, Scheduler
from gristmill.train.loop.row_plan import micro_batches
from gristmill.train.models.llama import Llama
from gristmill.train.models.shape import Shape
from gristmill.train.parallel.sharding import evaluating, gathered
from gristmill.train.parallel.world import World, sum_over_ranks
from gristmill.train.reinforcement.kept_answers import keep_batch
from gristmill.train.reinforcement.policy import is_critic, opinion_of
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

LAYER_PARTS = 3
"""Of a parameter's name, up to its layer: `model.layers.0`."""


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
        chat: tokenizer and template.
        world: the processes.
        folder: where each batch's answers are kept.
        drawn_tokens, seconds: of all answers so far, and how long they took.
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
    drawn_tokens: int = field(default=0, init=False)
    seconds: float = field(default=0.0, init=False)

    def before_step(self, step: int) -> None:
        """Let the policy answer the prompts of a step (counted from 0), unless their answers are there."""
        batch = step // self.section.updates_per_batch
        if int(self.rollouts.batch) == batch:
            return
        section, rollouts = self.section, self.rollouts
        prompts = self.prompts_of(batch)
        chosen = [self.prompts[number] for number in prompts]
        answers = self.draw(chosen, [
            sampling_of(section.temperature, section.key_seed, batch, prompt.example["id"], place)
            for place, prompt in enumerate(chosen)])
        rollouts.put(prompts, [prompt.ids for prompt in chosen], answers)
        rollouts.rewards.copy_(self.reward(chosen, answers))
        weights = torch.tensor([reward.weight for reward in section.rewards])
        rollouts.totals.copy_(rollouts.rewards @ weights)
        self._ask_models()
        learn_from(rollouts, section)
        rollouts.batch.fill_(batch)
        if self.world.is_first:
            advantages = rollouts.advantages.sum(dim=1) / rollouts.lengths.clamp(min=1)
            shown = self.shown(chosen, answers, rollouts.rewards, rollouts.totals)
            keep_batch(self.folder, batch, [{**one, "advantage": advantage, **tokens} for one, advantage, tokens in zip(
                shown, advantages.tolist(), rollouts.tokens_of_answers(bool(section.kl_weight)), strict=True)],
                [name_of(reward) for reward in section.rewards])

    def prompts_of(self, batch: int) -> np.ndarray:
        """The numbers of the prompts of a batch, one for each answer: those of a group side by side, (N,) int64."""
        count = self.section.rollouts_per_batch // self.section.group_size
        numbers = self.order.rows(np.arange(batch * count, (batch + 1) * count, dtype=np.int64))
        return np.repeat(numbers, self.section.group_size)

    def draw(self, prompts: Sequence[Prompt], samplings: Sequence[Sampling]) -> list[Generated]:
        """An answer to each prompt."""
        started = time.perf_counter()
        answers = self.sampler.answer([
            Request(prompt.ids, self.section.max_new_tokens, self.chat.stops, sampling)
            for prompt, sampling in zip(prompts, samplings, strict=True)])
        self.seconds += time.perf_counter() - started
        self.drawn_tokens += sum(len(answer.tokens) for answer in answers)
        return answers

    def shown(
        self, prompts: Sequence[Prompt], answers: Sequence[Generated], rewards: Tensor, totals: Tensor
    ) -> list[dict[str, Any]]:
        """Answers as they are kept: the prompt, the text, and what each reward gave."""
        names = [name_of(reward) for reward in self.section.rewards]
        return [{"id": prompt.example["id"], "prompt": prompt.example["prompt"][-1]["content"],
                 "answer": text_of(self.chat, answer), "right": prompt.answer, "ended": answer.ended,
                 "tokens": len(answer.tokens), "reward": float(total), "rewards": dict(zip(names, one, strict=True))}
                for prompt, answer, one, total in zip(prompts, answers, rewards.tolist(), totals.tolist(), strict=True)]

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
        found, returns = generalised_advantages(given, rollouts.values, mask, section.critic.discount,
                                                section.critic.gae_lambda)
        rollouts.returns.copy_(returns)
        rollouts.advantages.copy_(whitened(found, mask))
    counted = mask & rollouts.ended[:, None] if section.mask_truncated else mask
    for weights, of_step in zip(rollouts.weights.split(section.global_batch_size),
                                counted.split(section.global_batch_size), strict=True):
        weights.copy_(token_weights(of_step, section.normalisation, section.max_new_tokens))


class Sampler:
    """Draws from a model that is being trained.

    Args:
        model: sharded; read again before each batch.
        shape: of the model.
        lora: its adapters, if it has some.
        dtype: that is computed in.
        rows: answers at the same time on this rank.
        world: the processes.
    """

    def __init__(
        self, model: nn.Module, shape: Shape, lora: Lora | None, dtype: torch.dtype, rows: int, world: World
    ) -> None:
        self._model, self._lora, self._rows, self._world = model, lora, rows, world
        with torch.device("meta"):
            copy = Llama(shape).to(dtype)
        self._copy = copy.to_empty(device=world.device).eval().requires_grad_(False)

    def answer(self, requests: Sequence[Request]) -> list[Generated]:
        """An answer to each request, the same on every rank; every rank calls this together, with the same requests."""
        self._refresh()
        own = range(self._world.data_rank, len(requests), self._world.data_size)
        drawn = drawn_by(Scheduler(self._copy, self._rows), [requests[number] for number in own])
        everybody: list[tuple[int, list[Generated]]] = [(self._world.data_rank, drawn)]
        if self._world.size > 1:
            gathered: list[tuple[int, list[Generated]]] = [(0, [])] * self._world.size
            dist.all_gather_object(gathered, everybody[0])
            everybody = gathered
        found: list[Generated] = [Generated([], False)] * len(requests)
        for rank, share in everybody:
            found[rank :: self._world.data_size] = share
        return found

    @torch.no_grad()
    def _refresh(self) -> None:
        """Copy the weights, a layer at a time."""
        own = dict(self._copy.named_parameters())
        for _, layer in groupby(_whole(self._model), key=lambda item: item[0].split(".")[:LAYER_PARTS]):
            tensors = dict(layer)
            for name, tensor in (tensors if self._lora is None else merged(tensors, self._lora)).items():
                own[name].copy_(tensor)


def _whole(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights of a policy, without its critic, gathered one by one; those held rounded before their adapters."""
    rounded = rounded_weights(model)
    for name, parameter in model.named_parameters():
        if name.endswith(DOWN) and (weight := rounded.get(f"{name.removesuffix(DOWN)}weight")) is not None:
            yield f"{name.removesuffix(DOWN)}weight", weight.whole(torch.float32)
        if not is_critic(name):
            yield name, gathered(parameter)


def drawn_by(scheduler: Scheduler, requests: Sequence[Request]) -> list[Generated]:
    """The answer to each request; the scheduler must be idle."""
    numbers = [scheduler.add(request) for request in requests]
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    ended: set[int] = set()
    while not scheduler.is_idle:
        for one in scheduler.step():
            tokens[one.number] += one.tokens
            if one.stop is not None:
                # The end is drawn like any other token, and learned from.
                tokens[one.number].append(one.stop)
                ended.add(one.number)
    return [Generated(tokens[number], number in ended) for number in numbers]


def sampling_of(temperature: float, seed: int, batch: int, prompt: str, place: int) -> Sampling:
    """How one answer is drawn.

    Args:
        temperature: logits are divided by it.
        seed: of the training.
        batch: the number of the batch of prompts.
        prompt: the prompt's id.
        place: of the answer in the batch.
    """
    return Sampling(temperature, seed=seeded_key(seed, batch, prompt, place) >> 1)
