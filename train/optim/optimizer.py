"""Optimizers by name, their parameter groups, and an update that a flag on the device
can skip.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from gristmill.dataprep.user_functions import blaming
from gristmill.mixtures.schema.optimizer import OPTIMIZERS, Optimizer, OptimizerKind
from gristmill.mixtures.user_code import OwnFunction
from gristmill.train.optim.builder import Build, GuardedOptimizer
from gristmill.train.optim.dtensor_sums import local, trainable
from gristmill.train.optim.mup import rate_factor
from gristmill.train.optim.own_optimizer import own_optimizer

RATE_FACTOR = "lr_factor"
"""Key of a parameter group for its share of the learning rate."""
LAYERS = re.compile(r"(^|\.)(layers?|blocks?|h)\.")
"""List of layers in the name of a parameter, here and in models of transformers."""


def make_optimizers(
    model: nn.Module,
    section: Optimizer,
    width_factor: float = 1.0,
) -> list[torch.optim.Optimizer]:
    """Create the optimizers of a model's trainable parameters: one, or one for matrices
    and AdamW for the others.

    Only matrices decay, not the gains of norms. Moments are sharded as their
    parameters.

    Args:
        model: sharded.
        section: kind and hyperparameters.
        width_factor: width divided by muP's base width
            (`mixtures.schema.model.Model.mup_base_width`).

    Raises:
        ModuleNotFoundError: `adamw8bit` without torchao.
        ValueError: the kind has no parameter to update.
        OwnCodeError: a user's optimizer fails, or is not an optimizer of these
            parameters.
    """
    trained = trainable(model)
    if section.own is not None:
        return [own_optimizer(section.own, trained, section.learning_rate)]
    embeddings = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
    }
    parts = {section.kind: [item for _, item in trained]}
    if OPTIMIZERS[section.kind].on_matrices:
        parts = {section.kind: [], "adamw": []}
        for name, item in trained:
            is_matrix = item.ndim == 2 and id(item) not in embeddings
            is_matrix = is_matrix and LAYERS.search(name) is not None
            parts[section.kind if is_matrix else "adamw"].append(item)
    optimizers = [
        builder(kind)(parameters, section)
        for kind, parameters in parts.items()
        # Adapters are matrices alone; a kind without any parameter raises its error.
        if parameters or kind == section.kind
    ]
    if not section.decay_embeddings or section.embedding_rate_scale != 1.0:
        of_embeddings = (section.embedding_rate_scale, section.decay_embeddings)
        for optimizer in optimizers:
            split_groups(optimizer, dict.fromkeys(embeddings, of_embeddings))
    if width_factor != 1.0:
        factors = {
            id(item): (rate_factor(name, item.ndim, width_factor, section.kind), True)
            for name, item in trained
        }
        for optimizer in optimizers:
            split_groups(optimizer, factors)
    return optimizers


def split_groups(
    optimizer: torch.optim.Optimizer, settings: Mapping[int, tuple[float, bool]]
) -> None:
    """Split parameter groups by their share of the learning rate, and by whether they
    decay; decay per step does not depend on the share.

    Args:
        optimizer: of any parameters.
        settings: id of a parameter -> share and decay; others keep their group's.
    """
    groups = []
    for group in optimizer.param_groups:
        members: dict[tuple[float, bool], list[nn.Parameter]] = {}
        for parameter in group["params"]:
            members.setdefault(settings.get(id(parameter), (1.0, True)), []).append(
                parameter
            )
        for (share, decays), parameters in members.items():
            split = {
                **group,
                "params": parameters,
                # torchao's rates are tensors, which each group fills
                "lr": deepcopy(group["lr"]),
                RATE_FACTOR: share * group.get(RATE_FACTOR, 1.0),
                "weight_decay": group["weight_decay"] / share if decays else 0.0,
            }
            groups.append(split)
    optimizer.param_groups = groups


def optimizers_by_name(
    model: nn.Module,
    kind: OptimizerKind = "adamw",
    *,
    learning_rate: float = 1e-3,
    **settings: Any,
) -> list[torch.optim.Optimizer]:
    """Create the optimizers of a model's trainable parameters: one, or one for matrices
    and AdamW for the others.

    Matrices decay, gains and biases do not. Step all of the optimizers and scale their
    learning rates together.

    Args:
        model: plain, or sharded by FSDP. Muon updates the matrices inside `layers` (in
            models of transformers also `layer`, `block` or `h`), AdamW all other
            parameters.
        kind: `optimizer.kind` of the manifest, such as adamw, muon or adamw8bit (which
            needs torchao).
        learning_rate: at the peak of a schedule.
        settings: keys of `optimizer` in the manifest, such as betas, weight_decay,
            momentum.

    Raises:
        pydantic.ValidationError: a setting is wrong or unknown.
        ValueError: the kind has no parameter to update.

    >>> model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4)]), "head": nn.Linear(4, 8)})
    >>> [type(optimizer).__name__ for optimizer in optimizers_by_name(model, "muon", learning_rate=0.02)]
    ['Muon', 'AdamW']
    """
    return make_optimizers(
        model,
        Optimizer.model_validate(
            {"kind": kind, "learning_rate": learning_rate, **settings}
        ),
    )


def builder(kind: OptimizerKind) -> Build:
    """Load the function that creates a kind: `build` of the module of its name."""
    return import_module(f"gristmill.train.optim.{kind}").build


@torch.no_grad()
def update(
    optimizers: Sequence[torch.optim.Optimizer], learning_rate: float, bad: Tensor
) -> None:
    """Make one update, or skip it if `bad` (a scalar bool on the device) is true,
    without a host synchronisation.

    A skipped update leaves weights, moments and step counts as they are, without copies
    of them, except for torchao's AdamW, whose weights and moments are copied.
    """
    for optimizer in optimizers:
        set_rate(optimizer, learning_rate)
        _step_unless(bad, optimizer)
        optimizer.zero_grad(set_to_none=True)


def _step_unless(bad: Tensor, optimizer: torch.optim.Optimizer) -> None:
    code: OwnFunction | None = getattr(optimizer, "own_code", None)
    if code is not None:
        # The state that a user's step changes is unknown, so it cannot be restored: the
        # host waits for the flag.
        if not bad.item():
            with blaming(code):
                optimizer.step()
        return
    if isinstance(optimizer, torch.optim.AdamW | GuardedOptimizer):
        # The flag of PyTorch's gradient scaler.
        optimizer.grad_scale, optimizer.found_inf = None, bad.float()  # type: ignore[union-attr]
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[union-attr]
        return
    # plain local tensors that the step may change
    tensors: list[Tensor] = []
    for parameter in parameters_of(optimizer):
        tensors.append(local(parameter))
        for value in optimizer.state[parameter].values():
            tensor = local(value) if isinstance(value, Tensor) else None
            if tensor is not None and _is_plain(tensor):
                tensors.append(tensor)
            elif tensor is not None:
                names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
                tensors += [getattr(tensor, name) for name in names]
    copies = [(tensor, tensor.clone()) for tensor in tensors]
    with eager_on_cpu(optimizer):
        optimizer.step()
    for tensor, copy in copies:
        tensor.copy_(torch.where(bad, copy, tensor))


def has_plain_state(optimizer: torch.optim.Optimizer) -> bool:
    """True if no moment is quantised."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return all(_is_plain(local(value)) for value in values if isinstance(value, Tensor))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group, scaled by its factor."""
    for group in optimizer.param_groups:
        scaled = rate * group.get(RATE_FACTOR, 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(scaled)
        else:
            group["lr"] = scaled


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    """Yield the parameters of all groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _is_plain(tensor: Tensor) -> bool:
    return not hasattr(tensor, "__tensor_flatten__")


def eager_on_cpu(optimizer: torch.optim.Optimizer) -> Any:
    """Keep torchao from compiling its update on a CPU, which needs a C++ compiler and
    gains nothing.
    """
    on_cpu = next(parameters_of(optimizer)).device.type == "cpu"
    return torch.compiler.set_stance("force_eager") if on_cpu else nullcontext()
