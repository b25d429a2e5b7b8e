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
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TypedDict

import numpy as np

from gristmill.core.stage_context import Context
from gristmill.mixtures.schema.posttraining import Dpo
from gristmill.tokenize.packed import PackedSet
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
    draw_pairs,
    held_out_mask,
)
from gristmill.train.eval.intervals import Estimate, share_with_interval
from gristmill.train.loop.training_job import Learner
from gristmill.train.objectives.preference_objective import Preferences
from gristmill.train.objectives.preference_report import (
    MARGINS,
    measured_again,
    pair_margins,
    pair_rewards,
    write_margins,
)
from gristmill.train.objectives.reference_logps import (
    PAIR_LOGPS,
    certify_start,
    key_of,
    pair_logps,
    read_reference,
    rounding_of,
)
from gristmill.train.stages.kto import KtoSummary, optimise
from gristmill.train.stages.stage_inputs import (
    Inputs,
    open_rows,
    start_of,
)
from gristmill.train.stages.trained_models import (
    PreferenceSummary,
    averaged,
    optimise_preferences,
    tuning,
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
    inputs: Inputs,
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
    start = start_of(inputs)
    with closing(PackedSet(inputs["dpo_data"])) as data:
        check_pairs(data)
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
            key_of(start, rows, setup.dtype, rounding_of(section)),
            PAIR_LOGPS,
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
        record, summary = optimise_preferences(
            setup,
            section,
            rows,
            draws,
            is_out,
            Learner(objective, model, averaged(model, section)),
            partial(certify_start, model, objective, section, setup.dtype, world),
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
                [records[pair] for pair in np.flatnonzero(is_out)],
                "reference",
                before,
                sequence_length=setup.length,
            )
    return {
        **summary,
        "training_pairs": int((~is_out).sum()),
        "held_out_pairs": len(before),
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
