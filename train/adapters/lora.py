"""Low-rank adapters: LoRA (Hu et al. 2022), rsLoRA (Kalajdzievski 2023) and DoRA (Liu et al. 2024).

Names and layout are PEFT's, so that its users can load what is trained here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gristmill.dataprep.context import Context
from gristmill.mixtures.posttraining import LinearLayer, Lora, RoundedBase
from gristmill.train.adapters.quantised import RoundedWeight, product, rounded
from gristmill.train.models.initialisation import generator_of
from gristmill.train.models.llama import Llama
from gristmill.train.models.shape import Shape
from gristmill.train.models.weights import TensorOf
from gristmill.train.parallel.sharding import sharded_model
from gristmill.train.parallel.world import World
from gristmill.train.planning.flops import flops_per_token

DOWN, UP, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
"""How the parameters of an adapter are called, after the name of their layer."""


class LoraError(ValueError):
    """A model cannot have the adapters that are asked for."""


class LoraLinear(nn.Linear):
    """A frozen linear layer with an adapter: V x with V = W + scale B A, or with magnitudes m V x / |V|.

    Attributes:
        lora_A: (rank, in); lora_B: (out, rank).
        lora_magnitude_vector: (out,), of DoRA alone.
        is_off: whether it computes as the frozen layer does.
        rounded: the frozen weight, where it is not `weight` (see quantised.py).
    """

    rounded: RoundedWeight | None = None

    def __init__(self, frozen: nn.Linear, lora: Lora) -> None:
        super().__init__(frozen.in_features, frozen.out_features, bias=frozen.bias is not None)
        self.requires_grad_(False)
        if lora.base is not None:
            self.weight = None  # type: ignore[assignment]
        self.scale = lora.scale
        self.is_off = False
        self.lora_A = nn.Linear(self.in_features, lora.rank, bias=False)
        self.lora_B = nn.Linear(lora.rank, self.out_features, bias=False)
        self.lora_magnitude_vector = nn.Parameter(torch.empty(self.out_features)) if lora.dora else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        if self.is_off:
            return self._frozen(x)
        added = self.lora_B(self.lora_A(x)) * self.scale
        if self.lora_magnitude_vector is None:
            return self._frozen(x) + added
        # The norm is a constant to the gradient (section 4.3), which saves a third of the memory and costs nothing.
        norm = adapted_weight(self.weight, self.lora_A.weight, self.lora_B.weight, self.scale).norm(dim=1).detach()
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
    """Freeze a model and give its linear layers adapters, in place; before it is sharded.

    Raises:
        LoraError: the model has none of the layers that are asked for.
    """
    model.requires_grad_(False)
    wanted = lora.targets or get_args(LinearLayer)
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in wanted
    ]
    missing = set(wanted) - {name.rpartition(".")[2] for name, _ in found}
    if not found or (lora.targets and missing):
        raise LoraError(
            f"lora.targets: the model has no linear layer called {', '.join(sorted(missing))} (the "
            "matrices of experts are none); leave these out"
        )
    for name, module in found:
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, LoraLinear(module, lora))


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Let a model compute as if it had no adapters: as what it was adapted from."""
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    for layer in layers:
        layer.is_off = True
    try:
        yield
    finally:
        for layer in layers:
            layer.is_off = False


def adapted_tensors(tensor_of: TensorOf, lora: Lora | None, seed: int) -> TensorOf:
    """Where the tensors of an adapted model come from: the frozen ones as before, new adapters change nothing at first.

    A is uniform within 1 / sqrt(in) (PEFT's default, Kaiming's with a = sqrt 5), drawn by its name, B is zero, and
    DoRA's magnitudes are the norms of W's rows.
    """
    if lora is None:
        return tensor_of

    def found(name: str, size: torch.Size) -> Tensor:
        if name.endswith(DOWN):
            edge = 1 / math.sqrt(size[1])
            return torch.empty(size).uniform_(-edge, edge, generator=generator_of(seed, name))
        if name.endswith(UP):
            return torch.zeros(size)
        if name.endswith(MAGNITUDE):
            layer = name.removesuffix(MAGNITUDE) + "weight"
            return tensor_of(layer, widths[layer]).norm(dim=1)
        widths[name] = size
        return tensor_of(name, size)

    widths: dict[str, torch.Size] = {}
    return found


def is_adapter(name: str) -> bool:
    """Whether a parameter is an adapter's."""
    return name.endswith((DOWN, UP, MAGNITUDE))


def merged(tensors: Mapping[str, Tensor], lora: Lora) -> dict[str, Tensor]:
    """The weights that compute the same without adapters, under the names of the model without them."""
    weights = {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}
    for name in tensors:
        if not name.endswith(DOWN):
            continue
        layer = name.removesuffix(DOWN)
        weight = adapted_weight(weights[f"{layer}weight"], tensors[name], tensors[layer + UP], lora.scale)
        if lora.dora:
            weight = weight * (tensors[layer + MAGNITUDE] / weight.norm(dim=1))[:, None]
        weights[f"{layer}weight"] = weight
    return weights


