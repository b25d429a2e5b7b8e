"""Kahneman-Tversky optimisation as the stage `dpo` runs it for `loss: kto`: single answers in place of pairs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gristmill.dataprep.context import Context
from gristmill.mixtures.posttraining import Dpo
from gristmill.tokenize.packed import PackedSet
from gristmill.train.adapters.lora import adapted_flops_per_token, describe_rounding, tuned_model
from gristmill.train.adapters.peft_files import settle_adapters
from gristmill.train.data.conversation_tokens import NothingToTrainError, write_example_ids
from gristmill.train.data.pairs import HOLDOUT, is_held_out, write_holdout
from gristmill.train.data.preference_rows import AnswerRows, describe_draws, draw_pairs, merged
from gristmill.train.evaluation.held_out import Validation, read_token_bytes
from gristmill.train.evaluation.intervals import wilson
from gristmill.train.loop.loop import Job, train
from gristmill.train.loop.resuming import measured_once
from gristmill.train.loop.row_plan import plan_of
from gristmill.train.loop.throughput import peak_flops
from gristmill.train.models.weights import read_shape, stored
from gristmill.train.objectives.kto_objective import Desirability, answer_logps, weights_to_balance
from gristmill.train.objectives.margins import MARGINS, answer_margins, decline_of, measured_again, write_margins
from gristmill.train.objectives.reference_logps import (
    LARGEST_MARGIN,
    NotTheReferenceError,
    answer_key,
    measured_at_start,
    read_answer_reference,
    rounding_of,
)
from gristmill.train.parallel.sharding import compute_dtype
from gristmill.train.parallel.world import World, process_group
from gristmill.train.stages.stage_inputs import open_mixture, start_of
from gristmill.train.stages.trained_models import (
    all_tensors,
    averaged,
    causal_share,
    describe_model,
    publish,
    tuned_shape,
)

CERTIFICATE = "step-0.json"
MOST_IMBALANCE = 4 / 3
"""Equation 8 of the paper asks that both kinds weigh the same in all, up to this factor for the desirable ones."""


def optimise(inputs: Mapping[str, Path], section: Dpo, out: Path, context: Context) -> dict[str, Any]:
    """Optimise desirability; called on every rank of a torchrun process group. Returns the stage's summary.

    Raises:
        NothingToTrainError: no answer is left to train on.
        gristmill.train.objectives.reference_logps.StaleReferenceError: the reference is of other weights or
            rows.
        gristmill.train.objectives.reference_logps.NotTheReferenceError: the first batch's rewards are not zero.
        gristmill.train.loop.stopping.StoppedError: SIGTERM came; a rerun continues.
    """
    seed, start = section.key_seed, start_of(inputs)
    with closing(PackedSet(inputs["dpo_data"], context.stream, context.warn)) as data, \
            open_mixture(inputs, context) as packed, \
            process_group(context.parallel, pipelined=False, split=section.lora is None) as world:
        rows, length = AnswerRows(data), data.sequence_length
        shape = tuned_shape(read_shape(start), length, context)
        is_out = held_out_answers(rows, section, seed)
        draws = draw_pairs(rows, is_out, section, seed)
        dtype = compute_dtype(section.precision, world.device)
        reference = read_answer_reference(inputs["reference"], answer_key(start, rows, dtype, rounding_of(section)))
        model = tuned_model(shape, stored(start), section.lora, seed, world, dtype, context)
        # The estimate of the KL is one more forward pass over as many tokens, or nearly.
        flops = adapted_flops_per_token(shape, length, section.lora) + 2 * shape.matrix_parameters
        objective = Desirability(rows, draws, reference, section, seed, flops, world, context.warn)
        if world.is_first:
            write_example_ids(out, [rows.ids[answer] for answer in merged(draws)], [len(drawn) for drawn in draws])
            warn_of_imbalance(rows.desirable[merged(draws)], section, context)
        certificate = measured_once(context.work / CERTIFICATE, world, partial(
            certify, model, objective, section, dtype, world))
        average = averaged(model, section)
        record, summary = train(Job(
            section=section, objective=objective, model=model, world=world, context=context, average=average,
            peak_flops=peak_flops(world.device, dtype), causal_share=causal_share(shape, length, flops),
            before_step=lambda step, rows: objective.take_baseline(model, rows),
            after_step=Validation(section.validate_every, section.steps, packed, model, average,
                                  read_token_bytes(inputs["tokenizer"], world.device), world)))
        held_out = np.flatnonzero(is_out)
        measured = measured_again(rows.ids, is_out, section.measured_pairs)
        gained = answer_logps(model, rows, measured, section.micro_batch_size, world) - reference[measured, 0]
        gains = gained[is_out[measured]]
        tensors = all_tensors(model, average)
        summary |= describe_rounding(model, section.lora)
        if record is not None:
            summary |= publish(out, shape, settle_adapters(out, tensors, section.lora, start), record)
            summary["chosen_decline"] = decline_of(record.lines())
            summary["margins"] = write_margins(
                out / MARGINS, answer_margins(rows, data.sources, measured, section.beta * gained, is_out),
                {rows.ids[answer]: rows.records[rows.examples[answer]] for answer in measured})
            # A pair's rejected answer is the row behind its chosen one.
            chosen = np.array([answer for answer in held_out if rows.desirable[answer]
                               and "chosen" in rows.records[rows.examples[answer]]], dtype=np.int64)
            write_holdout(out / HOLDOUT, [rows.records[example] for example in rows.examples[chosen]],
                          np.stack([reference[chosen, 0], reference[chosen + 1, 0]], axis=1), length)
    desirable = rows.desirable[held_out]
    return {
        **summary, **describe_model(shape, length), "sequence_length": length,
        "sets": describe_draws(rows, data.sources, draws, is_out), "beta": section.beta, "objective": section.loss,
        "training_answers": {"desirable": int(rows.desirable[~is_out].sum()),
                             "undesirable": int((~rows.desirable[~is_out]).sum())},
        "held_out_answers": {"desirable": int(desirable.sum()), "undesirable": int((~desirable).sum())},
        "step_0": certificate, "held_out": {
            "ranked_right": ranked_right(gains[desirable], gains[~desirable]),
            "ranked_right_interval": ranked_right_interval(gains[desirable], gains[~desirable])},
    }


def held_out_answers(rows: AnswerRows, section: Dpo, seed: int) -> np.ndarray:
    """Which of A answers are held out, (A,) bool: by prompt, as pairs are.

    Raises:
        NothingToTrainError: all of them are.
    """
    held_out: np.ndarray = np.array([is_held_out(record, section.holdout, seed) for record in rows.records],
                                    dtype=bool)[rows.examples]
    if held_out.all():
        raise NothingToTrainError(f"dpo: all {len(rows)} answers are held out; lower dpo.holdout ({section.holdout}) "
                                  "or add answers to other prompts")
    return held_out


def warn_of_imbalance(desirable: np.ndarray, section: Dpo, context: Context) -> None:
    """Tell where the two kinds of answers weigh too differently."""
    counts = int(desirable.sum()), int((~desirable).sum())
    if not all(counts):
        missing = "undesirable" if counts[0] else "desirable"
        context.warn(f"dpo: there is no {missing} answer to train on; training on one kind alone has little effect")
        return
    share = weights_to_balance(*counts, section.desirable_weight, section.undesirable_weight)
    if not 1 / MOST_IMBALANCE <= share <= MOST_IMBALANCE:
        context.warn(f"dpo: {counts[0]:,} desirable answers with the weight {section.desirable_weight:g} against "
                     f"{counts[1]:,} undesirable ones with {section.undesirable_weight:g} are {share:.2f} to 1, where "
                     "Ethayarajh et al. 2024 (equation 8) ask for 1 to 1.33: set dpo.desirable_weight or "
                     "dpo.undesirable_weight")


def ranked_right(desirable: np.ndarray, undesirable: np.ndarray) -> float | None:
    """Among all pairs of a desirable and an undesirable answer the share whose first gained more; ties count half.

    The area under the curve of Mann & Whitney 1947. None where a kind is missing.
    """
    if not len(desirable) or not len(undesirable):
        return None
    ordered = np.sort(undesirable)
    below, upto = (np.searchsorted(ordered, desirable, side=side) for side in ("left", "right"))
    return float((below + upto).sum() / (2 * len(desirable) * len(undesirable)))


def ranked_right_interval(desirable: np.ndarray, undesirable: np.ndarray) -> dict[str, float] | None:
    """That share with Wilson's interval over as many units as the smaller kind has answers, None where one is missing.

    Its variance is at most A (1 - A) / min(m, n) (Birnbaum & Klose 1957), so the interval is rather too wide.
    """
    share = ranked_right(desirable, undesirable)
    return None if share is None else wilson(share, min(len(desirable), len(undesirable)))


def certify(
    model: nn.Module, objective: Desirability, section: Dpo, dtype: torch.dtype, world: World
) -> dict[str, float]:
    """Prove, before the first step, that policy and reference are one: rewards and KL are zero on the first batch.

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
            "run again with `--force reference`")
    return certificate
