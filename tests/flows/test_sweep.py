"""Sweeps: the choice of mixtures, the analysis of their measurements, and proxies that
differ in nothing else.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.core.lease import acquire
from gristmill.flows.running.run import StageFailedError
from gristmill.flows.running.session import Session
from gristmill.flows.sweeps import proxies
from gristmill.flows.sweeps.grid import Grid, SweepError, mixtures_of, read_settings
from gristmill.flows.sweeps.proxies import (
    Proxy,
    Sweep,
    TrainedGroup,
    TriedMixture,
    check_held_out,
    plan_sweep,
    task_errors,
    train_proxies,
)
from gristmill.flows.sweeps.results import (
    analyse,
    fit,
    least_within_hull,
    members_of,
)
from gristmill.flows.sweeps.run_tables import read_runs, write_runs
from gristmill.flows.sweeps.sweep_report import (
    describe_suggestion,
    print_results,
    suggested_text,
    write_results,
)
from gristmill.mixtures.loader import parse_manifest
from gristmill.tokenize.packed_files import ShardEntry
from tests.jsonl import write_jsonl

OWN = {"prose": 3.0, "code": 1.0, "maths": 1.0}
MANIFEST = """\
name: small
sources:
  prose: {path: a.txt, weight: 3}   # most of it
  code: {path: b.txt}
  maths: {path: c.txt}
