"""The frozen reference of preference optimisation: its log-probabilities, and the proof that they fit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from gristmill.dataprep.files import atomic_write, canonical_json, read_json, sha256_file, write_json
from gristmill.mixtures.posttraining import Dpo
from gristmill.train.loop.batches import read_batch
from gristmill.train.loop.stream import plan_of
from gristmill.train.models.weights import WEIGHTS_FILE
from gristmill.train.objectives.chat import Chat
from gristmill.train.objectives.pairs import Pair
from gristmill.train.objectives.preference_losses import loss_at_start
from gristmill.train.objectives.preferences import Preferences
from gristmill.train.parallel.sharding import evaluating
from gristmill.train.parallel.world import World, agree, sum_over_ranks

LARGEST_MARGIN = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""What rounding alone may make of a margin of zero; a reference in another precision was seen to give 0.066."""


class NotTheReferenceError(RuntimeError):
    """Before the first step the policy is not the model that the reference log-probabilities are of."""


def reference_key(start: Path, chat: Chat, pairs: Sequence[Pair], length: int, dtype: torch.dtype) -> str:
    """Names what reference log-probabilities depend on: weights, precision, template, length, and every pair."""
    parts = [sha256_file(start / WEIGHTS_FILE), chat.digest, str(dtype), length,
             [[pair.example[name] for name in ("prompt", "chosen", "rejected")] for pair in pairs]]
    return hashlib.sha256(canonical_json(parts)).hexdigest()[:16]


def cached_reference(file: Path, compute: Callable[[], np.ndarray], world: World) -> np.ndarray:
    """Reference log-probabilities (n, 2) float32 from the file, or computed once and kept there."""
    if not agree(file.exists(), world):
        computed = compute()
        if world.is_first:
            with atomic_write(file) as sink:
                np.save(sink, computed)
    found: np.ndarray = agree(np.load(file) if world.is_first else None, world)
    return found


def certify_start(
    model: nn.Module, objective: Preferences, section: Dpo, dtype: torch.dtype, file: Path, world: World
) -> dict[str, float]:
    """Prove, before the first step, that policy and reference are one: margin 0 and DPO's loss ln 2 on the first batch.

    The losses without a reference have nothing to prove; their first values are written down all the same.

    A resumed training has its certificate already.

    Raises:
        NotTheReferenceError: they are not.
    """
    if agree(file.exists(), world):
        certificate: dict[str, float] = agree(read_json(file) if world.is_first else None, world)
        return certificate
    plan = plan_of(section, objective.sequence_length)
    batch = read_batch(objective, plan, 0, section.micro_batch_size, world.data_rank, world.data_size)
    sums = torch.zeros(objective.sums_length, dtype=torch.float64, device=world.device)
    with evaluating(model):
        for part in batch.parts:
            sums += objective.loss(model, part, 1.0).sums
    measured = objective.report(sum_over_ranks(sums, world).tolist(), batch.weight)
    certificate = {"loss": measured["loss"], "margin": measured["rewards/margins"]}
    expected, most = loss_at_start(section.loss, section.beta), LARGEST_MARGIN[dtype]
    if expected is not None:
        # What is added for the chosen answers alone is no part of the proof.
        loss = certificate["loss"] if not section.sft_weight else expected
        if not (abs(certificate["margin"]) <= most and abs(loss - expected) <= most * max(1.0, expected)):
            raise NotTheReferenceError(
                f"dpo: before the first step the margin is {certificate['margin']:.6f} and the loss {loss:.6f}, not 0 "
                f"and {expected:.6f} (tolerance {most}): the reference log-probabilities are of another model; delete "
                f"{file.parent} and run the stage again")
    if world.is_first:
        write_json(file, certificate)
    return certificate
