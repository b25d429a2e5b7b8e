"""Losses and log-probabilities: pure functions of hidden states, targets and masks.

Legend: n rows, t tokens, d width, v ids. Targets of IGNORED are neither trained nor
measured. Without an output matrix the hidden states are logits (d = v), as from a
user's module.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gristmill.train.loop.batch_plan import slices

IGNORED = -100
"""PyTorch's default ignore_index."""
CHUNK_LOGITS = 1 << 22
"""Logits per chunk on a CPU: 16 MB of float32, which fit its cache."""
GPU_CHUNK_LOGITS = 1 << 28
"""Logits per chunk on a GPU: 1 GB of float32.

Large enough to saturate matrix products, and to read and write the gradient of the
output matrix only a few times per batch instead of hundreds of times.
"""


Values = tuple[Tensor, ...]
"""Values of k positions, (k, ...) each."""
OfLogits = Callable[[Tensor, slice], Values]
"""Function of the logits (k, v) float32 of a slice of positions."""


def softcap(logits: Tensor, cap: float) -> Tensor:
    """Logits within (-cap, cap) (Gemma Team 2024, "Gemma 2", section 2)."""
    return cap * torch.tanh(logits / cap)


class Softcapped(NamedTuple):
    """Output matrix (v, d) whose products become logits by `softcap`."""

    matrix: Tensor
    cap: float

    def bound(self, logits: Tensor) -> Tensor:
        """Logits within (-cap, cap), of products with the matrix."""
        return softcap(logits, self.cap)

    def before(self, function: OfLogits) -> OfLogits:
        """Function of products with the matrix, from one of logits."""
        return lambda products, part: function(self.bound(products), part)


Output = Tensor | Softcapped | None
"""Output matrix of a model; None if its hidden states are logits."""


