"""Measurement of what the logits of a module depend on, on a few tokens."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

PROBED_TOKENS = 16
LARGEST_LEAK = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Change of a logit that rounding explains, relative to the largest logit."""


@torch.no_grad()
def logit_changes(model: Any, packs: bool) -> tuple[float, float]:
    """Largest changes of logits, relative to the largest logit: of tokens if later ones
    change, and of documents if others precede them in their row (0 unless `packs`). NaN
    for logits that are not finite.

    Args:
        model: called like `transformer.Llama`, with its weights; a collective call if
            they are sharded.
        packs: measure packed documents too.
    """
    half = min(PROBED_TOKENS, model.shape.sequence_length) // 2
    if not half:
        return 0.0, 0.0
    ids = torch.arange(3 * half) % model.shape.vocab_size
    first, *others = ids.view(3, half).to(next(model.parameters()).device)
    rows = torch.stack([torch.cat((first, other)) for other in others])
    training = model.training
    model.eval()
    logits: Tensor = model(rows)
    on_later = logits[0, :half] - logits[1, :half]
    on_neighbours = torch.zeros(1)
    if packs:
        packed: Tensor = model(
            rows.roll(half, 1),
            positions=torch.arange(half, device=rows.device).repeat(2, 2),
        )
        on_neighbours = packed[:, half:] - model(rows[:, :half])
    model.train(training)
    scale = float(logits.abs().max()) or 1.0
    return (
        float(on_later.abs().max()) / scale if logits.isfinite().all() else math.nan,
        float(on_neighbours.abs().max()) / scale,
    )
