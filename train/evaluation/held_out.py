"""Loss, perplexity, bits per byte and token accuracy of a model on rows of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from gristmill.train.loop.stream import micro_batches
from gristmill.train.objectives.losses import IGNORED, next_tokens, score_tokens
from gristmill.train.parallel.sharding import evaluating
from gristmill.train.parallel.world import World, sum_over_ranks

ROWS_PER_FORWARD = 16
LARGEST_EXPONENT = 700.0
"""Beyond this a float64 overflows."""


@torch.no_grad()
def score_rows(model: nn.Module, ids: Tensor, token_bytes: Tensor, positions: Tensor | None = None) -> Tensor:
    """Sums over rows of tokens: (4,) float64: loss, predicted tokens, their bytes, correct ones.

    Args:
        model: predicts ids.
        ids: (n, t) int64.
        token_bytes: (vocab,) bytes that each id stands for.
        positions: (n, t) in their documents, for a model whose tokens see their own document only.
    """
    targets = next_tokens(ids)
    nll, correct = model(ids, partial(score_tokens, targets=targets), positions=positions)
    counted = targets != IGNORED
    num_bytes = token_bytes[targets.clamp(min=0)] * counted
    return torch.stack([part.double().sum() for part in (nll, counted, num_bytes, correct)])


def measure(
    model: nn.Module, rows: np.ndarray, token_bytes: Tensor, world: World, positions: np.ndarray | None = None
) -> dict[str, float]:
    """Metrics of a model on rows (n, t), spread over the ranks; all of them call this together.

    `positions` (n, t) in their documents are for a model whose tokens see their own document only.
    """
    sums = torch.zeros(4, dtype=torch.float64, device=world.device)
    with evaluating(model):
        for part in micro_batches(np.arange(len(rows)), world.data_rank, world.data_size, ROWS_PER_FORWARD):
            # An empty share still takes part in the collectives of the forward pass.
            chosen = part if len(part) else [0]
            ids = torch.from_numpy(rows[chosen].astype(np.int64)).to(world.device)
            places = None if positions is None else torch.from_numpy(positions[chosen]).to(world.device)
            scored = score_rows(model, ids, token_bytes, places)
            sums += scored if len(part) else 0.0
    return metrics_of(sum_over_ranks(sums, world).tolist())


def metrics_of(sums: Sequence[float]) -> dict[str, float]:
    """Metrics from (loss, tokens, bytes, correct) sums.

    `loss` is nats per token, `perplexity` its exponential, `bits_per_byte` nats over ln 2 per byte of the text that
    the predicted tokens stand for (special tokens stand for none, but their loss counts), `token_accuracy` the share
    of tokens that were the likeliest.
    """
    nll, tokens, num_bytes, correct = sums
    return {**loss_metrics(nll, tokens, num_bytes), "tokens": int(tokens),
            "perplexity": math.exp(min(nll / tokens, LARGEST_EXPONENT)), "token_accuracy": correct / tokens}


def loss_metrics(nll: float, tokens: float, num_bytes: float) -> dict[str, float]:
    """`loss` per token and `bits_per_byte`, from sums; `tokens` positive, no bits per byte where there are no bytes."""
    metrics = {"loss": nll / tokens}
    if num_bytes:
        metrics["bits_per_byte"] = nll / math.log(2.0) / num_bytes
    return metrics