tokenizer: {vocab_size: 400}
mix: {tokens: 9000, sequence_length: 64}
pretrain: {steps: 900, global_batch_size: 4, seed: 5}
"""


MIXTURES = [
    {"prose": share, "code": round(1 - share, 6)} for share in (0.1, 0.3, 0.5, 0.7, 0.9)
]


def three(*shares: float) -> dict[str, float]:
    return dict(zip(OWN, shares, strict=True))


def test_lists_grids_and_draws_are_normalized_and_deduplicated(tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text(
        "mixtures: [{prose: 1}, {prose: 2, code: 2}]\ngrid: {prose: [1, 3], code: "
        "[1]}\ndirichlet: {samples: 2}\n"
    )
    tried = mixtures_of(read_settings(tmp_path / "grid.yaml", Grid), OWN)
    assert tried[:3] == [three(1, 0, 0), three(0.5, 0.5, 0), three(0.75, 0.25, 0)]
    assert len(tried) == 5
    for mixture in tried:
        assert sum(mixture.values()) == pytest.approx(1, abs=1e-5)
    (tmp_path / "list.yaml").write_text("- {prose: 1}\n- {code: 1}\n")
    assert mixtures_of(read_settings(tmp_path / "list.yaml", Grid), OWN) == [
        three(1, 0, 0),
        three(0, 1, 0),
    ]


def test_reused_sources_keep_their_ratios_and_count_as_one_source() -> None:
    """Prose and maths are 3 to 1, as in the earlier mixture, whatever code gets."""
    grid = Grid.model_validate(
        {
            "reuse": {"prose": 0.6, "maths": 0.2},
            "mixtures": [{"code": 1}],
            "grid": {"reused": [1], "code": [0, 0.25, 1]},
            "dirichlet": {"samples": 3},
        }
    )
    tried = mixtures_of(grid, OWN)
    assert tried[:4] == [
        three(0, 1, 0),
        three(0.75, 0, 0.25),
        three(0.6, 0.2, 0.2),
        three(0.375, 0.5, 0.125),
    ]
    for mixture in tried[4:]:
        assert mixture["prose"] == pytest.approx(3 * mixture["maths"], abs=1e-5)
    with pytest.raises(SweepError, match="poetry"):
        mixtures_of(grid.model_copy(update={"reuse": {"poetry": 1.0}}), OWN)
    with pytest.raises(SweepError, match="prose"):
        mixtures_of(grid.model_copy(update={"mixtures": ({"prose": 1.0},)}), OWN)
    tried_shares = np.array([list(mixture.values()) for mixture in tried])
    assert members_of(tried_shares).tolist() == [[1, 0], [0, 1], [1, 0]]
    values = 1.0 + np.exp(tried_shares @ [-1.0, 0.5, -1.0])
    fitted = fit(tried_shares[:5], values[:5])
    assert fitted.predict(tried_shares[5:]) == pytest.approx(values[5:], abs=0.02)


def drawn(number: int, **grid: Any) -> list[dict[str, float]]:
    dirichlet = {"samples": number, "concentration": 3.0}
    return mixtures_of(Grid.model_validate({**grid, "dirichlet": dirichlet}), OWN)


@given(st.integers(1, 6), st.integers(1, 6))
def test_draws_are_independent_of_their_number(few: int, more: int) -> None:
    listed = [three(1, 0, 0), three(0, 1, 0)]
    longer = drawn(few + more, mixtures=listed)
    assert longer[: 2 + few] == drawn(few, mixtures=listed)


def test_draws_lie_around_the_manifests_own_weights() -> None:
    mean = np.mean([list(mixture.values()) for mixture in drawn(400)], axis=0)
    assert mean == pytest.approx([0.6, 0.2, 0.2], abs=0.03)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "mixtures: [{poetry: 1}, {prose: 1}]",
            "poetry.*prose, code, maths",
        ),
        ("- {prose: 1}\n- {prose: 2}", "a sweep needs at least 2 mixtures, not 1"),
        ("- {prose: 0}\n- {prose: 2}", "all weights of a mixture are 0"),
        ("mixes: []", "mixes: unknown key.*its keys are mixtures, grid, dirichlet"),
        (
            "- {prose: -1}",
            "mixtures.0.prose: input should be greater than or equal to 0",
        ),
    ],
)
def test_invalid_grids_are_rejected(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "grid.yaml").write_text(text)
    with pytest.raises(SweepError, match=complaint):
        mixtures_of(read_settings(tmp_path / "grid.yaml", Grid), OWN)


def test_target_source_without_held_out_text_is_rejected_after_the_first_mixture() -> (
    None
):
    held_out = {
        name: ShardEntry(file="", rows=rows, sha256="", beside={})
        for name, rows in (("prose", 3), ("code", 0))
    }
    check_held_out(held_out, {"prose": 1.0, "code": 0.0, "maths": 0.0})
    with pytest.raises(
        SweepError, match=r"no held-out text of code, maths; raise mix\.validation"
    ):
        check_held_out(held_out, {"prose": 0.5, "code": 0.25, "maths": 0.25})


def shares(number: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet([1.0, 1.0, 1.0], number)


@pytest.mark.slow
def test_model_with_the_lowest_leave_one_out_error_is_chosen() -> None:
    tried, law = shares(14), np.array([-3.0, 0.5, -0.4])
    curved = fit(tried, 0.8 + np.exp(tried @ law))
    assert curved.model == "law"
    assert curved.errors["law"] < curved.errors["process"] < curved.errors["mean"]
    elsewhere = shares(5, seed=1)
    assert curved.predict(elsewhere) == pytest.approx(
        0.8 + np.exp(elsewhere @ law), abs=0.02
    )
    noise = fit(tried, 2.0 + 0.1 * np.random.default_rng(2).standard_normal(14))
    assert noise.errors[noise.model] <= noise.errors["mean"]


def test_too_few_mixtures_fall_back_to_the_mean() -> None:
    assert set(fit(shares(3), np.array([1.0, 2.0, 3.0])).errors) == {"mean"}
    assert set(fit(shares(4), np.array([1.0, 2.0, 3.0, 4.0])).errors) == {
        "mean",
        "process",
    }


def test_process_fits_interactions_of_sources() -> None:
    tried, elsewhere = shares(60), shares(20, seed=1)

    def values(where: np.ndarray) -> np.ndarray:
        return 2.0 - np.sqrt(where[:, 0] * where[:, 1])

    fitted = fit(tried, values(tried))
    assert fitted.model == "process"
    assert fitted.predict(elsewhere) == pytest.approx(values(elsewhere), abs=0.02)
    assert len(fitted.left_out) == 60


@pytest.mark.parametrize(
    ("optimum", "most", "weights"),
    [
        ([1.0, 0.0, 0.0], 1.0, [0.8, 0.1, 0.1]),
        ([0.3, 0.4, 0.3], 1.0, [0.3, 0.4, 0.3]),
        ([0.3, 0.4, 0.3], 0.2, [0.2, 0.45, 0.35]),
        ([0.3, 0.4, 0.3], 0.05, None),
    ],
)
def test_suggestion_lies_within_the_tried_mixtures(
    optimum: list[float], most: float, weights: list[float] | None
) -> None:
    corners = np.array([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]])

    def distance(where: np.ndarray) -> np.ndarray:
        return np.asarray(((where - optimum) ** 2).sum(axis=1))

    solution = least_within_hull(distance, corners, np.array([most, 1.0, 1.0]))
    if weights is None:
        assert solution is None
    else:
        assert solution is not None
        assert solution[0] == pytest.approx(weights, abs=1e-3)
        assert solution[1] == pytest.approx(distance(np.array([weights]))[0], abs=1e-5)


def sweep(
    mixtures: list[dict[str, float]],
    seeds: int = 1,
    target: dict[str, float] | None = None,
) -> Sweep:
    return Sweep(
        "small.yaml",
        (),
        None,
        tuple(mixtures),
        tuple(range(seeds)),
        {"prose": 0.5, "code": 0.5},
        target or {"prose": 0.5, "code": 0.5},
    )


def outcome(
    number: int, weights: dict[str, float], *per_seed: dict[str, float]
) -> TriedMixture:
    proxies = tuple(Proxy(seed, "f", values) for seed, values in enumerate(per_seed))
    return TriedMixture(number, weights, TrainedGroup("mixture", proxies))


def lawful(mixture: dict[str, float], wiggle: float = 0.0) -> dict[str, float]:
    """Bits per byte by a law with its optimum in the middle."""
    return {
        "prose": 2 + np.exp(-3 * mixture["prose"]) + wiggle,
        "code": 1 + np.exp(-3 * mixture["code"]) - wiggle,
    }


def test_results_have_the_spread_between_runs_the_weighted_mean_and_a_suggestion_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "64")
    outcomes = [
        outcome(number, mixture, *(lawful(mixture, wiggle) for wiggle in (0.0, 0.002)))
        for number, mixture in enumerate(MIXTURES)
    ]
    analysis = analyse(sweep(MIXTURES, 2), outcomes)
    first = analysis.mixtures[0]
    assert first.bits_per_byte["prose"].mean == pytest.approx(2 + np.exp(-0.3) + 0.001)
    assert first.bits_per_byte["prose"].spread == pytest.approx(0.002 / np.sqrt(2))
    assert first.target.mean == pytest.approx(1.5 + (np.exp(-0.3) + np.exp(-2.7)) / 2)
    assert first.target.spread == pytest.approx(0, abs=1e-12)
    assert analysis.suggestion is not None
    assert analysis.suggestion.weights["prose"] == pytest.approx(0.5, abs=0.02)
    print_results(analysis)
    assert capsys.readouterr().out.splitlines()[:3] == [
        "mixture        bits/byte  source  weight  bits/byte of it",
        "      2  1.7231 ± 0.0000  prose    0.500  2.2241 ± 0.0014",
        "                          code     0.500  1.2221 ± 0.0014",
    ]
    manifest = tmp_path / "small.yaml"
    manifest.write_text(MANIFEST.replace("  maths: {path: c.txt}\n", ""))
    json_file, suggested = write_results(str(manifest), analysis)
    assert json_file.exists()
    loaded = parse_manifest(suggested.read_text(), str(suggested))
    assert loaded.sources["prose"].weight == analysis.suggestion.weights["prose"]
    assert "# most of it" in suggested.read_text()


def test_suggestion_respects_max_epochs_of_the_full_set() -> None:
    """Of 100 mixed tokens at most 30 may be prose, which is 15 tokens twice."""
    supply = {
        "requested": {"prose": {"max_epochs": 2}, "code": {"max_epochs": 4}},
        "realised": {
            "prose": {"available_tokens": 15},
            "code": {"available_tokens": 100},
        },
    }
    outcomes = []
    for number, mixture in enumerate(MIXTURES):
        tried = outcome(number, mixture, lawful(mixture))
        trained = replace(tried.trained, packed=supply)
        outcomes.append(replace(tried, trained=trained))
    analysis = analyse(replace(sweep(MIXTURES), tokens=100), outcomes)
    assert analysis.limits == {"prose": 0.3, "code": 1.0}
    assert analysis.suggestion is not None
    assert analysis.suggestion.weights == pytest.approx(
        {"prose": 0.3, "code": 0.7}, abs=1e-4
    )
    assert analysis.suggestion.best_tried.mixture == 1
    described = describe_suggestion(analysis)
    assert "prose (0.300) at the maximum that max_epochs allows" in described
    infeasible = analyse(replace(sweep(MIXTURES), tokens=1000), outcomes)
    assert infeasible.suggestion is None
    assert "prose 0.030, code 0.400; raise a max_epochs" in str(infeasible.refusal)


def planned_sweep(
    folder: Path,
    grid: str = "- {prose: 1}\n- {prose: 1, maths: 1}\n",
    seeds: int = 1,
    manifest: str = MANIFEST,
    target: dict[str, float] | None = None,
) -> Sweep:
    """A sweep of 10 steps, planned for files in a folder."""
    for name in ("a.txt", "b.txt", "c.txt", "quiz.jsonl", "chats.jsonl"):
        (folder / name).write_text("{}")
    (folder / "small.yaml").write_text(manifest)
    (folder / "grid.yaml").write_text(grid)
    return plan_sweep(
        str(folder / "small.yaml"),
        folder / "grid.yaml",
        10,
        seeds,
        {"width": 64},
        ["mix.validation=0.1"],
        str(folder / "store"),
        target,
    )


def test_task_metric_can_be_the_target(tmp_path: Path) -> None:
    write_jsonl(
        tmp_path / "metrics.jsonl",
        [
            {"step": 5, "tasks": {"quiz": {"acc": 0.1, "brier_score": 0.9}}},
            {
                "step": 9,
                "tasks": {
                    "quiz": {"acc": 0.2, "brier_score": 0.75},
                    "gap": {"acc": 0.0, "perplexity": math.exp(3.5)},
                    "text": {"bits_per_byte": 2.5, "byte_perplexity": 5.6},
                    "hellaswag": {"acc": 0.25, "acc_norm": 0.5},
                },
            },
            {"step": 9, "loss": 2.0},
        ],
    )
    assert task_errors(tmp_path / "metrics.jsonl") == {
        "quiz": 0.75,
        "gap": pytest.approx(3.5),
        "text": 2.5,
        "hellaswag": 0.75,
    }

    outcomes = []
    for number, weights in enumerate(MIXTURES):
        tasks = {"quiz": 0.3 + np.exp(-2 * weights["code"])}
        proxy = Proxy(0, "f", {"prose": 2.0, "code": 1.0}, tasks)
        outcomes.append(TriedMixture(number, weights, TrainedGroup("m", (proxy,))))
    target = {"prose": 0.0, "code": 0.0, "quiz": 1.0}
    analysis = analyse(sweep(MIXTURES, target=target), outcomes)
    assert analysis.suggestion is not None
    assert analysis.suggestion.weights == pytest.approx(
        {"prose": 0.1, "code": 0.9}, abs=1e-4
    )

    manifest = MANIFEST.replace(
        "seed: 5}", "seed: 5, tasks: [{name: quiz, path: quiz.jsonl, kind: cloze}]}"
    )
    planned = planned_sweep(
        tmp_path, manifest=manifest, target={"quiz": 3.0, "code": 1.0}
    )
    assert planned.target == {"prose": 0.0, "code": 0.25, "maths": 0.0, "quiz": 0.75}
    assert planned.tokens == 9000
    with pytest.raises(SweepError, match=r"riddle.*prose, code, maths, quiz"):
        planned_sweep(tmp_path, manifest=manifest, target={"riddle": 1.0})


def test_fit_no_better_than_the_mean_suggests_nothing() -> None:
    outcomes = [
        outcome(number, mixture, {"prose": 2 + 0.1 * (-1) ** number, "code": 1.0})
        for number, mixture in enumerate(MIXTURES)
    ]
    analysis = analyse(sweep(MIXTURES, target={"prose": 1.0, "code": 0.0}), outcomes)
    assert analysis.suggestion is None
    assert "leave-one-out error of the fit" in describe_suggestion(analysis)


def test_failed_mixtures_are_listed() -> None:
    mixtures = [three(1, 0, 0), three(0, 1, 0), three(0.5, 0.5, 0)]
    failed = TriedMixture(2, mixtures[2], TrainedGroup("m", error="too few tokens"))
    tried = [
        outcome(number, mixtures[number], {"prose": 2.0, "code": 1.0})
        for number in range(2)
    ]
    analysis = analyse(sweep(mixtures), [*tried, failed])
    assert [failure.mixture for failure in analysis.failed] == [2]
    assert "2 mixtures are too few to fit a model" in str(analysis.refusal)


def test_proxies_differ_in_weights_and_seed_only_and_read_their_tokens_once(
    tmp_path: Path,
) -> None:
    planned = planned_sweep(tmp_path, seeds=2)
    assert planned.seeds == (5, 6)
    assert planned.target == three(0.6, 0.2, 0.2)
    with pytest.raises(SweepError, match="poetry"):
        planned_sweep(tmp_path, target={"poetry": 1.0})
    first_proxy, second_proxy = (
        planned.open(planned.request(*place).overrides) for place in ((0, 5), (1, 6))
    )
    assert first_proxy.manifest.mix is not None
    assert first_proxy.manifest.mix.tokens == 10 * 4 * 64
    assert first_proxy.manifest.pretrain is not None
    pretrain = first_proxy.manifest.pretrain
    assert (pretrain.steps, pretrain.model.width) == (10, 64)
    sessions = (first_proxy, second_proxy, planned.open((), "tokenize"))
    assert len({each.plan["tokenize"].fingerprint for each in sessions}) == 1
    recipes = [
        {**session.plan["pretrain"].recipe} for session in (first_proxy, second_proxy)
    ]
    assert [recipe.pop("seed") for recipe in recipes] == [5, 6]
    assert recipes[0] == recipes[1]
    mixes = [session.plan["mix"].recipe for session in (first_proxy, second_proxy)]
    assert mixes[0] != mixes[1]
    weights = {"prose": 0.5, "code": 0.25, "maths": 0.25}
    suggested = suggested_text(planned.manifest_file, weights)
    assert suggested.count("weight: 0.25") == 2


def test_proxy_plans_no_data_of_later_trainings(tmp_path: Path) -> None:
    sft = "sft: {data: [{path: chats.jsonl, format: messages}], steps: 3}\n"
    planned = planned_sweep(tmp_path, manifest=MANIFEST + sft)
    proxy = planned.open(planned.request(0, 5).overrides)
    assert list(proxy.plan) == ["ingest", "tokenizer", "tokenize", "mix", "pretrain"]


def test_proxy_that_another_run_makes_waits_for_the_free_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = "- {prose: 1}\n- {code: 1}\n- {maths: 1}\n"
    planned = planned_sweep(tmp_path, grid, seeds=2)
    requests = [planned.request(number, seed) for number in range(3) for seed in (0, 1)]
    paths = [
        planned.open(entry.overrides).folder("pretrain").path for entry in requests
    ]
    lease = acquire(paths[0] / "lease", lambda owner: None, lambda: True)
    assert lease is not None
    trained: list[int] = []

    def run(session: Session, *args: Any) -> None:
        trained.append(paths.index(session.folder("pretrain").path))
        if session.manifest.mix.weights["code"]:  # type: ignore[union-attr,index]
            raise StageFailedError("too little code")

    monkeypatch.setattr(proxies, "run_in_sequence", run)
    monkeypatch.setattr(proxies, "measured", lambda session, seed, weights: seed)
    monkeypatch.setattr(proxies, "packed_manifest", lambda session: {"rows": 1})
    groups = train_proxies(planned, requests, lambda event: None)
    # The other seed of the failed mixture is not tried.
    assert trained == [1, 2, 4, 5, 0]
    assert {group.name: group.proxies for group in groups} == {
        "mixture 0": (0, 1),
        "mixture 1": (),
        "mixture 2": (0, 1),
    }
    assert groups[1].error == "too little code"
    lease.release()


def test_written_runs_read_back_as_further_mixtures_with_their_seeds(
    tmp_path: Path,
) -> None:
    mixtures = [{"prose": share, "code": 1 - share} for share in (0.25, 0.5, 0.75)]
    planned = sweep(mixtures, 2)
    outcomes = [
        outcome(
            number,
            mixture,
            *({"prose": number + seed / 8, "code": 1.0} for seed in range(2)),
        )
        for number, mixture in enumerate(mixtures)
    ]
    write_runs(tmp_path, analyse(planned, outcomes))
    again = read_runs(tmp_path, planned)
    assert [entry.mixture for entry in again] == [3, 4, 5]
    assert [entry.weights for entry in again] == mixtures
    assert [[proxy.values for proxy in entry.trained.proxies] for entry in again] == [
        [proxy.values for proxy in entry.trained.proxies] for entry in outcomes
    ]
    analysed = analyse(planned, outcomes + again)
    assert [mixture.mixture for mixture in analysed.mixtures] == list(range(6))


def write_tables(folder: Path, ratios: str, metrics: str) -> None:
    (folder / "ratios.csv").write_text(ratios)
    (folder / "metrics.csv").write_text(metrics)


def test_runs_of_other_sources_are_used_if_they_read_none_of_them(
    tmp_path: Path,
) -> None:
    """The manifest has prose and code; code is new, and maths was removed."""
    write_tables(
        tmp_path,
        "run_id,prose,maths\n1,1.0,0.0\n2,0.5,0.5\n3,1,\n",
        "run_id,name,prose,code,other\n1,first,2.0,3.0,7\n2,second,1,1,8\n",
    )
    (only,) = read_runs(tmp_path, sweep([]))
    assert only.weights == {"prose": 1.0, "code": 0.0}
    assert [proxy.values for proxy in only.trained.proxies] == [
        {"prose": 2.0, "code": 3.0}
    ]


@pytest.mark.parametrize(
    ("ratios", "metrics", "complaint"),
    [
        ("run_id,prose\n1,0.9\n", "run_id,prose,code\n1,2,3\n", "run 1 sum to 0.900"),
        ("run_id,prose\n1,1\n", "run_id,prose\n1,2\n", "no measurement of 'code'"),
        ("run_id,prose\n1,1\n", "run_id,prose,code\n2,2,3\n", "no run with"),
        ("run,prose\n1,1\n", "run_id,prose,code\n1,2,3\n", "run_id"),
        ("run_id,prose\n1,a\n", "run_id,prose,code\n1,2,3\n", "prose"),
    ],
)
def test_malformed_tables_of_runs_are_rejected(
    tmp_path: Path, ratios: str, metrics: str, complaint: str
) -> None:
    write_tables(tmp_path, ratios, metrics)
    with pytest.raises(SweepError, match=complaint):
        read_runs(tmp_path, sweep([]))
