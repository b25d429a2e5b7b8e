"""Scaled dot-product attention: choice of kernel, and masks.

Legend: n rows, t tokens, s attended tokens, h heads, k key/value heads, c channels per
head.
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
from torch.nn.attention import SDPBackend, sdpa_kernel

LEAST_MEAN_LENGTH = 128
"""Mean document length from which documents are attended to one by one on a CPU.

For shorter documents one masked product is cheaper, as separate products are mostly
overhead.
"""
SHORT_ROW = 256
"""Longest rows for which plain products measured faster than the CPU's kernel: 13.5 and
20.4 ms of 2,048 tokens in rows of 256, and 72 and 57 ms in rows of 512 (AMD EPYC).
"""
HOPPER = 9


@dataclass(frozen=True)
class Segments:
    """Rows cut into documents, for attention one document at a time.

    Attributes:
        spans: for each row the pieces of documents of its queries, in order: (queries,
            first key, end of keys). The queries of a piece are the last of its keys:
            all keys of a full document, fewer if only its end is queried.
    """

    spans: tuple[tuple[tuple[int, int, int], ...], ...]


@dataclass(frozen=True)
class Elsewhere:
    """Mask of queries over rows whose keys and values are split over processes.

    Attributes:
        whole: gathers a tensor of all tokens along a dimension from the local parts.
        visible: mask over the gathered keys; not None.
    """

    whole: Callable[[Tensor, int], Tensor]
    visible: Any


Visible = Any
"""None (causal), a bool mask (n, 1, t, s), Segments, FlexAttention's
BlockMask, or Elsewhere.
"""


def document_numbers(positions: Tensor) -> Tensor:
    """Document number of each token within its row, (n, t) int64, from its position in
    the document (n, t).

    A document begins where positions do not increase by one. Padding, with negative
    positions, is a separate document.
    """
    before = positions[:, :-1]
    current = positions[:, 1:]
    starts = torch.ones_like(positions)
    starts[:, 1:] = (current != before + 1) & ~((current < 0) & (before < 0))
    return starts.cumsum(dim=1)


def see_documents(
    positions: Tensor,
    dense: bool = False,
    prefix: Tensor | None = None,
    places: Tensor | None = None,
) -> Visible:
    """Mask of causal attention within documents, in the fastest form for the device.

    Args:
        positions: (n, t) of each token within its document, negative for padding.
        dense: return a plain mask, for which compiled code is not recompiled with every
            batch.
        prefix: (n, t) bool, tokens visible to earlier tokens too (Raffel et al. 2020,
            figure 4); none if absent.
        places: (s,) indices of the queries, in ascending ranges; all tokens if absent.
    """
    numbers = document_numbers(positions)
    if positions.device.type == "cuda":
        return block_mask(numbers, prefix, places)
    rows, t = numbers.shape
    if (
        dense
        or prefix is not None
        or rows * t < LEAST_MEAN_LENGTH * int(numbers[:, -1].sum())
    ):
        queries = torch.arange(t, device=numbers.device) if places is None else places
        mask = numbers[:, queries, None] == numbers[:, None, :]
        earlier = torch.arange(t, device=numbers.device) <= queries[:, None]
        mask &= earlier if prefix is None else earlier | prefix[:, None, :]
        return mask.unsqueeze(1)
    ranges = [(0, t)]
    if places is not None:  # their consecutive stretches
        breaks = (places.diff() != 1).nonzero().squeeze(1) + 1
        ranges = [
            (int(part[0]), int(part[-1]) + 1)
            for part in places.tensor_split(breaks.cpu())
        ]
    spans_of_rows = []
    for row in numbers:
        lengths = torch.unique_consecutive(row, return_counts=True)[1].tolist()
        spans = []
        for first, range_end in ranges:
            begin = 0
            for length in lengths:
                end = begin + length
                start = max(begin, first)
                stop = min(end, range_end)
                if start < stop:
                    spans.append((stop - start, begin, stop))
                begin = end
        spans_of_rows.append(tuple(spans))
    return Segments(tuple(spans_of_rows))


def block_mask(
    numbers: Tensor,
    prefix: Tensor | None = None,
    places: Tensor | None = None,
) -> Visible:
    """FlexAttention's BlockMask (Dong et al. 2024), which skips blocks without a common
    document.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    n, t = numbers.shape
    query_indices = torch.arange(t, device=numbers.device) if places is None else places

    def same_document(row: Tensor, head: Tensor, asks: Tensor, key: Tensor) -> Tensor:
        query = query_indices[asks]
        same = numbers[row, query] == numbers[row, key]
        return same & (
            query >= key if prefix is None else (query >= key) | prefix[row, key]
        )

    # Compiled, it does not materialise the n x t x t mask.
    create = (
        _compiled(create_block_mask)
        if numbers.device.type == "cuda"
        else create_block_mask
    )
    return create(same_document, n, None, len(query_indices), t, device=numbers.device)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Visible,
) -> Tensor:
    """Attention (n, h, t, c) of queries (n, h, t, c) over keys and values (n, k, s, c).

    Args:
        visible: mask of rows or documents; None and Segments are causal.
    """
    if isinstance(visible, Elsewhere):
        pairs = torch.cat((keys, values), dim=1)
        keys, values = visible.whole(pairs, 2).chunk(2, dim=1)
        visible = visible.visible
    grouped = queries.shape[1] != keys.shape[1]
    if isinstance(visible, Segments):
        rows = []
        for row, spans in enumerate(visible.spans):
            document_queries = queries[row : row + 1].split(
                [count for count, _, _ in spans], dim=2
            )
            document_key_values = [
                [tensor[row : row + 1, :, begin:end] for tensor in (keys, values)]
                for _, begin, end in spans
            ]
            rows.append(
                torch.cat(
                    [
                        _attend_to_end(q, k, v, grouped)
                        for q, (k, v) in zip(
                            document_queries, document_key_values, strict=True
                        )
                    ],
                    dim=2,
                )
            )
        return torch.cat(rows)
    if visible is None or isinstance(visible, Tensor):
        with _preferred_kernels(queries, keys.shape[2]):
            return F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=visible,
                is_causal=visible is None,
                enable_gqa=grouped,
            )
    from torch.nn.attention.flex_attention import flex_attention

    # Eager mode would materialise all scores; within compiled code it is compiled with
    # its caller.
    run: Any = flex_attention
    if queries.device.type == "cuda" and not torch.compiler.is_compiling():
        run = _compiled(flex_attention)
    return run(queries, keys, values, block_mask=visible, enable_gqa=grouped)


