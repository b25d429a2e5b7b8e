"""No operation of a step that logs nothing waits for the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gristmill.train import trainer
from gristmill.train.loop.step import one_step

WAITING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.equal.default,
}
"""Operations whose result, or its size, the host reads from the device."""


class Refusal(TorchDispatchMode):
    """Raise at operations for which the host would wait for a GPU."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        indices = args[1] if function is torch.ops.aten.index.Tensor else ()
        by_mask = any(
            index is not None and index.dtype == torch.bool for index in indices
        )
        assert function not in WAITING, function
        assert not by_mask, "index by a mask"
        return function(*args, **(kwargs or {}))


def test_synchronising_operations_are_refused() -> None:
    values = torch.ones(3)
    for wait in (
        lambda: values[0].item(),
        lambda: bool(values[0] > 0),
        lambda: values[values > 0],
        lambda: values.nonzero(),
        lambda: torch.equal(values, values),
    ):
        with Refusal(), pytest.raises(AssertionError):
            wait()


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": {"kind": "adamw"}},
        {"optimizer": {"kind": "lion", "learning_rate": 1e-4}},
        {"optimizer": {"kind": "adafactor"}},
        {"optimizer": {"kind": "muon", "cautious_decay": True}},
        {"optimizer": {"kind": "normuon"}},
        {"average": {"kind": "ema"}},
        {"model": {"moe": {"experts": 4}}},
    ],
)
def test_pretraining_step_does_not_wait_for_the_device(
    changes: dict[str, Any],
    run_stage: Any,
    tokenizer_folder: Path,
    mix_folder: Path,
    pretrain_config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps 2 and 3 of 4, of two micro-batches each."""
    config = {
        **pretrain_config,
        **changes,
        "model": {**pretrain_config["model"], **changes.get("model", {})},
        "steps": 4,
        "log_every": 4,
        "validate_every": 4,
    }
    watched_steps = []

    def watched(attempt: Any, *arguments: Any) -> Any:
        step = attempt.progress.step + 1
        if step not in (2, 3):
            return one_step(attempt, *arguments)
        watched_steps.append(step)
        with Refusal():
            return one_step(attempt, *arguments)

    monkeypatch.setattr(trainer, "one_step", watched)
    inputs = {"tokenizer": tokenizer_folder, "mix": mix_folder}
    run_stage("pretrain", inputs, config, tmp_path)
    assert watched_steps == [2, 3]
