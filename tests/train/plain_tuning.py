"""Fine-tuning of a module of transformers in plain PyTorch, the peer of the stage `sft`
for encoders and encoder-decoders.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gristmill.core.files import write_json
from gristmill.flows.running.session import Session
from tests.train.trained import losses_of

STEPS, BATCH, SEED, LEARNING_RATE = 5, 8, 3, 0.003
SFT: dict[str, Any] = {
    "global_batch_size": BATCH,
    "micro_batch_size": 4,
    "log_every": 1,
    "seed": SEED,
    "schedule": {"kind": "constant", "warmup_steps": 0},
    "optimizer": {"learning_rate": LEARNING_RATE, "weight_decay": 0.0},
}


def write_tokenizer_config(folder: Path, **tokens: str) -> None:
    """Write the tokenizer_config.json of a tokenizer.json, with the special tokens."""
    named = {f"{name}_token": token for name, token in tokens.items()}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    write_json(folder / "tokenizer_config.json", config)


def assert_equal_losses(
    session: Session,
    model: torch.nn.Module,
    order: Any,
    loss_of: Callable[[np.ndarray], Tensor],
) -> None:
    """Assert that `sft` has logged the losses of STEPS steps of AdamW on a module.

    Args:
        session: with a committed `sft`.
        model: module with the start weights.
        order: order of the rows.
        loss_of: numbers of the rows of a step -> its loss.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
    )
    losses = []
    for step in range(STEPS):
        places = np.arange(BATCH * step, BATCH * (step + 1), dtype=np.int64)
        loss = loss_of(order.rows(places))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    ours = losses_of(session.folder("sft").data.parent)
    assert ours == pytest.approx(losses, rel=1e-5)
