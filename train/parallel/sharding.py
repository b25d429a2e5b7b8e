"""Sharding: a model whose weights are spread over all processes, or a plain one where there is nothing to spread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from gristmill.mixtures.engine import Compute
from gristmill.train.loop.row_plan import micro_batches
from gristmill.train.models.experts import Experts, MixtureOfExperts
from gristmill.train.models.own_model import build_own
from gristmill.train.models.shape import OwnShape, Shape
from gristmill.train.models.weights import TensorOf
from gristmill.train.parallel.row_split import RowSplit, RowSplitError
from gristmill.train.parallel.world import World, sum_over_ranks

if TYPE_CHECKING:
    from gristmill.train.models.llama import Llama

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(precision: Literal["auto", "fp32", "bf16", "fp16"], device: torch.device) -> torch.dtype:
    """The dtype of matrix products: bf16 on a GPU and fp32 on a CPU, unless the manifest says otherwise."""
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[precision]


def sharded_model(
    shape: Shape | OwnShape,
    tensor_of: TensorOf | None,
    world: World,
    dtype: torch.dtype,
    compute: Compute | None = None,
    float8: Literal["off", "tensorwise", "rowwise"] = "off",
    adapt: Callable[[nn.Module], None] | None = None,
    build: Callable[[Shape], Llama] | None = None,
) -> nn.Module:
    """A model whose parameters are spread over all processes.

    Master weights and the reduction of gradients are float32, compute is `dtype`. FSDP does both, at world size 1 too
    (torchtitan #3148): only one process that computes in float32 has neither to do, and its model is a plain module.
    Every process gets its values from
    `tensor_of`, tensor by tensor, so no process ever holds more than one whole tensor beside its share.

    Args:
        shape: of the model.
        tensor_of: where its parameters come from, those that `adapt` adds included; a user's model makes its own.
        world: the processes.
        dtype: of matrix products.
        compute: what is compiled and recomputed.
        float8: how layers multiply in 8-bit floating point.
        adapt: changes the model before it is sharded (see adapters.lora).
        build: makes the model, one that predicts tokens if absent (see models.reward); no pipeline has it.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, distribute_tensor

    from gristmill.train.models.encoder import model_of
    from gristmill.train.models.float8 import Float8Error, use_float8
    from gristmill.train.models.llama import configure
    from gristmill.train.parallel.expert_parallel import deal_experts
    from gristmill.train.parallel.pipeline_parallel import PipelineStage
    from gristmill.train.parallel.tensor import split_matrices

    if isinstance(shape, OwnShape):
        if world.row_split is not None:
            raise RowSplitError("engine.parallel.context: a model of your own reads whole rows; use shard")
        return _sharded_own(shape, world, dtype)
    assert tensor_of is not None
    compute = compute or Compute()

    policy = precision_policy(dtype)
    with torch.device("meta"):
        model: Any = (
            (build or model_of)(shape)
            if world.pipeline_group is None
            else PipelineStage(shape, world.stage, world.pipeline_group, dtype, world.device, world.shards_weights)
        )
        if adapt is not None:
            adapt(model)
    if float8 != "off":
        if world.tensor_mesh is not None:
            raise Float8Error(f"pretrain.float8 is {float8}, but engine.parallel.tensor splits the matrices; use shard")
        use_float8(model, float8, world.device)
    if world.tensor_mesh is not None:
        split_matrices(model, world.tensor_mesh)
    if world.row_split is not None:
        split_rows(model, world.row_split)
    configure(model, compute)
    if world.size > 1 or dtype != torch.float32:
        dealt = deal_experts(model, world, compute) if world.deals_experts else set()
        # FSDP's work around a layer would cut a compiled model into pieces.
        layers = model.model.layers.children() if compute.compile != "model" else ()
        for layer in (*layers, *getattr(model, "further_layers", ())):
            fully_shard(layer, mesh=world.data_mesh, mp_policy=policy, ignored_params=dealt)
        fully_shard(model, mesh=world.data_mesh, mp_policy=policy, ignored_params=dealt)
    model.to_empty(device=world.device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = tensor_of(name, parameter.shape).to(world.device)
            parameter.copy_(
                distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)
                if isinstance(parameter, DTensor)
                else values
            )
    assert_master_weights(model)
    probes: Sequence[nn.Module] = [model.model] if compute.compile == "model" else list(model.model.layers.children())
    assert_compute_dtype(probes[0], dtype)
    return model


def split_rows(model: Any, split: RowSplit) -> None:
    """Have a decoder compute a share of each row's tokens on each of some processes.

    Raises:
        RowSplitError: it is none, or predicts further tokens.
    """
    shape: Shape = model.shape
    if shape.encoder or shape.encoder_decoder or shape.multi_token:
        kind = "a decoder that predicts further tokens" if shape.multi_token else "an encoder"
        raise RowSplitError(f"engine.parallel.context is {split.size}, but {kind} reads whole rows; use shard")
    model.row_split = split
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.row_split = split


def precision_policy(dtype: torch.dtype) -> Any:
    """What FSDP computes in `dtype`: all but the reduction of gradients, and what passes through `forward`."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    # Masks and loss weights that pass through `forward` must keep their dtype.
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def _sharded_own(shape: OwnShape, world: World, dtype: torch.dtype) -> nn.Module:
    """A user's model, which every process makes whole; what is spread are the first one's values."""
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
    """Refuse parameters that are not float32 master weights, or that are whole where FSDP has the model.

    Raises:
        RuntimeError: a parameter is of another dtype, or whole though its model is sharded or there are several
            processes: sharding was not applied, or was undone by a forward pass outside `evaluating`.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    is_sharded = isinstance(model, FSDPModule) or torch.distributed.get_world_size() > 1
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32 or isinstance(parameter, DTensor) != is_sharded:
            raise RuntimeError(
                f"{name} is {type(parameter).__name__} of {parameter.dtype}, not a float32 "
                f"{'DTensor' if is_sharded else 'Parameter'}: sharding was not applied to it, or a "
                "forward pass without `evaluating` undid it"
            )


def assert_compute_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    """On the first forward pass of a module, raise an error if it does not multiply in `dtype`.

    Looks at its parameters (but those of experts that are dealt, which are masters still) and at its first argument, if
    that is floating-point, after FSDP made them ready, and outside of compiled code.

    Raises:
        RuntimeError: (in that pass) the precision policy was not applied.
    """

    def check(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        handle.remove()
        masters = {
            id(weight)
            for one in module.modules()
            if isinstance(one, Experts) and one.dealt is not None
            for weight in one.parameters()
        }
        found = {parameter.dtype for parameter in module.parameters() if id(parameter) not in masters}
        found |= {one.dtype for one in arguments[:1] if one.is_floating_point()}
        if found != {dtype}:
            raise RuntimeError(f"layers compute in {found}, not in {dtype}: the precision policy was not applied")

    handle = module.register_forward_pre_hook(check)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Forward passes without gradients, after which the model is sharded again.

    FSDP shards the root's parameters again in the backward pass. Where there is none they would stay whole, in the
    compute dtype, and an optimizer or an export would take them for the master weights.
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
    columns: int,
    micro_batch_size: int,
    world: World,
    measure: Callable[[np.ndarray], Tensor],
) -> np.ndarray:
    """What a model makes of n examples, (n, columns) float32, the same on every rank; each measures its share of them.

    Args:
        model: on every rank.
        number: n.
        columns: values per example.
        micro_batch_size: examples per forward pass on one rank, at the most.
        world: the processes.
        measure: numbers of some examples (int64) -> their values, (len, columns).
    """
    found = torch.zeros(number, columns, dtype=torch.float32, device=world.device)
    with evaluating(model):
        for part in micro_batches(np.arange(number), world.data_rank, world.data_size, micro_batch_size):
            # An empty share still takes part in the collectives of the forward pass.
            values = measure(part if len(part) else np.zeros(1, dtype=np.int64))
            if len(part):
                found[torch.from_numpy(part).to(world.device)] = values
    summed: np.ndarray = sum_over_ranks(found, world).cpu().numpy()
    return summed


def whole_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All master weights, float32 on the CPU of the first process; nothing on the others, which help to gather them.

    Every process calls this together; none but the first ever holds more than one whole tensor, or than its own stage
    of a pipeline.
    """
    from gristmill.train.parallel.pipeline_parallel import is_beside_first, of_all_stages

    assert_master_weights(model)
    is_kept, kept = is_beside_first(model), dict[str, Tensor]()
    for name, parameter in model.named_parameters():
        whole = gathered(parameter).detach()
        if is_kept:
            kept[name] = whole.cpu()
    return of_all_stages(model, kept) if is_kept else {}


def gathered(tensor: Tensor) -> Tensor:
    """All of a tensor on every process, which call this together; a plain one is its own."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
