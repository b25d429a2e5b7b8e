"""Distillation: files of a teacher's distributions, divergences from them, and the
objective of a student.

Legend: m trained tokens, v ids, k ids stored of the teacher. q is the teacher's
distribution and p the student's, both at one temperature. If not all ids are stored,
both are distributions over k + 1 outcomes, the last being all other ids: their
divergence is a lower bound of the full one (the data-processing inequality), and zero
if the full distributions agree.

`logps.npy` (tokens, k) float32; unless all ids are stored, `ids.npy` (tokens, k) int32
and `rest.npy` (tokens,) float32; tokens row by row. `key.json`: the settings and inputs
that they depend on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gristmill.core.arrays import offsets_of
from gristmill.core.files import json_digest, reserve, sha256_file
from gristmill.mixtures.schema.posttraining import Distill
from gristmill.tokenize.loss_masks import LossMasks
from gristmill.train.data.conversation_tokens import Chat
from gristmill.train.loop.batch_plan import or_first
from gristmill.train.loop.objective import UNTRAINED, Measured, Metrics
from gristmill.train.loop.prefetch import TensorBatch
from gristmill.train.models.weights import SHAPE_FILE
from gristmill.train.objectives.losses import (
    IGNORED,
    Output,
    weighted_sum,
)
from gristmill.train.objectives.reference_logps import PredictionKey
from gristmill.train.objectives.sft import AssistantTurns, Turns

LOGPS = "logps.npy"
IDS = "ids.npy"
REST = "rest.npy"


@dataclass(frozen=True)
class Taught(TensorBatch):
    """Teacher's distributions over m next tokens.

    Attributes:
        logps: (m, k) float32, log-probabilities of the stored ids; of all ids in order
            if `ids` is None.
        ids: (m, k) int64, distinct within a row.
        rest: (m,) float32, total log-probability of all other ids; None if `ids` is
            None.
    """

    logps: Tensor
    ids: Tensor | None = None
    rest: Tensor | None = None


def kept_of(logits: Tensor, temperature: float, top_k: int | None) -> Taught:
    """Distribution of a teacher's logits (m, v), reduced to the `top_k` likeliest
    ids.
    """
    logps = F.log_softmax(logits.float() / temperature, dim=-1)
    if top_k is None or top_k >= logits.shape[-1]:
        return Taught(logps)
    # 1 minus the sum would lose precision if the rest is small.
    values, ids = logps.topk(top_k, dim=-1)
    return Taught(values, ids, mass_of_others(logps, ids))


def mass_of_others(logps: Tensor, ids: Tensor) -> Tensor:
    """Total log-probability, (m,), of the ids of (m, v) that are not in `ids` (m,
    k).
    """
    return logps.scatter(1, ids, -math.inf).logsumexp(dim=-1)


def divergence(
    logits: Tensor, taught: Taught, temperature: float, beta: float
) -> Tensor:
    """Divergence of a student from its teacher per token, (m,) in nats.

    Args:
        logits: (m, v) float32, of the student.
        taught: distributions of the teacher at the same temperature.
        temperature: divisor of the logits.
        beta: see `generalised_jsd`.
    """
    student = F.log_softmax(logits / temperature, dim=-1)
    teacher = taught.logps
    if taught.ids is not None and taught.rest is not None:
        student = torch.cat(
            (
                student.gather(1, taught.ids),
                mass_of_others(student, taught.ids)[:, None],
            ),
            dim=1,
        )
        teacher = torch.cat((teacher, taught.rest[:, None]), dim=1)
    return generalised_jsd(teacher, student, beta)


def forward_kl(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(q || p) = sum of q (log q - log p), (m,), from log-probabilities (m,
    outcomes): Hinton et al. 2015.
    """
    return (teacher.exp() * (teacher - student)).sum(dim=-1)


