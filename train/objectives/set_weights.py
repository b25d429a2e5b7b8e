"""How often each example of a weighted set is taken, so that sets have their shares of the trained tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def quotas(trained_tokens: Sequence[int], weights: Sequence[float]) -> list[float]:
    """Trained tokens that each set gives: in proportion to the weights, none of the sets less than once.

    The set that is largest for its weight is taken exactly once, all others more often.

    Args:
        trained_tokens: of each set, positive.
        weights: of each set, positive.
    """
    scale = max(tokens / weight for tokens, weight in zip(trained_tokens, weights, strict=True))
    return [scale * weight for weight in weights]


def copies(trained_tokens: np.ndarray, ids: Sequence[str], quota: float, seed: int) -> np.ndarray:
    """How often each example is taken (int64, shape (n,)): whole passes, then the first ones by a hash of seed and id.

    What is taken differs from the quota by at most half of the longest example, and no two examples' numbers differ by
    more than one.

    Args:
        trained_tokens: (n,) of each example, positive.
        ids: of each example.
        quota: trained tokens that are wanted.
        seed: of the hash.
    """
    total = int(trained_tokens.sum())
    passes, rest = divmod(quota, total)
    keys = [hashlib.blake2b(f"{seed}/{one}".encode(), digest_size=16).digest() for one in ids]
    order = sorted(range(len(keys)), key=lambda place: (keys[place], place))
    reached = np.concatenate([[0], np.cumsum(trained_tokens[order])])
    taken = np.full(len(keys), int(passes), dtype=np.int64)
    taken[order[: int(np.abs(reached - rest).argmin())]] += 1
    return taken