def _attend_to_end(
    queries: Tensor, keys: Tensor, values: Tensor, grouped: bool
) -> Tensor:
    """Causal attention of queries that are the last tokens of the keys."""
    count = queries.shape[2]
    length = keys.shape[2]
    if count == length:
        with _preferred_kernels(queries, length):
            return F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, enable_gqa=grouped
            )
    # Queries are in reverse order, the last one first. Each line of the mask is the
    # line before it shifted by one key, so all lines are views of one vector.
    line = torch.zeros(count + length - 1, dtype=queries.dtype, device=queries.device)
    line[length:] = -torch.inf
    mask = line.as_strided((count, length), (1, 1))
    return F.scaled_dot_product_attention(
        queries.flip(2), keys, values, attn_mask=mask, enable_gqa=grouped
    ).flip(2)


def _preferred_kernels(queries: Tensor, length: int) -> AbstractContextManager[None]:
    """Prefer cuDNN on Hopper: 1.7 to 2.3 times faster than PyTorch's default for
    training (transformers #48163); and plain products of short rows where oneDNN
    multiplies float32, whose overhead the small blocks of the CPU's kernel do not bear,
    nor plain products of the single token that is generated.

    Other devices keep PyTorch's order, as cuDNN measured slower there.
    """
    is_short = queries.device.type == "cpu" and length <= SHORT_ROW
    if is_short and queries.shape[2] > 1 and _has_onednn_products():
        return sdpa_kernel(SDPBackend.MATH)
    if not _is_hopper(queries.device):
        return nullcontext()
    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    return sdpa_kernel(order, set_priority=True)


def _is_hopper(device: torch.device) -> bool:
    """Return True on Hopper; evaluated while compiling instead of traced, as driver
    queries are not part of a graph.
    """
    return device.type == "cuda" and _capability(device)[0] == HOPPER


def _has_onednn_products() -> bool:
    """Return True if oneDNN multiplies float32 matrices (see
    process_groups.multiply_with_avx512); evaluated while compiling.
    """
    return torch.get_float32_matmul_precision() == "medium"


# Same effect as torch.compiler.assume_constant_result, which would load the compiler
# and add more than a second to every start.
_is_hopper._dynamo_marked_constant = True  # type: ignore[attr-defined]
_has_onednn_products._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)
