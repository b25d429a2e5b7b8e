"""Steps before the updates of a batch: sampling answers, rewarding them, and computing
advantages.

Samples depend only on seed, batch, prompt and position in the batch: not on the number
of processes or on the other answers (up to rounding, as matrix shapes differ). Tools
may depend on more, so a killed training reloads saved batches and continues as it would
have.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from gristmill.mixtures.schema.rl import Rl
from gristmill.mixtures.user_code import name_of
from gristmill.tokenize.shuffle import Order
from gristmill.train.adapters.lora import without_adapters
from gristmill.train.data.conversation_tokens import Chat
from gristmill.train.distributed.fsdp import evaluating
from gristmill.train.distributed.process_groups import World, on_first, sum_over_ranks
from gristmill.train.generation.sampling import Sampling
from gristmill.train.generation.scheduler import Request
from gristmill.train.rl.curriculum import PromptChoice
from gristmill.train.rl.multi_turn import Asked
from gristmill.train.rl.policy import opinion_of
from gristmill.train.rl.prompts import Prompt
from gristmill.train.rl.rewards import Given, text_of
from gristmill.train.rl.rollout import Generated, Rollouts
from gristmill.train.rl.rollout_tables import (
    AnswerRow,
    keep_batch,
    read_batch,
)
from gristmill.train.rl.sampler import Sampler, sampling_of
from gristmill.train.rl.teacher_endpoint import EndpointTeacher
from gristmill.train.rl.tools.tool_call import Used


@dataclass
class Actor:
    """Fills the rollouts, batch after batch.

    Attributes:
        section: the stage's.
        prompts: to train on.
        order: of the prompts.
        model: the policy, sharded.
        reference: the frozen model, sharded: a teacher or the start; None if the policy
            without adapters is the reference, or none is needed.
        sampler: samples from the policy.
        reward: (prompts, answers) -> (n, k) float32 on the CPU, every rank together
            (see rewards.rewards_of).
        rollouts: filled by the actor.
        choice: selection of prompts, with a curriculum.
        teacher: reference behind an endpoint instead.
        chat: tokenizer and template.
        world: the processes.
        folder: folder of saved batches of answers.
        drawn_tokens, seconds: tokens of all answers so far, and their sampling time.
    """

    section: Rl
    prompts: Sequence[Prompt]
    order: Order
    model: nn.Module
    reference: nn.Module | None
    sampler: Sampler
    reward: Given
    rollouts: Rollouts
    chat: Chat
    world: World
    folder: Path
    choice: PromptChoice | None = None
    teacher: EndpointTeacher | None = None
    drawn_tokens: int = field(default=0, init=False)
    seconds: float = field(default=0.0, init=False)

    def before_step(self, step: int) -> None:
        """Answer the prompts of a step (counted from 0), unless their answers exist."""
        batch = step // self.section.updates_per_batch
        if int(self.rollouts.batch) == batch:
            return
        section = self.section
        rollouts = self.rollouts
        count = section.rollouts_per_batch // section.group_size
        numbers = (
            self.order.span(batch * count, count)
            if self.choice is None
            else self.choice.choose(count)
        )
        prompts = np.repeat(numbers, section.group_size)
        chosen = [self.prompts[number] for number in prompts]
        answers = self._kept(batch, chosen) or self.draw(
            chosen,
            [
                sampling_of(
                    section.temperature,
                    section.key_seed,
                    batch,
                    prompt.example["id"],
                    place,
                )
                for place, prompt in enumerate(chosen)
            ],
        )
        rollouts.put(prompts, [prompt.ids for prompt in chosen], answers)
        rollouts.rewards.copy_(self.reward(chosen, answers))
        rollouts.totals.copy_(self._totals(rollouts.rewards))
        if self.choice is not None and section.curriculum is not None:
            passed = (rollouts.totals >= section.curriculum.passed_at).view(
                -1, section.group_size
            )
            self.choice.learn(
                prompts[:: section.group_size].tolist(), passed.float().mean(dim=1)
            )
        rollouts.old.copy_(self._logps(self.model))
        if self.teacher is not None:
            rollouts.reference.copy_(
                on_first(partial(self.teacher.logps, rollouts), self.world)
            )
        elif section.needs_reference:
            with (
                nullcontext()
                if self.reference is not None
                else without_adapters(self.model)
            ):
                rollouts.reference.copy_(self._logps(self.reference or self.model))
        rollouts.weigh(section)
        rollouts.batch.fill_(batch)
        if self.world.is_first:
            advantages = rollouts.advantages.sum(dim=1) / rollouts.mask.sum(
                dim=1
            ).clamp(min=1)
            entries = self.shown(chosen, answers, rollouts.rewards)
            keep_batch(
                self.folder,
                batch,
                [
                    {**answer, "advantage": advantage, **tokens}
                    for answer, advantage, tokens in zip(
                        entries,
                        advantages.tolist(),
                        rollouts.tokens_of_answers(section.needs_reference),
                        strict=True,
                    )
                ],
            )

    def _kept(self, batch: int, prompts: Sequence[Prompt]) -> list[Generated] | None:
        """Answers of a batch as saved by an earlier attempt; None if the batch was
        never sampled.
        """
        answers = on_first(
            lambda: read_batch([self.folder.parent], batch, with_tokens=True),
            self.world,
        )
        if answers is None or [answer["id"] for answer in answers] != [
            prompt.example["id"] for prompt in prompts
        ]:
            return None
        return [
            Generated(
                answer["answer_ids"],
                answer["ended"],
                tuple(answer["drawn"]) if answer.get("drawn") is not None else None,
                tuple(Used(**used) for used in answer.get("used") or ()),
            )
            for answer in answers
        ]

    def draw(
        self, prompts: Sequence[Prompt], samplings: Sequence[Sampling]
    ) -> list[Generated]:
        """Answer each prompt."""
        started = time.perf_counter()
        answers = self.sampler.answer(
            [
                Asked(
                    Request(
                        prompt.ids,
                        self.section.max_new_tokens,
                        self.chat.stops,
                        sampling,
                    ),
                    prompt.offered,
                )
                for prompt, sampling in zip(prompts, samplings, strict=True)
            ]
        )
        self.seconds += time.perf_counter() - started
        self.drawn_tokens += sum(answer.num_drawn for answer in answers)
        return answers

    def shown(
        self,
        prompts: Sequence[Prompt],
        answers: Sequence[Generated],
        rewards: Tensor,
    ) -> list[AnswerRow]:
        """Answers for saving."""
        names = [name_of(reward) for reward in self.section.rewards]
        rows: list[AnswerRow] = [
            {
                "id": prompt.example["id"],
                "prompt": prompt.example["prompt"][-1]["content"],
                "answer": text_of(self.chat, answer),
                "right": prompt.answer,
                "ended": answer.ended,
                "tokens": answer.num_drawn,
                "reward": total,
                "rewards": dict(zip(names, answer_rewards, strict=True)),
            }
            for prompt, answer, answer_rewards, total in zip(
                prompts,
                answers,
                rewards.tolist(),
                self._totals(rewards).tolist(),
                strict=True,
            )
        ]
        if self.section.tools:
            for row, answer in zip(rows, answers, strict=True):
                row["turns"] = len(answer.turns)
                row["used"] = [asdict(call) for call in answer.used]
        return rows

    def measure(self, prompts: Sequence[Prompt]) -> list[AnswerRow]:
        """The policy's greedy answer to each prompt with its rewards, as in `shown`."""
        answers = self.draw(prompts, [Sampling()] * len(prompts))
        return self.shown(prompts, answers, self.reward(prompts, answers))

    def _totals(self, rewards: Tensor) -> Tensor:
        """Weighted sums of rewards, (n,)."""
        return rewards @ torch.tensor(
            [reward.weight for reward in self.section.rewards]
        )

    def _logps(self, model: nn.Module) -> Tensor:
        section = self.section
        world = self.world
        logps = torch.zeros_like(self.rollouts.old, device=world.device)
        with evaluating(model):
            for first in range(0, len(logps), section.global_batch_size):
                rows = np.arange(first, first + section.global_batch_size)
                for batch in world.micro_batches(rows, section.micro_batch_size):
                    # A rank without rows still takes part in the collectives of the
                    # forward pass.
                    rows_or_first = batch if len(batch) else rows[:1]
                    opinion = opinion_of(
                        model,
                        self.rollouts.part(rows_or_first).to(world.device),
                        section.temperature,
                    )
                    if len(batch):
                        answers = torch.from_numpy(batch).to(world.device)
                        logps[answers, : opinion.logps.shape[1]] = opinion.logps
        return sum_over_ranks(logps, world).cpu()
