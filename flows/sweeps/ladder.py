"""A ladder: small trainings whose losses, by a fitted law, predict that of the manifest's own training."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TextIO, cast

from gristmill.flows.running.launch import interrupt
from gristmill.flows.running.run import Observer
from gristmill.flows.running.session import Session, open_session
from gristmill.flows.running.terminal import LastingStream, TerminalObserver, plain_console
from gristmill.flows.stages.registry import PRETRAIN
from gristmill.flows.sweeps.grid import SweepError
from gristmill.flows.sweeps.proxies import needed_of, run_recorded
from gristmill.flows.sweeps.scaling_law import (
    FLOPS_PER_WEIGHT_AND_TOKEN,
    LEAST_RUNS,
    described,
    fit_scaling_law,
    jackknife,
    left_out,
)
from gristmill.train.loop.batch_plan import plan_of
from gristmill.train.loop.stopping import held_out_loss


@dataclass(frozen=True)
class Rung:
    """A training of a ladder, or the one that it is to predict.

    Attributes:
        name: its size and tokens per weight, as they were asked for.
        parameters: weights in the layers, N.
        tokens: that it reads, D.
        session: its run, up to the training.
    """

    name: str
    parameters: int
    tokens: int
    session: Session


@dataclass(frozen=True)
class Ladder:
    """The trainings, the smallest first, and the one to predict; `set_tokens` is what their set has."""

    rungs: tuple[Rung, ...]
    target: Rung
    set_tokens: int


def plan_ladder(
    manifest_file: str, sizes: Sequence[str], ratios: Sequence[float], overrides: Sequence[str], store: str | None
) -> Ladder:
    """Derive the trainings by the size dial, and check them before any work.

    Args:
        manifest_file: the manifest; its own training is the target.
        sizes: as `pretrain.size` has them.
        ratios: tokens per weight of each size.
        overrides: settings that replace the manifest's.
        store: where the outputs are.

    Raises:
        SweepError: the manifest's size does not come from the dial, it holds nothing out, or the trainings are too few,
            of one size, or read more than the set has.
        gristmill.mixtures.load.ManifestError: the manifest is wrong, or a size is.
    """
    target = _rung("target", manifest_file, overrides, store)
    manifest = target.session.manifest
    assert manifest.pretrain is not None
    assert manifest.mix is not None
    if manifest.pretrain.size is None and manifest.pretrain.depth is None:
        raise SweepError(
            f"{manifest_file}: a ladder's trainings follow from the dial that the target's follow from; "
            "give pretrain.size (or depth) in place of the shape, batch, rate and steps"
        )
    if not manifest.mix.validation:
        raise SweepError("mix.validation is 0, so that there is no held-out loss to predict; raise it")
    rungs = tuple(
        sorted(
            (
                _rung(
                    f"{size} x {ratio:g}",
                    manifest_file,
                    [
                        *overrides,
                        f"pretrain.size={size}",
                        "pretrain.depth=null",
                        f"pretrain.tokens_per_parameter={ratio:g}",
                        "pretrain.steps=null",
                        "pretrain.early_stopping=null",
                        "merge=null",
                    ],
                    store,
                )
                for size in dict.fromkeys(sizes)
                for ratio in dict.fromkeys(ratios)
            ),
            key=lambda one: (one.parameters, one.tokens),
        )
    )
    _check(rungs, len(dict.fromkeys(sizes)), manifest.mix.tokens)
    return Ladder(rungs, target, manifest.mix.tokens)


def _rung(name: str, manifest_file: str, overrides: Sequence[str], store: str | None) -> Rung:
    session = open_session(manifest_file, list(overrides), store)
    manifest = session.manifest
    if manifest.mix is None or manifest.pretrain is None:
        raise SweepError(f"{manifest_file} has no `mix:` and `pretrain:` sections; a ladder predicts a pre-training")
    length = manifest.mix.sequence_length
    tokens = plan_of(manifest.pretrain, length).positions(manifest.pretrain.steps)[0] * length
    needed = needed_of(session.plan, PRETRAIN)
    return Rung(
        name,
        manifest.pretrain.model.layer_weights,
        tokens,
        replace(session, plan={stage: node for stage, node in session.plan.items() if stage in needed}),
    )


def _check(rungs: Sequence[Rung], sizes: int, set_tokens: int) -> None:
    shapes = len({one.parameters for one in rungs})
    if shapes < sizes:
        raise SweepError(
            f"{sizes} sizes come out as {shapes} shape{'s' if shapes > 1 else ''}: the nearest depths are "
            "the same, or pretrain.model says the width; give sizes that are further apart, or remove it"
        )
    if len({(one.parameters, one.tokens) for one in rungs}) < LEAST_RUNS or shapes < 2 or len(rungs) == shapes:
        raise SweepError(
            f"{len(rungs)} trainings of {shapes} size{'s' if shapes > 1 else ''}: the law has five "
            f"numbers, so that a ladder needs at least {LEAST_RUNS} trainings, of two sizes and two "
            "budgets; give more of --sizes or --tokens-per-parameter"
        )
    most = max(rungs, key=lambda one: one.tokens)
    if most.tokens > set_tokens:
        raise SweepError(
            f"{most.name}: reads {most.tokens:,} tokens, and the set has {set_tokens:,}: the law is of "
            f"text that is read once; set mix.tokens to at least {most.tokens}, or lower "
            "--tokens-per-parameter"
        )


def climb(ladder: Ladder, shown: TextIO) -> list[float]:
    """Train what is not trained yet; returns the held-out loss of each rung, in nats per token.

    Args:
        ladder: what to train.
        shown: where to say how it goes.

    Raises:
        gristmill.flows.running.run.StageFailedError: a stage failed.
        KeyboardInterrupt: by the user, or SIGTERM; the same command resumes it.
    """
    console = plain_console(cast(TextIO, LastingStream(shown)))
    observer = TerminalObserver(console)
    previous = signal.signal(signal.SIGTERM, interrupt)
    losses: list[float] = []
    try:
        for rung in ladder.rungs:
            console.print(f"training {len(losses) + 1} of {len(ladder.rungs)}: {rung.name}", style="bold")
            losses.append(train_rung(rung, observer))
        return losses
    finally:
        observer.stop_bar()
        signal.signal(signal.SIGTERM, previous)


def train_rung(rung: Rung, observer: Observer) -> float:
    """Run the stages of a rung that are not committed yet; returns its held-out loss."""
    run_recorded(rung.session, observer)
    loss = measured_loss(rung)
    if loss is None:
        raise SweepError(f"{rung.name}: nothing was held out; raise mix.validation")
    return loss


def measured_loss(rung: Rung) -> float | None:
    """The held-out loss at the end of a training, over all sources; None where it is not committed."""
    folder = rung.session.committed(PRETRAIN)
    return None if folder is None else held_out_loss(folder.manifest()["summary"])


def analyse_ladder(ladder: Ladder, losses: Sequence[float]) -> dict[str, Any]:
    """Fit the law, predict the target, and compare with it where it was trained.

    Returns:
        `rungs` (name, parameters, tokens, loss, `fitted` and `left_out`: what the law says with and without it),
        `law` (each number with `value`, `low`, `high`), `error` (root mean square of `left_out` over the losses, as a
        share), `target` (parameters, tokens, `set_tokens`, `predicted` with its interval, `measured`, `off` as a share
        of the measured loss, or None), and `best_parameters` for the target's arithmetic.
    """
    n, d = [float(one.parameters) for one in ladder.rungs], [float(one.tokens) for one in ladder.rungs]
    law = fit_scaling_law(n, d, losses)
    without = left_out(law, n, d, losses)
    target = ladder.target
    guesses = [one(size, tokens) for one, size, tokens in zip(without, n, d, strict=True)]
    predicted = jackknife(law, without, lambda one: one(target.parameters, target.tokens))
    measured = measured_loss(target)
    rungs: list[Mapping[str, Any]] = [
        {
            "name": one.name,
            "parameters": one.parameters,
            "tokens": one.tokens,
            "loss": loss,
            "fitted": law(one.parameters, one.tokens),
            "left_out": guess,
            "fingerprint": one.session.plan[PRETRAIN].fingerprint,
        }
        for one, loss, guess in zip(ladder.rungs, losses, guesses, strict=True)
    ]
    flops = FLOPS_PER_WEIGHT_AND_TOKEN * target.parameters * target.tokens
    return {
        "rungs": rungs,
        "law": described(law, without),
        "error": (sum((guess / loss - 1) ** 2 for guess, loss in zip(guesses, losses, strict=True)) / len(losses))
        ** 0.5,
        "target": {
            "parameters": target.parameters,
            "tokens": target.tokens,
            "set_tokens": ladder.set_tokens,
            "predicted": asdict(predicted),
            "measured": measured,
            "off": None if measured is None else predicted.value / measured - 1,
        },
        "best_parameters": law.best_parameters(flops),
    }
