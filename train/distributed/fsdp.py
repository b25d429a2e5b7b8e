"""Construction of sharded models, and operations on sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from gristmill.mixtures.schema.engine import Compute
from gristmill.mixtures.schema.pretrain import Precision
from gristmill.train.distributed.context_parallel import RowSplit
from gristmill.train.distributed.process_groups import World, sum_over_ranks
from gristmill.train.loop.batch_plan import or_first
from gristmill.train.models.model_config import (
    AnyShape,
    OwnShape,
    Shape,
    TransformersShape,
)
from gristmill.train.models.moe import MixtureOfExperts
from gristmill.train.models.own_model import build_own
from gristmill.train.models.tensor_files import Tensors
from gristmill.train.models.transformers_decoder import (
    TransformersModule,
    check_module,
)
from gristmill.train.models.weights import TensorOf, allocate, stored_buffers


class ForeignModelError(ValueError):
    """A setting that needs the built-in decoder."""


Adapt = Callable[[nn.Module], object]
"""Function that modifies a model before it is sharded."""
Build = Callable[[Any], nn.Module]
"""Function that constructs the model of a shape."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def compute_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """Dtype of matrix products; `auto` is bf16 on a GPU and fp32 on a CPU."""
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[precision]


def sharded_model(
    shape: AnyShape,
    tensor_of: TensorOf | None,
    world: World,
    dtype: torch.dtype,
    compute: Compute | None = None,
    float8: Literal["off", "tensorwise", "rowwise"] = "off",
    adapt: Adapt | None = None,
    build: Build | None = None,
) -> nn.Module:
    """Build a model whose parameters are sharded over all processes.

    Master weights and gradient reduction are float32, compute is `dtype`. FSDP handles
    both, also at world size 1 (torchtitan #3148); a single process that computes in
    float32 needs neither and gets a plain module. Every process gets values from
    `tensor_of` one tensor at a time, so it never holds more than one full tensor beside
    its shard.

    Args:
        shape: of the model.
        tensor_of: source of its parameters, including those that `adapt` adds; a user's
            model initialises its own.
        world: the processes.
        dtype: of matrix products.
        compute: compilation and activation checkpointing.
        float8: 8-bit floating-point mode of linear layers.
        adapt: modifies the model before sharding (see adapters.lora).
        build: constructs the model; by default a language model (see
            models.reward_model).
    """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, distribute_tensor

    from gristmill.train.distributed.tensor import split_matrices
    from gristmill.train.models.encoder import model_of
    from gristmill.train.models.float8 import Float8Error, use_float8
    from gristmill.train.models.transformer import OutputLayer, configure

    compute = compute or Compute()
    if not isinstance(shape, Shape):
        refuse_splits(world, compute, float8)
    if isinstance(shape, OwnShape):
        return _sharded_own(shape, world, dtype)
    assert tensor_of is not None

    policy = precision_policy(dtype)
    with torch.device("meta"):
        model: Any = (build or model_of)(shape)
        if adapt is not None:
            adapt(model)
    if float8 != "off":
        if world.tensor_mesh is not None:
            raise Float8Error(
                f"pretrain.float8 is {float8}, but engine.parallel.tensor splits the "
                "matrices; use shard"
            )
        use_float8(model, float8, world.device)
    if world.tensor_mesh is not None:
        split_matrices(model, world.tensor_mesh)
    if world.row_split is not None:
        split_rows(model, world.row_split)
    configure(model, compute)
    if world.size > 1 or dtype != torch.float32:
        # FSDP hooks around layers would break the graph of a compiled model.
        if compute.compile != "model":
            for layer in (*vocabulary_layers(model), *model.blocks):
                fully_shard(
                    layer,
                    mesh=world.data_mesh,
                    mp_policy=policy,
                    # Its backward pass follows at once.
                    reshard_after_forward=not isinstance(layer, OutputLayer),
                )
        fully_shard(model, mesh=world.data_mesh, mp_policy=policy)
    allocate(model, world.device)
    with torch.no_grad():
        for name, buffer in stored_buffers(model).items():
            buffer.copy_(tensor_of(name, buffer.shape))
        for name, parameter in model.named_parameters():
            values = tensor_of(name, parameter.shape).to(world.device)
            parameter.copy_(
                distribute_tensor(
                    values,
                    parameter.device_mesh,
                    parameter.placements,
                    src_data_rank=None,
                )
                if isinstance(parameter, DTensor)
                else values
            )
    assert_master_weights(model)
    assert_compute_dtype(
        model.model if compute.compile == "model" else [*model.blocks, model][0], dtype
    )
    if isinstance(shape, TransformersShape):
        with evaluating(model):
            check_module(model, dtype)
    return model


def vocabulary_layers(model: Any) -> list[nn.Module]:
    """Embedding and output layer of a decoder, and the embedding of a module of
    transformers; none if other layers share the matrix.
    """
    if isinstance(model, TransformersModule):
        module: Any = model
        embedding = module.get_input_embeddings()
        owners = [
            layer
            for layer in model.modules()
            if getattr(layer, "weight", None) is embedding.weight
        ]
        return owners if len(owners) == 1 else []
    return (
        [model.model.embed_tokens, model.lm_head] if hasattr(model, "lm_head") else []
    )


def refuse_splits(
    world: World, compute: Compute, float8: Literal["off", "tensorwise", "rowwise"]
) -> None:
    """Refuse settings that need the layers of this package.

    Raises:
        ForeignModelError: names the setting.
    """
    for setting, is_set in (
        ("engine.parallel.tensor", world.tensor_mesh is not None),
        ("engine.parallel.context", world.row_split is not None),
        ("engine.compute.compile", compute.compiles),
        ("pretrain.float8", float8 != "off"),
    ):
        if is_set:
            raise ForeignModelError(
                f"{setting} needs the built-in decoder, and this model has layers of "
                "its own or of transformers; remove it, and use engine.parallel.shard"
            )


def split_rows(model: Any, split: RowSplit) -> None:
    """Split the tokens of each row over the processes."""
    model.row_split = split
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.row_split = split


def precision_policy(dtype: torch.dtype) -> Any:
    """FSDP mixed-precision policy: compute in `dtype`, reduce gradients in float32, do
    not cast inputs.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    # Masks and loss weights that pass through `forward` must keep their dtype.
    return MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def _sharded_own(shape: OwnShape, world: World, dtype: torch.dtype) -> nn.Module:
    """Build a user's model on every process, with the first one's values, and shard
    it.
    """
    from torch.distributed.fsdp import fully_shard

    model = build_own(shape)
    if world.size > 1:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                torch.distributed.broadcast(tensor, src=0)
    model.to(world.device)
    if world.size > 1 or dtype != torch.float32:
        fully_shard(model, mesh=world.data_mesh, mp_policy=precision_policy(dtype))
    assert_master_weights(model)
    assert_compute_dtype(model.inner, dtype)
    return model


def assert_master_weights(model: nn.Module) -> None:
    """Check that parameters are float32 master weights, and sharded if FSDP has the
    model.

    Raises:
        RuntimeError: a parameter has another dtype, or is not sharded though its model
            is or there are several processes: sharding was not applied, or was undone
            by a forward pass outside `evaluating`.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    is_sharded = isinstance(model, FSDPModule) or torch.distributed.get_world_size() > 1
    for name, parameter in model.named_parameters():
        if (
            parameter.dtype != torch.float32
            or isinstance(parameter, DTensor) != is_sharded
        ):
            raise RuntimeError(
                f"{name} is {type(parameter).__name__} of {parameter.dtype}, not a "
                f"float32 {'DTensor' if is_sharded else 'Parameter'}: sharding was not "
                "applied to it, or a forward pass without `evaluating` undid it"
            )


def assert_compute_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    """Install a check that the first forward pass of a module computes in `dtype`.

    Checks its parameters and its first argument, if floating-point, after FSDP prepared
    them and outside of compiled code.

    Raises:
        RuntimeError: in that pass: the precision policy was not applied.
    """

    def check(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        handle.remove()
        dtypes = {parameter.dtype for parameter in module.parameters()}
        dtypes |= {
            argument.dtype for argument in arguments[:1] if argument.is_floating_point()
        }
        if dtypes != {dtype}:
            raise RuntimeError(
                f"layers compute in {dtypes}, not in {dtype}: the precision policy "
                "was not applied"
            )

    handle = module.register_forward_pre_hook(check)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context for forward passes without gradients, after which the model is sharded
    again.

    FSDP reshards the root's parameters in the backward pass. Without one they would
    stay unsharded in the compute dtype, and an optimizer or export would use them as
    master weights.
    """
    from torch.distributed.fsdp import FSDPModule

    with torch.no_grad():
        yield
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def measured_by_all(
    model: nn.Module,
    number: int,
    micro_batch_size: int,
    world: World,
    measure: Callable[[np.ndarray], Tensor],
) -> np.ndarray:
    """Measure both answers of n pairs with a model, each rank its share: (n, 2) float32,
    equal on every rank.

    Args:
        model: on every rank.
        number: n.
        micro_batch_size: maximum number of pairs per forward pass on a rank.
        world: the processes.
        measure: indices of pairs (int64) -> values (len, 2).
    """
    measured = torch.zeros(number, 2, dtype=torch.float32, device=world.device)
    with evaluating(model):
        for part in world.micro_batches(np.arange(number), micro_batch_size):
            values = measure(or_first(part))
            if len(part):
                measured[torch.from_numpy(part).to(world.device)] = values
    summed: np.ndarray = sum_over_ranks(measured, world).cpu().numpy()
    return summed


def whole_tensors(model: nn.Module) -> Tensors:
    """Gather all master weights, float32 on the CPU of the first process; empty on the
    others.

    This is a collective. Processes except the first hold at most one full tensor.
    """
    assert_master_weights(model)
    is_kept, full_tensors = torch.distributed.get_rank() == 0, Tensors()
    for name, parameter in model.named_parameters():
        full_tensor = gathered(parameter).detach()
        if is_kept:
            full_tensors[name] = full_tensor.cpu()
    if is_kept:
        for name, buffer in stored_buffers(model).items():
            full_tensors[name] = buffer.cpu()
    return full_tensors


def gathered(tensor: Tensor) -> Tensor:
    """Full tensor on every process (a collective); a plain tensor is returned as it
    is.
    """
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
