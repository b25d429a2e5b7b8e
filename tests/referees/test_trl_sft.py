"""TRL's SFTTrainer for five updates against our cross-entropy on the same batches, whole and accumulated."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.train.models.weights import load_model
from gristmill.train.objectives.losses import IGNORED, weighted_nll

# Looked for, not imported: it takes seconds, and only the process that runs these tests needs it.
pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")

STEPS, RATE = 5, 1e-3
ROWS = [
    {"prompt": f"the {word} is", "completion": f" {word} and long, {'so ' * number}"}
    for number, word in enumerate(("red", "blue", "grass", "rose", "sky"))
] * 4


@pytest.mark.parametrize("accumulated", [1, 2])
def test_five_updates_are_theirs(accumulated: int, tmp_path: Path) -> None:
    """Answers differ in length, so that a mean of means would differ from the mean over the step's tokens."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = sorted({word for row in ROWS for text in row.values() for word in text.replace(",", " ,").split()})
    tokenizer = Tokenizer(
        models.WordLevel(
            {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", "<pad>", *words])}, unk_token="<unk>"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.3,
            tie_word_embeddings=False,
        )
    )
    theirs.save_pretrained(tmp_path / "start")
    seen: list[dict[str, torch.Tensor]] = []

    class Watched(SFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            seen.append({name: inputs[name].clone() for name in ("input_ids", "labels")})
            return super().compute_loss(model, inputs, *rest, **named)

    trainer = Watched(
        model=theirs,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
        ),
        args=SFTConfig(
            output_dir=str(tmp_path / "trl"),
            use_cpu=True,
            bf16=False,
            report_to="none",
            max_steps=STEPS,
            gradient_checkpointing=False,
            per_device_train_batch_size=4 // accumulated,
            learning_rate=RATE,
            gradient_accumulation_steps=accumulated,
            lr_scheduler_type="constant",
            logging_steps=1,
            max_grad_norm=1.0,
            optim="adamw_torch",
            weight_decay=0.0,
            disable_tqdm=True,
            save_strategy="no",
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
        batches = seen[step * accumulated : (step + 1) * accumulated]
        shifted = [
            torch.cat([batch["labels"][:, 1:], torch.full((len(batch["labels"]), 1), IGNORED)], dim=1)
            for batch in batches
        ]
        count = sum(int((targets != IGNORED).sum()) for targets in shifted)
        total = 0.0
        for batch, targets in zip(batches, shifted, strict=True):
            weights = torch.full(targets.shape, 1 / count)
            loss, _ = policy(batch["input_ids"], partial(weighted_nll, targets=targets, weights=weights))
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    assert losses == pytest.approx(expected, rel=2e-5, abs=1e-5)
    weights_of_theirs = theirs.state_dict()
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(parameter.detach(), weights_of_theirs[name], atol=1e-4, rtol=0)
