"""Scaled dot-product attention: which kernel computes it, and which tokens may see each other.

Legend: n rows, t tokens, h heads, k key/value heads, c channels per head.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_MEAN_LENGTH = 128
"""Documents at least so long on average are attended to one by one on a CPU; one masked product is cheaper for shorter
ones, whose separate products would mostly be overhead."""
HOPPER = 9


@dataclass(frozen=True)
class Segments:
    """Rows cut into documents, for attention one document at a time.

    Attributes:
        lengths: of each row's documents, in order; they sum to t.
    """

    lengths: tuple[tuple[int, ...], ...]


Visible = Any
"""None (all that `attend` is asked for), a bool mask (n, 1, t, s), Segments, or FlexAttention's BlockMask."""


def document_numbers(positions: Tensor) -> Tensor:
    """Which document of its row each token belongs to, (n, t) int64, from its position in the document (n, t).

    A document begins where positions do not increase by one. Padding, whose positions are negative, is one of its own.
    """
    before, here = positions[:, :-1], positions[:, 1:]
    starts = torch.ones_like(positions)
    starts[:, 1:] = (here != before + 1) & ~((here < 0) & (before < 0))
    return starts.cumsum(dim=1)


def see_documents(
    positions: Tensor, dense: bool = False, causal: bool = True, prefix: Tensor | None = None
) -> Visible:  # fmt: skip
    """What lets every token see its own document only, up to itself: the form that is fastest on this device.

    Args:
        positions: (n, t) of each token within its document, negative where there is only padding.
        dense: give a plain mask, which compiled code takes without being compiled again for every batch.
        causal: up to itself; else all of its document. `attend` is to be told the same.
        prefix: (n, t) bool, tokens that those before them see too (Raffel et al. 2020, figure 4); none if absent.
    """
    numbers = document_numbers(positions)
    if positions.device.type == "cuda":
        return block_mask(numbers, causal, prefix)
    rows, t = numbers.shape
    if dense or prefix is not None or rows * t < LEAST_MEAN_LENGTH * int(numbers[:, -1].sum()):
        same = numbers[:, :, None] == numbers[:, None, :]
        if causal:
            earlier = torch.ones(t, t, dtype=torch.bool, device=numbers.device).tril()
            same &= earlier if prefix is None else earlier | prefix[:, None, :]
        return same.unsqueeze(1)
    return Segments(tuple(tuple(torch.unique_consecutive(row, return_counts=True)[1].tolist()) for row in numbers))


def block_mask(numbers: Tensor, causal: bool = True, prefix: Tensor | None = None) -> Visible:
    """FlexAttention's BlockMask (Dong et al. 2024): blocks of documents that do not meet are never computed."""
    from torch.nn.attention.flex_attention import create_block_mask

    def same_document(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = numbers[row, query] == numbers[row, key]
        if not causal:
            return same
        return same & (query >= key if prefix is None else (query >= key) | prefix[row, key])

    n, t = numbers.shape
    # Compiled, it never holds the whole n x t x t mask.
    create = _compiled(create_block_mask) if numbers.device.type == "cuda" else create_block_mask
    return create(same_document, n, None, t, t, device=numbers.device)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Visible, causal: bool = True, scale: float | None = None
) -> Tensor:
    """Attention (n, h, t, c) of queries (n, h, t, c) over keys and values (n, k, s, c).

    Args:
        visible: what a token may see, of its whole row or of its document; or a mask of numbers that are added to
            scores.
        causal: of these only what stands up to itself; a mask says so already.
        scale: of the scores, with None or a mask; one over the root of c if absent.
    """
    grouped = queries.shape[1] != keys.shape[1]
    if isinstance(visible, Segments):
        return _attend_by_document(queries, keys, values, visible, grouped, causal)
    if visible is None or isinstance(visible, Tensor):
        with _preferred_kernels(queries.device):
            return F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=visible, is_causal=causal and visible is None, enable_gqa=grouped,
                scale=scale)
    from torch.nn.attention.flex_attention import flex_attention

    # Not compiled it would hold all scores; inside compiled code it is compiled along with its surroundings.
    run: Any = flex_attention
    if queries.device.type == "cuda" and not torch.compiler.is_compiling():
        run = _compiled(flex_attention)
    mixed: Tensor = run(queries, keys, values, block_mask=visible, enable_gqa=grouped)
    return mixed


def _attend_by_document(
    queries: Tensor, keys: Tensor, values: Tensor, segments: Segments, grouped: bool, causal: bool
) -> Tensor:
    """Plain attention of each document on its own; what no token may see is never computed."""
    rows = []
    for row, lengths in enumerate(segments.lengths):
        parts = (tensor[row : row + 1].split(lengths, dim=2) for tensor in (queries, keys, values))
        rows.append(torch.cat([F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
                               for q, k, v in zip(*parts, strict=True)], dim=2))
    return torch.cat(rows)


def _preferred_kernels(device: torch.device) -> AbstractContextManager[None]:
    """On Hopper try cuDNN first: 1.7 to 2.3 times faster than PyTorch's own choice for training (transformers #48163).

    Other devices keep PyTorch's order; there it measured slower.
    """
    if not _is_hopper(device):
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)


def _is_hopper(device: torch.device) -> bool:
    """Asked while compiling, not traced: a question to the driver is not part of a graph."""
    return device.type == "cuda" and _capability(device)[0] == HOPPER


# All that torch.compiler.assume_constant_result does; to call it would load the compiler, whoever needs it or not: more
# than a second of every start.
_is_hopper._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)
