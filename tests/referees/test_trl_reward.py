"""Our reward model against five updates of TRL's RewardTrainer on the same batches, and
transformers' scores.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.mixtures.schema.model import Model
from gristmill.train.models.model_config import shape_of
from gristmill.train.models.reward_model import (
    RewardModel,
    load_reward_model,
    save_reward_model,
    scores,
    with_new_score,
)
from gristmill.train.models.weights import drawn
from gristmill.train.objectives.reward_pairs import reward_loss
from tests.referees.tiny_models import TINY, trainer_settings, word_tokenizer

# Importing it takes seconds, which collection need not spend.
pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")

STEPS, RATE, CENTER = 5, 1e-3, 0.01
ROWS = [
    {"chosen": f"{word} and long {'so ' * number}", "rejected": f"no {word}"}
    for number, word in enumerate(("red", "blue", "grass", "rose", "sky"))
] * 2


def test_losses_and_weights_equal_those_of_trl(tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    words = sorted(
        {word for row in ROWS for text in row.values() for word in text.split()}
    )
    tokenizer = word_tokenizer(words)
    torch.manual_seed(0)
    theirs = LlamaForSequenceClassification(
        LlamaConfig(**TINY, num_labels=1, pad_token_id=tokenizer.pad_token_id)
    )
    theirs.save_pretrained(tmp_path / "start")
    ours = load_reward_model(tmp_path / "start")
    batches: list[torch.Tensor] = []

    class RecordingTrainer(RewardTrainer):
        def compute_loss(
            self, model: Any, inputs: Any, *args: Any, **kwargs: Any
        ) -> Any:
            batches.append(inputs["input_ids"].clone())
            return super().compute_loss(model, inputs, *args, **kwargs)

    settings = RewardConfig(
        **trainer_settings(tmp_path / "trl", STEPS, RATE),
        center_rewards_coefficient=CENTER,
        per_device_train_batch_size=4,
    )
    trainer = RecordingTrainer(
        model=theirs,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(ROWS),
        args=settings,
    )
    trainer.train()
    log = [line for line in trainer.state.log_history if "loss" in line]
    optimizer = torch.optim.AdamW(
        ours.requires_grad_(True).parameters(), lr=RATE, weight_decay=0.0
    )
    assert len(batches) == len(log) == STEPS
    for ids, line in zip(batches, log, strict=True):
        chosen, rejected = scores(ours, ids, tokenizer.pad_token_id).chunk(2)
        loss = reward_loss(chosen, rejected, center_weight=CENTER).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        # TRL logs rounded values.
        assert loss.item() == pytest.approx(line["loss"], rel=2e-5, abs=1e-5)
        assert (chosen > rejected).float().mean().item() == pytest.approx(
            line["accuracy"], abs=1e-5
        )
        assert (chosen - rejected).mean().item() == pytest.approx(
            line["margin"], rel=2e-4, abs=1e-5
        )
    state = theirs.state_dict()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.detach(), state[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("options", "family"),
    [
        ({}, "Llama"),
        ({"tied_embeddings": True, "qk_norm": True}, "Qwen3"),
        ({"moe": {"experts": 4, "experts_per_token": 2}}, "Mixtral"),
    ],
)
def test_transformers_scores_a_saved_model_alike(
    options: dict[str, Any], family: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    section = Model.model_validate(
        {
            "layers": 2,
            "width": 32,
            "heads": 4,
            "kv_heads": 2,
            "ffn_width": 48,
            **options,
        }
    )
    shape = shape_of(section, vocab_size=100, sequence_length=24)
    # Larger than initial weights, so that a mistake shows.
    tensor_of = with_new_score(
        lambda name, size: (
            drawn(shape, 3)(name, size) * (8.0 if len(size) > 1 else 1.0)
        ),
        5,
    )
    tensors = {
        name: tensor_of(name, parameter.shape)
        for name, parameter in RewardModel(shape).named_parameters()
    }
    save_reward_model(tmp_path, shape, tensors, stops=[1, 2], pad=3)
    ids = torch.randint(4, 100, (3, 20), generator=torch.Generator().manual_seed(1))
    ids[0, 12:], ids[1, 19:] = 3, 3
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(theirs).__name__ == f"{family}ForSequenceClassification"
    with torch.no_grad():
        expected = theirs(
            input_ids=ids, attention_mask=(ids != 3).long(), use_cache=False
        ).logits[:, 0]
    assert expected.std() > 0.1
    torch.testing.assert_close(
        scores(load_reward_model(tmp_path), ids, 3), expected, atol=1e-5, rtol=0
    )