def generalised_jsd(teacher: Tensor, student: Tensor, beta: float) -> Tensor:
    """beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p, (m,), from
    log-probabilities (m, outcomes): Agarwal et al. 2024, equation 1.

    For beta 0 it is KL(q || p), and for 1 KL(p || q) (Gu et al. 2024, "MiniLLM"): the
    limits of the sum divided by beta and by 1 - beta.
    """
    if beta == 0.0:
        return forward_kl(teacher, student)
    if beta == 1.0:
        return forward_kl(student, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * forward_kl(teacher, mixture) + (1 - beta) * forward_kl(
        student, mixture
    )


def distilled_nll(
    hidden: Tensor,
    matrix: Output,
    targets: Tensor,
    weights: Tensor,
    taught: Taught,
    settings: Distill,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of weight * ((1 - w) nll + w T^2 divergence) over trained tokens, without
    materialising all logits.

    Args:
        hidden: (n, t, d).
        matrix: the output matrix.
        targets: (n, t) int64, IGNORED where nothing is trained.
        weights: (n, t) float32, factor of each token's loss.
        taught: of the m tokens with a target, row by row.
        settings: kind, temperature T and weight w.

    Returns:
        the sum, for the backward pass, and per token (n, t) without gradient the nll
        and the divergence.
    """
    places = (targets != IGNORED).flatten().nonzero().squeeze(1)
    labels = targets.flatten()[places]

    def losses(logits: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        hard = F.cross_entropy(logits, labels[part], reduction="none")
        soft = divergence(
            logits,
            taught.apply(itemgetter(part)),
            settings.temperature,
            settings.teacher_share,
        )
        scale = settings.weight * settings.temperature**2
        mixed = (1 - settings.weight) * hard + scale * soft
        return mixed, hard.detach(), soft.detach()

    flat = hidden.flatten(0, 1)[places]
    total, *parts = weighted_sum(flat, matrix, weights.flatten()[places], losses)
    nll, divergences = (
        torch.zeros(targets.numel(), device=part.device)
        .index_copy(0, places, part)
        .view(targets.shape)
        for part in parts
    )
    return total, nll, divergences


def teacher_key(
    teacher: Path,
    chat: Chat,
    rows: str,
    dtype: torch.dtype,
    temperature: float,
    top_k: int | None,
    vocab_size: int,
) -> PredictionKey:
    """Dependencies of a teacher's distributions: weights, template, tokenizer,
    precision, rows, stored ids.

    Args:
        teacher: folder of the teacher.
        chat: tokenizer and template.
        rows: fingerprint of the packed set and its loss masks.
        dtype: of matrix products.
        temperature, top_k: of the stored distributions; None stores all ids.
        vocab_size: number of ids that it predicts.
    """
    weights = json_digest(
        {
            path.name: sha256_file(path)
            for path in teacher.iterdir()
            if path.suffix == ".safetensors" or path.name == SHAPE_FILE
        }
    )
    return {
        "weights": weights,
        "chat template and tokenizer": chat.digest,
        "precision": str(dtype).removeprefix("torch."),
        "rows": rows,
        "temperature": temperature,
        "top_k": "all" if top_k is None else top_k,
        "vocabulary": vocab_size,
    }


class TeacherFiles:
    """Memory-mapped distributions of a teacher over the trained tokens of a packed set;
    several processes each write their own rows.

    Args:
        folder: of the files, created by `create`.
        masks: loss masks of the rows.
        mode: `r+` to write.
    """

    def __init__(
        self, folder: Path, masks: LossMasks, mode: Literal["r", "r+"] = "r"
    ) -> None:
        self._starts = offsets_of(masks.trained_per_row)
        names = (LOGPS, IDS, REST) if (folder / IDS).exists() else (LOGPS,)
        self._parts = [np.load(folder / name, mmap_mode=mode) for name in names]

    @staticmethod
    def create(folder: Path, masks: LossMasks, kept: int, with_ids: bool) -> None:
        """Create files of the final size; on one process.

        Raises:
            OSError: too little disk space.
        """
        tokens = int(masks.trained_per_row.sum())
        sizes: dict[str, tuple[Any, tuple[int, ...]]] = {
            LOGPS: (np.float32, (tokens, kept))
        }
        if with_ids:
            sizes |= {IDS: (np.int32, (tokens, kept)), REST: (np.float32, (tokens,))}
        folder.mkdir(parents=True, exist_ok=True)
        for name, (dtype, size) in sizes.items():
            np.lib.format.open_memmap(folder / name, mode="w+", dtype=dtype, shape=size)
            reserve(folder / name)

    def write(self, rows: np.ndarray, taught: Taught) -> None:
        """Write the distributions of some rows."""
        places = self._places(rows)
        for part, values in zip(
            self._parts, (taught.logps, taught.ids, taught.rest), strict=False
        ):
            if values is not None:
                part[places] = values.cpu().numpy()

    def close(self) -> None:
        """Flush the files to disk."""
        for part in self._parts:
            part.flush()

    def read(self, rows: np.ndarray) -> Taught:
        """Distributions of the trained tokens of some rows, in the given order."""
        places = self._places(rows)
        logps, *of_top_ids = (torch.from_numpy(part[places]) for part in self._parts)
        if not of_top_ids:
            return Taught(logps)
        ids, remainder = of_top_ids
        return Taught(logps, ids.long(), remainder)

    def _places(self, rows: np.ndarray) -> np.ndarray:
        """Indices, (m,) int64, of the trained tokens of some rows."""
        ranges = (np.arange(*self._starts[row : row + 2]) for row in rows)
        return np.concatenate([np.empty(0, np.int64), *ranges])


@dataclass(frozen=True)
class TaughtBatch(Turns):
    """Micro-batch whose trained tokens have a teacher's distributions, in host memory."""

    taught: Taught


class TaughtTurns(AssistantTurns):
    """Loss on labels mixed with divergence from a teacher (see objective.Objective).

    Args:
        teacher: folder of its distributions over the same rows.
        settings: of the mixture.
        arguments: of AssistantTurns.
    """

    def __init__(self, teacher: Path, settings: Distill, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._teacher = TeacherFiles(teacher, self.masks)
        self._settings = settings
        self.sums_length += 2

    def prepare(self, rows: np.ndarray, cuts: int = 1, step: int = 0) -> TaughtBatch:
        """See AssistantTurns.prepare."""
        return TaughtBatch(
            **vars(super().prepare(rows, cuts)),
            taught=self._teacher.read(or_first(rows)).pinned(),
        )

    def loss(self, model: nn.Module, batch: Turns, scale: float) -> Measured:
        """See objective.Objective; the sums are mixed loss, divergence, and those of
        AssistantTurns.
        """
        assert isinstance(batch, TaughtBatch)
        turns, targets, counted = self.place(batch)
        weights = counted * scale
        head = partial(
            distilled_nll,
            targets=targets,
            weights=weights,
            taught=batch.taught.to(weights.device),
            settings=self._settings,
        )
        loss, nll, divergences = model(
            turns.ids, head, positions=turns.positions, trained=weights.sum(dim=1)
        )
        weight = self._settings.weight
        square = self._settings.temperature**2
        mixed = (1 - weight) * nll + weight * square * divergences
        loss_sums = torch.stack(
            [(part * counted).double().sum() for part in (mixed, divergences)]
        )
        return Measured(
            loss,
            torch.cat((loss_sums, self.sums(turns.sources, targets, counted, nll))),
            torch.where(counted > 0, mixed, UNTRAINED),
        )

    def report(self, sums: Sequence[float], weight: float) -> Metrics:
        """Metrics of AssistantTurns, with the mixed `loss`, `label_loss`, and
        `divergence` in nats per token.
        """
        mixed, total_divergence, *label_sums = sums
        labels = super().report(label_sums, weight)
        return {
            **labels,
            "loss": mixed / weight,
            "label_loss": labels["loss"],
            "divergence": total_divergence / weight,
        }
