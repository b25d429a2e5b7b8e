"""Optimizers by name, their parameter groups, and an update that a flag on the device
can skip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gristmill.mixtures.training import (
    ON_MATRICES,
    SMALL_MOMENTS,
    Optimizer,
    OptimizerKind,
)
from gristmill.train.models.initialisation import LAYERS
from gristmill.train.optim.adafactor import Adafactor
from gristmill.train.optim.ademamix import AdEMAMix
from gristmill.train.optim.dion import Dion
from gristmill.train.optim.dtensor_sums import local
from gristmill.train.optim.lion import Lion
from gristmill.train.optim.mup import RATE_FACTOR, scale_rates
from gristmill.train.optim.normuon import NorMuon
from gristmill.train.optim.offload import (
    STEP,
    host_zeros_like,
    is_offloaded,
    load_each,
    mark_offloaded,
)
from gristmill.train.optim.own_optimizer import own_code_of, own_optimizer, step_own
from gristmill.train.optim.sophia import Sophia

ZerosLike = Callable[[Tensor], Tensor]
"""Creates a moment of a parameter: zeros with the parameter's placement."""


def make_optimizers(
    model: nn.Module,
    section: Optimizer,
    offload: bool = False,
    steps: int = 0,
    width_factor: float = 1.0,
) -> list[torch.optim.Optimizer]:
    """Create the optimizers of a model's trainable parameters: one, or one for matrices
    and AdamW for the others.

    Only matrices decay, not the gains of norms. Moments are sharded as their
    parameters.

    Args:
        model: sharded.
        section: kind and hyperparameters.
        offload: keep moments in host memory (except those of adafactor and adamw8bit);
            updates stay bit-equal.
        steps: of the whole training; the slow mean of ademamix rises over all of them
            by default.
        width_factor: width divided by muP's base width
            (`mixtures.model.Model.mup_base_width`).

    Raises:
        ModuleNotFoundError: `adamw8bit` without torchao.
        OwnCodeError: a user's optimizer fails, or is not an optimizer of these
            parameters.
    """
    if section.own is not None:
        return [own_optimizer(section.own, _trainable(model), section.learning_rate)]
    offload = offload and section.kind not in SMALL_MOMENTS
    optimizers = _optimizers_of(
        model, section, host_zeros_like if offload else torch.zeros_like, steps
    )
    if width_factor != 1.0:
        scale_rates(optimizers, model, width_factor, section.kind)
    if offload:
        for optimizer in optimizers:
            mark_offloaded(optimizer)
    return optimizers


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
        model: plain, or sharded by FSDP. Muon updates the matrices inside `layers` (the
            name in transformers' models and ours), AdamW all other parameters.
        kind: adamw, muon, normuon, dion, ademamix, lion, adafactor or adamw8bit (needs
            torchao).
        learning_rate: at the peak of a schedule.
        settings: keys of `optimizer` in the manifest, such as betas, weight_decay,
            momentum.

    Raises:
        pydantic.ValidationError: a setting is wrong or unknown.
        ValueError: kind is sophia, which needs labels sampled from the model and exists
            in manifest trainings only.

    >>> model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4)]), "head": nn.Linear(4, 8)})
    >>> [type(optimizer).__name__ for optimizer in optimizers_by_name(model, "muon", learning_rate=0.02)]
    ['Muon', 'AdamW']
    """
    if kind == "sophia":
        raise ValueError(
            "sophia estimates curvature from labels sampled from the model, which "
            "only trainings of a manifest do"
        )
    return make_optimizers(
        model,
        Optimizer.model_validate(
            {"kind": kind, "learning_rate": learning_rate, **settings}
        ),
    )


def _trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def _optimizers_of(
    model: nn.Module, section: Optimizer, zeros_like: ZerosLike, steps: int
) -> list[torch.optim.Optimizer]:
    named = _trainable(model)
    if section.kind in ON_MATRICES:
        matrices = [
            (name, parameter)
            for name, parameter in named
            if LAYERS in name and parameter.ndim == 2
        ]
        names = {name for name, _ in matrices}
        adamw_groups = _groups(
            [parameter for name, parameter in named if name not in names], section
        )
        return [
            _matrix_optimizer(matrices, section, zeros_like),
            _fused_adamw(adamw_groups, section, zeros_like),
        ]
    groups = _groups([parameter for _, parameter in named], section)
    match section.kind:
        case "adafactor":
            return [Adafactor(groups, section.learning_rate)]
        case "ademamix":
            rise = steps if section.rise_steps is None else section.rise_steps
            return [
                AdEMAMix(
                    groups,
                    section.learning_rate,
                    section.decays,
                    section.beta3,
                    section.alpha,
                    rise,
                    section.eps,
                    zeros_like,
                )
            ]
        case "lion":
            return [Lion(groups, section.learning_rate, section.decays, zeros_like)]
        case "sophia":
            return [
                Sophia(
                    groups,
                    section.learning_rate,
                    section.decays,
                    section.gamma,
                    zeros_like,
                )
            ]
        case "adamw8bit":
            return [_adamw_8bit(groups, section)]
    return [_fused_adamw(groups, section, zeros_like)]


@torch.no_grad()
def update(
    optimizers: Sequence[torch.optim.Optimizer], learning_rate: float, bad: Tensor
) -> None:
    """Make one update, or skip it if `bad` (a scalar bool on the device) is true,
    without a host synchronisation.

    A skipped update leaves weights, moments and step counts bit-equal. The fused AdamW
    reads the flag itself; other kinds restore copies of weights and moments, which
    doubles their memory during the update.
    """
    for optimizer in optimizers:
        _set_rate(optimizer, learning_rate)
        if is_offloaded(optimizer):
            for _ in load_each(optimizer):
                _step_unless(bad, optimizer)
        else:
            _step_unless(bad, optimizer)
        optimizer.zero_grad(set_to_none=True)


def _step_unless(bad: Tensor, optimizer: torch.optim.Optimizer) -> None:
    code = own_code_of(optimizer)
    if code is not None:
        step_own(code, optimizer, bad)
        return
    if isinstance(optimizer, torch.optim.AdamW):
        # The flag of PyTorch's gradient scaler.
        optimizer.grad_scale, optimizer.found_inf = None, bad.float()  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        return
    copies = [(tensor, tensor.clone()) for tensor in _mutable_tensors(optimizer)]
    with _eager_on_cpu(optimizer):
        optimizer.step()
    for tensor, copy in copies:
        tensor.copy_(torch.where(bad, copy, tensor))


def has_plain_state(optimizer: torch.optim.Optimizer) -> bool:
    """True if no moment is quantised."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return all(_is_plain(local(value)) for value in values if isinstance(value, Tensor))


