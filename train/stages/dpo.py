"""Stage `dpo`: direct preference optimisation (Rafailov et al. 2023) of the tuned
model.

Output: `model/`, `metrics.jsonl`, `skipped_steps.jsonl` as of pre-training;
`holdout.jsonl`, the held-out pairs with their log-probabilities under the start model;
`examples.txt`, the example of each row, and `rows-per-set.json`; `margins.parquet`, the
margin of each pair (see `objectives/preference_report.py`); with `lora` also
`adapter/`, which PEFT loads, and `model/` is the model with the adapters merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypedDict

import numpy as np

from gristmill.core.stage_context import Context
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.schema.posttraining import Dpo
from gristmill.train.data.conversation_tokens import write_example_ids
from gristmill.train.data.pairs import (
    HOLDOUT,
    gained_more,
    more_likely,
    write_holdout,
)
from gristmill.train.data.preference_rows import (
    PairRows,
    describe_draws,
    draw_pairs,
    held_out_mask,
    merged,
)
from gristmill.train.eval.intervals import Estimate, share_with_interval
from gristmill.train.loop.objective import JsonObject
from gristmill.train.loop.training_job import Learner
from gristmill.train.objectives.preference_objective import Preferences
from gristmill.train.objectives.preference_report import (
    MARGINS,
    Decline,
    MarginSummary,
    decline_of,
    measured_again,
    pair_rewards,
    write_margins,
)
from gristmill.train.objectives.preflight_checks import CERTIFICATE
from gristmill.train.objectives.reference_logps import (
    certify_start,
    key_of,
    pair_logps,
    read_reference,
)
from gristmill.train.resuming import measured_once
from gristmill.train.stages.stage_inputs import (
    Inputs,
    open_rows,
    start_of,
)
from gristmill.train.stages.trained_models import (
    TunedSummary,
    averaged,
    tune,
    tuning,
)


class HeldOutPairs(TypedDict):
    """Held-out pairs: share whose chosen answer gained more in the training, and shares
    whose chosen answer is more likely before and after it.
    """

    reward_accuracy_interval: Estimate | None
    chosen_more_likely_before: float | None
    chosen_more_likely_interval: Estimate | None


class DpoSummary(TunedSummary):
    """Summary of the stage.

    Attributes:
        sets: counts of each set.
        beta: strength of the reference.
        objective: name of the loss.
        step_0: measurements before the first step.
        chosen_decline, margins: None on other ranks than the first.
        training_pairs, held_out_pairs: their numbers.
        held_out: measurements of the held-out pairs.
    """

    sets: list[JsonObject]
    beta: float
    objective: str
    step_0: Mapping[str, float]
    chosen_decline: Decline | None
    margins: MarginSummary | None
    training_pairs: int
    held_out_pairs: int
    held_out: HeldOutPairs


def run(
    inputs: Inputs,
    config: Recipe,
    out: Path,
    context: Context,
) -> DpoSummary:
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
    start = start_of(inputs)
    with (
        open_rows(inputs["dpo_data"], context) as data,
        tuning(inputs, section, start, data.sequence_length, out, context) as setup,
    ):
        rows = PairRows(data)
        records = rows.records()
        is_out = held_out_mask(records, section, section.key_seed)
        draws = draw_pairs(rows, is_out, section, section.key_seed)
        world = setup.world
        reference = read_reference(
            inputs["reference"],
            key_of(start, rows, setup.dtype, section.lora),
        )
        model = setup.model()
        objective = Preferences(
            rows,
            draws,
            reference,
            section,
            section.key_seed,
            setup.flops_per_token,
            world.device,
            context.warn,
        )
        section = section.in_steps(objective.order.total)
        if world.is_first:
            ids = [rows.ids[number] for number in merged(draws)]
            write_example_ids(out, ids, list(map(len, draws)))
        certificate = measured_once(
            context.work / CERTIFICATE,
            world,
            partial(certify_start, model, objective, section, setup.dtype, world),
        )
        record, summary = tune(
            replace(setup, section=section),
            Learner(objective, model, averaged(model, section)),
        )
        measured = measured_again(rows.ids, is_out, section.measured_pairs)
        logps = pair_logps(model, rows, measured, section.micro_batch_size, world)
        before = reference[is_out]
        after = logps[is_out[measured]]
        margins = None
        if record is not None:
            rewards = pair_rewards(
                logps, reference[measured], rows.scored_tokens[measured], section
            )
            margins = write_margins(
                out / MARGINS,
                [records[pair] for pair in measured],
                [data.sources[set_number] for set_number in rows.sets[measured]],
                is_out[measured],
                rewards,
            )
            write_holdout(
                out / HOLDOUT,
                [records[pair] for pair in np.flatnonzero(is_out)],
                "reference",
                before,
            )
    return {
        **summary,
        "sets": describe_draws(rows, data.sources, draws, is_out),
        "beta": section.beta,
        "objective": section.loss_name,
        "step_0": certificate,
        "chosen_decline": None if record is None else decline_of(record.lines()),
        "training_pairs": int((~is_out).sum()),
        "held_out_pairs": len(before),
        "margins": margins,
        "held_out": {
            "reward_accuracy_interval": share_with_interval(gained_more(after, before)),
            "chosen_more_likely_before": more_likely(before),
            "chosen_more_likely_interval": share_with_interval(
                after[:, 0] > after[:, 1]
            ),
        },
    }
