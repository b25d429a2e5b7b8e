"""Optimizers by name, their parameter groups, and an update that a flag on the device can hold back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gristmill.mixtures.training import ON_MATRICES, SMALL_MOMENTS, Optimizer, OptimizerKind
from gristmill.train.models.initialisation import LAYERS
from gristmill.train.optim.adafactor import Adafactor
from gristmill.train.optim.ademamix import AdEMAMix
from gristmill.train.optim.dion import Dion
from gristmill.train.optim.lion import Lion
from gristmill.train.optim.mup import RATE_FACTOR, scale_rates
from gristmill.train.optim.offload import STEP, host_zeros_like, is_on_host, keep_on_host, one_by_one
from gristmill.train.optim.orthogonal import OrthogonalMomentum
from gristmill.train.optim.own_optimizer import own_code_of, own_optimizer, step_own
from gristmill.train.optim.sharded import local
from gristmill.train.optim.sophia import Sophia

ZerosLike = Callable[[Tensor], Tensor]
"""Makes a moment for a parameter: zeros, split as it is."""


def make_optimizers(
    model: nn.Module, section: Optimizer, offload: bool = False, steps: int = 0, width_factor: float = 1.0
) -> list[torch.optim.Optimizer]:
    """What updates a model's trained parameters: one optimizer, or Muon and AdamW side by side.

    All of them decay matrices only, not the gains of norms; all keep their moments split as the parameters are.

    Args:
        model: sharded.
        section: what an update is.
        offload: keep the moments in host memory (but those of adafactor and adamw8bit); changes no bit of an update.
        steps: of the whole training, where ademamix's slow mean is to rise over all of them.
        width_factor: the width over muP's base width (`mixtures.model.Model.mup_base_width`).

    Raises:
        ModuleNotFoundError: `adamw8bit` where torchao is not installed.
        OwnCodeError: an optimizer of the user's cannot be made, or is none.
    """
    if section.own is not None:
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        return [own_optimizer(section.own, trained, section.learning_rate)]
    offload = offload and section.kind not in SMALL_MOMENTS
    optimizers = _optimizers_of(model, section, host_zeros_like if offload else torch.zeros_like, steps)
    if width_factor != 1.0:
        scale_rates(optimizers, model, width_factor, section.kind)
    if offload:
        for optimizer in optimizers:
            keep_on_host(optimizer)
    return optimizers


def optimizers_by_name(
    model: nn.Module, kind: OptimizerKind = "adamw", *, learning_rate: float = 1e-3, **settings: Any
) -> list[torch.optim.Optimizer]:
    """What updates a model's trained parameters: one optimizer of PyTorch's kind, or Muon and AdamW side by side.

    Matrices decay, gains and biases do not. Step all of them, and scale their learning rates alike.

    Args:
        model: plain, or with its parameters spread by FSDP. Muon takes matrices inside `layers` (as the models of
            transformers and ours call them), and leaves the rest to AdamW.
        kind: adamw, muon, normuon, dion, ademamix, lion, adafactor or adamw8bit (which needs torchao).
        learning_rate: at the peak of a schedule.
        settings: keys of `optimizer` in the manifest, such as betas, weight_decay, momentum.

    Raises:
        pydantic.ValidationError: names a setting that is wrong or unknown.
        ValueError: kind is sophia, which needs labels that the model draws: only the trainings of a manifest have it.

    >>> model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4)]), "head": nn.Linear(4, 8)})
    >>> [type(one).__name__ for one in optimizers_by_name(model, "muon", learning_rate=0.02)]
    ['Muon', 'AdamW']
    """
    if kind == "sophia":
        raise ValueError(
            "sophia estimates curvature from labels that the model draws, which only the trainings of a manifest do"
        )
    return make_optimizers(model, Optimizer.model_validate({"kind": kind, "learning_rate": learning_rate, **settings}))


def _optimizers_of(
    model: nn.Module, section: Optimizer, zeros_like: ZerosLike, steps: int
) -> list[torch.optim.Optimizer]:
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if section.kind in ON_MATRICES:
        inside = {name for name, parameter in named if LAYERS in name and parameter.ndim == 2}
        outside = _groups([parameter for name, parameter in named if name not in inside], section)
        return [
            _on_matrices([(name, parameter) for name, parameter in named if name in inside], section, zeros_like),
            _fused_adamw(outside, section, zeros_like),
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
            return [Sophia(groups, section.learning_rate, section.decays, section.gamma, zeros_like)]
        case "adamw8bit":
            return [_adamw_8bit(groups, section)]
    return [_fused_adamw(groups, section, zeros_like)]


@torch.no_grad()
def update(optimizers: Sequence[torch.optim.Optimizer], learning_rate: float, bad: Tensor) -> None:
    """Make one update, or none where `bad` (a scalar bool on the device) is true: the host need not wait to know.

    Held back means exactly: weights, moments and step counts stay as they were, bit by bit. The fused AdamW looks at
    the flag itself; for the other kinds copies of weights and moments are put back, which takes their memory once
    more for the time of the update.
    """
    for optimizer in optimizers:
        _set_rate(optimizer, learning_rate)
        for _ in one_by_one(optimizer) if is_on_host(optimizer) else (None,):
            _step_unless(bad, optimizer)
        optimizer.zero_grad(set_to_none=True)


def _step_unless(bad: Tensor, optimizer: torch.optim.Optimizer) -> None:
    code = own_code_of(optimizer)
    if code is not None:
        step_own(code, optimizer, bad)
        return
    if isinstance(optimizer, torch.optim.AdamW):
        # The flag that PyTorch's gradient scaler uses.
        optimizer.grad_scale, optimizer.found_inf = None, bad.float()  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        return
    before = [(part, part.clone()) for part in _moving_parts(optimizer)]
    with _eagerly_on_cpus(optimizer):
        optimizer.step()
    for part, old in before:
        part.copy_(torch.where(bad, old, part))


def has_plain_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all moments are ordinary tensors, none of them quantised."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return all(_is_plain(local(value)) for value in values if isinstance(value, Tensor))


def _groups(parameters: Sequence[nn.Parameter], section: Optimizer) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def _fused_adamw(groups: list[dict[str, Any]], section: Optimizer, zeros_like: ZerosLike) -> torch.optim.Optimizer:
    """PyTorch's fused AdamW with its moments made now.

    Where there are none yet, a checkpoint of step 0 would make them by a step without gradients, and count that.
    """
    optimizer = torch.optim.AdamW(groups, lr=section.learning_rate, betas=section.decays, eps=section.eps, fused=True)
    for parameter in _parameters(optimizer):
        optimizer.state[parameter] = {
            STEP: torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": zeros_like(parameter),
            "exp_avg_sq": zeros_like(parameter),
        }
    return optimizer


def _on_matrices(
    named: Sequence[tuple[str, nn.Parameter]], section: Optimizer, zeros_like: ZerosLike
) -> torch.optim.Optimizer:
    """What moves the matrices of the layers; cautious decay is no part of PyTorch's Muon."""
    rate, decay, matrices = section.learning_rate, section.weight_decay, [matrix for _, matrix in named]
    if section.kind == "dion":
        return Dion(named, rate, decay, section.momentum, section.rank_fraction, zeros_like)
    if section.kind == "normuon" or section.cautious_decay:
        rows = section.decays[1] if section.kind == "normuon" else None
        return OrthogonalMomentum(matrices, rate, decay, section.momentum, rows, section.cautious_decay, zeros_like)
    return _muon(matrices, section, zeros_like)


