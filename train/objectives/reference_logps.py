"""Frozen reference of preference optimisation: table of its log-probabilities, and
checks that they match the policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from gristmill.core.files import read_json, sha256_file
from gristmill.dataprep.documents import read_table
from gristmill.dataprep.user_functions import wrong
from gristmill.mixtures.schema.posttraining import Dpo, Lora, Rounded
from gristmill.mixtures.user_code import Own
from gristmill.train.data.preference_rows import PairRows
from gristmill.train.distributed.fsdp import measured_by_all
from gristmill.train.distributed.process_groups import World
from gristmill.train.loop.batch_plan import plan_of
from gristmill.train.loop.objective import Numbers
from gristmill.train.loop.prefetch import read_batch
from gristmill.train.loop.step import summed_losses
from gristmill.train.models.weights import WEIGHTS_FILE
from gristmill.train.objectives.losses import sequence_logps
from gristmill.train.objectives.preference_losses import loss_at_start
from gristmill.train.objectives.preference_objective import Preferences

TABLE = "reference.parquet"
KEY = "key.json"
LARGEST_MARGIN = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Tolerance of a zero margin for rounding; a reference in another precision gave
0.066.
"""


PAIR_LOGPS = ["chosen", "rejected"]
"""Columns of log-probabilities."""
PredictionKey = Mapping[str, object]
"""Dependencies of stored predictions by name, as JSON."""


class NotTheReferenceError(RuntimeError):
    """The initial policy is not the model of the reference log-probabilities."""


class StaleReferenceError(RuntimeError):
    """Reference log-probabilities were computed with other inputs or settings."""


def key_of(
    start: Path,
    rows: PairRows,
    dtype: torch.dtype,
    rounded: Rounded | Lora | None,
) -> PredictionKey:
    """Inputs and settings that the log-probabilities of a packed set depend on.

    Args:
        start: model folder of the reference.
        rows: the pairs.
        dtype: of matrix products.
        rounded: section with the rounding of the base weights, if any.
    """
    rounding = (
        None
        if rounded is None or rounded.base is None
        else f"{rounded.base} in {', '.join(sorted(rounded.targets or ['all layers']))}"
    )
    return {
        "weights": sha256_file(start / WEIGHTS_FILE),
        "precision": str(dtype).removeprefix("torch."),
        "rounding": rounding,
        **rows.made_of,
    }


def pair_logps(
    model: nn.Module,
    rows: PairRows,
    pairs: np.ndarray,
    micro_batch_size: int,
    world: World,
) -> np.ndarray:
    """Summed log-probabilities of both answers of n pairs: (n, 2) float32, chosen
    first, equal on every rank.

    Args:
        model: on every rank.
        rows: rows of the pairs.
        pairs: int64 of shape (n,), indices of the pairs.
        micro_batch_size: maximum number of pairs per forward pass on a rank.
        world: the processes.
    """

    def measure(numbers: np.ndarray) -> Tensor:
        ids, targets = (tensor.to(world.device) for tensor in rows.read(pairs[numbers]))
        logps: Tensor = model(ids, partial(sequence_logps, targets=targets))
        return logps.view(2, -1).T

    return measured_by_all(model, len(pairs), micro_batch_size, world, measure)


def read_reference(folder: Path, key: PredictionKey) -> np.ndarray:
    """Log-probabilities of both answers of all pairs, (P, 2) float32, chosen first.

    Raises:
        StaleReferenceError: they were computed with another key.
    """
    check_key(folder, key, "reference log-probabilities", "reference")
    table = read_table(folder / TABLE, columns=PAIR_LOGPS)
    return np.stack([table[name].to_numpy() for name in PAIR_LOGPS], axis=1)


def check_key(folder: Path, key: PredictionKey, predictions: str, stage: str) -> None:
    """Check that stored predictions match a key.

    Args:
        folder: of the predictions.
        key: of now.
        predictions: name of the stored values, for the message.
        stage: that stores it.

    Raises:
        StaleReferenceError: the message names the differences.
    """
    stored_key = read_json(folder / KEY)
    differing = [
        f"{name} was {stored_key.get(name)} and is {value}"
        for name, value in key.items()
        if stored_key.get(name) != value
    ]
    if differing:
        raise StaleReferenceError(
            f"{folder}: the {predictions} there are of something else: "
            f"{'; '.join(differing)}. Run again with `--force {stage}`, on the kind of "
            "device that trains"
        )


def certify_start(
    model: nn.Module,
    objective: Preferences,
    section: Dpo,
    dtype: torch.dtype,
    world: World,
) -> Numbers:
    """Check before the first step that policy and reference are equal: margin 0 and DPO
    loss ln 2 on the first batch.

    Losses without a reference cannot be checked; their first values are returned all
    the same.

    Raises:
        NotTheReferenceError: they differ.
        OwnCodeError: the loss is user code and not finite.
    """
    batch = read_batch(
        objective,
        plan_of(section, objective.sequence_length),
        0,
        section.micro_batch_size,
        world.data_rank,
        world.data_size,
    )
    sums = summed_losses(model, objective, batch.parts, world)
    measured = objective.report(sums, batch.weight)
    certificate = {"loss": measured["loss"], "margin": measured["rewards/margins"]}
    expected = loss_at_start(section)
    tolerance = LARGEST_MARGIN[dtype]
    if isinstance(section.loss, Own):
        if not math.isfinite(certificate["loss"]):
            raise wrong(
                section.loss,
                f"gives the loss {certificate['loss']} for the first batch, where the "
                "policy still is the reference; it must be finite",
            )
        expected = certificate["loss"]  # its value at the start is unknown
    if expected is not None:
        # The SFT term on chosen answers is not part of the check.
        loss = certificate["loss"] if not section.sft_weight else expected
        if not (
            abs(certificate["margin"]) <= tolerance
            and abs(loss - expected) <= tolerance * max(1.0, expected)
        ):
            raise NotTheReferenceError(
                f"dpo: before the first step the margin is {certificate['margin']:.6f} "
                f"and the loss {loss:.6f}, not 0 and {expected:.6f} (tolerance "
                f"{tolerance}): the reference log-probabilities are of another model; "
                "run again with `--force reference`"
            )
    return certificate
