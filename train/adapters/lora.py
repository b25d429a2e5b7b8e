"""Low-rank adapters: LoRA (Hu et al. 2022), rsLoRA (Kalajdzievski 2023) and DoRA (Liu
et al. 2024).

Names and layout follow PEFT, so that PEFT can load the adapters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypedDict, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gristmill.core.stage_context import Context
from gristmill.mixtures.schema.posttraining import LinearLayer, Lora, RoundedBase
from gristmill.train.adapters.quantised import RoundedWeight, product, rounded
from gristmill.train.distributed.fsdp import Adapt, Build, sharded_model
from gristmill.train.distributed.process_groups import World
from gristmill.train.models.initialisation import generator_of
from gristmill.train.models.model_config import Shape, StoredShape
from gristmill.train.models.tensor_files import Tensors
from gristmill.train.models.transformers_decoder import (
    ONE_BY_ONE,
    TransformersModule,
)
from gristmill.train.models.weights import TensorOf
from gristmill.train.planning.flops import flops_per_token

DOWN, UP, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
"""Suffixes of the parameters of an adapter, after the name of the layer."""


class LoraError(ValueError):
    """A model does not support the configured adapters."""


class LoraLinear(nn.Linear):
    """A frozen linear layer with an adapter: V x with V = W + scale B A, or with
    magnitudes m V x / |V|.

    Attributes:
        lora_A: (rank, in); lora_B: (out, rank).
        lora_magnitude_vector: (out,), only for DoRA.
        is_off: true to compute as the frozen layer.
        rounded: quantised frozen weight, in place of `weight` (see quantised.py).
    """

    rounded: RoundedWeight | None = None

    def __init__(self, frozen: nn.Linear, lora: Lora) -> None:
        super().__init__(
            frozen.in_features, frozen.out_features, bias=frozen.bias is not None
        )
        self.requires_grad_(False)
        if lora.base is not None:
            self.weight = None  # type: ignore[assignment]
        self.scale = lora.scale
        self.is_off = False
        self.lora_A = nn.Linear(self.in_features, lora.rank, bias=False)
        self.lora_B = nn.Linear(lora.rank, self.out_features, bias=False)
        self.lora_magnitude_vector = (
            nn.Parameter(torch.empty(self.out_features)) if lora.dora else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        if self.is_off:
            return self._frozen(x)
        down, up = self.lora_A, self.lora_B
        added = up(down(x)) * self.scale
        if self.lora_magnitude_vector is None:
            return self._frozen(x) + added
        # The norm is detached from the gradient (section 4.3), which saves a third of
        # the memory at no loss.
        weight = adapted_weight(self.weight, down.weight, up.weight, self.scale)
        norm = weight.norm(dim=1).detach()
        out = (F.linear(x, self.weight) + added) * (self.lora_magnitude_vector / norm)
        return out if self.bias is None else out + self.bias

    def _frozen(self, x: Tensor) -> Tensor:
        if self.rounded is None:
            return super().forward(x)
        out = product(x, self.rounded)
        return out if self.bias is None else out + self.bias


def adapted_weight(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """W + scale B A, (out, in)."""
    return weight + scale * (up @ down)


def adapt(model: nn.Module, lora: Lora) -> None:
    """Freeze a model and add adapters to its linear layers in place, before sharding;
    without `targets`, those of a decoder of transformers are all in its blocks.

    Raises:
        LoraError: the model lacks the target layers.
    """
    model.requires_grad_(False)
    targets = lora.targets or get_args(LinearLayer)
    blocks, takes_all = [model], False
    if isinstance(model, TransformersModule):
        blocks, takes_all = model.blocks, not lora.targets
    of_blocks = {module for block in blocks for module in block.modules()}
    target_layers = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module in of_blocks
        and (takes_all or name.rpartition(".")[2] in targets)
        # Llama 4's routing is a subclass that returns a pair.
        and isinstance(module(module.weight[:1]), Tensor)
    ]
    missing = set(targets) - {name.rpartition(".")[2] for name, _ in target_layers}
    if not target_layers or (lora.targets and missing):
        raise LoraError(
            "lora.targets: the model has no linear layer called "
            f"{', '.join(sorted(missing))} (the "
            "matrices of experts are none); leave these out"
        )
    for name, module in target_layers:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, LoraLinear(module, lora))


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Context in which a model computes without its adapters, as its base model."""
    layers = [layer for _, layer in _adapted_layers(model)]
    for layer in layers:
        layer.is_off = True
    try:
        yield
    finally:
        for layer in layers:
            layer.is_off = False


def adapted_tensors(tensor_of: TensorOf, lora: Lora | None, seed: int) -> TensorOf:
    """Source of the tensors of an adapted model, whose adapters do not change its
    outputs initially.

    A is uniform within 1 / sqrt(in) (PEFT's default, Kaiming with a = sqrt 5), seeded
    by its name; B is zero; DoRA's magnitudes are the norms of W's rows.
    """
    if lora is None:
        return tensor_of

    def tensor_of_adapted(name: str, size: torch.Size) -> Tensor:
        if name.endswith(DOWN):
            bound = 1 / math.sqrt(size[1])
            return torch.empty(size).uniform_(
                -bound, bound, generator=generator_of(seed, name)
            )
        if name.endswith(UP):
            return torch.zeros(size)
        if name.endswith(MAGNITUDE):
            layer = name.removesuffix(MAGNITUDE) + "weight"
            return tensor_of(layer, widths[layer]).norm(dim=1)
        widths[name] = size
        return tensor_of(name, size)

    widths: dict[str, torch.Size] = {}
    return tensor_of_adapted