def adapted_flops_per_token(shape: Shape, length: int, lora: Lora | None) -> float:
    """Arithmetic of a training per token: where weights are frozen, their gradients are not computed."""
    flops = flops_per_token(shape, length)
    if lora is None:
        return flops.whole
    # Two of six operations per weight are its gradient's. Adapters are so small that they are not counted.
    return flops.matrices * 2 / 3 + flops.attention


def check_rounding(kind: RoundedBase, compiled: bool) -> None:
    """Refuse what cannot be had.

    Raises:
        LoraError: bitsandbytes, which rounds to 4 bits, is not installed, or the model is to be compiled.
    """
    if compiled:
        raise LoraError(
            f"lora.base is {kind}, but engine.compute.compile takes no rounded matrices; say compile: "
            "off, or remove lora.base"
        )
    if kind == "nf4":
        try:
            import bitsandbytes  # noqa: F401
        except ModuleNotFoundError as error:
            raise LoraError(
                "lora.base is nf4, but bitsandbytes is not installed; install it with: "
                "pip install 'gristmill[quant]', or say base: int8, which needs nothing"
            ) from error


def round_frozen(model: nn.Module, tensor_of: TensorOf, kind: RoundedBase, world: World) -> None:
    """Give all adapted layers of a model, which have no weight yet, their rounded ones; matrix by matrix, of which each
    process keeps its share."""
    group = world.sharing_group
    for name, layer in _adapted_layers(model):
        whole = tensor_of(f"{name}.weight", torch.Size((layer.out_features, layer.in_features))).to(world.device)
        found = rounded(whole, kind)
        layer.rounded = found if group is None else found.among(group)


def rounded_weights(model: nn.Module) -> dict[str, RoundedWeight]:
    """The matrices that are held rounded, by the names of their layers' weights."""
    return {f"{name}.weight": layer.rounded for name, layer in _adapted_layers(model) if layer.rounded is not None}


def rounded_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What they stand for; float32 on the CPU of the first process, nothing on the others, which help to gather it."""
    found, is_first = dict[str, Tensor](), torch.distributed.get_rank() == 0
    for name, weight in rounded_weights(model).items():
        whole = weight.whole(torch.float32)
        if is_first:
            found[name] = whole.cpu()
    return found


def describe_rounding(model: nn.Module, lora: Lora | None) -> dict[str, Any]:
    """For a summary: bytes that rounded matrices take on each process, and would in float32 if whole; nothing if none
    is."""
    if lora is None or lora.base is None:
        return {}
    taken = [
        (layer.rounded.nbytes, 4 * layer.in_features * layer.out_features)
        for _, layer in _adapted_layers(model)
        if layer.rounded is not None
    ]
    return {
        "lora_base": {
            "kind": lora.base,
            "bytes": sum(ours for ours, _ in taken),
            "float32_bytes": sum(whole for _, whole in taken),
        }
    }


def _adapted_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


def tuned_model(
    shape: Shape,
    tensor_of: TensorOf,
    lora: Lora | None,
    seed: int,
    world: World,
    dtype: torch.dtype,
    context: Context,
    extend: Callable[[nn.Module], None] | None = None,
    build: Callable[[Shape], Llama] | None = None,
) -> nn.Module:
    """A model that exists already, sharded, with new adapters where they are asked for.

    Args:
        shape, tensor_of: the model.
        lora: its adapters, and how what they freeze is rounded; all is trained without.
        seed: of the adapters.
        world, dtype, context: where and how it computes.
        extend: changes it once more before it is sharded; layers that this puts on top of it begin at zero.
        build: see `sharded_model`.

    Raises:
        LoraError: there is no such layer, the model is a GLM, or frozen weights cannot be rounded as they are to be.
    """
    if lora is not None and shape.rotary_share != 1.0:
        raise LoraError(
            "lora writes adapters for PEFT, but a GLM's matrices are joined or reordered in transformers, "
            "where adapters of these would not fit; remove it"
        )
    base = None if lora is None else lora.base
    if base is not None:
        check_rounding(base, context.compute.compiles)
    inside = adapted_tensors(tensor_of, lora, seed)
    added: set[str] = set()

    def change(model: nn.Module) -> None:
        if lora is not None:
            adapt(model, lora)
        before = {name for name, _ in model.named_parameters()}
        if extend is not None:
            extend(model)
        added.update(name for name, _ in model.named_parameters() if name not in before)

    model = sharded_model(
        shape,
        lambda name, size: torch.zeros(size) if name in added else inside(name, size),
        world,
        dtype,
        context.compute,
        adapt=change,
        build=build,
    )
    if base is not None:
        round_frozen(model, tensor_of, base, world)
    return model