def _muon(matrices: Sequence[nn.Parameter], section: Optimizer, zeros_like: ZerosLike) -> torch.optim.Optimizer:
    """PyTorch's Muon on sharded matrices: its products gather what they need.

    Updates have the size of AdamW's (Liu et al. 2025, "Muon is scalable for LLM training", section 2.2), so that both
    share the learning rate and the decay.
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


def _adamw_8bit(groups: list[dict[str, Any]], section: Optimizer) -> torch.optim.Optimizer:
    """torchao's AdamW, moments in 8 bits by blocks of 256 (Dettmers et al. 2022).

    A share that is small or does not divide into blocks keeps its moments in float32, so that results depend a
    little on the number of processes.
    """
    try:
        from torchao.optim import AdamW8bit
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "optimizer.kind is adamw8bit, but torchao is not installed; install it "
            "with: pip install 'gristmill[quant]', or choose another optimizer.kind"
        ) from error
    optimizer = AdamW8bit(groups, lr=section.learning_rate, betas=section.decays, eps=section.eps)
    _make_state(optimizer)
    return optimizer  # type: ignore[no-any-return]


@torch.no_grad()
def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer make its moments now, as they are before the first step.

    A step without gradient and learning rate leaves all moments at zero; the step counts are put back, and lie on
    the device, so that an update can be held back there.
    """
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    _set_rate(optimizer, 0.0)
    for parameter in _parameters(optimizer):
        parameter.grad = torch.zeros_like(parameter)
    with _eagerly_on_cpus(optimizer):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for parameter in _parameters(optimizer):
        optimizer.state[parameter][STEP] = torch.zeros((), dtype=torch.float32, device=parameter.device)
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


def _moving_parts(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Plain tensors that hold this process's share of all that a step may change."""
    for parameter in _parameters(optimizer):
        yield local(parameter)
        for value in optimizer.state[parameter].values():
            if isinstance(value, Tensor):
                yield from _plain_parts(local(value))


def _plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor itself, or the plain tensors inside one that is quantised."""
    if _is_plain(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    yield from (getattr(tensor, name) for name in names)


def _is_plain(tensor: Tensor) -> bool:
    return not hasattr(tensor, "__tensor_flatten__")


def _eagerly_on_cpus(optimizer: torch.optim.Optimizer) -> Any:
    """torchao compiles its update; on a CPU that would need a C++ compiler and gain nothing."""
    on_cpu = next(_parameters(optimizer)).device.type == "cpu"
    return torch.compiler.set_stance("force_eager") if on_cpu else nullcontext()
