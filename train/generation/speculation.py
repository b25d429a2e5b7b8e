"""Speculative decoding (Leviathan et al. 2023): what a small model proposed, accepted so that the large one's own
distribution comes out, and the ids of greedy decoding are those without it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gristmill.train.generation.sampling import draw


def accept(
    proposed: Sequence[int], draft: np.ndarray, target: np.ndarray, generator: np.random.Generator
) -> list[int]:
    """The ids that count, at least one: accepted proposals, and one more of the large model's (algorithm 1).

    Args:
        proposed: g ids, each drawn from its row of `draft`.
        draft: (g, v) the small model's probabilities.
        target: (g + 1, v) the large model's, each given the proposals before it.
        generator: the request's random numbers.
    """
    for place, token in enumerate(proposed):
        if generator.random() * draft[place, token] > target[place, token]:
            # What the small model gives too much of is left out, which makes the sum over both ways exact.
            return [*proposed[:place], draw(np.maximum(target[place] - draft[place], 0.0), generator)]
    return [*proposed, draw(target[-1], generator)]


def accept_greedy(proposed: Sequence[int], likeliest: Sequence[int]) -> list[int]:
    """The same at temperature 0: proposals as long as they are the large model's likeliest ids, and its next one."""
    accepted = 0
    while accepted < len(proposed) and proposed[accepted] == likeliest[accepted]:
        accepted += 1
    return [*proposed[:accepted], likeliest[accepted]]
