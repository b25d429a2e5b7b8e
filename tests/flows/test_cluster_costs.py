"""Simulation of 10 and 100 TB on a cluster: totals, prices, and the shuffle of each
engine.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gristmill.flows.cli.main import app
from gristmill.flows.planning.at_scale import Extent
from gristmill.flows.planning.cluster_costs import (
    ENGINES,
    REQUESTS,
    Prices,
    asked,
    loads_of,
    plan_on_cluster,
    print_on_cluster,
)
from gristmill.mixtures.load import load_manifest

COUNTED = {
    8: {
        "files": {
            "ingest": (30, 35),
            "dedup": (263, 2192),
            "tokenize": (57, 154),
            "mix": (228, 1762),
        }
    },
    16: {
        "files": {
            "ingest": (55, 67),
            "dedup": (467, 7408),
            "tokenize": (97, 298),
            "mix": (411, 5913),
        },
        "engine": {
            "ingest": (54, 67),
            "dedup": (567, 1142),
            "tokenize": (97, 298),
            "mix": (486, 1002),
        },
    },
}
"""Requests that write or list, and that read, by number of document shards and
partitions: `gristmill bench requests`.
"""


@pytest.fixture
def manifest_file(tmp_path: Path) -> Path:
    (tmp_path / "m.yaml").write_text(
        "name: m\nsources: {web: {path: 'a.jsonl'}}\ningest: {shard_bytes: "
        "256_000_000}\nprepare: [{dedup: {}}]\n"
        "tokenizer: {vocab_size: 300}\nmix: {tokens: 1000}\n"
    )
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    return tmp_path / "m.yaml"


@pytest.mark.parametrize(
    ("size", "form"),
    [(size, form) for size, forms in COUNTED.items() for form in forms],
)
def test_request_laws_match_counted_requests(size: int, form: str) -> None:
    for step, request_counts in COUNTED[size][form].items():
        for law, number in zip(REQUESTS[form][step], request_counts, strict=True):
            assert asked(law, size, size) == pytest.approx(number, rel=0.03, abs=2), (
                step
            )
            assert min(law) >= 0


def test_costs_are_priced_per_thousand_requests_and_per_worker_hour(
    manifest_file: Path,
) -> None:
    manifest = load_manifest(manifest_file)
    (plan,) = plan_on_cluster(
        manifest, [10], ["flink"], 100, prices=Prices(1.0, 0.1, 0.5)
    )
    assert plan.shards == 39063
    for step in plan.steps:
        assert step.price == pytest.approx(step.writes / 1000 + step.reads / 10_000)
    hours = sum(step.seconds for step in plan.steps) / 3600
    assert plan.totals.hours == pytest.approx(hours)
    assert plan.totals.core_price == pytest.approx(hours * 100 * 0.5)
    (larger_cluster,) = plan_on_cluster(
        manifest, [10], ["flink"], 200, prices=Prices(1.0, 0.1, 0.5)
    )
    assert larger_cluster.totals.hours == pytest.approx(hours / 2)
    assert larger_cluster.totals.memory_bytes == plan.totals.memory_bytes


def test_shuffled_bytes_grow_linearly_while_elements_stay_bounded(
    manifest_file: Path,
) -> None:
    manifest = load_manifest(manifest_file)
    small, large = plan_on_cluster(manifest, [10, 100], ["flink"], 100)
    for small_step, large_step in zip(small.steps, large.steps, strict=True):
        assert large_step.shuffle_bytes == pytest.approx(10 * small_step.shuffle_bytes)
        assert small_step.elements <= large_step.elements <= 4096
    assert [step.shuffle_bytes > 0 for step in small.steps] == [
        False,
        True,
        False,
        True,
    ]


def test_engine_shuffle_sends_fewer_store_requests_than_file_shuffle() -> None:
    extent = Extent(1e10, 1000, shard_bytes=256_000_000)
    files, engine = (
        {
            load.step: load.reads
            for load in loads_of(extent, ENGINES[name], 100, Prices())
        }
        for name in ("local", "flink")
    )
    assert files["mix"] > 4 * engine["mix"]
    # The engine moves sketches to the partitions that compare them, without a request
    # for each shard and partition.
    assert engine["dedup"] < 50 * (extent.shards + 4096) < files["dedup"] / 100


def test_every_engine_names_the_location_of_shuffled_rows(manifest_file: Path) -> None:
    manifest = load_manifest(manifest_file)
    first_sentences = {
        plan.engine: plan.sentences[0]
        for plan in plan_on_cluster(manifest, [10], list(ENGINES), 100)
    }
    assert all(
        sentence.startswith("mix shuffles 4.88 TB")
        for sentence in first_sentences.values()
    ), first_sentences
    assert "48.8 GB in the memory of each worker" in first_sentences["dask"]
    assert first_sentences["flink"] == first_sentences["spark"]
    assert "48.8 GB on the disk of each worker" in first_sentences["flink"]


def test_the_table_fits_a_narrow_terminal(
    manifest_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "62")
    print_on_cluster(
        plan_on_cluster(load_manifest(manifest_file), [100], ["local"], 100)
    )
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 62
    assert not any("…" in line for line in lines)


def test_plan_accepts_amounts_and_engines_and_rejects_unknown_ones(
    manifest_file: Path,
) -> None:
    path = str(manifest_file)
    outcome = CliRunner().invoke(
        app,
        [
            "plan",
            path,
            "--tb",
            "10",
            "--tb",
            "100",
            "--engine",
            "flink",
            "--engine",
            "dask",
            "--workers",
            "50",
            "--json",
        ],
    )
    assert outcome.exit_code == 0, outcome.output
    assert [
        (plan["terabytes"], plan["engine"], plan["workers"])
        for plan in json.loads(outcome.stdout)
    ] == [
        (10, "flink", 50),
        (10, "dask", 50),
        (100, "flink", 50),
        (100, "dask", 50),
    ]
    unknown = CliRunner().invoke(
        app, ["plan", path, "--tb", "10", "--engine", "hadoop"]
    )
    assert (unknown.exit_code, "engines are local, dask, flink" in unknown.output) == (
        2,
        True,
    )
    assert CliRunner().invoke(app, ["plan", path, "--workers", "3"]).exit_code == 2
