"""Predictions of a run's cost from small samples: sampling, extrapolation, refusals."""

from __future__ import annotations

import gzip
import json
import signal
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.flows.planning import predict
from gristmill.flows.planning.predict import Measured
from gristmill.flows.planning.sampled_sources import take_sample
from gristmill.flows.running.session import open_session
from gristmill.mixtures.loader import load_manifest
from gristmill.mixtures.manifest import Manifest
from tests.commands import call

SENTENCE = "The river and the mountain have to be seen with that light of the morning. "


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    (tmp_path / "notes").mkdir()
    for number in range(20):
        (tmp_path / "notes" / f"{number:02d}.txt").write_text(
            f"{number} {SENTENCE}" * 10
        )
    lines = "\n".join(
        json.dumps({"text": f"{number} {SENTENCE}" * 8}) for number in range(300)
    )
    (tmp_path / "web.jsonl").write_text(lines)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    table = pa.table({"text": [f"{number} {SENTENCE}" for number in range(5000)]})
    pq.write_table(table, tmp_path / "rows.parquet", compression="none")
    (tmp_path / "m.yaml").write_text("""\
name: small
sources:
  notes: {path: "notes/*.txt"}
  web: {path: web.jsonl}
  packed: {path: packed.jsonl.gz}
  rows: {path: rows.parquet}
prepare: [{filter: {rules: [gopher_quality]}}, {dedup: {minhash: {bands: 20, rows: 5, threshold: 0.8}}}]
""")
    return load_manifest(tmp_path / "m.yaml")


def copied(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_sources_are_sampled_proportionally_with_their_factor(
    manifest: Manifest, tmp_path: Path
) -> None:
    total_bytes = sum(
        (tmp_path / name).stat().st_size
        for name in ("web.jsonl", "packed.jsonl.gz", "rows.parquet")
    )
    total_bytes += sum(path.stat().st_size for path in (tmp_path / "notes").iterdir())
    sample = take_sample(
        manifest, tmp_path / "sample", total_bytes // 4, whole_python=False
    )
    for name in ("notes", "web", "packed"):
        assert sample.factor(name) == pytest.approx(4, rel=0.3)
        assert sample.bytes_taken[name] == sum(
            map(len, copied(tmp_path / "sample" / name).values())
        )
    rows = pq.read_table(tmp_path / "sample" / "rows" / "rows.parquet").num_rows
    assert sample.factor("rows") == pytest.approx(5000 / rows, rel=0.01)


def test_a_larger_sample_contains_a_smaller_one(
    manifest: Manifest, tmp_path: Path
) -> None:
    take_sample(manifest, tmp_path / "small", 20_000, whole_python=False)
    take_sample(manifest, tmp_path / "large", 80_000, whole_python=False)
    small, large = copied(tmp_path / "small"), copied(tmp_path / "large")
    assert set(small) <= set(large)
    texts = {
        name: content
        for name, content in small.items()
        if not name.endswith(".parquet")
    }
    assert all(large[name].startswith(content) for name, content in texts.items())


def test_time_grows_with_the_text_and_memory_with_the_shards_only() -> None:
    small = predict.SampleRun(
        1e6, 1e9, 100_000, {"filter": Measured(3.0, 300_000_000, 1_000)}, {}
    )
    large = predict.SampleRun(
        4e6, 1e9, 400_000, {"filter": Measured(6.0, 330_000_000, 4_000)}, {}
    )
    row = predict.extrapolate("filter", small, large, 1e9, 16_000_000)
    assert row.seconds == pytest.approx(2.0 + 1e9 * 1e-6)
    assert row.memory_bytes == pytest.approx(330e6 + 100 * 15.6e6)
    assert row.disk_bytes == pytest.approx(1e6)


def test_no_stage_starts_after_the_time_limit_and_each_has_a_figure_or_reason(
    manifest: Manifest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.yaml").write_text(
        (tmp_path / "m.yaml").read_text()
        + """\
tokenizer: {vocab_size: 300}
mix: {tokens: 20000, sequence_length: 32}
pretrain: {model: {layers: 1, width: 16, heads: 2}, steps: 40, global_batch_size: 4}
export: {}
"""
    )
    session = open_session(str(tmp_path / "m.yaml"), [], str(tmp_path / "st"))
    node = session.plan["pretrain"]
    earlier_output = session.store.folder("pretrain", "small", "0" * 64)
    earlier_output.begin({})
    earlier_output.commit(
        {
            "stage": "pretrain",
            "recipe": {**node.recipe, "steps": 10},
            "started": 1.0,
            "seconds": 5.0,
            "cost": {"peak_memory_bytes": 7},
        },
        {},
    )

    prediction = predict.predict(session, 100_000, budget_seconds=0.0)

    assert [row.stage for row in prediction.stages] == list(session.plan)
    (predicted,) = (
        row for row in prediction.stages if isinstance(row, predict.PredictedStage)
    )
    assert (predicted.stage, predicted.seconds, predicted.from_) == (
        "pretrain",
        20.0,
        "a run before",
    )
    errors = {
        row.stage: row.error
        for row in prediction.stages
        if isinstance(row, predict.UnpredictedStage)
    }
    assert "used up their time; allow more with --sample-seconds" in errors["ingest"]
    assert errors["mix"] == "a sample has too few tokens to be mixed"
    predict.print_prediction(prediction)
    assert "? mix: a sample has too few tokens" in capsys.readouterr().out


def test_slow_stage_is_interrupted() -> None:
    with (
        pytest.raises(predict.OutOfTimeError),
        predict.interrupted_at(predict.time.monotonic() + 0.01),
    ):
        threading.Event().wait(60)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_insufficient_memory_or_disk_is_reported_with_both_numbers() -> None:
    totals = predict.Totals(1.0, memory_bytes=9_000_000_000, disk_bytes=5_000_000)
    available = predict.Available(memory_bytes=8_000_000_000, disk_bytes=1_000_000)
    memory, disk = predict.refusals(totals, available)
    assert "9 GB are needed, but 8 GB are free" in memory
    assert "5 MB are needed, but 1 MB are free" in disk
    assert predict.refusals(totals, predict.Available(0, None)) == []


@pytest.mark.slow
def test_plan_predict_prints_a_row_per_stage(
    manifest: Manifest, tmp_path: Path
) -> None:
    arguments = [
        "plan",
        str(tmp_path / "m.yaml"),
        "--predict",
        "--sample-mb",
        "0.1",
        "--sample-seconds=500",
        "--store",
        str(tmp_path / "st"),
    ]
    prediction = json.loads(
        call(*arguments, "--json", catch_exceptions=False, code=None).stdout
    )
    assert [row["stage"] for row in prediction["stages"]] == [
        "ingest",
        "filter",
        "dedup",
    ]
    assert all(
        row["seconds"] > 0 and row["memory_bytes"] > 50e6
        for row in prediction["stages"]
    )
    true_text = (
        20 * 10 * len(SENTENCE) + 2 * 300 * 8 * len(SENTENCE) + 5000 * len(SENTENCE)
    )
    assert prediction["text_bytes"] == pytest.approx(true_text, rel=0.25)
    assert not (tmp_path / "st").exists()
