"""The processes of a training and the GPUs that they see."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.core.stage_context import Context
from gristmill.train.distributed.process_groups import (
    DeviceError,
    process_group,
    single_process,
)
from gristmill.train.worker_main import warn_of_idle_gpus


def test_more_processes_than_gpus_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 4,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 4,
    }.items():
        monkeypatch.setenv(name, str(value))
    with (
        pytest.raises(DeviceError, match=r"engine\.ranks is 4\b.* 2\b"),
        process_group(),
    ):
        pass
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("gpus", "ranks", "is_warned"), [(8, 2, True), (8, 8, False), (0, 2, False)]
)
def test_idle_gpus_are_a_warning(
    gpus: int,
    ranks: int,
    is_warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    events: list[dict[str, Any]] = []
    warn_of_idle_gpus(Context(tmp_path, "pretrain", emit=events.append))
    assert ["engine.ranks is 2: set it to 8" in str(event) for event in events] == [
        True
    ] * is_warned


@pytest.mark.parametrize("rank", [None, "3"])
def test_a_group_of_one_restores_the_environment(
    rank: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    before = {name: os.environ.get(name) for name in names}
    with single_process() as world:
        assert (world.rank, world.size, os.environ["RANK"]) == (0, 1, "0")
    assert {name: os.environ.get(name) for name in names} == before
