"""Joining the processes of a training."""

from __future__ import annotations

import pytest
import torch

from gristmill.train.parallel.world import DeviceError, process_group


def test_more_processes_than_gpus_are_refused_before_they_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(DeviceError, match=r"engine\.ranks is 4, .* this machine has 2: set engine\.ranks to 2"), \
            process_group():
        pass
    assert not torch.distributed.is_initialized()
