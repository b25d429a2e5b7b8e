"""The frozen reference of preference optimisation: its log-probabilities as a table, and the proof that they fit."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from gristmill.dataprep.documents import read_table, write_table
from gristmill.dataprep.files import read_json, sha256_file, write_json
from gristmill.mixtures.own_code import Own, OwnCodeError
from gristmill.mixtures.posttraining import Dpo, Rounded
from gristmill.train.data.preference_rows import AnswerRows, PairRows
from gristmill.train.loop.objective import Objective
from gristmill.train.loop.prefetch import read_batch
from gristmill.train.loop.row_plan import plan_of
from gristmill.train.models.weights import WEIGHTS_FILE
from gristmill.train.objectives.kto_objective import Desirability
from gristmill.train.objectives.losses import sequence_logps
from gristmill.train.objectives.preference_losses import loss_at_start
from gristmill.train.objectives.preference_objective import Preferences
from gristmill.train.parallel.sharding import evaluating, measured_by_all
from gristmill.train.parallel.world import World, sum_over_ranks

TABLE, KEY = "reference.parquet", "key.json"
LARGEST_MARGIN = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""What rounding alone may make of a margin of zero; a reference in another precision was seen to give 0.066."""


class NotTheReferenceError(RuntimeError):
    """Before the first step the policy is not the model that the reference log-probabilities are of."""


class StaleReferenceError(RuntimeError):
    """Reference log-probabilities depend on something else than what they are wanted for."""


def key_of(start: Path, rows: PairRows, dtype: torch.dtype, rounded: Rounded | None) -> dict[str, Any]:
    """What reference log-probabilities depend on, by name: weights, precision, template, tokenizer, length, pairs.

    Args:
        start: the folder of the model that is the reference.
        rows: the pairs.
        dtype: of matrix products.
        rounded: how the model is rounded, if it is.
    """
    return {**_model_key(start, dtype, rounded), **rows.made_of}


def _model_key(start: Path, dtype: torch.dtype, rounded: Rounded | None) -> dict[str, Any]:
    told = None if rounded is None else f"{rounded.base} in {', '.join(sorted(rounded.targets or ['all layers']))}"
    return {
        "weights": sha256_file(start / WEIGHTS_FILE),
        "precision": str(dtype).removeprefix("torch."),
        "rounding": told,
    }


def rounding_of(section: Dpo) -> Rounded | None:
    """How the model is rounded that a training starts from, which is its reference."""
    lora = section.lora
    return None if lora is None or lora.base is None else Rounded(base=lora.base, targets=lora.targets)


def pair_logps(model: nn.Module, rows: PairRows, pairs: np.ndarray, micro_batch_size: int, world: World) -> np.ndarray:
    """Summed log-probabilities of both answers of n pairs: (n, 2) float32, chosen first, the same on every rank.

    Args:
        model: on every rank.
        rows: the pairs' rows.
        pairs: int64 of shape (n,), the numbers of the pairs.
        micro_batch_size: pairs per forward pass on one rank, at the most.
        world: the processes.
    """

    def measure(numbers: np.ndarray) -> Tensor:
        ids, targets = (tensor.to(world.device) for tensor in rows.read(pairs[numbers]))
        logps: Tensor = model(ids, partial(sequence_logps, targets=targets))
        return logps.view(2, -1).T

    return measured_by_all(model, len(pairs), 2, micro_batch_size, world, measure)


def write_reference(folder: Path, key: dict[str, Any], rows: PairRows, logps: np.ndarray) -> None:
    """Write log-probabilities (n, 2) float32 of all n pairs, chosen first, with what they depend on."""
    tokens = rows.scored_tokens.astype(np.int32)
    write_table(
        folder / TABLE,
        pa.table(
            {
                "id": rows.ids,
                "chosen": logps[:, 0],
                "rejected": logps[:, 1],
                "chosen_tokens": tokens[:, 0],
                "rejected_tokens": tokens[:, 1],
            }
        ),
    )
    write_json(folder / KEY, key)


def answer_key(start: Path, rows: AnswerRows, dtype: torch.dtype, rounded: Rounded | None) -> dict[str, Any]:
    """As `key_of`, of log-probabilities of single answers."""
    return {**_model_key(start, dtype, rounded), "rows": "answers", **rows.made_of}


def write_answer_reference(folder: Path, key: dict[str, Any], rows: AnswerRows, logps: np.ndarray) -> None:
    """Write log-probabilities (A, 2) float32 of all answers, to their prompts and of their partners to the same."""
    write_table(
        folder / TABLE,
        pa.table(
            {
                "id": rows.ids,
                "logp": logps[:, 0],
                "mismatched": logps[:, 1],
                "tokens": rows.scored_tokens.astype(np.int32),
            }
        ),
    )
    write_json(folder / KEY, key)


