"""Kahneman-Tversky optimisation, run by the stage `dpo` for `loss: kto`: single answers
instead of pairs.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TypedDict

import numpy as np

from gristmill.core.stage_context import Context
from gristmill.mixtures.schema.posttraining import Dpo
from gristmill.train.data.pairs import HOLDOUT, write_holdout
from gristmill.train.data.preference_rows import (
    AnswerRows,
    draw_pairs,
    held_out_mask,
    merged,
)
from gristmill.train.eval.intervals import Estimate, wilson
from gristmill.train.loop.training_job import Learner, Observers
from gristmill.train.objectives.kto_objective import (
    Desirability,
    answer_logps,
)
from gristmill.train.objectives.preference_report import (
    MARGINS,
    answer_margins,
    measured_again,
    write_margins,
)
from gristmill.train.objectives.reference_logps import (
    ANSWER_LOGPS,
    certify_answers,
    key_of,
    read_reference,
    rounding_of,
)
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

MOST_IMBALANCE = 4 / 3
"""Equation 8 of the paper: total weights of both kinds are equal, up to this factor for
the desirable one.
"""


class AnswerCounts(TypedDict):
    """Numbers of answers by kind."""

    desirable: int
    undesirable: int


class HeldOutAnswers(TypedDict):
    """See `ranked_right`, with its interval."""

    ranked_right: float | None
    ranked_right_interval: Estimate | None


class KtoSummary(PreferenceSummary):
    """Summary of the stage `dpo` with a loss over single answers."""

    training_answers: AnswerCounts
    held_out_answers: AnswerCounts
    held_out: HeldOutAnswers


def optimise(inputs: Inputs, section: Dpo, out: Path, context: Context) -> KtoSummary:
    """Optimise desirability; called on every rank of a torchrun process group. Returns
    the stage's summary.

    Raises:
        gristmill.train.data.conversation_tokens.NothingToTrainError: no answer is left
            to train on.
        gristmill.train.objectives.reference_logps.StaleReferenceError: the reference is
            of other weights or rows.
        gristmill.train.objectives.reference_logps.NotTheReferenceError: the first
            batch's rewards are not zero.
        gristmill.train.loop.stopping.StoppedError: SIGTERM was received; a rerun
            continues.
    """
    start = start_of(inputs)
    with (
        open_rows(inputs["dpo_data"], context) as data,
        tuning(inputs, section, start, data.sequence_length, out, context) as setup,
    ):
        rows = AnswerRows(data)
        is_out = held_out_mask(rows.records, section, section.key_seed)[rows.examples]
        draws = draw_pairs(rows, is_out, section, section.key_seed)
        world = setup.world
        reference = read_reference(
            inputs["reference"],
            key_of(start, rows, setup.dtype, rounding_of(section)),
            ANSWER_LOGPS,
        )
        model = setup.model()
        objective = Desirability(
            rows,
            draws,
            reference,
            section,
            section.key_seed,
            # Estimating the KL takes one more forward pass over about as many tokens.
            setup.flops_per_token + 2 * setup.shape.matrix_parameters,
            world,
            context.warn,
        )
        section = section.in_steps(objective.order.total)
        if world.is_first:
            warn_of_imbalance(rows.desirable[merged(draws)], section, context)
        record, summary = optimise_preferences(
            setup,
            section,
            rows,
            draws,
            is_out,
            Learner(objective, model, averaged(model, section)),
            partial(certify_answers, model, objective, section, setup.dtype, world),
            Observers(
                before_step=lambda step, rows: objective.take_baseline(model, rows)
            ),
        )
        held_out = np.flatnonzero(is_out)
        measured = measured_again(rows.ids, is_out, section.measured_pairs)
        answer_gains = (
            answer_logps(model, rows, measured, section.micro_batch_size, world)
            - reference[measured, 0]
        )
        gains = answer_gains[is_out[measured]]
        desirable = rows.desirable[held_out]
        margins = None
        if record is not None:
            margins = write_margins(
                out / MARGINS,
                answer_margins(
                    rows, data.sources, measured, section.beta * answer_gains, is_out
                ),
                {
                    rows.ids[answer]: rows.records[rows.examples[answer]]
                    for answer in measured
                },
            )
            # The rejected answer of a pair follows its chosen answer.
            chosen = np.array(
                [
                    answer
                    for answer in held_out
                    if rows.desirable[answer]
                    and "chosen" in rows.records[rows.examples[answer]]
                ],
                dtype=np.int64,
            )
            write_holdout(
                out / HOLDOUT,
                [rows.records[example] for example in rows.examples[chosen]],
                "reference",
                np.stack([reference[chosen, 0], reference[chosen + 1, 0]], axis=1),
                sequence_length=setup.length,
            )
    return {
        **summary,
        "training_answers": count_kinds(rows.desirable[~is_out]),
        "held_out_answers": count_kinds(desirable),
        "margins": margins,
        "held_out": {
            "ranked_right": ranked_right(gains[desirable], gains[~desirable]),
            "ranked_right_interval": ranked_right_interval(
                gains[desirable], gains[~desirable]
            ),
        },
    }


def count_kinds(desirable: np.ndarray) -> AnswerCounts:
    """Count answers by kind."""
    return {
        "desirable": int(desirable.sum()),
        "undesirable": int((~desirable).sum()),
    }


def warn_of_imbalance(desirable: np.ndarray, section: Dpo, context: Context) -> None:
    """Warn if the total weights of both kinds of answers differ too much."""
    counts = count_kinds(desirable)
    missing = next((kind for kind, count in counts.items() if not count), None)
    if missing is not None:
        context.warn(
            f"dpo: there is no {missing} answer to train on; training on one kind "
            "alone has little effect"
        )
        return
    share = (
        section.desirable_weight
        * counts["desirable"]
        / (section.undesirable_weight * counts["undesirable"])
    )
    if not 1 / MOST_IMBALANCE <= share <= MOST_IMBALANCE:
        context.warn(
            f"dpo: {counts['desirable']:,} desirable answers with the weight "
            f"{section.desirable_weight:g} against {counts['undesirable']:,} "
            f"undesirable ones with {section.undesirable_weight:g} are {share:.2f} to "
            "1, where Ethayarajh et al. 2024 (equation 8) ask for 1 to 1.33: set "
            "dpo.desirable_weight or dpo.undesirable_weight"
        )


def ranked_right(desirable: np.ndarray, undesirable: np.ndarray) -> float | None:
    """Share of all (desirable, undesirable) pairs in which the desirable answer gained
    more; ties count half.

    The area under the curve of Mann & Whitney 1947. None if a kind is missing.
    """
    if not len(desirable) or not len(undesirable):
        return None
    ordered = np.sort(undesirable)
    lower, not_higher = (
        np.searchsorted(ordered, desirable, side=side) for side in ("left", "right")
    )
    return float((lower + not_higher).sum() / (2 * len(desirable) * len(undesirable)))


def ranked_right_interval(
    desirable: np.ndarray, undesirable: np.ndarray
) -> Estimate | None:
    """`ranked_right` with Wilson's interval over as many units as the smaller kind has
    answers; None if a kind is missing.

    The variance is at most A (1 - A) / min(m, n) (Birnbaum & Klose 1957), so the
    interval is conservative.
    """
    share = ranked_right(desirable, undesirable)
    return (
        None if share is None else wilson(share, min(len(desirable), len(undesirable)))
    )
