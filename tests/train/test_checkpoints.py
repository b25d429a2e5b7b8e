from __future__ import annotations

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gristmill.mixtures.schema.engine import TrainingEngine
from gristmill.mixtures.schema.optimizer import Optimizer, OptimizerKind
from gristmill.train import checkpoint as checkpoints
from gristmill.train.checkpoint import (
    MARKER,
    Checkpoints,
    complete_steps,
    is_complete,
    outdated,
    step_folder,
)
from gristmill.train.distributed.fsdp import gathered, sharded_model
from gristmill.train.distributed.process_groups import World, process_group
from gristmill.train.models.model_config import Shape
from gristmill.train.models.weights import drawn
from gristmill.train.optim.optimizer import make_optimizers, update

GOOD = torch.tensor(False)


class Training:
    """A model whose gradients are always one."""

    def __init__(
        self,
        shape: Shape,
        world: World,
        folder: Path,
        kind: OptimizerKind = "adamw",
        keeping: TrainingEngine | None = None,
    ) -> None:
        self.model = sharded_model(shape, drawn(shape, 0), world, torch.float32)
        self.optimizers = make_optimizers(self.model, Optimizer(kind=kind))
        self.tensors = {"window": torch.zeros(3)}
        self.warnings: list[str] = []
        self.checkpoints = Checkpoints(
            folder,
            self.model,
            self.optimizers,
            world,
            keeping or TrainingEngine(),
            self.warnings.append,
        )

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        update(self.optimizers, 0.1, GOOD)
        self.tensors["window"] += 1

    def save(self, step: int) -> None:
        self.checkpoints.save(step, self.tensors, {"digest": str(step)})

    def save_now(self, step: int) -> None:
        self.save(step)
        self.checkpoints.join()

    def load(self) -> tuple[int, dict[str, Any]] | None:
        return self.checkpoints.load_newest(self.tensors)

    def weights(self) -> list[torch.Tensor]:
        return [gathered(parameter).clone() for parameter in self.model.parameters()]


def equal_weights(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    "kind",
    [
        "adamw",
        "lion",
        "adafactor",
        "adamw8bit",
        "muon",
        "normuon",
    ],
)
def test_checkpoint_has_all_that_the_next_step_needs_and_is_isolated_from_later_steps(
    one_process: None, tiny_shape: Shape, tmp_path: Path, kind: OptimizerKind
) -> None:
    """The next step runs while the checkpoint is still being written."""
    if kind == "adamw8bit":
        pytest.importorskip("torchao")
    with process_group() as world:
        training = Training(tiny_shape, world, tmp_path, kind)
        training.step()
        training.step()
        training.save(2)
        training.step()
        training.checkpoints.close()
        resumed = Training(tiny_shape, world, tmp_path, kind)
        assert resumed.load() == (2, {"digest": "2"})
        assert resumed.tensors["window"].tolist() == [2.0] * 3
        resumed.step()  # moments and step counts decide this one
        assert equal_weights(resumed.weights(), training.weights())


