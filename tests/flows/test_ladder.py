"""Ladders: a planted law is recovered, the dial derives the runs, and the target is
predicted and then compared.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gristmill.flows.running.events import Subscriber
from gristmill.flows.sweeps import ladder
from gristmill.flows.sweeps.ladder import Rung
from gristmill.flows.sweeps.scaling_law import (
    ScalingLaw,
    fit_scaling_law,
    jackknife,
    left_out,
    parameter_intervals,
)
from gristmill.mixtures.scaling.size_rules import model_of
from tests.commands import call

CHINCHILLA = ScalingLaw(1.69, 406.4, 0.34, 410.7, 0.28)
"""Hoffmann et al. 2022, equation 10."""
SIZES, RATIOS = (1e6, 3e6, 1e7), (5, 20, 60)


def trainings(
    law: ScalingLaw, noise: float = 0.0, seed: int = 0
) -> tuple[list[float], list[float], list[float]]:
    pairs = [(size, size * ratio) for size in SIZES for ratio in RATIOS]
    noise_samples = np.random.default_rng(seed).standard_normal(len(pairs))
    return (
        [n for n, _ in pairs],
        [d for _, d in pairs],
        [
            law(n, d) * (1 + noise * sample)
            for (n, d), sample in zip(pairs, noise_samples, strict=True)
        ],
    )


@pytest.mark.parametrize("law", [CHINCHILLA, ScalingLaw(0.8, 12.0, 0.15, 3000.0, 0.5)])
def test_fit_recovers_a_planted_law(law: ScalingLaw) -> None:
    fitted = fit_scaling_law(*trainings(law))
    for name in ("floor", "alpha", "beta"):
        assert getattr(fitted, name) == pytest.approx(getattr(law, name), rel=1e-3)
    for name in ("a", "b"):
        assert getattr(fitted, name) == pytest.approx(getattr(law, name), rel=1e-2)
    assert fitted(1e9, 2e10) == pytest.approx(law(1e9, 2e10), rel=1e-4)


def test_fit_is_robust_to_one_outlier() -> None:
    n, d, losses = trainings(CHINCHILLA)
    losses[4] *= 1.2
    assert fit_scaling_law(n, d, losses)(3e7, 6e8) == pytest.approx(
        CHINCHILLA(3e7, 6e8), rel=2e-3
    )


@pytest.mark.slow
def test_noise_gives_a_prediction_with_an_interval_around_the_truth() -> None:
    n, d, losses = trainings(CHINCHILLA, noise=0.002, seed=3)
    law = fit_scaling_law(n, d, losses)
    leave_one_out = left_out(law, n, d, losses)
    assert len(leave_one_out) == 9
    predicted = jackknife(law(3e7, 6e8), [fitted(3e7, 6e8) for fitted in leave_one_out])
    assert predicted.low < CHINCHILLA(3e7, 6e8) < predicted.high
    assert predicted.high - predicted.low < 0.3
    numbers = parameter_intervals(law, leave_one_out)
    assert all(
        estimate.low <= estimate.value <= estimate.high for estimate in numbers.values()
    )
    assert numbers["a"].value == pytest.approx(law.a)


def test_compute_optimal_size_has_the_lowest_loss() -> None:
    flops = 1e19
    best = CHINCHILLA.best_parameters(flops)
    assert best is not None
    least_loss = CHINCHILLA(best, flops / 6 / best)
    for parameters in (best / 1.1, best * 1.1):
        assert CHINCHILLA(parameters, flops / 6 / parameters) > least_loss
    assert ScalingLaw(1.0, 2.0, 1e-9, 3.0, 0.3).best_parameters(flops) is None


MANIFEST = """\
name: small
sources: {a: {path: a.txt}}
tokenizer: {vocab_size: 300}
mix: {tokens: 100000, sequence_length: 32, validation: 0.1}
pretrain: {size: 500k, tokens_per_parameter: 0.5}
"""


def asked(*arguments: str, code: int = 0) -> str:
    result = call("ladder", "m.yaml", *arguments, "--store=store", code=code)
    return result.output


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("Some prose.")
    Path("m.yaml").write_text(MANIFEST)


@pytest.mark.slow
@pytest.mark.usefixtures("manifest")
def test_ladder_reports_the_error_of_its_prediction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every training has the loss of a planted law; the trained target has one percent
    more.
    """
    law, trained = ScalingLaw(2.0, 30.0, 0.3, 20.0, 0.25), []

    def train(rung: Rung, emit: Subscriber) -> float:
        section = rung.session.manifest.pretrain
        assert section is not None
        assert list(rung.session.plan) == [
            "ingest",
            "tokenizer",
            "tokenize",
            "mix",
            "pretrain",
        ]
        trained.append(
            (
                section.model.layer_weights,
                section.steps * section.global_batch_size * 32,
            )
        )
        return law(rung.parameters, rung.tokens)

    monkeypatch.setattr(ladder, "train_rung", train)
    options = (
        "--sizes=50k,400k",
        "--tokens-per-parameter=0.02,0.06,0.2",
        "--json",
    )
    outcome = call("ladder", "m.yaml", *options, "--store=store")
    report = json.loads(outcome.stdout)  # stdout is only JSON: progress goes to stderr
    assert [
        line for line in outcome.stderr.splitlines() if line.startswith("training")
    ] == [
        f"training {number} of 6: {rung_row['name']}"
        for number, rung_row in enumerate(report["rungs"], start=1)
    ]
    assert trained == [
        (rung_row["parameters"], rung_row["tokens"]) for rung_row in report["rungs"]
    ]
    assert [rung_row["parameters"] for rung_row in report["rungs"]] == [
        depth_weights(1)
    ] * 3 + [depth_weights(2)] * 3
    for rung_row, ratio in zip(report["rungs"], (0.02, 0.06, 0.2) * 2, strict=True):
        # rounded to whole steps of whole batches
        assert rung_row["tokens"] == pytest.approx(
            ratio * rung_row["parameters"], rel=0.35
        )
    target = report["target"]
    assert target["measured"] is None
    assert target["predicted"]["value"] == pytest.approx(
        law(target["parameters"], target["tokens"]), rel=1e-3
    )
    monkeypatch.setattr(
        ladder, "measured_loss", lambda rung: 1.01 * law(rung.parameters, rung.tokens)
    )
    output = asked(*options[:-1])
    assert "off by -0.99%" in " ".join(output.split())
    assert "the target reads its set of 100,000 tokens more than once" in " ".join(
        output.split()
    )
    assert json.loads(Path("m-ladder.json").read_text())["rungs"] == report["rungs"]
    assert "make no difference" not in output


