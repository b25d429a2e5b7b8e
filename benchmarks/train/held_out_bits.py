"""Bits per byte of held-out documents in overlapping windows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

WINDOW, STRIDE = 256, 128
"""Tokens of a window, and from one to the next: every token but a document's first ones
is predicted from at least STRIDE others.
"""
HELD_OUT = "held_out.json"
"""File of the documents: a list of ids for each, and the bytes of all."""


def bits_per_byte(logits_of: Callable[[Tensor], Tensor], file: Path) -> float:
    """Return the bits that a model needs per byte of the documents of a HELD_OUT file.

    Args:
        logits_of: ids (n, t) -> logits (n, t, vocab) of their next tokens.
    """
    held_out = json.loads(file.read_text())
    nats = sum(nll(logits_of, torch.tensor(ids)) for ids in held_out["documents"])
    return nats / math.log(2) / held_out["bytes"]


@torch.no_grad()
def nll(logits_of: Callable[[Tensor], Tensor], ids: Tensor) -> float:
    """Return the nats of all ids (t,) but the first."""
    total, scored = 0.0, 1
    for start in range(0, len(ids), STRIDE):
        window = ids[start : start + WINDOW]
        end = start + len(window)
        logits = logits_of(window[None])[0].float().log_softmax(dim=-1)
        predictions = logits[scored - start - 1 : -1]
        total -= float(predictions.gather(1, ids[scored:end, None]).double().sum())
        scored = end
        if end == len(ids):
            break
    return total