def test_newest_complete_checkpoint_is_loaded_and_torn_ones_are_removed(
    one_process: None, tiny_shape: Shape, tmp_path: Path
) -> None:
    with process_group() as world:
        training = Training(
            tiny_shape, world, tmp_path, keeping=TrainingEngine(keep_checkpoints=4)
        )
        for step in (1, 2, 3, 4):
            training.step()
            training.save_now(step)
        (step_folder(tmp_path, 4) / MARKER).unlink()  # the kill came before the marker
        shard = next(step_folder(tmp_path, 3).glob("*.distcp"))
        shard.write_bytes(shard.read_bytes()[:-1])  # the disk lost a byte
        loaded = training.load()
    assert loaded == (2, {"digest": "2"})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000001",
        "step-00000002",
    ]


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit"])
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError(
            "[enforce fail at inline_container.cc:672] . unexpected pos 7 vs 5"
        ),
    ],
)
def test_full_disk_raises_oserror(
    one_process: None,
    tiny_shape: Shape,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: OptimizerKind,
    error: Exception,
) -> None:
    """torch wraps the error into one that does not derive from Exception."""
    from torch.distributed.checkpoint import filesystem

    if kind == "adamw8bit":
        pytest.importorskip("torchao")

    def full(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(filesystem, "_write_item", full)
    if isinstance(error, RuntimeError):
        monkeypatch.setattr(
            checkpoints.shutil, "disk_usage", lambda _: SimpleNamespace(free=4096)
        )
    with process_group() as world:
        training = Training(tiny_shape, world, tmp_path, kind)
        with pytest.raises(OSError, match="No space left on device"):
            training.save_now(1)
    assert complete_steps(tmp_path) == []


def test_damaged_checkpoint_is_skipped_with_a_warning(
    one_process: None, tiny_shape: Shape, tmp_path: Path
) -> None:
    with process_group() as world:
        training = Training(tiny_shape, world, tmp_path)
        for step in (1, 2):
            training.step()
            training.save_now(step)
        shard = next(step_folder(tmp_path, 2).glob("*.distcp"))
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
        assert is_complete(step_folder(tmp_path, 2))  # by names and sizes
        assert training.load() == (1, {"digest": "1"})
    (warning,) = training.warnings
    assert f"step-00000002 is damaged: {shard.name}" in warning
    assert not step_folder(tmp_path, 2).exists()


def test_error_of_a_save_is_raised_on_join(
    one_process: None,
    tiny_shape: Shape,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(path: Path) -> str:
        raise OSError("no space left on device")

    with process_group() as world:
        training = Training(tiny_shape, world, tmp_path)
        monkeypatch.setattr("gristmill.train.checkpoint.sha256_file", full)
        training.save(1)
        with pytest.raises(OSError, match="no space left"):
            training.checkpoints.join()
    assert complete_steps(tmp_path) == []


def test_newest_checkpoints_are_kept(
    one_process: None, tiny_shape: Shape, tmp_path: Path
) -> None:
    with process_group() as world:
        training = Training(
            tiny_shape, world, tmp_path, keeping=TrainingEngine(keep_checkpoints=2)
        )
        for step in (5, 10, 100):
            training.step()
            training.save_now(step)
    assert complete_steps(tmp_path) == [10, 100]
    assert not step_folder(tmp_path, 5).exists()


def test_permanent_checkpoints_are_kept_too() -> None:
    steps = [10, 20, 30, 40, 50, 60, 70]
    assert outdated(steps, TrainingEngine()) == [10, 20, 30, 40, 50]
    assert outdated(steps, TrainingEngine(permanent_every=20)) == [10, 30, 50]


@given(st.lists(st.integers(1, 200), unique=True, max_size=20), st.integers(2, 4))
def test_newest_and_permanent_checkpoints_are_never_outdated(
    steps: list[int], newest: int
) -> None:
    steps.sort()
    removed = outdated(
        steps, TrainingEngine(keep_checkpoints=newest, permanent_every=7)
    )
    assert not set(removed) & set(steps[-newest:])
    assert all(step % 7 for step in removed)


def test_checkpoint_with_an_invalid_marker_is_incomplete(tmp_path: Path) -> None:
    for content in (
        "",
        "{}",
        json.dumps({"step": 1, "files": "0"}),
        json.dumps({"files": {"a": {"bytes": 1}}}),
    ):
        step_folder(tmp_path, 1).mkdir(exist_ok=True)
        (step_folder(tmp_path, 1) / MARKER).write_text(content)
        assert complete_steps(tmp_path) == []


def test_empty_folder_has_no_checkpoint(
    one_process: None, tiny_shape: Shape, tmp_path: Path
) -> None:
    with process_group() as world:
        assert Training(tiny_shape, world, tmp_path / "none").load() is None
