"""Unsharded model of a single process, which trains like a sharded one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from gristmill.mixtures.schema.model import Model
from gristmill.mixtures.schema.optimizer import Optimizer
from gristmill.train.distributed.fsdp import (
    assert_master_weights,
    evaluating,
    sharded_model,
)
from gristmill.train.distributed.process_groups import World, single_process
from gristmill.train.models.model_config import shape_of
from gristmill.train.models.weights import drawn
from gristmill.train.objectives.losses import next_tokens, weighted_nll
from gristmill.train.optim.clipping import clip_gradients
from gristmill.train.optim.dtensor_sums import local
from gristmill.train.optim.optimizer import make_optimizers, update

SHAPE = shape_of(Model(layers=2, width=32, heads=4), 100, 16)


def test_single_process_in_float32_has_a_plain_model(one_process: None) -> None:
    with single_process() as world:
        model = sharded_model(SHAPE, drawn(SHAPE, 0), world, torch.float32)
        assert not any(isinstance(module, FSDPModule) for module in model.modules())
        assert not any(
            isinstance(parameter, DTensor) for parameter in model.parameters()
        )
        assert_master_weights(model)


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_output_have_fsdp_groups_of_their_own_unless_tied(
    tied: bool, one_process: None
) -> None:
    section = Model(layers=1, width=32, heads=4, tied_embeddings=tied)
    shape = shape_of(section, 100, 16)
    with single_process() as world:
        model = sharded_model(shape, drawn(shape, 0), world, torch.bfloat16)
    groups = {
        name for name, module in model.named_modules() if isinstance(module, FSDPModule)
    }
    vocabulary = set() if tied else {"model.embed_tokens", "lm_head"}
    assert groups == {"", "model.layers.0", *vocabulary}


def test_layers_in_bfloat16_have_separate_weights(one_process: None) -> None:
    with single_process() as world:
        model = sharded_model(SHAPE, drawn(SHAPE, 0), world, torch.bfloat16)
        master = {local(parameter).data_ptr() for parameter in model.parameters()}
        layer, used_pointers = model.model.layers[1], set[int]()
        layer.register_forward_hook(
            lambda *_: used_pointers.update(
                weight.data_ptr() for weight in layer.parameters()
            )
        )
        with evaluating(model):
            model(_ids(), _loss_of(_ids()))
        assert used_pointers
        assert not used_pointers & master
        assert_master_weights(model)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    "kind",
    ["adamw", "muon", "normuon", "lion", "adafactor"],
)
def test_updates_equal_those_of_a_sharded_model(
    one_process: None, micro_batches: int, kind: str
) -> None:
    section = Optimizer.model_validate(
        {"kind": kind, "learning_rate": 1e-2, "clip_norm": 0.5}
    )
    with single_process() as world:
        plain = sharded_model(SHAPE, drawn(SHAPE, 0), world, torch.float32)
        expected = _trained(_sharded(world), section, micro_batches)
        weights = _trained(plain, section, micro_batches)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


def _sharded(world: World) -> nn.Module:
    """Wrap the same model in FSDP, layer by layer."""
    model = sharded_model(SHAPE, drawn(SHAPE, 0), world, torch.float32)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for module in (*model.model.layers.children(), model):
        fully_shard(module, mesh=world.data_mesh, mp_policy=policy)
    return model


def _trained(
    model: nn.Module, section: Optimizer, micro_batches: int
) -> dict[str, Tensor]:
    """Return weights and gradient norms after three clipped updates."""
    optimizers, norms, good = make_optimizers(model, section), [], torch.tensor(False)
    for step in range(3):
        for number in range(micro_batches):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(number == micro_batches - 1)
            ids = _ids(step * micro_batches + number)
            model(ids, _loss_of(ids))[0].backward()
        norms.append(clip_gradients(model, section.clip_norm))
        update(optimizers, 1e-2, good)
    return {
        name: local(parameter).detach() for name, parameter in model.named_parameters()
    } | {"norms": torch.stack(norms)}


def _ids(seed: int = 0) -> Tensor:
    return torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(seed))


def _loss_of(ids: Tensor) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    targets = next_tokens(ids)
    weights = torch.full(targets.shape, 1.0 / targets.numel())
    return lambda hidden, matrix: weighted_nll(hidden, matrix, targets, weights)
