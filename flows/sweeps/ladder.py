"""A ladder: small trainings whose losses predict, by a fitted scaling law, the loss of
the manifest's own training.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

import numpy as np

from gristmill.flows.running.events import RunNotice, Subscriber
from gristmill.flows.running.session import Session, open_session
from gristmill.flows.stages.registry import PRETRAIN
from gristmill.flows.sweeps.grid import SweepError
from gristmill.flows.sweeps.proxies import (
    only_needed,
    run_in_sequence,
    sections_of,
    showing_progress,
    tokens_read,
)
from gristmill.flows.sweeps.results import root_mean_square
from gristmill.flows.sweeps.scaling_law import (
    FLOPS_PER_WEIGHT_AND_TOKEN,
    LEAST_RUNS,
    Interval,
    fit_scaling_law,
    jackknife,
    left_out,
    parameter_intervals,
)
from gristmill.train.loop.stopping import held_out_loss


@dataclass(frozen=True)
class Rung:
    """A training of a ladder, or the target.

    Attributes:
        name: requested size and tokens per weight.
        parameters: number of weights in the layers, N.
        tokens: number of tokens that the training reads, D.
        session: the run, up to the training.
    """

    name: str
    parameters: int
    tokens: int
    session: Session


@dataclass(frozen=True)
class Ladder:
    """Trainings in order of size and tokens, the target to predict, and the number of
    tokens of the packed set.
    """

    rungs: tuple[Rung, ...]
    target: Rung
    set_tokens: int


@dataclass(frozen=True)
class TrainedRung:
    """A trained rung.

    Attributes:
        name: requested size and tokens per weight.
        parameters: number of weights in the layers.
        tokens: number of tokens that the training read.
        loss: held-out loss, in nats per token.
        fitted: loss by the law.
        left_out: loss by the law fitted to the other rungs.
        fingerprint: of the training's output.
    """

    name: str
    parameters: int
    tokens: int
    loss: float
    fitted: float
    left_out: float
    fingerprint: str


@dataclass(frozen=True)
class PredictedTarget:
    """Prediction for the manifest's own training.

    Attributes:
        parameters: number of weights in the layers.
        tokens: number of tokens that the training reads.
        set_tokens: number of tokens of the packed set.
        predicted: loss by the law, in nats per token.
        measured: measured loss; None if the target is not trained.
        off: error of the prediction, relative to the measured loss.
    """

    parameters: int
    tokens: int
    set_tokens: int
    predicted: Interval
    measured: float | None
    off: float | None


@dataclass(frozen=True)
class LadderResults:
    """Results of a ladder.

    Attributes:
        rungs: the trainings, in order of size and tokens.
        law: parameter of `ScalingLaw` -> its value.
        error: relative root mean square error of `left_out` of the rungs.
        target: prediction for the manifest's own training.
        best_parameters: number of weights of least loss for the target's FLOPs; None if
            the loss does not depend on both size and tokens.
    """

    rungs: list[TrainedRung]
    law: dict[str, Interval]
    error: float
    target: PredictedTarget
    best_parameters: float | None


def plan_ladder(
    manifest_file: str,
    sizes: Sequence[str],
    ratios: Sequence[float],
    overrides: Sequence[str],
    store: str | None,
) -> Ladder:
    """Derive the trainings from `pretrain.size`, and check them before any stage runs.

    Args:
        manifest_file: the manifest; its own training is the target.
        sizes: values of `pretrain.size`.
        ratios: tokens per weight, for each size.
        overrides: settings that replace the manifest's.
        store: folder or URL of the outputs.

    Raises:
        SweepError: the manifest sets neither `pretrain.size` nor `pretrain.depth` or
            holds nothing out, or the trainings are too few, of one size, or read more
            tokens than the set has.
        gristmill.mixtures.loader.ManifestError: the manifest or a size is invalid.
    """
    target = _rung("target", manifest_file, overrides, store)
    mix, pretrain = sections_of(target.session)
    if pretrain.size is None and pretrain.depth is None:
        raise SweepError(
            f"{manifest_file}: a ladder derives its trainings from pretrain.size, as "
            "it does the target; give pretrain.size (or depth) in place of the shape, "
            "batch, learning rate and steps"
        )
    if not mix.validation:
        raise SweepError(
            "mix.validation is 0, so there is no held-out loss to predict; raise it"
        )
    rungs = []
    for size, ratio in itertools.product(dict.fromkeys(sizes), dict.fromkeys(ratios)):
        rung_overrides = [
            *overrides,
            f"pretrain.size={size}",
            "pretrain.depth=null",
            f"pretrain.tokens_per_parameter={ratio:g}",
            "pretrain.steps=null",
            "pretrain.early_stopping=null",
            "merge=null",
        ]
        rungs.append(_rung(f"{size} x {ratio:g}", manifest_file, rung_overrides, store))
    rungs.sort(key=lambda rung: (rung.parameters, rung.tokens))
    set_tokens, num_sizes = mix.tokens, len(set(sizes))
    shapes = len({rung.parameters for rung in rungs})
    if shapes < num_sizes:
        raise SweepError(
            f"{num_sizes} sizes give {shapes} shapes: their nearest depths are equal, "
            "or pretrain.model sets the width; give sizes that are further apart, or "
            "remove pretrain.model"
        )
    distinct_runs = len({(rung.parameters, rung.tokens) for rung in rungs})
    if distinct_runs < LEAST_RUNS or shapes < 2 or len(rungs) == shapes:
        raise SweepError(
            f"a ladder needs at least {LEAST_RUNS} trainings, of two sizes and two "
            f"budgets, not {len(rungs)} of {shapes} sizes, since the law has five "
            "parameters; add values to --sizes or --tokens-per-parameter"
        )
    longest = max(rungs, key=lambda rung: rung.tokens)
    if longest.tokens > set_tokens:
        raise SweepError(
            f"{longest.name} reads {longest.tokens:,} tokens, but the set has "
            f"{set_tokens:,}, and the law holds for text that is read once; set "
            f"mix.tokens to at least {longest.tokens}, or lower --tokens-per-parameter"
        )
    return Ladder(tuple(rungs), target, set_tokens)


def _rung(
    name: str, manifest_file: str, overrides: Sequence[str], store: str | None
) -> Rung:
    session = open_session(manifest_file, list(overrides), store)
    mix, pretrain = sections_of(session)
    return Rung(
        name,
        pretrain.model.layer_weights,
        tokens_read(pretrain, mix.sequence_length),
        only_needed(session),
    )


def climb(ladder: Ladder, output: TextIO) -> list[float]:
    """Train every rung that is not trained yet, and return the held-out loss of each,
    in nats per token.

    Args:
        ladder: the trainings.
        output: stream of the progress display.

    Raises:
        gristmill.flows.running.run.StageFailedError: a stage failed.
        KeyboardInterrupt: the user pressed Ctrl+C or SIGTERM arrived; the same command
            resumes the ladder.
    """
    losses: list[float] = []
    with showing_progress(output) as observer:
        for rung in ladder.rungs:
            place = f"{len(losses) + 1} of {len(ladder.rungs)}"
            observer(RunNotice(f"training {place}: {rung.name}"))
            losses.append(train_rung(rung, observer))
    return losses


def train_rung(rung: Rung, emit: Subscriber) -> float:
    """Run the stages of a rung that are not committed yet, and return its held-out
    loss.
    """
    run_in_sequence(rung.session, emit)
    loss = measured_loss(rung)
    if loss is None:
        raise SweepError(f"{rung.name}: no rows were held out; raise mix.validation")
    return loss


def measured_loss(rung: Rung) -> float | None:
    """Return the held-out loss at the end of a training, over all sources, or None if
    it is not committed.
    """
    folder = rung.session.committed(PRETRAIN)
    return None if folder is None else held_out_loss(folder.manifest()["summary"])


def analyse_ladder(ladder: Ladder, losses: Sequence[float]) -> LadderResults:
    """Fit the law, predict the target's loss, and compare it with the measured one if
    the target was trained.
    """
    parameters = [rung.parameters for rung in ladder.rungs]
    tokens = [rung.tokens for rung in ladder.rungs]
    law = fit_scaling_law(parameters, tokens, losses)
    left_out_laws = left_out(law, parameters, tokens, losses)
    target = ladder.target
    predicted = jackknife(
        law(target.parameters, target.tokens),
        [fitted(target.parameters, target.tokens) for fitted in left_out_laws],
    )
    measured = measured_loss(target)
    rungs = [
        TrainedRung(
            rung.name,
            rung.parameters,
            rung.tokens,
            loss,
            law(rung.parameters, rung.tokens),
            left_out_law(rung.parameters, rung.tokens),
            rung.session.plan[PRETRAIN].fingerprint,
        )
        for rung, loss, left_out_law in zip(
            ladder.rungs, losses, left_out_laws, strict=True
        )
    ]
    relative_errors = np.array([rung.left_out / rung.loss - 1 for rung in rungs])
    flops = FLOPS_PER_WEIGHT_AND_TOKEN * target.parameters * target.tokens
    return LadderResults(
        rungs,
        parameter_intervals(law, left_out_laws),
        root_mean_square(relative_errors),
        PredictedTarget(
            target.parameters,
            target.tokens,
            ladder.set_tokens,
            predicted,
            measured,
            None if measured is None else predicted.value / measured - 1,
        ),
        law.best_parameters(flops),
    )