def _groups(
    parameters: Sequence[nn.Parameter], section: Optimizer
) -> list[dict[str, Any]]:
    return [
        {
            "params": [p for p in parameters if p.ndim >= 2],
            "weight_decay": section.weight_decay,
        },
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def _fused_adamw(
    groups: list[dict[str, Any]], section: Optimizer, zeros_like: ZerosLike
) -> torch.optim.Optimizer:
    """PyTorch's fused AdamW with its moments created eagerly.

    A checkpoint of step 0 would otherwise create them by a step without gradients, and
    count that step.
    """
    optimizer = torch.optim.AdamW(
        groups,
        lr=section.learning_rate,
        betas=section.decays,
        eps=section.eps,
        fused=True,
    )
    for parameter in _parameters(optimizer):
        optimizer.state[parameter] = {
            STEP: torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": zeros_like(parameter),
            "exp_avg_sq": zeros_like(parameter),
        }
    return optimizer


def _matrix_optimizer(
    named: Sequence[tuple[str, nn.Parameter]], section: Optimizer, zeros_like: ZerosLike
) -> torch.optim.Optimizer:
    """Optimizer of the layers' matrices. PyTorch's Muon has no cautious decay."""
    rate, decay = section.learning_rate, section.weight_decay
    matrices = [matrix for _, matrix in named]
    if section.kind == "dion":
        return Dion(
            named, rate, decay, section.momentum, section.rank_fraction, zeros_like
        )
    if section.kind == "normuon" or section.cautious_decay:
        neuron_beta = section.decays[1] if section.kind == "normuon" else None
        cautious = section.cautious_decay
        return NorMuon(
            matrices, rate, decay, section.momentum, neuron_beta, cautious, zeros_like
        )
    return _muon(matrices, section, zeros_like)


def _muon(
    matrices: Sequence[nn.Parameter], section: Optimizer, zeros_like: ZerosLike
) -> torch.optim.Optimizer:
    """PyTorch's Muon on sharded matrices; its products gather what they need.

    Updates have the root mean square of AdamW's (Liu et al. 2025, "Muon is scalable for
    LLM training", section 2.2), so both share learning rate and decay.
    """
    optimizer = torch.optim.Muon(
        matrices,
        lr=section.learning_rate,
        weight_decay=section.weight_decay,
        momentum=section.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    for matrix in matrices:
        optimizer.state[matrix]["momentum_buffer"] = zeros_like(matrix)
    return optimizer


def _adamw_8bit(
    groups: list[dict[str, Any]], section: Optimizer
) -> torch.optim.Optimizer:
    """torchao's AdamW with 8-bit moments in blocks of 256 (Dettmers et al. 2022).

    A shard that is small or does not divide into blocks keeps float32 moments, so
    results depend slightly on the number of processes.
    """
    try:
        from torchao.optim import AdamW8bit
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "optimizer.kind is adamw8bit, but torchao is not installed; install it "
            "with: pip install 'gristmill[quant]', or choose another optimizer.kind"
        ) from error
    optimizer = AdamW8bit(
        groups, lr=section.learning_rate, betas=section.decays, eps=section.eps
    )
    _create_state(optimizer)
    return optimizer  # type: ignore[no-any-return]


@torch.no_grad()
def _create_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the moments of an optimizer before its first step.

    A step with zero gradients and learning rate leaves all moments at zero. Step counts
    are reset and moved to the device, where an update can be skipped.
    """
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    _set_rate(optimizer, 0.0)
    for parameter in _parameters(optimizer):
        parameter.grad = torch.zeros_like(parameter)
    with _eager_on_cpu(optimizer):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for parameter in _parameters(optimizer):
        optimizer.state[parameter][STEP] = torch.zeros(
            (), dtype=torch.float32, device=parameter.device
        )
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"].fill_(rate)


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        scaled = rate * group.get(RATE_FACTOR, 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(scaled)
        else:
            group["lr"] = scaled


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _mutable_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Plain local tensors that a step may change."""
    for parameter in _parameters(optimizer):
        yield local(parameter)
        for value in optimizer.state[parameter].values():
            if isinstance(value, Tensor):
                yield from _plain_tensors(local(value))


def _plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor itself, or the plain tensors inside a quantised one."""
    if _is_plain(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    yield from (getattr(tensor, name) for name in names)


def _is_plain(tensor: Tensor) -> bool:
    return not hasattr(tensor, "__tensor_flatten__")


def _eager_on_cpu(optimizer: torch.optim.Optimizer) -> Any:
    """Keep torchao from compiling its update on a CPU, which needs a C++ compiler and
    gains nothing.
    """
    on_cpu = next(_parameters(optimizer)).device.type == "cpu"
    return torch.compiler.set_stance("force_eager") if on_cpu else nullcontext()
