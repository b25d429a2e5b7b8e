"""The processes of a training, and the GPUs that they find."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from gristmill.dataprep.context import Context
from gristmill.train.launch import warn_of_idle_gpus
from gristmill.train.models.llama import Llama
from gristmill.train.models.shape import Shape
from gristmill.train.parallel.alone import NothingToReduce
from gristmill.train.parallel.sharding import sharded_model
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


@pytest.mark.parametrize(("gpus", "ranks", "told"), [(8, 2, True), (8, 8, False), (0, 2, False)])
def test_gpus_that_no_process_uses_are_told_of(
    gpus: int, ranks: int, told: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    events: list[dict[str, Any]] = []
    warn_of_idle_gpus(Context(tmp_path, "pretrain", emit=events.append))
    assert ["engine.ranks is 2: set it to 8" in str(event) for event in events] == [True] * told


def test_one_process_copies_no_gradients_and_has_those_of_the_plain_model(
    one_process: None, tiny_shape: Shape, make_model: Callable[[Shape], Llama]
) -> None:
    """Also where they are added up over several passes, each of them reduced."""
    plain = make_model(tiny_shape)
    tensors = dict(plain.named_parameters())
    ids = [torch.arange(12).view(2, 6) + shift for shift in (0, 5, 9)]
    given: list[torch.Tensor] = []

    class Watched(NothingToReduce):
        def allocate(self, *arguments: Any, **named: Any) -> torch.Tensor:
            given.append(super().allocate(*arguments, **named))
            return given[-1]

    with process_group() as world:
        model: Any = sharded_model(tiny_shape, lambda name, size: tensors[name].detach(), world, torch.float32)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(Watched())  # type: ignore[arg-type]
        for part in ids:
            plain(part).square().mean().backward()
            model(part).square().mean().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), tensors[name].grad, msg=name)
    # Of every layer, and of what is around them, and in every pass, twice the same memory.
    assert len(given) == 2 * 3 * (tiny_shape.layers + 1)
    assert all(one is two for one, two in zip(given[::2], given[1::2], strict=True))
    with pytest.raises(RuntimeError, match="as if there were one"):
        NothingToReduce()(torch.zeros(1), torch.zeros(1))
