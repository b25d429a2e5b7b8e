"""Learning from a teacher's distributions: divergences between two models' next tokens.

Legend: m trained tokens, v ids, k ids that were kept of the teacher. q is the teacher's distribution and p the
student's, both at one temperature. Where not all ids were kept, both are distributions over k + 1 outcomes, the last
being any other id: a divergence of these is at most that of the whole ones (the data-processing inequality), and zero
where those agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gristmill.mixtures.posttraining import Distill, Divergence
from gristmill.train.objectives.losses import IGNORED, chunk_rows


@dataclass(frozen=True)
class Taught:
    """A teacher's distributions over the next of m tokens.

    Attributes:
        logps: (m, k) float32, log-probabilities of the kept ids; of all ids in their order where `ids` is None.
        ids: (m, k) int64, distinct within a row.
        rest: (m,) float32, the log-probability of any other id; None with `ids`.
    """

    logps: Tensor
    ids: Tensor | None = None
    rest: Tensor | None = None

    def part(self, which: slice) -> Taught:
        """Some of the tokens."""
        return Taught(*(None if one is None else one[which] for one in (self.logps, self.ids, self.rest)))  # type: ignore[arg-type]

    def to(self, device: torch.device) -> Taught:
        """The same on a device."""
        return Taught(*(None if one is None else one.to(device, non_blocking=True)  # type: ignore[arg-type]
                        for one in (self.logps, self.ids, self.rest)))


def kept_of(logits: Tensor, temperature: float, top_k: int | None) -> Taught:
    """What is kept of a teacher's logits (m, v): its `top_k` likeliest ids, or all."""
    logps = F.log_softmax(logits.float() / temperature, dim=-1)
    if top_k is None or top_k >= logits.shape[-1]:
        return Taught(logps)
    # Not 1 minus the sum, which is all rounding where the rest is small.
    values, ids = logps.topk(top_k, dim=-1)
    return Taught(values, ids, mass_of_others(logps, ids))


def mass_of_others(logps: Tensor, ids: Tensor) -> Tensor:
    """The log-probability, (m,), of any id of (m, v) that is not among `ids` (m, k)."""
    return logps.scatter(1, ids, -math.inf).logsumexp(dim=-1)


def divergence(logits: Tensor, taught: Taught, temperature: float, kind: Divergence, beta: float) -> Tensor:
    """How far a student is from its teacher, per token, (m,) in nats; zero where they agree.

    Args:
        logits: (m, v) float32, the student's.
        taught: of the teacher, at the same temperature.
        temperature: what logits are divided by.
        kind, beta: see `mixtures.distillation.Distill`.
    """
    student, teacher = F.log_softmax(logits / temperature, dim=-1), taught.logps
    if taught.ids is not None and taught.rest is not None:
        student = torch.cat((student.gather(1, taught.ids), mass_of_others(student, taught.ids)[:, None]), dim=1)
        teacher = torch.cat((teacher, taught.rest[:, None]), dim=1)
    return DIVERGENCES[kind](teacher, student, beta)


def forward_kl(teacher: Tensor, student: Tensor, beta: float) -> Tensor:
    """KL(q || p) = sum of q (log q - log p), (m,), from log-probabilities (m, outcomes): Hinton et al. 2015."""
    return (teacher.exp() * (teacher - student)).sum(dim=-1)


def reverse_kl(teacher: Tensor, student: Tensor, beta: float) -> Tensor:
    """KL(p || q), token by token (Gu et al. 2024, "MiniLLM")."""
    return forward_kl(student, teacher, beta)


def jsd(teacher: Tensor, student: Tensor, beta: float) -> Tensor:
    """beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p (Agarwal et al. 2024, equation 1)."""
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * forward_kl(teacher, mixture, beta) + (1 - beta) * forward_kl(student, mixture, beta)


DIVERGENCES: dict[Divergence, Callable[[Tensor, Tensor, float], Tensor]] = {
    "forward": forward_kl, "reverse": reverse_kl, "jsd": jsd}


def distilled_nll(
    hidden: Tensor, matrix: Tensor, targets: Tensor, weights: Tensor, taught: Taught, settings: Distill
) -> tuple[Tensor, Tensor, Tensor]:
    """(1 - w) nll + w T^2 divergence of the trained tokens, weighted and summed, without ever holding all logits.

    Args:
        hidden: (n, t, d).
        matrix: (v, d), the output matrix.
        targets: (n, t) int64, IGNORED where nothing is trained.
        weights: (n, t) float32, what each token's loss is multiplied with.
        taught: of the m tokens that have a target, row by row.
        settings: kind, temperature T and weight w.

    Returns:
        the sum, to call backward on, and per token (n, t) without gradient the nll and the divergence.
    """
    chosen = (targets != IGNORED).flatten().nonzero().squeeze(1)
    total, nll, apart = _Distilled.apply(hidden.flatten(0, 1)[chosen], matrix, targets.flatten()[chosen],
                                         weights.flatten()[chosen], taught, settings)
    nll, apart = (torch.zeros(targets.numel(), device=part.device).index_copy(0, chosen, part).view(targets.shape)
                  for part in (nll, apart))
    return total, nll, apart


class _Distilled(torch.autograd.Function):
    """Gradients are computed chunk by chunk on the way forward, as `losses._WeightedNll` has them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, matrix: Tensor, targets: Tensor, weights: Tensor, taught: Taught, settings: Distill
    ) -> tuple[Tensor, Tensor, Tensor]:
        trains_matrix, size = ctx.needs_input_grad[1], chunk_rows(matrix)
        nll, apart = (torch.zeros(len(hidden), device=hidden.device) for _ in range(2))
        hidden_gradient = torch.zeros_like(hidden)
        matrix_gradient = torch.zeros(matrix.shape if trains_matrix else (0,), device=matrix.device)
        total = torch.zeros((), device=hidden.device)
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            with torch.enable_grad():
                inner, outer = hidden[part].detach().requires_grad_(), matrix.detach().requires_grad_(trains_matrix)
                logits = (inner @ outer.T).float()
                hard = F.cross_entropy(logits, targets[part], reduction="none")
                soft = divergence(logits, taught.part(part), settings.temperature, settings.kind, settings.beta)
                mixed = (1 - settings.weight) * hard + settings.weight * settings.temperature**2 * soft
                loss = (mixed * weights[part]).sum()
            found = torch.autograd.grad(loss, (inner, outer) if trains_matrix else (inner,))
            hidden_gradient[part] = found[0]
            if trains_matrix:
                matrix_gradient += found[1]
            nll[part], apart[part], total = hard.detach(), soft.detach(), total + loss.detach()
        ctx.save_for_backward(hidden_gradient, matrix_gradient.to(matrix.dtype))
        ctx.mark_non_differentiable(nll, apart)
        return total, nll, apart

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        hidden_gradient, matrix_gradient = ctx.saved_tensors
        of_matrix = matrix_gradient * gradients[0] if ctx.needs_input_grad[1] else None
        return hidden_gradient * gradients[0], of_matrix, None, None, None, None
