"""Keys and values of rows that come, go and are taken back, kept so that all rows end at the same position.

A row's positions are counted from its own start, so that what is cached stays right wherever it is moved to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gristmill.train.models.llama import Cache, Llama, empty_cache


def arranged(model: Llama, parts: Sequence[tuple[Cache, Sequence[int]]], room: int) -> Cache:
    """A new cache of some rows of others, as short as the longest of them allows.

    Args:
        model: whose they are.
        parts: caches, and which of their rows; in this order.
        room: positions to come.
    """
    device = parts[0][0].starts.device
    chosen = [(cache, torch.tensor(rows, dtype=torch.int64, device=device)) for cache, rows in parts]
    sizes = torch.cat([cache.length - cache.starts[rows] for cache, rows in chosen])
    length = int(sizes.max()) if len(sizes) else 0
    made = empty_cache(model.shape, length - sizes, length + room, parts[0][0].layers[0].keys.dtype)
    made.length = length
    first = 0
    for cache, rows in chosen:
        width, here = min(length, cache.length), slice(first, first + len(rows))
        for new, old in zip(made.layers, cache.layers, strict=True):
            new.keys[here, :, length - width : length] = old.keys[rows, :, cache.length - width : cache.length]
            new.values[here, :, length - width : length] = old.values[rows, :, cache.length - width : cache.length]
        first += len(rows)
    return made


def take_back(cache: Cache, dropped: Tensor) -> None:
    """Forget the last positions of each row, as many as `dropped` (n,) int64 says; rows then end together again."""
    least = int(dropped.min())
    shift = dropped - least
    if int(shift.max()):
        columns = (torch.arange(cache.length, device=shift.device) - shift[:, None]).clamp(min=0)[:, None, :, None]
        for layer in cache.layers:
            for tensor in (layer.keys, layer.values):
                kept = tensor[:, :, : cache.length]
                tensor[:, :, : cache.length] = kept.gather(2, columns.expand_as(kept))
        cache.starts = cache.starts + shift
    cache.length -= least


@torch.no_grad()
def filled(model: Llama, prompts: Sequence[Sequence[int]]) -> Cache:
    """A cache of prompts, which may be empty; no logits are computed."""
    device = model.model.embed_tokens.weight.device
    longest = max(map(len, prompts))
    # Padding lies on the left, so that all rows end at the same position.
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt, dtype=torch.int64)
    starts = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    cache = empty_cache(model.shape, starts, longest, model.model.embed_tokens.weight.dtype)
    if longest:
        model(ids.to(device), head=lambda hidden, weight: None, cache=cache)
    return cache
