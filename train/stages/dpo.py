"""Stage `dpo`: direct preference optimisation (Rafailov et al. 2023) of the tuned
model.

Output: `model/`, `metrics.jsonl`, `skipped_steps.jsonl` as of pre-training;
`holdout.jsonl`, the held-out pairs with their log-probabilities under the start model;
`examples.txt`, the example of each row, and `rows-per-set.json`; `margins.parquet`, the
margin of each pair (see objectives/margins.py); with `lora` also `adapter/`, which PEFT
loads, and `model/` is the model with the adapters merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TypedDict

import numpy as np

from gristmill.core.stage_context import Context
from gristmill.mixtures.posttraining import Dpo
from gristmill.tokenize.packed import PackedSet
from gristmill.train.adapters.lora import adapted_flops_per_token, tuned_model
from gristmill.train.data.pairs import (
    HOLDOUT,
    gained_more,
    more_likely,
    reward_accuracy,
    write_holdout,
)
from gristmill.train.data.preference_rows import (
    PairRows,
    check_pairs,
    describe_draws,
    draw_pairs,
    held_out_mask,
    write_drawn_ids,
)
from gristmill.train.evaluation.intervals import Estimate, share_with_interval
from gristmill.train.loop.resuming import measured_once
from gristmill.train.loop.training_job import Learner
from gristmill.train.models.weights import read_shape, stored
from gristmill.train.objectives.preference_objective import Preferences
from gristmill.train.objectives.preference_report import (
    MARGINS,
    decline_of,
    measured_again,
    pair_margins,
    pair_rewards,
    write_margins,
)
from gristmill.train.objectives.preflight_checks import CERTIFICATE
from gristmill.train.objectives.reference_logps import (
    certify_start,
    key_of,
    pair_logps,
    read_reference,
    rounding_of,
)
from gristmill.train.parallel.process_groups import process_group
from gristmill.train.parallel.sharding import compute_dtype
from gristmill.train.stages.kto import KtoSummary, optimise
from gristmill.train.stages.stage_inputs import open_mixture, open_rows, start_of
from gristmill.train.stages.trained_models import (
    PreferenceSummary,
    averaged,
    tune,
    tuned_shape,
)


class HeldOutPairs(TypedDict):
    """Held-out pairs before and after the training: shares whose chosen answer gained
    more, and whose chosen answer is more likely, with their intervals.
    """

    reward_accuracy_before: float | None
    reward_accuracy: float | None
    reward_accuracy_interval: Estimate | None
    chosen_more_likely_before: float | None
    chosen_more_likely: float | None
    chosen_more_likely_interval: Estimate | None


class DpoSummary(PreferenceSummary):
    """Summary of the stage with a loss over pairs."""

    training_pairs: int
    held_out_pairs: int
    held_out: HeldOutPairs


def run(
    inputs: Mapping[str, Path],
    config: Mapping[str, object],
    out: Path,
    context: Context,
) -> DpoSummary | KtoSummary:
    """Optimise preferences; called on every rank of a torchrun process group.

    Raises:
        gristmill.train.data.conversation_tokens.NothingToTrainError: no pair is left to
            train on.
        gristmill.train.objectives.reference_logps.StaleReferenceError: the reference is
            of other weights or pairs.
        gristmill.train.objectives.reference_logps.NotTheReferenceError: the first
            batch's margin is not zero.
        gristmill.train.loop.stopping.StoppedError: SIGTERM was received; a rerun
            continues.
    """
    section = Dpo.model_validate(config)
    if section.loss == "kto":
        return optimise(inputs, section, out, context)
    seed = section.key_seed
    start = start_of(inputs)
    with closing(PackedSet(inputs["dpo_data"])) as data:
        check_pairs(data)
    with (
        open_rows(inputs["dpo_data"], context) as data,
        open_mixture(inputs, context) as packed,
        process_group(
            context.training.parallel, pipelined=False, split=section.lora is None
        ) as world,
    ):
        rows = PairRows(data)
        length = data.sequence_length
        shape = tuned_shape(read_shape(start), length, context)
        records = rows.records()
        is_out = held_out_mask(records, section, seed)
        draws = draw_pairs(rows, is_out, section, seed)
        dtype = compute_dtype(section.precision, world.device)
        reference = read_reference(
            inputs["reference"], key_of(start, rows, dtype, rounding_of(section))
        )
        model = tuned_model(
            shape, stored(start), section.lora, seed, world, dtype, context
        )
        flops = adapted_flops_per_token(shape, length, section.lora)
        objective = Preferences(
            rows, draws, reference, section, seed, flops, world.device, context.warn
        )
        section = section.in_steps(objective.order.total)
        if world.is_first:
            write_drawn_ids(out, rows, draws)
        certificate = measured_once(
            context.work / CERTIFICATE,
            world,
            partial(certify_start, model, objective, section, dtype, world),
        )
        record, summary = tune(
            section,
            Learner(objective, model, averaged(model, section)),
            shape,
            start,
            inputs,
            packed,
            out,
            world,
            context,
        )
        measured = measured_again(rows.ids, is_out, section.measured_pairs)
        logps = pair_logps(model, rows, measured, section.micro_batch_size, world)
        before = reference[is_out]
        after = logps[is_out[measured]]
        held_out = np.flatnonzero(is_out)
        decline = margins = None
        if record is not None:
            decline = decline_of(record.lines())
            rewards = pair_rewards(
                logps, reference[measured], rows.scored_tokens[measured], section
            )
            margins = write_margins(
                out / MARGINS,
                pair_margins(
                    [rows.ids[pair] for pair in measured],
                    [data.sources[set_number] for set_number in rows.sets[measured]],
                    is_out[measured],
                    rewards,
                ),
                {rows.ids[pair]: records[pair] for pair in measured},
            )
            write_holdout(
                out / HOLDOUT,
                [records[pair] for pair in held_out],
                "reference",
                before,
                sequence_length=length,
            )
    return {
        **summary,
        "sets": [
            asdict(drawn_set)
            for drawn_set in describe_draws(rows, data.sources, draws, is_out)
        ],
        "beta": section.beta,
        "objective": section.loss_name,
        "training_pairs": int((~is_out).sum()),
        "held_out_pairs": len(held_out),
        "step_0": certificate,
        "chosen_decline": decline,
        "margins": margins,
        "held_out": {
            "reward_accuracy_before": reward_accuracy(before, before),
            "reward_accuracy": reward_accuracy(after, before),
            "reward_accuracy_interval": share_with_interval(gained_more(after, before)),
            "chosen_more_likely_before": more_likely(before),
            "chosen_more_likely": more_likely(after),
            "chosen_more_likely_interval": share_with_interval(
                after[:, 0] > after[:, 1]
            ),
        },
    }
