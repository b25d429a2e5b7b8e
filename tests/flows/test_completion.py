"""Shell completion of stages, runs, manifests and their keys: fast, and only valid
values.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gristmill.flows.cli.completion import (
    complete_manifest,
    complete_run,
    complete_setting,
    complete_stage,
    manifest_keys,
)

MANIFEST = "name: tiny\nsources:\n  notes: {path: 'notes/*.txt'}\n"


def context(**parameters: Any) -> Any:
    return SimpleNamespace(params=parameters)


def names(offers: list[tuple[str, str]]) -> list[str]:
    return [name for name, _ in offers]


def test_stages_are_completed_in_execution_order() -> None:
    assert complete_stage("de") == [
        "dedup",
        "dedup_semantic",
        "dedup_lines",
        "dedup_substrings",
        "decontaminate",
    ]
    assert complete_stage("")[:4] == ["generate", "ingest", "clean", "filter"]
    assert complete_stage("nonsense") == []


def test_manifests_and_folders_are_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mixtures").mkdir()
    for name in (
        "mixtures/demo.yaml",
        "mixtures/notes.txt",
        "mine.yml",
        ".hidden.yaml",
    ):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert complete_manifest("") == ["mine.yml", "mixtures/"]
    assert complete_manifest("mixtures/") == ["mixtures/demo.yaml"]
    assert complete_manifest(f"{tmp_path}/m") == [
        f"{tmp_path}/mine.yml",
        f"{tmp_path}/mixtures/",
    ]
    assert complete_manifest("absent/x") == []


def test_runs_are_completed_newest_first_with_their_state(tmp_path: Path) -> None:
    for name, state in (
        ("20260101-1-tiny", "completed"),
        ("20260102-1-tiny", "failed"),
    ):
        (tmp_path / "runs" / name).mkdir(parents=True)
        record = {"state": state, "manifest_file": "/somewhere/tiny.yaml"}
        (tmp_path / "runs" / name / "run.json").write_text(json.dumps(record))
    (tmp_path / "runs" / "20260103-1-begun").mkdir()
    assert complete_run(context(store=str(tmp_path)), "") == [
        ("last", "the newest run"),
        ("20260102-1-tiny", "failed, tiny.yaml"),
        ("20260101-1-tiny", "completed, tiny.yaml"),
    ]
    assert names(complete_run(context(store=str(tmp_path)), "20260101")) == [
        "20260101-1-tiny"
    ]
    assert complete_run(context(store=str(tmp_path / "absent")), "2") == []


@pytest.mark.slow
def test_manifest_keys_are_completed_with_their_summary(
    tmp_path: Path,
) -> None:
    manifest = tmp_path / "tiny.yaml"
    manifest.write_text(MANIFEST)
    completion_context = context(manifest=str(manifest))
    assert ("pretrain.steps", "Optimizer steps.") in complete_setting(
        completion_context, "pretrain.st"
    )
    assert (
        names(complete_setting(completion_context, "filter.gopher_quality.min_w"))[0]
        == "filter.gopher_quality.min_words"
    )
    assert "sources.notes.licence" in names(
        complete_setting(completion_context, "sources.no")
    )
    assert complete_setting(context(manifest="absent.yaml"), "sources.") == []


@pytest.mark.slow
def test_enumerable_values_are_completed_after_the_equals_sign() -> None:
    completion_context = context(manifest=None)
    assert names(complete_setting(completion_context, "pretrain.schedule.kind=co")) == [
        "pretrain.schedule.kind=cosine",
        "pretrain.schedule.kind=constant",
    ]
    assert names(complete_setting(completion_context, "pretrain.model.qk_norm=")) == [
        "pretrain.model.qk_norm=true",
        "pretrain.model.qk_norm=false",
    ]
    assert complete_setting(completion_context, "pretrain.steps=") == []
    assert complete_setting(completion_context, "nonsense=") == []


@pytest.mark.slow
def test_every_completed_key_is_a_valid_setting() -> None:
    from gristmill.mixtures.load import ManifestError, parse_manifest

    unknown = []
    for key in manifest_keys():
        try:
            parse_manifest(MANIFEST, "tiny.yaml", [f"{key}=1"])
        except ManifestError as error:
            # 1 may be an invalid value, but the key is known
            unknown += [
                key for problem in error.problems if "unknown key" in problem.message
            ]
    assert unknown == []


@pytest.mark.slow
def test_completion_imports_no_heavy_library(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(MANIFEST)
    code = (
        "import atexit, sys; sys.argv[0] = 'gristmill'; "
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr)); "
        "from gristmill.flows.cli.main import main; main()"
    )
    for words, completion in (
        ("run tiny.yaml --until de", "dedup"),
        ("stage de", "dedup"),
        ("run tiny.yaml --set pretrain.ste", "pretrain.steps"),
        ("run ti", "tiny.yaml"),
    ):
        command_line = f"gristmill {words}"
        run = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={
                **os.environ,
                "_GRISTMILL_COMPLETE": "complete_bash",
                "COMP_WORDS": command_line,
                "COMP_CWORD": str(len(command_line.split()) - 1),
            },
        )
        assert run.stdout.split()[0] == completion, run.stderr[-2000:]
        loaded = set(run.stderr.split())
        assert (
            loaded
            & {
                "torch",
                "apache_beam",
                "prefect",
                "numba",
                "pyarrow",
                "matplotlib",
                "numpy",
            }
            == set()
        )
