"""Our preference losses against five updates of TRL's DPOTrainer on the same batches:
losses and weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.mixtures.schema.posttraining import PreferenceLoss
from gristmill.train.models.weights import load_model
from gristmill.train.objectives.losses import IGNORED, sequence_logps
from gristmill.train.objectives.preference_losses import (
    LossSettings,
    PairLogps,
    preference_loss,
)
from tests.referees.tiny_models import TINY, trainer_settings, word_tokenizer

# Importing it takes seconds, which collection need not spend.
pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")

STEPS, RATE, BETA = 5, 1e-3, 0.1
PAIRS = [
    {
        "prompt": f"the {word} is",
        "chosen": f" {word} and long, {'so ' * number}",
        "rejected": f" no {word}",
    }
    for number, word in enumerate(("red", "blue", "grass", "rose", "sky"))
] * 2


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Save a tiny model of transformers, and make a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    words = sorted(
        {
            word
            for pair in PAIRS
            for text in pair.values()
            for word in text.replace(",", " ,").split()
        }
    )
    tokenizer = word_tokenizer(words)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    folder = tmp_path_factory.mktemp("start")
    model.save_pretrained(folder)
    return folder, tokenizer


@pytest.fixture(scope="module")
def train_with_trl(
    start: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer

    folder, tokenizer = start

    def train(
        loss: str, smoothing: float
    ) -> tuple[list[dict[str, torch.Tensor]], list[float], dict[str, Any]]:
        """Train, and return batches, losses and the final weights."""
        policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        settings = DPOConfig(
            **trainer_settings(tmp_path_factory.mktemp("trl"), STEPS, RATE),
            beta=BETA,
            loss_type=[loss],
            label_smoothing=smoothing,
            per_device_train_batch_size=4,
        )
        batches: list[dict[str, torch.Tensor]] = []

        class RecordingTrainer(DPOTrainer):
            def compute_loss(
                self, model: Any, inputs: Any, *args: Any, **kwargs: Any
            ) -> Any:
                batches.append(
                    {
                        name: value.clone()
                        for name, value in inputs.items()
                        if isinstance(value, torch.Tensor)
                    }
                )
                return super().compute_loss(model, inputs, *args, **kwargs)

        trainer = RecordingTrainer(
            model=policy,
            ref_model=copy.deepcopy(policy),
            args=settings,
            train_dataset=Dataset.from_list(PAIRS),
            processing_class=tokenizer,
        )
        trainer.train()
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        return (
            batches,
            losses,
            {name: value.detach() for name, value in policy.state_dict().items()},
        )

    return train


@pytest.mark.parametrize(
    ("ours", "theirs", "smoothing"),
    [
        ("sigmoid", "sigmoid", 0.0),
        ("robust", "robust", 0.2),
        ("hinge", "hinge", 0.0),
        ("ipo", "ipo", 0.0),
        ("sigmoid_norm", "sigmoid_norm", 0.0),
    ],
)
def test_losses_and_weights_equal_those_of_trl(
    ours: PreferenceLoss,
    theirs: str,
    smoothing: float,
    start: tuple[Path, Any],
    train_with_trl: Callable[..., Any],
) -> None:
    batches, expected, weights = train_with_trl(theirs, smoothing)
    policy, reference = load_model(start[0]), load_model(start[0])
    for parameter in policy.parameters():
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE, weight_decay=0.0)
    settings = LossSettings(BETA, label_smoothing=smoothing)
    losses = []
    for batch in batches:
        ids, scored = batch["input_ids"], batch["completion_mask"].bool()
        targets = torch.cat(
            [
                ids.masked_fill(~scored, IGNORED)[:, 1:],
                torch.full((len(ids), 1), IGNORED),
            ],
            dim=1,
        )
        chosen, rejected = policy(ids, partial(sequence_logps, targets=targets)).chunk(
            2
        )
        with torch.no_grad():
            before = reference(ids, partial(sequence_logps, targets=targets)).chunk(2)
        tokens = (targets != IGNORED).sum(dim=1).float().chunk(2)
        loss = preference_loss(
            ours, PairLogps(chosen, rejected, *before, *tokens), settings
        )[0].mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    # TRL logs rounded values.
    assert losses == pytest.approx(expected, rel=2e-5, abs=1e-5)
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(parameter.detach(), weights[name], atol=1e-4, rtol=0)
