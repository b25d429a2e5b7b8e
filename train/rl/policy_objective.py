"""Objective of reinforcement learning: a clipped surrogate over answers, with a KL
term, or the divergence from a teacher.

A row is a position in the stream of answers: each step's rows follow those of the
previous step, so every row is read once. The step determines its answers: a batch's
answers are distributed to several steps, for one or more epochs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from gristmill.core.files import canonical_json
from gristmill.mixtures.schema.rl import Curriculum, Rl
from gristmill.mixtures.user_code import name_of
from gristmill.train.loop.batch_plan import or_first
from gristmill.train.loop.objective import JsonObject, Measured, Numbers, ReadDocument
from gristmill.train.rl.policy import answer_distributions, opinion_of
from gristmill.train.rl.policy_gradient import (
    kl_estimate,
    kl_loss,
    surrogate_loss,
)
from gristmill.train.rl.rollout_phase import Actor

OF_TOKENS = 4
"""Sums over tokens, after the loss: tokens, entropy, divergence, clipped."""
OF_ANSWERS = 8
"""Sums over answers, after those: reward, its square, truncated, in groups with equal
rewards, passed, turns, calls of tools, failed calls.
"""


class InOrder:
    """Order in which rows are their own positions."""

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """The positions."""
        return positions

    def span(self, first: int, count: int) -> np.ndarray:
        """The positions."""
        return np.arange(first, first + count, dtype=np.int64)


class Reinforcement:
    """Loss over answers (see objective.Objective), which an actor samples and rewards.

    Args:
        actor: fills its rollouts before a step's loss is computed.
        length: most tokens of prompt and answer.
        flops_per_token: model arithmetic of the updates.
    """

    def __init__(self, actor: Actor, length: int, flops_per_token: float) -> None:
        self.order = InOrder()
        digest = hashlib.blake2b(digest_size=16)
        for prompt in actor.prompts:
            digest.update(canonical_json([list(prompt.ids), prompt.answer]))
        self.fingerprint = digest.hexdigest()
        self.flops_per_token = flops_per_token
        self.sequence_length = length
        self._section = actor.section
        self._actor = actor
        self._rollouts = actor.rollouts
        self._device = actor.world.device
        self._names = [name_of(reward) for reward in self._section.rewards]
        self.sums_length = 1 + OF_TOKENS + OF_ANSWERS + len(self._names)

    def weight(self, rows: np.ndarray, cuts: int = 1, step: int = 0) -> float:
        """Number of answers: the weights of their tokens hold the normalisation."""
        return float(len(rows))

    def num_tokens(self, rows: np.ndarray) -> int:
        """Tokens of prompts and answers, without padding."""
        places = answers_of_rows(rows, self._section)
        return int(
            (self._rollouts.sizes + self._rollouts.lengths)[
                torch.from_numpy(places)
            ].sum()
        )

    def prepare(self, rows: np.ndarray, cuts: int = 1, step: int = 0) -> np.ndarray:
        """The rows themselves, as their answers may not exist yet."""
        return rows

    def loss(self, model: nn.Module, batch: np.ndarray, scale: float) -> Measured:
        """See objective.Objective; sums: the loss, OF_TOKENS, OF_ANSWERS, and each
        reward.
        """
        real = float(bool(len(batch)))
        places = answers_of_rows(or_first(batch), self._section)
        part = self._rollouts.part(places).to(self._device)
        section = self._section
        beta = section.beta
        teacher = (
            None
            if beta is None or self._actor.reference is None
            else answer_distributions(self._actor.reference, part, section.temperature)
        )
        opinion = opinion_of(model, part, section.temperature, teacher, beta or 0.0)
        old, reference, advantages, weights = self._rollouts.of(
            places,
            opinion.logps.shape[1],
            self._device,
            "old",
            "reference",
            "advantages",
            "weights",
        )
        losses, clipped = surrogate_loss(
            opinion.logps,
            old,
            advantages,
            section.clip,
            section.clip_high,
            part.mask if section.ratio == "sequence" else None,
        )
        if teacher is not None:
            losses, clipped = opinion.divergences, torch.zeros_like(part.mask)
        if section.algorithm == "grpo" and section.kl_weight:
            losses = losses + section.kl_weight * kl_loss(
                opinion.logps,
                old,
                reference,
                section.kl_estimator,
                section.kl_correction,
            )
        row_losses = (losses * weights).sum(dim=1)
        divergence = kl_estimate(opinion.logps.detach(), reference, "k3") * part.mask
        rollouts = self._rollouts
        chosen = torch.from_numpy(places)
        totals = rollouts.totals[chosen].double()
        sums = (
            torch.cat(
                (
                    torch.stack(
                        [
                            term.detach().double().sum()
                            for term in (
                                row_losses,
                                part.mask,
                                opinion.entropies,
                                divergence,
                                clipped & part.mask,
                            )
                        ]
                    ),
                    torch.stack(
                        [
                            totals.sum(),
                            totals.square().sum(),
                            (~rollouts.ended[chosen]).sum().double(),
                            rollouts.flat[chosen].sum().double(),
                            (totals >= (section.curriculum or Curriculum()).passed_at)
                            .sum()
                            .double(),
                            *(
                                torch.zeros(3).double()
                                if rollouts.used is None
                                else rollouts.used[chosen].double().sum(dim=0)
                            ),
                            *rollouts.rewards[chosen].double().sum(dim=0),
                        ]
                    ).to(self._device),
                )
            )
            * real
        )
        # The recorded loss of a row is absolute: a surrogate may have either sign.
        return Measured(
            row_losses.sum() * (scale * real), sums, row_losses.detach().abs()[:, None]
        )

    def report(self, sums: Sequence[float], weight: float) -> Numbers:
        """Means under the names of TRL's GRPOTrainer.

        `kl` is the k3 estimate per token, `clip_ratio` a share of tokens,
        `completions/clipped_ratio` one of answers, `frac_reward_zero_std` that of
        answers whose groups have equal rewards. `completions/mean_turns` and
        `tools/call_frequency` are per answer, `tools/failure_frequency` per call. With
        a curriculum `pass_rate` is a share of answers, and keys with the prefix
        `curriculum/` describe its batch (see `PromptChoice`).
        """
        (
            loss,
            tokens,
            entropy,
            divergence,
            clipped,
            reward,
            square,
            cut,
            flat,
            passed,
            turns,
            calls,
            failed,
            *each,
        ) = sums
        mean = reward / weight
        seconds = self._actor.seconds
        line = {
            "loss": loss / weight,
            "reward": mean,
            "reward_std": math.sqrt(max(0.0, square / weight - mean**2)),
            **{
                f"rewards/{name}": value / weight
                for name, value in zip(self._names, each, strict=True)
            },
            "entropy": entropy / tokens,
            "clip_ratio": clipped / tokens,
            "completions/mean_length": tokens / weight,
            "completions/clipped_ratio": cut / weight,
            "frac_reward_zero_std": flat / weight,
        }
        if self._section.needs_reference:
            line["kl"] = divergence / tokens
        if self._section.tools:
            line |= {
                "completions/mean_turns": turns / weight,
                "tools/call_frequency": calls / weight,
                "tools/failure_frequency": failed / calls if calls else 0.0,
            }
        if self._actor.choice is not None:
            line |= {"pass_rate": passed / weight, **self._actor.choice.report()}
        if seconds:
            line["rollout_tokens_per_second"] = self._actor.drawn_tokens / seconds
        return line

    def describe(self, rows: np.ndarray) -> JsonObject:
        """Ids of the prompts."""
        return {"prompts": list(dict.fromkeys(self._ids_of(rows)))}

    def blame(self, rows: np.ndarray, row_losses: np.ndarray) -> list[ReadDocument]:
        """Each answer with its prompt's id and its absolute loss."""
        return [
            {"id": prompt_id, "loss": float(losses[0]), "row": row}
            for prompt_id, row, losses in zip(
                self._ids_of(rows), rows.tolist(), row_losses, strict=True
            )
        ]

    def _ids_of(self, rows: np.ndarray) -> list[str]:
        """Prompt ids of rows."""
        # Rows are described in the step that reads them, while their batch is current.
        numbers = self._rollouts.prompts[
            torch.from_numpy(answers_of_rows(rows, self._section))
        ].tolist()
        return [self._actor.prompts[number].example["id"] for number in numbers]


def answers_of_rows(rows: np.ndarray, section: Rl) -> np.ndarray:
    """Index of each row's answer in its batch, int64: steps divide a batch's answers,
    epoch after epoch.
    """
    step, place = np.divmod(rows, section.global_batch_size)
    return step % section.steps_per_batch * section.global_batch_size + place