def depth_weights(depth: int) -> int:
    return model_of(depth, {}).layer_weights


@pytest.mark.usefixtures("manifest")
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            ("--sizes=50k", "--tokens-per-parameter=0.02,0.06"),
            "not 2 of 1 sizes",
        ),
        (
            ("--sizes=50k,400k", "--tokens-per-parameter=0.02,0.06"),
            "a ladder needs at least 6 trainings",
        ),
        (
            ("--sizes=50k,51k,400k", "--tokens-per-parameter=0.02,0.06,0.2"),
            "3 sizes give 2 shapes",
        ),
        (
            ("--sizes=50k,51k,400k", "--tokens-per-parameter=0.02,0.06"),
            "3 sizes give 2 shapes",
        ),
        (
            ("--sizes=50k,400k", "--tokens-per-parameter=1,2,3"),
            "set mix.tokens to at least",
        ),
        (
            ("--sizes=50k,400k", "--tokens-per-parameter=a"),
            "'a' is not a list of numbers",
        ),
        (("--sizes=x,400k", "--tokens-per-parameter=1,2,3"), "pretrain.size"),
        (
            (
                "--sizes=50k,400k",
                "--tokens-per-parameter=1",
                "--set=pretrain.size=null",
                "--set=pretrain.tokens_per_parameter=null",
                "--set=pretrain.steps=4",
            ),
            "give pretrain.size",
        ),
        (
            (
                "--sizes=50k,400k",
                "--tokens-per-parameter=1",
                "--set=mix.validation=0",
            ),
            "mix.validation is 0",
        ),
    ],
)
def test_ladders_without_a_fit_are_rejected_before_any_work(
    options: tuple[str, ...], complaint: str
) -> None:
    assert complaint in " ".join(asked(*options, code=2).split())
    assert not Path("store").exists()
