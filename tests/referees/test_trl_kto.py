"""Our KTO loss against five updates of TRL's KTOTrainer on the same batches: losses and
weights.
"""

from __future__ import annotations

import copy
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.train.models.weights import load_model
from gristmill.train.objectives.kto_objective import baseline_of, kto_loss
from gristmill.train.objectives.losses import next_tokens, sequence_logps
from tests.referees.tiny_models import TINY, trainer_settings, word_tokenizer

# Importing it takes seconds, which collection need not spend.
pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")

STEPS, RATE, BETA, DESIRABLE, UNDESIRABLE = 5, 1e-2, 0.5, 1.2, 0.7
ROWS = [
    {
        "prompt": f"the {word} is",
        "completion": f" {word} and long, {'so ' * number}" if kind else f" no {word}",
        "label": kind,
    }
    for number, word in enumerate(("red", "blue", "grass", "rose", "sky"))
    for kind in (True, False)
] * 2


def test_losses_and_weights_equal_those_of_trl(tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import KTOConfig, KTOTrainer

    words = sorted(
        {
            word
            for row in ROWS
            for text in (row["prompt"], row["completion"])
            for word in str(text).replace(",", " ,").split()
        }
    )
    tokenizer = word_tokenizer(words)
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(LlamaConfig(**TINY))
    theirs.save_pretrained(tmp_path / "start")
    ours, reference = load_model(tmp_path / "start"), load_model(tmp_path / "start")
    batches: list[dict[str, torch.Tensor]] = []

    class RecordingTrainer(KTOTrainer):
        def compute_loss(
            self, model: Any, inputs: Any, *args: Any, **kwargs: Any
        ) -> Any:
            batches.append(
                {
                    name: value.clone()
                    for name, value in inputs.items()
                    if isinstance(value, torch.Tensor)
                }
                | {"label": torch.as_tensor(inputs["label"], dtype=torch.bool)}
            )
            return super().compute_loss(model, inputs, *args, **kwargs)

    settings = KTOConfig(
        **trainer_settings(tmp_path / "trl", STEPS, RATE),
        beta=BETA,
        desirable_weight=DESIRABLE,
        undesirable_weight=UNDESIRABLE,
        per_device_train_batch_size=4,
    )
    trainer = RecordingTrainer(
        model=theirs,
        ref_model=copy.deepcopy(theirs),
        args=settings,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tokenizer,
    )
    trainer.train()
    log = [line for line in trainer.state.log_history if "loss" in line]
    optimizer = torch.optim.AdamW(
        ours.requires_grad_(True).parameters(), lr=RATE, weight_decay=0.0
    )
    assert len(batches) == len(log) == STEPS

    def gains(batch: dict[str, torch.Tensor], kind: str) -> torch.Tensor:
        ids = batch[f"{kind}input_ids"]
        head = partial(
            sequence_logps,
            targets=next_tokens(ids, batch[f"{kind}completion_mask"].bool()),
        )
        with torch.no_grad():
            before = reference(ids, head)
        log_ratio: torch.Tensor = ours(ids, head) - before
        return log_ratio

    for batch, line in zip(batches, log, strict=True):
        baseline = baseline_of(gains(batch, "KL_"))
        log_ratios = gains(batch, "")
        loss = kto_loss(
            log_ratios, batch["label"], baseline, BETA, DESIRABLE, UNDESIRABLE
        ).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        # TRL logs rounded values.
        assert loss.item() == pytest.approx(line["loss"], rel=2e-5, abs=1e-5)
        assert baseline.item() == pytest.approx(line["kl"], rel=2e-4, abs=1e-5)
        assert BETA * log_ratios[batch["label"]].mean().item() == pytest.approx(
            line["rewards/chosen"], rel=2e-4, abs=1e-5
        )
    assert max(line["kl"] for line in log) > 0.01
    state = theirs.state_dict()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.detach(), state[name], atol=1e-4, rtol=0)
