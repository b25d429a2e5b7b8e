"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024) on single answers, desirable
or not, with a frozen reference.

Legend, per answer: g = log pi(y|x) - log pi0(y|x), summed over the answer's tokens, is
the log-ratio of the policy pi to the frozen reference pi0, in nats; z is its mean over
answers to other prompts, an estimate of KL(pi || pi0) clamped to be non-negative. beta
is the strength of the KL penalty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from gristmill.mixtures.schema.posttraining import Dpo
from gristmill.train.data.preference_rows import AnswerRows
from gristmill.train.distributed.fsdp import measured_by_all
from gristmill.train.distributed.process_groups import World
from gristmill.train.loop.objective import Measured
from gristmill.train.loop.prefetch import TensorBatch
from gristmill.train.objectives.losses import IGNORED, sequence_logps
from gristmill.train.objectives.preference_objective import (
    DrawnObjective,
    measured_pairs,
)

KINDS = ("chosen", "rejected")
"""Names of desirable and undesirable answers in metrics, as in TRL."""


def kto_loss(
    gains: Tensor,
    desirable: Tensor,
    baseline: Tensor,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """w_D (1 - sigma(beta (g - z))) of a desirable answer, w_U (1 - sigma(beta (z -
    g))) of another, (n,).

    Equation 7 of the paper, up to a constant that its authors' code and TRL omit too.

    Args:
        gains: (n,) g.
        desirable: (n,) bool.
        baseline: z, a scalar without gradient.
        beta, desirable_weight, undesirable_weight: see
            `mixtures.schema.posttraining.Dpo`.

    >>> kto_loss(torch.tensor([1.0, 1.0]), torch.tensor([True, False]), torch.tensor(1.0), 0.1, 1.0, 1.0).tolist()
    [0.5, 0.5]
    """
    differences = torch.where(desirable, gains - baseline, baseline - gains)
    weights = torch.where(desirable, desirable_weight, undesirable_weight)
    return weights * torch.sigmoid(-beta * differences)


def baseline_of(mismatched_gains: Tensor) -> Tensor:
    """Estimate z from the gains (n,) of answers to other prompts: their mean, clamped
    to be non-negative.

    >>> baseline_of(torch.tensor([1.0, 4.0])).item()
    2.5
    """
    return mismatched_gains.detach().mean().clamp(min=0.0)


@dataclass(frozen=True)
class PaddedAnswers(TensorBatch):
    """A micro-batch of n answers in host memory.

    Attributes:
        ids, targets: (n, t) each.
        desirable: (n,) bool.
        reference: (n,) float32, log-probabilities under the frozen reference.
        real: false for an empty micro-batch, whose rows are padding.
    """

    ids: Tensor
    targets: Tensor
    desirable: Tensor
    reference: Tensor
    real: bool


class Desirability(DrawnObjective):
    """KTO (see objective.Objective).

    Before each step `take_baseline` measures the KL with mismatched answers over the
    whole batch, so the loss depends neither on the split into micro-batches nor on the
    number of processes.

    Args:
        rows: the answers.
        draws: int64 arrays of the answers to train on, by set; duplicates are read
            repeatedly in an epoch.
        reference: (A, 2) float32 of all answers: log-probabilities of each answer, and
            of its partner's answer, given its prompt.
        section: settings of the loss.
        seed: of the row order.
        flops_per_token: model FLOPs of a step, per token of the answers' conversations.
        world: the processes.
        warn: receives warnings that desirable answers keep becoming less likely.
    """

    sums_length = 12

    def __init__(
        self,
        rows: AnswerRows,
        draws: Sequence[np.ndarray],
        reference: np.ndarray,
        section: Dpo,
        seed: int,
        flops_per_token: float,
        world: World,
        warn: Callable[[str], None],
    ) -> None:
        super().__init__(
            rows, draws, reference, section, seed, flops_per_token, world.device, warn
        )
        self._answers = rows
        self._world = world
        self._baseline = torch.zeros((), device=world.device)

    def take_baseline(self, model: nn.Module, rows: np.ndarray) -> None:
        """Estimate the KL on the rows of the next step, with answers to other
        prompts.
        """
        answers = self._numbers[rows]
        logps = answer_logps(
            model,
            self._answers,
            answers,
            self._section.micro_batch_size,
            self._world,
            mismatched=True,
        )
        self._baseline = baseline_of(
            torch.from_numpy(logps - self._reference[answers, 1])
        ).to(self._world.device)

    def prepare(self, rows: np.ndarray, cuts: int = 1, step: int = 0) -> PaddedAnswers:
        """Read a micro-batch of answers; an empty one holds an answer of weight
        zero.
        """
        # Empty micro-batches are computed too, as forward and backward are collectives.
        answers = self._numbers[rows if len(rows) else [0]]
        return PaddedAnswers(
            *self._answers.read(answers),
            torch.from_numpy(self._answers.desirable[answers]),
            torch.from_numpy(self._reference[answers, 0]),
            bool(len(rows)),
        ).pinned()

    def loss(self, model: nn.Module, batch: PaddedAnswers, scale: float) -> Measured:
        """See objective.Objective.

        The sums are the loss, the estimated KL, and for desirable and for undesirable
        answers each: count, rewards, log-probs, number below the reference, and
        log-ratios to the reference per token.
        """
        section = self._section
        batch = batch.to(self._device)
        logps = model(batch.ids, partial(sequence_logps, targets=batch.targets))
        gains = logps - batch.reference
        losses = kto_loss(
            gains,
            batch.desirable,
            self._baseline,
            section.beta,
            section.desirable_weight,
            section.undesirable_weight,
        )
        tokens = (batch.targets != IGNORED).sum(dim=1)
        of_answers = (
            torch.ones_like(gains),
            section.beta * gains,
            logps,
            gains < 0,
            gains / tokens,
        )
        baselines = self._baseline.expand(len(gains))
        by_kind = [
            column * is_of_kind
            for is_of_kind in (batch.desirable, ~batch.desirable)
            for column in of_answers
        ]
        return measured_pairs(losses, [losses, baselines, *by_kind], scale, batch.real)

    def report(self, sums: Sequence[float], weight: float) -> dict[str, float]:
        """Means over answers, with the names of TRL; metrics of a kind without answers
        are omitted.
        """
        line: dict[str, float] = {"loss": sums[0] / weight, "kl": sums[1] / weight}
        for kind, (number, *values) in zip(KINDS, (sums[2:7], sums[7:12]), strict=True):
            line[f"answers/{kind}"] = int(number)
            if number:
                line |= {
                    f"{name}/{kind}": value / number
                    for name, value in zip(
                        ("rewards", "logps", "fell", "log_ratio"), values, strict=True
                    )
                }
        if all(line[f"answers/{kind}"] for kind in KINDS):
            line["rewards/margins"] = line["rewards/chosen"] - line["rewards/rejected"]
            self._alarm.look(line)
        return line


def answer_logps(
    model: nn.Module,
    rows: AnswerRows,
    answers: np.ndarray,
    micro_batch_size: int,
    world: World,
    mismatched: bool = False,
) -> np.ndarray:
    """Summed log-probabilities of n answers, (n,) float32, equal on every rank.

    Args:
        model: on every rank.
        rows: rows of the answers.
        answers: int64 of shape (n,), indices of the answers.
        micro_batch_size: maximum number of answers per forward pass on a rank.
        world: the processes.
        mismatched: score the partners' answers to their prompts instead.
    """

    def measure(numbers: np.ndarray) -> Tensor:
        batch = answers[numbers]
        ids, targets = (
            tensor.to(world.device)
            for tensor in (
                rows.read_mismatched(batch) if mismatched else rows.read(batch)
            )
        )
        logps: Tensor = model(ids, partial(sequence_logps, targets=targets))
        return logps[:, None]

    return measured_by_all(model, len(answers), 1, micro_batch_size, world, measure)[
        :, 0
    ]
