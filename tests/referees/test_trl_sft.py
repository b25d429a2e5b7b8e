"""Our cross-entropy against five updates of TRL's SFTTrainer on the same batches, whole
and accumulated.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.train.models.weights import load_model
from gristmill.train.objectives.losses import IGNORED, weighted_nll
from tests.referees.tiny_models import tiny_model, trainer_settings, word_tokenizer

# Importing it takes seconds, which collection need not spend.
pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")

STEPS, RATE = 5, 1e-3
ROWS = [
    {"prompt": f"the {word} is", "completion": f" {word} and long, {'so ' * number}"}
    for number, word in enumerate(("red", "blue", "grass", "rose", "sky"))
] * 4


@pytest.mark.parametrize(
    ("family", "accumulated"), [("llama", 1), ("llama", 2), ("gemma2", 2)]
)
def test_losses_and_weights_equal_those_of_trl(
    family: str, accumulated: int, tmp_path: Path
) -> None:
    """Answers differ in length, so that a mean of means differs from the mean over the
    tokens of a step.
    """
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    words = sorted(
        {
            word
            for row in ROWS
            for text in row.values()
            for word in text.replace(",", " ,").split()
        }
    )
    tokenizer = word_tokenizer(words)
    theirs = tiny_model(family)
    theirs.save_pretrained(tmp_path / "start")
    recorded: list[dict[str, torch.Tensor]] = []

    class RecordingTrainer(SFTTrainer):
        def compute_loss(
            self, model: Any, inputs: Any, *args: Any, **kwargs: Any
        ) -> Any:
            recorded.append(
                {name: inputs[name].clone() for name in ("input_ids", "labels")}
            )
            return super().compute_loss(model, inputs, *args, **kwargs)

    trainer = RecordingTrainer(
        model=theirs,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tokenizer,
        args=SFTConfig(
            **trainer_settings(tmp_path / "trl", STEPS, RATE),
            per_device_train_batch_size=4 // accumulated,
            gradient_accumulation_steps=accumulated,
        ),
    )
    trainer.train()
    expected = [line["loss"] for line in trainer.state.log_history if "loss" in line]

    policy = load_model(tmp_path / "start")
    for parameter in policy.parameters():
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        batches = recorded[step * accumulated : (step + 1) * accumulated]
        shifted = [
            torch.cat(
                [
                    batch["labels"][:, 1:],
                    torch.full((len(batch["labels"]), 1), IGNORED),
                ],
                dim=1,
            )
            for batch in batches
        ]
        count = sum(int((targets != IGNORED).sum()) for targets in shifted)
        total = 0.0
        for batch, targets in zip(batches, shifted, strict=True):
            weights = torch.full(targets.shape, 1 / count)
            loss, _ = policy(
                batch["input_ids"],
                partial(weighted_nll, targets=targets, weights=weights),
            )
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    assert losses == pytest.approx(expected, rel=2e-5, abs=1e-5)
    weights_of_theirs = theirs.state_dict()
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(
            parameter.detach(), weights_of_theirs[name], atol=1e-4, rtol=0
        )
