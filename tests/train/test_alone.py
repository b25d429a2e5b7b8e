"""A process that is alone copies neither weights nor gradients, and computes what a model without sharding does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gristmill.mixtures.model import Model
from gristmill.train.models.llama import Llama
from gristmill.train.models.shape import Shape, shape_of
from gristmill.train.models.weights import drawn
from gristmill.train.objectives.losses import next_tokens, weighted_nll
from gristmill.train.optim.sharded import local
from gristmill.train.parallel.alone import NothingToReduce
from gristmill.train.parallel.sharding import assert_sharded, evaluating, sharded_model
from gristmill.train.parallel.world import single_process

SHAPE = shape_of(Model(layers=2, width=32, heads=4), 100, 16)


def test_the_weights_that_layers_compute_with_are_the_master_weights(one_process: None) -> None:
    with single_process() as world:
        model = sharded_model(SHAPE, drawn(SHAPE, 0), world, torch.float32)
        master = {name: local(parameter).data_ptr() for name, parameter in model.named_parameters()}
        used: dict[str, int] = {}
        model.model.layers[1].register_forward_hook(
            lambda *_: used.update({name: parameter.data_ptr() for name, parameter in model.named_parameters()}))
        for _ in range(2):
            used.clear()
            with evaluating(model):
                model(_ids(), _loss_of(_ids()))
            assert used == master
            assert_sharded(model)


def test_layers_that_compute_in_another_dtype_have_their_own_weights(one_process: None) -> None:
    with single_process() as world:
        model = sharded_model(SHAPE, drawn(SHAPE, 0), world, torch.bfloat16)
        master = {local(parameter).data_ptr() for parameter in model.parameters()}
        used: set[int] = set()
        model.model.layers[1].register_forward_hook(
            lambda *_: used.update(parameter.data_ptr() for parameter in model.parameters()))
        with evaluating(model):
            model(_ids(), _loss_of(_ids()))
        assert len(used) == len(master)
        assert not used & master


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_three_updates_are_those_of_a_model_that_is_not_sharded(
    one_process: None, make_model: Callable[[Shape], Llama], micro_batches: int
) -> None:
    begun = dict(make_model(SHAPE).named_parameters())
    expected = _trained(make_model(SHAPE), micro_batches, sync=lambda last: None)
    with single_process() as world:
        model = sharded_model(SHAPE, lambda name, size: begun[name].detach(), world, torch.float32)

        def sync(last: bool) -> None:
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)

        found = _trained(model, micro_batches, sync)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_gradients_are_reduced_in_the_memory_that_they_are_gathered_in(one_process: None) -> None:
    given: list[Tensor] = []

    class Watched(NothingToReduce):
        def allocate(self, *arguments: Any, **named: Any) -> Tensor:
            given.append(super().allocate(*arguments, **named))
            return given[-1]

    with single_process() as world:
        model: Any = sharded_model(SHAPE, drawn(SHAPE, 0), world, torch.float32)
        model.set_custom_reduce_scatter(Watched())
        for number in range(3):
            model(_ids(number), _loss_of(_ids(number)))[0].backward()
    assert len(given) == 2 * 3
    assert all(one is two for one, two in zip(given[::2], given[1::2], strict=True))
    with pytest.raises(RuntimeError, match="as if there were one"):
        NothingToReduce()(torch.zeros(1), torch.zeros(1))


def test_weights_that_are_loaded_later_are_computed_with(one_process: None) -> None:
    with single_process() as world:
        model = sharded_model(SHAPE, drawn(SHAPE, 0), world, torch.float32)
        other, ids = sharded_model(SHAPE, drawn(SHAPE, 1), world, torch.float32), _ids()
        with evaluating(model):
            first = model(ids, _loss_of(ids))[0].item()
        with evaluating(other):
            expected = other(ids, _loss_of(ids))[0].item()
        model.load_state_dict(other.state_dict())
        with evaluating(model):
            found = model(ids, _loss_of(ids))[0].item()
    assert first != expected
    assert found == expected


def _trained(model: nn.Module, micro_batches: int, sync: Callable[[bool], None]) -> dict[str, Tensor]:
    """Weights and last gradients after three updates."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for step in range(3):
        optimizer.zero_grad(set_to_none=True)
        for number in range(micro_batches):
            sync(number == micro_batches - 1)
            ids = _ids(step * micro_batches + number)
            loss, _ = model(ids, _loss_of(ids))
            loss.backward()
        optimizer.step()
    weights = {name: local(parameter).detach() for name, parameter in model.named_parameters()}
    return weights | {f"{name}.grad": local(parameter.grad) for name, parameter in model.named_parameters()}


def _ids(seed: int = 0) -> Tensor:
    return torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(seed))


def _loss_of(ids: Tensor) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    targets = next_tokens(ids)
    weights = torch.full(targets.shape, 1.0 / targets.numel())
    return lambda hidden, matrix: weighted_nll(hidden, matrix, targets, weights)