def chunk_rows(matrix: Tensor) -> int:
    """Number of positions per chunk of logits, for an output matrix (v, d) on its
    device.
    """
    logits = GPU_CHUNK_LOGITS if matrix.device.type == "cuda" else CHUNK_LOGITS
    return max(1, logits // len(matrix))


def next_tokens(ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Targets (n, t): the next token at each position; IGNORED at the last.

    Args:
        ids: (n, t) int64.
        mask: (n, t) bool, tokens that count as targets; all if absent.

    >>> next_tokens(torch.tensor([[5, 6, 7]])).tolist()
    [[6, 7, -100]]
    """
    following = ids if mask is None else ids.masked_fill(~mask, IGNORED)
    return torch.cat(
        (following[:, 1:], following.new_full((len(ids), 1), IGNORED)), dim=1
    )


def _logit_gradients(
    logits: Tensor, targets: Tensor, weights: Tensor, z_loss: float, fused: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Negative log-likelihood (m,), squared log-normalisers (m,) and gradients (m, v)
    of m positions' logits (m, v).

    The logits are overwritten. Gradients are of the weighted loss, in the logits'
    dtype.

    Args:
        fused: use operations that compilers fuse, instead of those with the fewest
            passes in eager mode.
    """
    valid = (targets != IGNORED).float()[:, None]
    index = targets.clamp(min=0)[:, None]
    dtype = logits.dtype
    logits = logits.float()
    largest = logits.amax(dim=-1, keepdim=True)
    target = logits.gather(1, index)
    # One exponential per logit serves both the loss and its gradient.
    gradient = (logits - largest).exp() if fused else logits.sub_(largest).exp_()
    total = gradient.sum(dim=-1, keepdim=True)
    normaliser = total.log() + largest
    factor = valid * weights[:, None]
    # d nll / d logits = softmax - onehot, d normaliser^2 / d logits = 2 normaliser
    # softmax
    softmax_factor = factor * (1.0 + 2.0 * z_loss * normaliser) if z_loss else factor
    if fused:
        columns = torch.arange(logits.shape[1], device=logits.device)
        gradient = gradient * (softmax_factor / total) - torch.where(
            columns == index, factor, 0.0
        )
    else:
        gradient.mul_(softmax_factor / total)
        gradient.scatter_(1, index, gradient.gather(1, index) - factor)
    squares = normaliser.square() * valid if z_loss else torch.zeros_like(normaliser)
    return (
        ((normaliser - target) * valid).squeeze(1),
        squares.squeeze(1),
        gradient.to(dtype),
    )


@cache
def _compiled_logit_gradients() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return torch.compile(_logit_gradients, fullgraph=True)


def chunked_gradients(
    hidden: Tensor,
    matrix: Tensor,
    trains_matrix: bool,
    differentiate: Callable[[Tensor, slice], Tensor],
) -> tuple[Tensor, Tensor]:
    """Gradients of hidden states (m, d) and an output matrix (v, d) through their
    logits, of which only a chunk exists at a time.

    Args:
        hidden: of m positions.
        matrix: the output matrix.
        trains_matrix: if false, its gradient is empty.
        differentiate: returns the gradient (k, v) of the logits (k, v) of a slice of
            positions, both in the dtype of the hidden states.
    """
    hidden_gradient = torch.empty_like(hidden)
    matrix_gradient = torch.zeros(
        matrix.shape if trains_matrix else (0,), device=matrix.device
    )
    for part in slices(max(1, len(hidden)), chunk_rows(matrix)):
        gradient = differentiate(hidden[part] @ matrix.T, part)
        hidden_gradient[part] = gradient @ matrix
        if not trains_matrix:
            continue
        if matrix_gradient.dtype == gradient.dtype:
            matrix_gradient.addmm_(gradient.T, hidden[part])
        else:
            matrix_gradient += gradient.T @ hidden[part]
    return hidden_gradient, matrix_gradient.to(matrix.dtype)


def _in_chunks(
    function: Callable[[slice], Values], count: int, matrix: Tensor
) -> Values:
    """Joined values of chunks of `count` positions, for an output matrix (v, d)."""
    chunks = map(function, slices(max(1, count), chunk_rows(matrix)))
    return tuple(torch.cat(column) for column in zip(*chunks, strict=True))


class _OfLogits(torch.autograd.Function):
    """Values of logits, which both passes compute chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, matrix: Tensor, function: OfLogits) -> Values:
        ctx.function = function
        ctx.save_for_backward(hidden, matrix)
        return _in_chunks(
            lambda part: function((hidden[part] @ matrix.T).float(), part),
            len(hidden),
            matrix,
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        hidden, matrix = ctx.saved_tensors
        trains_matrix = ctx.needs_input_grad[1]

        def differentiate(logits: Tensor, part: slice) -> Tensor:
            with torch.enable_grad():
                scores = logits.float().requires_grad_()
                sides = [
                    (values, gradient[part])
                    for values, gradient in zip(
                        ctx.function(scores, part), gradients, strict=True
                    )
                    if values.requires_grad
                ]
            outputs, of_outputs = zip(*sides, strict=True)
            (gradient,) = torch.autograd.grad(outputs, scores, of_outputs)
            return gradient.to(logits.dtype)

        of_hidden, of_matrix = chunked_gradients(
            hidden, matrix, trains_matrix, differentiate
        )
        return of_hidden, of_matrix if trains_matrix else None, None


def of_logits(hidden: Tensor, matrix: Output, function: OfLogits) -> Values:
    """Values of the logits of m positions, (m, ...) each, with gradients, without
    materialising all logits: the backward pass recomputes those of each chunk.

    Args:
        hidden: (m, d), float32 or bfloat16.
        matrix: the output matrix.
        function: see `OfLogits`; values that it computes without gradients have none.
    """
    if isinstance(matrix, Softcapped):
        return _OfLogits.apply(hidden, matrix.matrix, matrix.before(function))
    if matrix is not None:
        return _OfLogits.apply(hidden, matrix, function)
    recomputed = partial(
        checkpoint, function, use_reentrant=False, preserve_rng_state=False
    )
    return _in_chunks(
        lambda part: recomputed(hidden[part].float(), part), len(hidden), hidden.T
    )


class _Differentiated(torch.autograd.Function):
    """Sum of values of logits and further values without gradient, whose gradients are
    computed chunk by chunk in the forward pass.

    Only the logits of one chunk exist at a time, and each chunk is used while it is in
    the cache.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        matrix: Tensor,
        differentiate: OfLogits,
    ) -> Values:
        chunks: list[list[Tensor]] = []

        def gradient_of(logits: Tensor, part: slice) -> Tensor:
            *values, gradient = differentiate(logits, part)
            chunks.append(values)
            return gradient

        ctx.save_for_backward(
            *chunked_gradients(hidden, matrix, ctx.needs_input_grad[1], gradient_of)
        )
        summed, *others = (torch.cat(column) for column in zip(*chunks, strict=True))
        ctx.mark_non_differentiable(*others)
        return summed.sum(), *others

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        of_hidden, of_matrix = ctx.saved_tensors
        # In place, as autograd rejects a second backward pass.
        trained = of_matrix.mul_(gradients[0]) if ctx.needs_input_grad[1] else None
        return of_hidden.mul_(gradients[0]), trained, None


def weighted_sum(
    hidden: Tensor, matrix: Output, weights: Tensor, function: OfLogits
) -> Values:
    """Sum of weight * the first of a function's values over m positions, for the
    backward pass, and its other values, (m,) each without gradient; without
    materialising all logits.

    Args:
        hidden: (m, d).
        matrix: the output matrix.
        weights: (m,) float32.
        function: see `OfLogits`.
    """
    if matrix is None:
        first, *others = of_logits(hidden, matrix, function)
        return (first * weights).sum(), *(value.detach() for value in others)
    if isinstance(matrix, Softcapped):
        function, matrix = matrix.before(function), matrix.matrix

    def differentiate(logits: Tensor, part: slice) -> Values:
        with torch.enable_grad():
            scores = logits.float().requires_grad_()
            first, *others = function(scores, part)
        (gradient,) = torch.autograd.grad(first, scores, weights[part])
        return first.detach() * weights[part], *others, gradient.to(logits.dtype)

    return _Differentiated.apply(hidden, matrix, differentiate)


def weighted_nll(
    hidden: Tensor,
    matrix: Output,
    targets: Tensor,
    weights: Tensor,
    z_loss: float = 0.0,
    fused: bool = False,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of next tokens in float32, without materialising all logits.

    Args:
        hidden: (n, t, d), float32 or bfloat16.
        matrix: the output matrix.
        targets: (n, t) int64, IGNORED where nothing is trained.
        weights: (n, t) float32, factor of each token's loss (one over the step's
            tokens).
        z_loss: factor of the squared log-normaliser of the softmax, a penalty on
            drifting logits (PaLM, Chowdhery et al. 2022, section 5: 1e-4).
        fused: compile the operations on a chunk's logits into fewer passes; of a plain
            matrix only.

    Returns:
        the weighted sum with the z-loss (a scalar for the backward pass) and the plain
        loss per token (n, t), without gradient.

    >>> total, nll = weighted_nll(torch.zeros(1, 2, 4), torch.ones(8, 4), torch.tensor([[3, 5]]), torch.ones(1, 2))
    >>> [f"{loss:.4f}" for loss in nll[0].tolist()]  # ln 8: all ids are alike
    ['2.0794', '2.0794']
    """
    states, labels, factors = hidden.flatten(0, 1), targets.flatten(), weights.flatten()

    def differentiate(logits: Tensor, part: slice) -> Values:
        gradients_of = _compiled_logit_gradients() if fused else _logit_gradients
        nll, squares, gradient = gradients_of(
            logits, labels[part], factors[part], z_loss, fused
        )
        return (nll + z_loss * squares) * factors[part], nll, gradient

    def penalised(logits: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        nll = F.cross_entropy(
            logits, labels[part], reduction="none", ignore_index=IGNORED
        )
        if not z_loss:
            return nll, nll.detach()
        squares = logits.logsumexp(dim=-1).square() * (labels[part] != IGNORED)
        return nll + z_loss * squares, nll.detach()

    if isinstance(matrix, Tensor):
        total, nll = _Differentiated.apply(states, matrix, differentiate)
    else:
        total, nll = weighted_sum(states, matrix, factors, penalised)
    return total, nll.view(targets.shape)


def cross_entropy(
    hidden: Tensor,
    matrix: Tensor,
    targets: Tensor,
    z_loss: float = 0.0,
    fused: bool = False,
) -> Tensor:
    """Mean loss of the targets that count, a scalar with gradients, without
    materialising all logits.

    Memory is one chunk of logits (16 MB on a CPU, 1 GB on a GPU), while a plain head
    holds n t v logits and as many gradients. Targets are at the positions that predict
    them (see `next_tokens`).

    Args:
        hidden: (n, t, d), float32 or bfloat16, after the final norm.
        matrix: (v, d), the output matrix.
        targets: (n, t) int64, IGNORED (-100) where nothing is trained.
        z_loss, fused: see `weighted_nll`.

    >>> hidden = torch.tensor([[[0.0, 1.0], [2.0, 0.0]]], requires_grad=True)
    >>> loss = cross_entropy(hidden, torch.eye(2), torch.tensor([[1, IGNORED]]))
    >>> f"{loss.item():.6f}"  # ln(1 + e^-1)
    '0.313262'
    >>> loss.backward()
    """
    counted = (targets != IGNORED).float()
    total, _ = weighted_nll(
        hidden, matrix, targets, counted / counted.sum().clamp(min=1.0), z_loss, fused
    )
    return total


@torch.no_grad()
def score_tokens(
    hidden: Tensor, matrix: Output, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Loss per token (n, t) float32, and a bool mask (n, t) of targets that are the
    likeliest id. Chunk by chunk.

    Both are zero where the target is IGNORED. Arguments as for `weighted_nll`.

    >>> nll, likeliest = score_tokens(torch.tensor([[[9.0, 0.0]]]), torch.eye(2), torch.tensor([[0]]))
    >>> likeliest.tolist()
    [[True]]
    """
    labels = targets.flatten()

    def scored(logits: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        nll = F.cross_entropy(
            logits, labels[part], reduction="none", ignore_index=IGNORED
        )
        return nll, logits.argmax(dim=-1) == labels[part]

    nll, correct = of_logits(hidden.flatten(0, 1), matrix, scored)
    return nll.view(targets.shape), correct.view(targets.shape)


def sequence_logps(hidden: Tensor, matrix: Output, targets: Tensor) -> Tensor:
    """Summed log-probability of each row's targets, (n,) float32, with gradients.

    log pi(y | x) of Rafailov et al. 2023, section 3: logits at t score token t + 1
    (`targets` are already shifted), prompt and padding are IGNORED, the end of the turn
    counts, and the sum is float32 in any compute dtype. Arguments as for
    `weighted_nll`.

    >>> logps = sequence_logps(torch.zeros(1, 3, 2), torch.ones(2, 2), torch.tensor([[IGNORED, 1, 0]]))
    >>> f"{logps.item():.4f}"  # 2 ln(1/2)
    '-1.3863'
    """
    places = (targets != IGNORED).flatten().nonzero().squeeze(1)
    labels = targets.flatten()[places]

    (nll,) = of_logits(
        hidden.flatten(0, 1)[places],
        matrix,
        lambda logits, part: (F.cross_entropy(logits, labels[part], reduction="none"),),
    )
    token_nll = torch.zeros(targets.numel(), device=nll.device)
    return -token_nll.index_copy(0, places, nll).view(targets.shape).sum(dim=1)
