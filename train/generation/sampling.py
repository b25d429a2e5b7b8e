"""Sampling of ids from logits: temperature, nucleus, and random streams of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gristmill.core.seeds import content_key


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


def probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Sampling distribution: (..., v) float64 that sums to 1, from logits (..., v);
    temperature above 0.
    """
    scaled = logits.astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    if sampling.top_p == 1.0:
        return weights
    order = np.argsort(-weights, axis=-1, kind="stable")
    ranked = np.take_along_axis(weights, order, axis=-1)
    # An id is in the nucleus if those before it have less than top_p; the likeliest one
    # always is.
    inside = ranked.cumsum(axis=-1) - ranked < sampling.top_p
    kept = np.zeros_like(weights)
    np.put_along_axis(kept, order, np.where(inside, ranked, 0.0), axis=-1)
    return kept / kept.sum(axis=-1, keepdims=True)


def draw(weights: np.ndarray, generator: np.random.Generator) -> int:
    """Sample one id from weights (v,) that need not sum to 1, by inverting their
    cumulative distribution.
    """
    cumulative = weights.cumsum()
    place = cumulative.searchsorted(generator.random() * cumulative[-1], side="right")
    return min(int(place), len(weights) - 1)
