"""Scaled dot-product attention: which kernel computes it, and which tokens may see each other.

Legend: n rows, t tokens, s of them that are seen, h heads, k key/value heads, c channels per head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
        spans: of each row the pieces of documents that its queries are, in order: (queries, first key, key behind the
            last). The queries of a piece are the last ones of its keys: all of a whole document, fewer where only its
            end is asked for.
    """

    spans: tuple[tuple[tuple[int, int, int], ...], ...]


@dataclass(frozen=True)
class Elsewhere:
    """What queries see of rows whose keys and values lie with several processes.

    Attributes:
        whole: makes keys and values (n, k, t, c) of rows, in their order, from this process's.
        visible: what queries see of them; not None.
    """

    whole: Callable[[Tensor, Tensor], Sequence[Tensor]]
    visible: Any


Visible = Any
"""None (all that `attend` is asked for), a bool mask (n, 1, t, s), Segments, FlexAttention's BlockMask, or Elsewhere.
"""


def document_numbers(positions: Tensor) -> Tensor:
    """Which document of its row each token belongs to, (n, t) int64, from its position in the document (n, t).

    A document begins where positions do not increase by one. Padding, whose positions are negative, is one of its own.
    """
    before, here = positions[:, :-1], positions[:, 1:]
    starts = torch.ones_like(positions)
    starts[:, 1:] = (here != before + 1) & ~((here < 0) & (before < 0))
    return starts.cumsum(dim=1)


def see_documents(
    positions: Tensor,
    dense: bool = False,
    causal: bool = True,
    prefix: Tensor | None = None,
    places: Tensor | None = None,
) -> Visible:
    """What lets every token see its own document only, up to itself: the form that is fastest on this device.

    Args:
        positions: (n, t) of each token within its document, negative where there is only padding.
        dense: give a plain mask, which compiled code takes without being compiled again for every batch.
        causal: up to itself; else all of its document. `attend` is to be told the same.
        prefix: (n, t) bool, tokens that those before them see too (Raffel et al. 2020, figure 4); none if absent.
        places: (s,) which tokens of the rows ask, in some stretches that ascend; all of them if absent.
    """
    numbers = document_numbers(positions)
    if positions.device.type == "cuda":
        return block_mask(numbers, causal, prefix, places)
    rows, t = numbers.shape
    if dense or prefix is not None or rows * t < LEAST_MEAN_LENGTH * int(numbers[:, -1].sum()):
        asking = torch.arange(t, device=numbers.device) if places is None else places
        same = numbers[:, asking, None] == numbers[:, None, :]
        if causal:
            earlier = torch.arange(t, device=numbers.device) <= asking[:, None]
            same &= earlier if prefix is None else earlier | prefix[:, None, :]
        return same.unsqueeze(1)
    stretches = [(0, t)] if places is None else _stretches(places)
    documents = (torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in numbers)
    return Segments(tuple(tuple(_spans(lengths, stretches, causal)) for lengths in documents))


def _stretches(places: Tensor) -> list[tuple[int, int]]:
    """Ascending places as (first, behind the last) of those that follow one another."""
    breaks = (places.diff() != 1).nonzero().squeeze(1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in places.tensor_split(breaks.cpu())]


def _spans(lengths: Sequence[int], stretches: Iterable[tuple[int, int]], causal: bool) -> list[tuple[int, int, int]]:
    """The pieces of documents of some lengths that lie in stretches of their row (see Segments)."""
    found = []
    for first, behind in stretches:
        begin = 0
        for length in lengths:
            end = begin + length
            asks, last = max(begin, first), min(end, behind)
            if asks < last:
                found.append((last - asks, begin, last if causal else end))
            begin = end
    return found


def block_mask(
    numbers: Tensor, causal: bool = True, prefix: Tensor | None = None, places: Tensor | None = None
) -> Visible:
    """FlexAttention's BlockMask (Dong et al. 2024): blocks of documents that do not meet are never computed."""
    from torch.nn.attention.flex_attention import create_block_mask

    n, t = numbers.shape
    asking = torch.arange(t, device=numbers.device) if places is None else places

    def same_document(row: Tensor, head: Tensor, asks: Tensor, key: Tensor) -> Tensor:
        query = asking[asks]
        same = numbers[row, query] == numbers[row, key]
        if not causal:
            return same
        return same & (query >= key if prefix is None else (query >= key) | prefix[row, key])

    # Compiled, it never holds the whole n x t x t mask.
    create = _compiled(create_block_mask) if numbers.device.type == "cuda" else create_block_mask
    return create(same_document, n, None, len(asking), t, device=numbers.device)


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
    if isinstance(visible, Elsewhere):
        keys, values = visible.whole(keys, values)
        visible = visible.visible
    grouped = queries.shape[1] != keys.shape[1]
    if isinstance(visible, Segments):
        return _attend_by_document(queries, keys, values, visible, grouped, causal)
    if visible is None or isinstance(visible, Tensor):
        with _preferred_kernels(queries.device):
            return F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=visible,
                is_causal=causal and visible is None,
                enable_gqa=grouped,
                scale=scale,
            )
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
    for row, spans in enumerate(segments.spans):
        asking = queries[row : row + 1].split([count for count, _, _ in spans], dim=2)
        seen = [[tensor[row : row + 1, :, begin:end] for tensor in (keys, values)] for _, begin, end in spans]
        rows.append(
            torch.cat([_attend_to_end(q, k, v, causal, grouped) for q, (k, v) in zip(asking, seen, strict=True)], dim=2)
        )
    return torch.cat(rows)


def _attend_to_end(queries: Tensor, keys: Tensor, values: Tensor, causal: bool, grouped: bool) -> Tensor:
    """Attention of queries that are, if causal, the last ones of the keys."""
    count, length = queries.shape[2], keys.shape[2]
    if not causal or count == length:
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=causal, enable_gqa=grouped)
    mask = _last_queries_first(count, length, queries.dtype, queries.device)
    return F.scaled_dot_product_attention(queries.flip(2), keys, values, attn_mask=mask, enable_gqa=grouped).flip(2)


def _last_queries_first(count: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What is added to scores (count, length) of the last queries of some keys, the last one first.

    Each line is the one before it moved by a key: so all of them are one line of count + length - 1 numbers, and no
    square is ever held.
    """
    line = torch.zeros(count + length - 1, dtype=dtype, device=device)
    line[length:] = -torch.inf
    return line.as_strided((count, length), (1, 1))


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