def read_answer_reference(folder: Path, key: dict[str, Any]) -> np.ndarray:
    """Log-probabilities (A, 2) float32 as they were written.

    Raises:
        StaleReferenceError: they depend on something else; the message names what differs.
    """
    return _read_table(folder, key, ["logp", "mismatched"])


def read_reference(folder: Path, key: dict[str, Any]) -> np.ndarray:
    """Log-probabilities (n, 2) float32, chosen first, in the order of the pairs that the key names.

    Raises:
        StaleReferenceError: they depend on something else; the message names what differs.
    """
    return _read_table(folder, key, ["chosen", "rejected"])


def _read_table(folder: Path, key: dict[str, Any], columns: list[str]) -> np.ndarray:
    check_key(folder, key)
    table = read_table(folder / TABLE, columns=columns)
    return np.stack([table[name].to_numpy() for name in columns], axis=1)


def check_key(folder: Path, key: dict[str, Any]) -> None:
    """Refuse log-probabilities that depend on something else than the key says.

    Raises:
        StaleReferenceError: the message names what differs.
    """
    found = read_json(folder / KEY)
    differing = [
        f"{name} was {found.get(name)} and is {wanted}" for name, wanted in key.items() if found.get(name) != wanted
    ]
    if differing:
        raise StaleReferenceError(
            f"{folder}: the reference log-probabilities there are of something else: "
            f"{'; '.join(differing)}. Run again with `--force reference`, on the kind of "
            "device that trains"
        )


def certify_start(
    model: nn.Module, objective: Preferences, section: Dpo, dtype: torch.dtype, world: World
) -> dict[str, float]:
    """Prove, before the first step, that policy and reference are one: margin 0 and DPO's loss ln 2 on the first batch.

    The losses without a reference have nothing to prove; their first values are written down all the same.

    Raises:
        NotTheReferenceError: they are not.
        OwnCodeError: the loss is the user's own, and not finite.
    """
    measured = measured_at_start(model, objective, section, world)
    certificate = {"loss": measured["loss"], "margin": measured["rewards/margins"]}
    expected, most = loss_at_start(section.loss, section.beta), LARGEST_MARGIN[dtype]
    if isinstance(section.loss, Own):
        if not math.isfinite(certificate["loss"]):
            raise OwnCodeError(
                f"{section.loss.use.place}: {section.loss_name} gives the loss {certificate['loss']} "
                "for the first batch, where the policy still is the reference; it must be finite"
            )
        expected = certificate["loss"]  # what it must be is not known
    if expected is not None:
        # What is added for the chosen answers alone is not part of the proof.
        loss = certificate["loss"] if not section.sft_weight else expected
        if not (abs(certificate["margin"]) <= most and abs(loss - expected) <= most * max(1.0, expected)):
            raise NotTheReferenceError(
                f"dpo: before the first step the margin is {certificate['margin']:.6f} and the loss {loss:.6f}, not 0 "
                f"and {expected:.6f} (tolerance {most}): the reference log-probabilities are of another model; run "
                "again with `--force reference`"
            )
    return certificate


def certify_answers(
    model: nn.Module, objective: Desirability, section: Dpo, dtype: torch.dtype, world: World
) -> dict[str, float]:
    """As `certify_start`, of single answers: rewards and KL are zero on the first batch.

    Raises:
        NotTheReferenceError: they are not.
    """
    objective.take_baseline(model, plan_of(section, objective.sequence_length).rows(objective.order, 0))
    measured = measured_at_start(model, objective, section, world)
    rewards = [measured[name] for name in ("rewards/chosen", "rewards/rejected") if name in measured]
    certificate = {"loss": measured["loss"], "kl": measured["kl"], "largest_reward": max(map(abs, rewards))}
    most = LARGEST_MARGIN[dtype]
    if certificate["largest_reward"] > most or certificate["kl"] > most / section.beta:
        raise NotTheReferenceError(
            f"dpo: before the first step the mean reward is up to {certificate['largest_reward']:.6f} and the KL "
            f"{certificate['kl']:.6f}, not 0 (tolerance {most}): the reference log-probabilities are of another model; "
            "run again with `--force reference`"
        )
    return certificate


def measured_at_start(model: nn.Module, objective: Objective, section: Dpo, world: World) -> dict[str, Any]:
    """What an objective reports of the first batch, before any step."""
    plan = plan_of(section, objective.sequence_length)
    batch = read_batch(objective, plan, 0, section.micro_batch_size, world.data_rank, world.data_size)
    sums = torch.zeros(objective.sums_length, dtype=torch.float64, device=world.device)
    with evaluating(model):
        for part in batch.parts:
            sums += objective.loss(model, part, 1.0).sums
    return objective.report(sum_over_ranks(sums, world).tolist(), batch.weight)
