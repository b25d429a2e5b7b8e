"""`gristmill export-tokens` on a store with a committed mixture."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

from gristmill.core.files import read_json, write_json
from gristmill.flows import export_tokens
from gristmill.flows.cli import application
from gristmill.flows.cli import data as data_commands
from gristmill.tokenize.packed import PackedSet
from tests.commands import call
from tests.packed_sets import piece_table, write_packed_set

LENGTH = 8


@pytest.fixture
def mix(tmp_path: Path) -> Path:
    """A set of 12 rows whose pieces are whole rows."""
    rows = np.arange(12 * LENGTH).reshape(12, LENGTH) + 2
    folder = tmp_path / "mix"
    write_packed_set(
        folder,
        rows,
        {"a": 12},
        {"vocab_size": 200, "eos": 0, "pad": 1, "sha256": ""},
        pieces=piece_table(
            row=range(12), start=[0] * 12, length=[LENGTH] * 12, id=[b"i" * 16] * 12
        ),
    )
    return folder


def opened(
    monkeypatch: pytest.MonkeyPatch, committed: dict[str, Path], **plan: Any
) -> None:
    """Patch the command to see these committed stages and this plan."""
    manifest = SimpleNamespace(seed=4, mix=SimpleNamespace())
    session = SimpleNamespace(
        plan=plan,
        manifest=manifest,
        command=lambda *words: " ".join(("gristmill", *words)),
    )
    monkeypatch.setattr(application, "open_or_exit", lambda *arguments: session)
    monkeypatch.setattr(export_tokens, "committed_inputs", lambda *arguments: committed)


def invoke(*arguments: str) -> Any:
    return call("export-tokens", "m.yaml", *arguments, code=None)


def test_rows_are_exported_in_pretraining_order(
    monkeypatch: pytest.MonkeyPatch, mix: Path, tmp_path: Path
) -> None:
    opened(monkeypatch, {"mix": mix}, pretrain=SimpleNamespace(config={"seed": 9}))
    packed = PackedSet(mix)
    outcome = invoke("--format=memmap", "--out", str(tmp_path / "out"))
    assert outcome.exit_code == 0, outcome.output
    assert (
        "96 tokens of 12 document pieces in 12 rows, order trained, uint16"
        in outcome.output
    )
    written = np.fromfile(tmp_path / "out" / "train.bin", dtype="<u2").reshape(
        12, LENGTH
    )
    assert np.array_equal(written, packed.read(packed.order(9).rows(np.arange(12))))
    outcome = invoke(
        "--format=memmap",
        "--out",
        str(tmp_path / "stored"),
        "--order=stored",
        "--json",
    )
    assert json.loads(outcome.output)["order"] == "stored"
    written = np.fromfile(tmp_path / "stored" / "train.bin", dtype="<u2").reshape(
        12, LENGTH
    )
    assert np.array_equal(written, packed.read(np.arange(12)))


def test_rows_without_pretraining_are_ordered_by_the_manifest_seed(
    monkeypatch: pytest.MonkeyPatch, mix: Path, tmp_path: Path
) -> None:
    opened(monkeypatch, {"mix": mix})
    outcome = invoke("--format=memmap", "--out", str(tmp_path / "out"), "--json")
    assert (outcome.exit_code, json.loads(outcome.output)["order"]) == (0, "trained")
    written = np.fromfile(tmp_path / "out" / "train.bin", dtype="<u2").reshape(
        12, LENGTH
    )
    packed = PackedSet(mix)
    assert np.array_equal(written, packed.read(packed.order(4).rows(np.arange(12))))


def test_missing_mixture_or_split_is_reported_with_the_command(
    monkeypatch: pytest.MonkeyPatch, mix: Path, tmp_path: Path
) -> None:
    opened(monkeypatch, {})
    outcome = invoke("--format=llmc", "--out", str(tmp_path / "out"))
    assert (outcome.exit_code, outcome.output) == (
        2,
        "the mixture is not packed yet; run: gristmill run --until mix\n",
    )
    opened(monkeypatch, {"mix": mix})
    outcome = invoke(
        "--format=memmap", "--out", str(tmp_path / "out"), "--split=validation"
    )
    assert outcome.exit_code == 2
    assert "no rows of this split to export" in outcome.output


def test_set_with_withheld_rows_is_not_exported_as_stored(
    monkeypatch: pytest.MonkeyPatch, mix: Path, tmp_path: Path
) -> None:
    content = read_json(mix / "packed.json")
    content["train"]["shards"][0]["withheld"] = [3, 4]
    write_json(mix / "packed.json", content)
    opened(monkeypatch, {"mix": mix})
    out = tmp_path / "out"
    outcome = invoke("--format=memmap", f"--out={out}", "--order=stored")
    assert (outcome.exit_code, out.exists()) == (2, False)
    assert outcome.output.startswith(f"{mix}: 2 of its rows are withheld")
    assert "--order trained" in outcome.output


def test_command_offers_every_export_format_and_split() -> None:
    from gristmill.tokenize.exporting.exported_files import FORMATS, SPLITS

    assert get_args(data_commands.TokenFormat) == FORMATS
    assert set(get_args(data_commands.SplitName)) == set(SPLITS)