def is_adapter(name: str) -> bool:
    """Return True for the names of adapter parameters."""
    return name.endswith((DOWN, UP, MAGNITUDE))


def merged(tensors: Tensors, lora: Lora) -> Tensors:
    """Merge adapters into the weights, under the names of the model without
    adapters.
    """
    weights = {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}
    for name in tensors:
        if not name.endswith(DOWN):
            continue
        layer = name.removesuffix(DOWN)
        weight = adapted_weight(
            weights[f"{layer}weight"], tensors[name], tensors[layer + UP], lora.scale
        )
        if lora.dora:
            weight = weight * (tensors[layer + MAGNITUDE] / weight.norm(dim=1))[:, None]
        weights[f"{layer}weight"] = weight
    return weights


def adapted_flops_per_token(
    shape: StoredShape, length: int, lora: Lora | None
) -> float:
    """Training FLOPs per token, without the gradients of frozen weights."""
    flops = flops_per_token(shape, length)
    if lora is None:
        return flops.whole
    # Two of six FLOPs per weight are for its gradient. Adapters are negligible and not
    # counted.
    return flops.matrices * 2 / 3 + flops.attention


def check_rounding(kind: RoundedBase, compiled: bool) -> None:
    """Check that the frozen weights can be quantised.

    Raises:
        LoraError: bitsandbytes, which quantises to 4 bits, is not installed, or the
            model is compiled.
    """
    if compiled:
        raise LoraError(
            f"lora.base is {kind}, but engine.compute.compile takes no rounded "
            "matrices; say compile: off, or remove lora.base"
        )
    if kind == "nf4":
        try:
            import bitsandbytes  # noqa: F401
        except ModuleNotFoundError as error:
            raise LoraError(
                "lora.base is nf4, but bitsandbytes is not installed; install it with: "
                "pip install 'gristmill[quant]', or say base: int8, which needs nothing"
            ) from error


def round_frozen(
    model: nn.Module, tensor_of: TensorOf, kind: RoundedBase, world: World
) -> None:
    """Quantise the frozen weights of all adapted layers, one matrix at a time; each
    process keeps its shard.
    """
    for name, layer in _adapted_layers(model):
        weight = tensor_of(
            f"{name}.weight", torch.Size((layer.out_features, layer.in_features))
        ).to(world.device)
        quantised = rounded(weight, kind)
        if world.shards_weights:
            quantised = quantised.among(world.weights.get_group("shard"))
        layer.rounded = quantised


def rounded_weights(model: nn.Module) -> dict[str, RoundedWeight]:
    """Quantised matrices, by the names of their layers' weights."""
    return {
        f"{name}.weight": layer.rounded
        for name, layer in _adapted_layers(model)
        if layer.rounded is not None
    }


def rounded_tensors(model: nn.Module) -> Tensors:
    """Dequantised matrices; float32 on the CPU of the first process, empty on the
    others. A collective.
    """
    matrices = Tensors()
    is_first = torch.distributed.get_rank() == 0
    for name, weight in rounded_weights(model).items():
        matrix = weight.whole(torch.float32)
        if is_first:
            matrices[name] = matrix.cpu()
    return matrices


class RoundedMatrices(TypedDict):
    """Quantised matrices of a model: their kind, and their bytes on each process and in
    unsharded float32.
    """

    kind: str
    bytes: int
    float32_bytes: int


def describe_rounding(model: nn.Module, lora: Lora | None) -> RoundedMatrices | None:
    """Summary of quantised matrices; None without them."""
    if lora is None or lora.base is None:
        return None
    quantised = unquantised = 0
    for _, layer in _adapted_layers(model):
        if layer.rounded is not None:
            quantised += layer.rounded.nbytes
            unquantised += 4 * layer.in_features * layer.out_features
    return {"kind": lora.base, "bytes": quantised, "float32_bytes": unquantised}


def _adapted_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


def tuned_model(
    shape: StoredShape,
    tensor_of: TensorOf,
    lora: Lora | None,
    seed: int,
    world: World,
    dtype: torch.dtype,
    context: Context,
    extend: Adapt | None = None,
    build: Build | None = None,
) -> nn.Module:
    """Load an existing model, sharded, with new adapters if configured.

    Args:
        shape, tensor_of: the model.
        lora: its adapters and the quantisation of frozen weights; None trains all
            weights.
        seed: of the adapters.
        world, dtype, context: processes, compute dtype and settings.
        extend: modifies the model again before sharding.
        build: see `sharded_model`.

    Raises:
        LoraError: target layers are missing, the model is a GLM, or its frozen weights
            cannot be quantised.
    """
    if lora is not None and isinstance(shape, Shape) and shape.rotary_share != 1.0:
        raise LoraError(
            "lora writes adapters for PEFT, but a GLM's matrices are joined or "
            "reordered in transformers, "
            "where adapters of these would not fit; remove it"
        )
    base = None if lora is None else lora.base
    if base is not None:
        check_rounding(base, context.training.compute.compiles)

    def change(model: nn.Module) -> None:
        if lora is not None:
            adapt(model, lora)
        if extend is not None:
            extend(model)

    model = sharded_model(
        shape,
        adapted_tensors(tensor_of, lora, seed),
        world,
        dtype,
        context.training.compute,
        adapt=change,
        build=build,
    )
    if base is not None:
        round_frozen(model, tensor_of, base, world)
    if not getattr(model, "separates_documents", True):
        context.warn(ONE_BY_ONE)
    return model
