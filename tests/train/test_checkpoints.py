from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gristmill.mixtures.optimizer import Optimizer
from gristmill.train.loop.checkpoints import MARKER, complete_steps, load_newest, save_checkpoint, step_folder
from gristmill.train.models.shape import Shape
from gristmill.train.models.weights import drawn
from gristmill.train.optim.optimizer import make_optimizers, update
from gristmill.train.parallel.sharding import sharded_model
from gristmill.train.parallel.world import World, process_group

GOOD = torch.tensor(False)


class Training:
    """A model that only ever subtracts from its weights."""

    def __init__(self, shape: Shape, world: World) -> None:
        self.world = world
        self.model = sharded_model(shape, drawn(shape, 0), world, torch.float32)
        self.optimizers = make_optimizers(self.model, Optimizer())
        self.tensors = {"window": torch.zeros(3)}

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        update(self.optimizers, 0.1, GOOD)
        self.tensors["window"] += 1

    def save(self, folder: Path, step: int, keep: int = 2) -> None:
        save_checkpoint(folder, step, self.model, self.optimizers, self.tensors, {"digest": str(step)}, keep,
                        self.world)

    def load(self, folder: Path) -> tuple[int, dict[str, str]] | None:
        return load_newest(folder, self.model, self.optimizers, self.tensors, self.world)

    def weights(self) -> list[torch.Tensor]:
        return [parameter.full_tensor().clone() for parameter in self.model.parameters()]  # type: ignore[attr-defined]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_checkpoint_holds_all_that_the_next_step_depends_on(
    one_process: None, tiny_shape: Shape, tmp_path: Path
) -> None:
    with process_group() as world:
        training = Training(tiny_shape, world)
        training.step()
        training.step()
        training.save(tmp_path, 2)
        training.step()
        resumed = Training(tiny_shape, world)
        assert resumed.load(tmp_path) == (2, {"digest": "2"})
        assert resumed.tensors["window"].tolist() == [2.0] * 3
        resumed.step()  # Adam's moments and step count decide this one
        assert same(resumed.weights(), training.weights())


def test_the_newest_complete_checkpoint_wins_and_torn_ones_are_removed(
    one_process: None, tiny_shape: Shape, tmp_path: Path
) -> None:
    with process_group() as world:
        training = Training(tiny_shape, world)
        for step in (1, 2, 3, 4):
            training.step()
            training.save(tmp_path, step, keep=4)
        (step_folder(tmp_path, 4) / MARKER).unlink()  # the kill came before the marker
        shard = next(step_folder(tmp_path, 3).glob("*.distcp"))
        shard.write_bytes(shard.read_bytes()[:-1])  # the disk lost a byte
        found = Training(tiny_shape, world).load(tmp_path)
    assert found == (2, {"digest": "2"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_the_newest_few_are_kept(one_process: None, tiny_shape: Shape, tmp_path: Path) -> None:
    with process_group() as world:
        training = Training(tiny_shape, world)
        for step in (5, 10, 100):
            training.step()
            training.save(tmp_path, step, keep=2)
    assert complete_steps(tmp_path) == [10, 100]
    assert not step_folder(tmp_path, 5).exists()


def test_a_marker_that_is_no_json_makes_a_checkpoint_torn(tmp_path: Path) -> None:
    for content in ("", "{}", json.dumps({"step": 1, "files": "0"})):
        step_folder(tmp_path, 1).mkdir(exist_ok=True)
        (step_folder(tmp_path, 1) / MARKER).write_text(content)
        assert complete_steps(tmp_path) == []


def test_there_may_be_no_checkpoint_yet(one_process: None, tiny_shape: Shape, tmp_path: Path) -> None:
    with process_group() as world:
        assert Training(tiny_shape, world).load(tmp_path / "none") is None


@pytest.mark.parametrize("bad", [True, False])
def test_an_update_is_held_back_by_a_flag_on_the_device(
    one_process: None, tiny_shape: Shape, bad: bool
) -> None:
    with process_group() as world:
        training = Training(tiny_shape, world)
        before = training.weights()
        for parameter in training.model.parameters():
            parameter.grad = torch.full_like(parameter, float("nan") if bad else 1.0)
        update(training.optimizers, 0.1, torch.tensor(bad))
        assert same(before, training.weights()) is bad


def test_only_matrices_decay(one_process: None, tiny_shape: Shape) -> None:
    with process_group() as world:
        decaying, others = Training(tiny_shape, world).optimizers[0].param_groups
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert {parameter.ndim for parameter in decaying["params"]} == {2}
    assert {parameter.ndim for parameter in others["params"]} == {1}
