"""TRL's KTOTrainer for five updates against our loss on the same batches: losses, and the weights that come of it."""

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

# Looked for, not imported: it takes seconds, and only the process that runs these tests needs it.
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


def test_five_updates_are_theirs(tmp_path: Path) -> None:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import KTOConfig, KTOTrainer

    words = sorted(
        {
            word
            for row in ROWS
            for text in (row["prompt"], row["completion"])
            for word in str(text).replace(",", " ,").split()
        }
    )
    backend = Tokenizer(
        models.WordLevel(
            {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", "<pad>", *words])}, unk_token="<unk>"
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
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
    ours, reference = load_model(tmp_path / "start"), load_model(tmp_path / "start")
    seen: list[dict[str, torch.Tensor]] = []

    class Watched(KTOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            seen.append(
                {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
                | {"label": torch.as_tensor(inputs["label"], dtype=torch.bool)}
            )
            return super().compute_loss(model, inputs, *rest, **named)

    settings = KTOConfig(
        output_dir=str(tmp_path / "trl"),
        use_cpu=True,
        bf16=False,
        beta=BETA,
        desirable_weight=DESIRABLE,
        undesirable_weight=UNDESIRABLE,
        max_steps=STEPS,
        report_to="none",
        gradient_checkpointing=False,
        per_device_train_batch_size=4,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        logging_steps=1,
        max_grad_norm=1.0,
        optim="adamw_torch",
        weight_decay=0.0,
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = Watched(
        model=theirs,
        ref_model=copy.deepcopy(theirs),
        args=settings,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tokenizer,
    )
    trainer.train()
    log = [line for line in trainer.state.log_history if "loss" in line]
    optimizer = torch.optim.AdamW(ours.requires_grad_(True).parameters(), lr=RATE, weight_decay=0.0)
    assert len(seen) == len(log) == STEPS

    def gains(batch: dict[str, torch.Tensor], kind: str) -> torch.Tensor:
        ids = batch[f"{kind}input_ids"]
        head = partial(sequence_logps, targets=next_tokens(ids, batch[f"{kind}completion_mask"].bool()))
        with torch.no_grad():
            before = reference(ids, head)
        gained: torch.Tensor = ours(ids, head) - before
        return gained

    for batch, line in zip(seen, log, strict=True):
        baseline = baseline_of(gains(batch, "KL_"))
        gained = gains(batch, "")
        loss = kto_loss(gained, batch["label"], baseline, BETA, DESIRABLE, UNDESIRABLE).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        # TRL rounds what it logs to some digits.
        assert loss.item() == pytest.approx(line["loss"], rel=2e-5, abs=1e-5)
        assert baseline.item() == pytest.approx(line["kl"], rel=2e-4, abs=1e-5)
        assert BETA * gained[batch["label"]].mean().item() == pytest.approx(line["rewards/chosen"], rel=2e-4, abs=1e-5)
    assert max(line["kl"] for line in log) > 0.01
    state = theirs.state_dict()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.detach(), state[name], atol=1e-4, rtol=0)
