"""Comparison of two runs by their records and outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gristmill.core.files import write_json
from gristmill.core.store import Store
from gristmill.flows.pages.page_elements import inline_text
from gristmill.flows.questions.compare import (
    ChangedKey,
    Pair,
    UnknownRunError,
    compare_runs,
    find_run,
    pair,
    stages_of,
)
from gristmill.flows.questions.what_changed import keyed
from tests.commands import call

FINGERPRINTS = {
    "ingest": "a" * 64,
    "dedup": "b" * 64,
    "mix": "c" * 64,
    "pretrain": "d" * 64,
}


def commit(
    store: Store,
    stage: str,
    fingerprint: str,
    summary: dict[str, Any],
    files: dict[str, str],
) -> None:
    folder = store.folder(stage, "toy", fingerprint)
    if folder.state() == "committed":
        return
    folder.begin({})
    for name, content in files.items():
        (folder.data / name).write_text(content)
    folder.commit({"stage": stage, "started": 0.0, "seconds": 1.5}, summary)


def counts(kept: int) -> dict[str, Any]:
    return {
        "counts": {
            "read": 10,
            "kept": kept,
            "bytes_kept": kept * 1000,
            "dropped": {},
            "sources": {},
        }
    }


def write_run(store: Store, name: str, changed: str, steps: int, loss: float) -> None:
    """Write a run of four stages whose last two have fingerprints of `changed`."""
    prints = {**FINGERPRINTS, "mix": changed * 64, "pretrain": changed * 64}
    packed = {
        "sources": ["web"],
        "realised": {"web": {"tokens": 100 * steps, "share": 1.0, "epochs": 0.5}},
        "requested": {"web": {"share": 1.0, "max_epochs": 1}},
    }
    lines = [{"step": step, "loss": loss + 1 / step} for step in (1, steps)]
    commit(store, "ingest", prints["ingest"], counts(10), {})
    commit(store, "dedup", prints["dedup"], counts(7), {})
    commit(store, "mix", prints["mix"], {}, {"packed.json": json.dumps(packed)})
    commit(
        store,
        "pretrain",
        prints["pretrain"],
        {},
        {"metrics.jsonl": "".join(json.dumps(line) + "\n" for line in lines)},
    )
    write_json(
        store.runs / name / "run.json",
        {
            "run": name,
            "name": "toy",
            "state": "completed",
            "started": 0.0,
            "finished": 9.0,
            "manifest": {
                "name": "toy",
                "prepare": [{"dedup": {"exact": True}}],
                "pretrain": {"steps": steps},
            },
            "stages": {
                stage: {"fingerprint": fingerprint}
                for stage, fingerprint in prints.items()
            },
        },
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.at(tmp_path / "store")
    write_run(store, "20260101-000000-toy", "e", 10, 3.0)
    write_run(store, "20260102-000000-toy", "f", 20, 2.0)
    return store


def test_comparison_separates_equal_from_different_outputs(store: Store) -> None:
    comparison = compare_runs(store, find_run(store, "last-1"), find_run(store, "last"))
    assert comparison.manifest == [ChangedKey("pretrain.steps", 10, 20)]
    assert [(row.stage, row.same) for row in comparison.stages] == [
        ("ingest", True),
        ("dedup", True),
        ("mix", False),
        ("pretrain", False),
    ]
    assert [(row["stage"], row["kept"]) for row in comparison.funnel] == [
        ("ingest", Pair(10, 10)),
        ("dedup", Pair(7, 7)),
    ]
    (mixture,) = comparison.mixture
    assert mixture["tokens"] == Pair(1000, 2000)
    assert comparison.training == [
        {
            "stage": "pretrain",
            "steps": Pair(10, 20),
            "first": Pair(4.0, 3.0),
            "last": Pair(3.1, 2.05),
        }
    ]
    assert comparison.evaluation == []


def test_run_is_found_by_a_unique_part_of_its_name(store: Store) -> None:
    assert (
        find_run(store, "0102")["run"]
        == find_run(store, "last")["run"]
        == "20260102-000000-toy"
    )
    with pytest.raises(
        UnknownRunError, match=r"part of the names of several runs .*gristmill runs"
    ):
        find_run(store, "toy")
    with pytest.raises(
        UnknownRunError, match=r"'other' is not a run .*20260102-000000-toy"
    ):
        find_run(store, "other")
    with pytest.raises(UnknownRunError, match="only 2 runs"):
        find_run(store, "last-2")
    with pytest.raises(UnknownRunError, match="no runs yet; start one with"):
        find_run(Store.at(store.root / "empty"), "last")


def test_missing_output_leaves_its_figures_empty(store: Store) -> None:
    folder = store.folder("pretrain", "toy", "f" * 64)
    (folder.data / "metrics.jsonl").unlink()
    comparison = compare_runs(store, find_run(store, "last-1"), find_run(store, "last"))
    (row,) = comparison.training
    assert row["last"] == Pair(3.1, None)
    assert inline_text(pair(row["last"], "{:.1f}".format)) == "3.1 -> -"


def test_lists_are_compared_by_entry_and_prepare_steps_by_name() -> None:
    assert keyed(
        {
            "prepare": [{"dedup": {"n": 5}}, {"langid": {}}],
            "data": [{"a": 1, "b": 2}],
            "keep": ["en"],
        }
    ) == {
        "prepare": {"dedup": {"n": 5}, "langid": {}},
        "data": {"0": {"a": 1, "b": 2}},
        "keep": ["en"],
    }
    record = {
        "manifest": {"prepare": [{"quality": {}}, {"dedup": {}}]},
        "stages": {"dedup": 1, "ingest": 1, "quality": 1, "tokenizer": 1},
    }
    assert stages_of(record) == ["ingest", "quality", "dedup", "tokenizer"]


@pytest.mark.slow
@pytest.mark.parametrize("columns", ["60", "80"])
def test_tables_fit_the_terminal(
    store: Store, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    result = call("compare", "last-1", "last", f"--store={store.root}")
    assert max(map(len, result.output.splitlines())) <= int(columns)
    assert "pretrain.steps  10     20" in result.output
    assert "10 -> 20" in result.output
