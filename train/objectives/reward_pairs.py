"""Objective of a reward model: the chosen answer of each pair must score higher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gristmill.mixtures.schema.rl import Reward
from gristmill.train.data.conversation_tokens import fingerprint_of, padded
from gristmill.train.data.pairs import Pair
from gristmill.train.data.preference_rows import Drawn
from gristmill.train.distributed.fsdp import measured_by_all
from gristmill.train.distributed.process_groups import World
from gristmill.train.loop.batch_plan import or_first
from gristmill.train.loop.objective import Measured, Numbers
from gristmill.train.loop.prefetch import TensorBatch
from gristmill.train.models.reward_model import scores
from gristmill.train.objectives.preference_objective import measured_pairs


def reward_loss(
    chosen: Tensor, rejected: Tensor, margin: float = 0.0, center_weight: float = 0.0
) -> Tensor:
    """-log sigma(r_c - r_r - margin) + center_weight (r_c + r_r)^2 of each pair, (n,).

    Bradley & Terry 1952, with the margin of Touvron et al. 2023b (equation 2) and the
    centering of Eisenstein et al. 2023 (equation 5).

    Args:
        chosen, rejected: (n,) float32, scores.
        margin: in units of scores.
        center_weight: weight of the term that centers scores at zero.

    >>> f"{reward_loss(torch.tensor([0.0]), torch.tensor([0.0])).item():.4f}"  # ln 2
    '0.6931'
    """
    return (
        -F.logsigmoid(chosen - rejected - margin)
        + center_weight * (chosen + rejected) ** 2
    )


@dataclass(frozen=True)
class PaddedAnswers(TensorBatch):
    """A micro-batch of n pairs in host memory.

    Attributes:
        ids: (2n, t), all chosen answers first.
        real: false for an empty micro-batch, whose rows are padding.
    """

    ids: Tensor
    real: bool


class RewardPairs(Drawn):
    """Loss on the scores of pairs (see objective.Objective).

    Args:
        pairs: of the training.
        section: settings of the loss.
        seed: of the row order.
        pad: id of padding.
        length: tokens of the longest conversation.
        flops_per_token: model FLOPs.
        device: of the model.
    """

    sums_length = 4

    def __init__(
        self,
        pairs: Sequence[Pair],
        section: Reward,
        seed: int,
        pad: int,
        length: int,
        flops_per_token: float,
        device: torch.device,
    ) -> None:
        super().__init__(
            [pair.example["id"] for pair in pairs],
            np.array(
                [len(pair.chosen.ids) + len(pair.rejected.ids) for pair in pairs],
                np.int64,
            ),
            [np.arange(len(pairs))],
            seed,
        )
        self.fingerprint = fingerprint_of(
            part for pair in pairs for part in (pair.chosen, pair.rejected)
        )
        self.flops_per_token = flops_per_token
        self.sequence_length = length
        self._pairs = pairs
        self._pad = pad
        self._device = device
        self._section = section

    def prepare(self, rows: np.ndarray, cuts: int = 1, step: int = 0) -> PaddedAnswers:
        """Pad a micro-batch of pairs; an empty one holds a pair of weight zero."""
        pairs = [self._pairs[row] for row in or_first(rows).tolist()]
        ids = answer_ids(pairs, self._pad, self.sequence_length)
        return PaddedAnswers(ids, bool(len(rows))).pinned()

    def loss(self, model: nn.Module, batch: PaddedAnswers, scale: float) -> Measured:
        """See objective.Objective; the sums are loss, number ranked correctly, and both
        answers' scores.
        """
        ids = batch.to(self._device).ids
        chosen, rejected = scores(model, ids, self._pad).chunk(2)
        losses = reward_loss(
            chosen, rejected, self._section.margin, self._section.center_weight
        )
        return measured_pairs(
            losses, (losses, chosen > rejected, chosen, rejected), scale, batch.real
        )

    def report(self, sums: Sequence[float], weight: float) -> Numbers:
        """Means over pairs; ties count as ranked incorrectly."""
        loss, right, chosen, rejected = (value / weight for value in sums)
        return {
            "loss": loss,
            "accuracy": right,
            "margin": chosen - rejected,
            "scores/chosen": chosen,
            "scores/rejected": rejected,
        }


def answer_ids(pairs: Sequence[Pair], pad: int, length: int) -> Tensor:
    """Ids of n pairs, (2n, t): all chosen answers, then all rejected answers."""
    return padded(
        [*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)],
        pad,
        length,
    )


def pair_scores(
    model: nn.Module,
    pairs: Sequence[Pair],
    pad: int,
    length: int,
    micro_batch_size: int,
    world: World,
) -> np.ndarray:
    """Scores of both answers of all pairs: (n, 2) float32, chosen first, equal on every
    rank.
    """

    def measure(numbers: np.ndarray) -> Tensor:
        ids = answer_ids([pairs[number] for number in numbers], pad, length).to(
            world.device
        )
        return scores(model, ids, pad).view(2, -1).T

    return measured_by_all(model, len(pairs), micro_batch_size, world, measure)
