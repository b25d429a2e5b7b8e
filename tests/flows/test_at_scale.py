"""Cost estimates for very large corpora, checked against measurements."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from gristmill.flows.cli.main import app
from gristmill.flows.planning.at_scale import (
    HOST,
    LARGEST_SHARD,
    MOST_DAYS,
    MOST_SHARDS,
    Extent,
    breaks_of,
    costs_of,
    plan_at_scale,
    print_at_scale,
    proposal_of,
)
from gristmill.mixtures.load import load_manifest
from gristmill.tokenize.packing.write_shards import MOST_PARTS

MEASURED = {
    "ingest": {
        "core_seconds": 7.1,
        "memory_bytes": 596e6,
        "work_bytes": 0,
        "out_bytes": 99.8e6,
    },
    "dedup": {
        "core_seconds": 16.3,
        "memory_bytes": 596e6,
        "work_bytes": 745e6,
        "out_bytes": 270.6e6,
    },
    "tokenize": {
        "core_seconds": 5.8,
        "memory_bytes": 495e6,
        "work_bytes": 0,
        "out_bytes": 111.2e6,
    },
    "mix": {
        "core_seconds": 5.0,
        "memory_bytes": 561e6,
        "work_bytes": 167.8e6,
        "out_bytes": 141.2e6,
    },
}
"""`gristmill bench bounds --documents 1000000` on two cores: documents of 197 bytes, 9
% of them dropped by dedup.
"""
MILLION = Extent(1e6, 197, kept=0.91)


@pytest.mark.parametrize("step", MEASURED)
def test_costs_of_a_million_documents_are_within_25_percent_of_measurements(
    step: str,
) -> None:
    cost = next(step_cost for step_cost in costs_of(MILLION) if step_cost.step == step)
    for key, measured in MEASURED[step].items():
        assert getattr(cost, key) == pytest.approx(measured, rel=0.25), key


def test_memory_is_constant_until_a_named_bound_is_exceeded() -> None:
    """Mixing holds two segments of 64 MB, seven while they are placed, and some records
    of tasks.
    """
    mix_costs = [
        next(
            cost
            for cost in costs_of(Extent(number, 200, shard_bytes=256_000_000))
            if cost.step == "mix"
        )
        for number in (1e8, 1e9, 5e9)
    ]
    assert max(cost.memory_bytes for cost in mix_costs) < 1.2e9
    assert [cost.partitions for cost in mix_costs] == [128, 1024, 4096]
    assert not any(
        "each grows" in sentence
        for sentence in breaks_of(Extent(1e9, 200, shard_bytes=256_000_000))
    )
    sentences = [*breaks_of(Extent(1e10, 3000))]
    affected_steps = [sentence.split(":")[0] for sentence in sentences]
    assert affected_steps == [
        "dedup",
        "mix",
        "mix",
        "mix",
        "explain",
        "1,875,000 document shards",
    ]
    assert (
        "above 1.1e+09 documents the 4,096 partitions of keys are at their maximum "
        "number" in sentences[0]
    )
    assert (
        "above 6.0e+09 documents the 4,096 segments are at their maximum number"
        in sentences[1]
    )


@pytest.mark.parametrize("documents", [1e5, 1e7, 1e9, 1e10, 1e11])
def test_a_proposal_keeps_within_the_bounds_of_its_hosts(documents: float) -> None:
    extent = Extent(documents, 3000)
    proposal = proposal_of(extent)
    assert proposal.runs * proposal.shards * proposal.shard_bytes >= extent.text_bytes
    assert proposal.shard_bytes <= LARGEST_SHARD
    assert proposal.shards <= (MOST_PARTS if proposal.hosts == 1 else MOST_SHARDS)
    assert proposal.memory_bytes <= HOST.memory_bytes
    assert proposal.disk_bytes <= HOST.disk_bytes
    assert proposal.days <= MOST_DAYS


def test_ten_billion_documents_are_too_many_for_one_machine() -> None:
    assert (
        proposal_of(Extent(1e7, 3000)).hosts,
        proposal_of(Extent(1e7, 3000)).reasons,
    ) == (1, ())
    proposal = proposal_of(Extent(1e10, 3000))
    assert proposal.hosts > 1
    assert proposal.reasons
    assert proposal.shard_bytes == 300_000_000


def manifest_file(folder: Path) -> Path:
    (folder / "m.yaml").write_text(
        "name: m\nseed: 1\nsources: {web: {path: 'a.jsonl'}}\nprepare: [{dedup: "
        "{}}]\ntokenizer: {vocab_size: 300}\n"
        "mix: {tokens: 1000}\n"
    )
    (folder / "a.jsonl").write_text('{"text": "a"}\n')
    return folder / "m.yaml"


def test_totals_are_the_sums_of_the_steps_and_the_price_is_by_the_hour(
    tmp_path: Path,
) -> None:
    manifest = load_manifest(manifest_file(tmp_path))
    small, large = plan_at_scale(manifest, [1e6, 1e7], 1000, core_hour=0.5)
    for plan in (small, large):
        hours = sum(step.core_seconds for step in plan.steps) / 3600
        assert plan.totals.core_hours == pytest.approx(hours)
        assert plan.totals.price == pytest.approx(hours * 0.5)
        assert plan.totals.days == pytest.approx(hours / manifest.engine.workers / 24)
        assert plan.totals.disk_bytes >= sum(step.out_bytes for step in plan.steps)
    assert [step.step for step in small.steps] == [
        "ingest",
        "dedup",
        "tokenize",
        "mix",
    ]
    assert large.text_bytes == 1e10
    # start-up costs do not grow
    assert 5 < large.totals.core_hours / small.totals.core_hours < 10


def test_the_table_fits_a_narrow_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    manifest = load_manifest(manifest_file(tmp_path))
    print_at_scale(SimpleNamespace(manifest=manifest), plan_at_scale(manifest, [1e10]))  # type: ignore[arg-type]
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[0].startswith("10,000,000,000 documents, 30 TB of text, on ")
    assert [line.split()[0] for line in lines[2:6]] == [
        "ingest",
        "dedup",
        "tokenize",
        "mix",
    ]
    assert not any("…" in line for line in lines)


def test_plan_accepts_several_sizes_and_rejects_their_options_without_a_size(
    tmp_path: Path,
) -> None:
    path = str(manifest_file(tmp_path))
    outcome = CliRunner().invoke(
        app, ["plan", path, "--documents", "1e9", "--documents", "1e10", "--json"]
    )
    assert outcome.exit_code == 0, outcome.output
    assert [plan["documents"] for plan in json.loads(outcome.stdout)] == [1e9, 1e10]
    assert CliRunner().invoke(app, ["plan", path, "--core-hour", "1"]).exit_code == 2
