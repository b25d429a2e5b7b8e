"""Sampling of ids from logits: temperature, nucleus, and random streams of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gristmill.core.seeds import content_key
from gristmill.train.loop.batch_plan import slices

BLOCK = 128
"""Ids per partial sum of a distribution."""
CHUNK_LOGITS = 1 << 19
"""Logits that a CPU samples from at once: 2 MB of float32, which fit its cache."""
LEAST_TEMPERATURE = 1e-30
"""Lower temperatures count as this, so that logits divided by it stay finite in float32."""


class SamplingError(ValueError):
    """Temperature or top_p out of range."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters.

    Attributes:
        temperature: logits are divided by it; 0 is greedy.
        top_p: sample from the smallest set of likeliest ids with this share of the
            probability (Holtzman et al. 2020); 1 samples from all.
        seed: with the prompt, determines every draw.

    Raises:
        SamplingError: a value is out of its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise SamplingError(
                f"temperature is {self.temperature}; it must be 0 (the likeliest id) "
                "or more"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise SamplingError(
                f"top_p is {self.top_p}; it must be over 0 and at most 1 (all ids)"
            )


def random_numbers(seed: int, prompt: Sequence[int]) -> np.random.Generator:
    """Random stream of a request, keyed by seed and prompt."""
    key = content_key(seed, [int(token) for token in prompt], bits=128)
    return np.random.Generator(np.random.Philox(key=key))


def sampled_ids(
    logits: Tensor,
    samplings: Sequence[Sampling],
    generators: Sequence[np.random.Generator],
) -> Tensor:
    """Next id of each row, (n,) int64 on the device of the logits.

    It depends only on the row's logits and parameters and on the next number of its
    random stream. On a GPU the host waits for nothing.

    Args:
        logits: (n, v).
        samplings: parameters of each row.
        generators: random stream of each row.
    """
    parameters = sent(
        [
            (sampling.temperature, sampling.top_p, generator.random())
            for sampling, generator in zip(samplings, generators, strict=True)
        ],
        torch.float64,
        logits.device,
    )
    rows_by_kind: dict[tuple[bool, bool], list[int]] = {}
    for row, sampling in enumerate(samplings):
        kind = (sampling.temperature == 0.0, sampling.top_p == 1.0)
        rows_by_kind.setdefault(kind, []).append(row)
    rows_at_once = (
        len(logits) if logits.is_cuda else max(1, CHUNK_LOGITS // logits.shape[1])
    )
    ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for (is_greedy, takes_all), rows in rows_by_kind.items():
        for part in slices(len(rows), rows_at_once):
            chosen = sent(rows[part], torch.int64, logits.device)
            if is_greedy:
                ids[chosen] = logits[chosen].argmax(dim=-1)
                continue
            temperatures, top_ps, numbers = parameters[chosen].unbind(1)
            weights = probabilities(logits[chosen], temperatures)
            if takes_all:
                ids[chosen] = drawn(weights, numbers).squeeze(1)
            else:
                # By sorting the host need not wait to know which ids are rejected.
                sample = by_sorting if logits.is_cuda else by_rejection
                ids[chosen] = sample(weights, top_ps[:, None], numbers)
    return ids


def sent(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Tensor of host values on a device, without waiting for the device."""
    tensor = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)


def by_sorting(weights: Tensor, top_ps: Tensor, numbers: Tensor) -> Tensor:
    """Ids (n,) at which the cumulative distribution over the nucleus, the likeliest id
    first, exceeds the numbers; arguments as for `by_rejection`.
    """
    values, ids = weights.sort(dim=-1, descending=True, stable=True)
    ends = values.double().cumsum(dim=-1)
    # The nucleus ends with the first id with which it has top_p.
    last = torch.searchsorted(ends, top_ps).clamp(max=ids.shape[1] - 1)
    total = ends.gather(1, last)
    return ids.gather(1, place(ends, numbers[:, None] * total, total)).squeeze(1)


def by_rejection(weights: Tensor, top_ps: Tensor, numbers: Tensor) -> Tensor:
    """Ids (n,) of nuclei, without sorting.

    An id is drawn from all, and rejected if those that rank before it have top_p; then
    the next one is drawn from these, which include the nucleus (as FlashInfer's dual
    pivot rejection sampling). The number of each draw determines that of the next one.

    Args:
        weights: (n, v) float32, distributions.
        top_ps: (n, 1) float64.
        numbers: (n,) float64.
    """
    ids = torch.empty(len(weights), dtype=torch.int64)
    rows = torch.arange(len(weights))
    places = torch.arange(weights.shape[1])
    while len(rows):
        chosen = drawn(weights, numbers)
        ids[rows] = chosen.squeeze(1)
        weight = weights.gather(1, chosen)
        # A mask of floats is vectorised, one of bools is not.
        likely = torch.ge(weights, weight, out=torch.empty_like(weights))
        likely.mul_(weights)
        mass = likely.double().sum(dim=-1, keepdim=True) - weight
        wide = (mass >= top_ps).squeeze(1).nonzero().squeeze(1)
        # As likely ids rank by their number.
        likely = likely[wide]
        follows = (likely == weight[wide]) & (places >= chosen[wide])
        likely.masked_fill_(follows, 0.0)
        is_rejected = likely.double().sum(dim=-1) >= top_ps[wide, 0]
        again = wide[is_rejected]
        rows, weights, top_ps = rows[again], likely[is_rejected], top_ps[again]
        numbers = torch.tensor(
            [
                np.random.Generator(np.random.Philox(key=int(number * 2**53))).random()
                for number in numbers[again].tolist()
            ],
            dtype=torch.float64,
        )
    return ids


def probabilities(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Distributions (n, v) in float32 of logits (n, v) at temperatures (n,)."""
    divisors = temperatures.clamp(min=LEAST_TEMPERATURE).float()
    return (logits.float() / divisors[:, None]).softmax(dim=-1)


def drawn(weights: Tensor, numbers: Tensor) -> Tensor:
    """Index of each row (n, 1) at which the cumulative weight exceeds a share of all.

    Args:
        weights: (n, v) float32.
        numbers: (n,) float64, the shares.
    """
    # Sums of blocks spare a cumulative sum over all ids.
    blocks = F.pad(weights, (0, -weights.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    ends = blocks.sum(dim=-1).double().cumsum(dim=-1)
    targets = numbers[:, None] * ends[:, -1:]
    block = place(ends, targets, ends[:, -1:])
    within = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1)
    within = within.double().cumsum(dim=-1)
    before = F.pad(ends, (1, 0)).gather(1, block)
    index = block * BLOCK + place(within, targets - before, within[:, -1:])
    return index.clamp(max=weights.shape[1] - 1)


def place(ends: Tensor, targets: Tensor, totals: Tensor) -> Tensor:
    """Index of the first cumulative weight above each target, (n, 1) int64; never one of
    weight 0, whatever the rounding.

    Args:
        ends: (n, k) cumulative weights.
        targets: (n, 1), below the totals but for rounding.
        totals: (n, 1), the cumulative weight of the last index that may be returned.
    """
    above = torch.searchsorted(ends, targets.contiguous(), right=True)
    index = torch.minimum(above, torch.searchsorted(ends, totals.contiguous()))
    return index.clamp(max=ends.shape[1] - 1)  # NaN has no place
