"""Outputs of finished trainings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.jsonl import read_metrics


def weights_of(training: Path, model: str = "model") -> dict[str, torch.Tensor]:
    return load_file(training / "data" / model / "model.safetensors")


def steps_of(training: Path) -> list[dict[str, Any]]:
    """Metrics of each logged step."""
    return [line for line in read_metrics(training) if "loss" in line]


def losses_of(training: Path) -> list[float]:
    return [step["loss"] for step in steps_of(training)]


def assert_same_output(ours: Path, theirs: Path, *names: str) -> None:
    """Compare the saved models of two trainings, and other files, byte by byte."""
    for name in ("model/model.safetensors", *names):
        ours_bytes, theirs_bytes = (
            (training / "data" / name).read_bytes() for training in (ours, theirs)
        )
        assert ours_bytes == theirs_bytes, name
