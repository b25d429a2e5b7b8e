"""Our preference losses against TRL's DPOTrainer: losses and weights of five updates on
the same batches, and losses and gradients of random log-probabilities.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gristmill.mixtures.schema.posttraining import (
    LossSettings,
    PolicyDivergence,
    PreferenceLoss,
)
from gristmill.train.models.weights import load_model
from gristmill.train.objectives.losses import IGNORED, sequence_logps
from gristmill.train.objectives.preference_losses import PairLogps, preference_loss
from tests.referees.tiny_models import tiny_model, trainer_settings, word_tokenizer

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
    """Save a tiny model of each family, and make a tokenizer."""
    words = sorted(
        {
            word
            for pair in PAIRS
            for text in pair.values()
            for word in text.replace(",", " ,").split()
        }
    )
    tokenizer = word_tokenizer(words)
    folder = tmp_path_factory.mktemp("start")
    for family in ("llama", "gemma2"):
        tiny_model(family).save_pretrained(folder / family)
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
        family: str, loss: str, smoothing: float
    ) -> tuple[list[dict[str, torch.Tensor]], list[float], dict[str, Any]]:
        """Train, and return batches, losses and the final weights."""
        policy = AutoModelForCausalLM.from_pretrained(
            folder / family, dtype=torch.float32
        )
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
    ("family", "ours", "theirs", "smoothing"),
    [
        ("llama", "sigmoid", "sigmoid", 0.0),
        ("llama", "robust", "robust", 0.2),
        ("llama", "hinge", "hinge", 0.0),
        ("llama", "ipo", "ipo", 0.0),
        ("llama", "sigmoid_norm", "sigmoid_norm", 0.0),
        ("gemma2", "sigmoid", "sigmoid", 0.0),
    ],
)
def test_losses_and_weights_equal_those_of_trl(
    family: str,
    ours: PreferenceLoss,
    theirs: str,
    smoothing: float,
    start: tuple[Path, Any],
    train_with_trl: Callable[..., Any],
) -> None:
    batches, expected, weights = train_with_trl(family, theirs, smoothing)
    policy, reference = (load_model(start[0] / family) for _ in range(2))
    for parameter in policy.parameters():
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE, weight_decay=0.0)
    settings = LossSettings(loss=ours, beta=BETA, label_smoothing=smoothing)
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
        loss = preference_loss(PairLogps(chosen, rejected, *before, *tokens), settings)[
            0
        ].mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    # TRL logs rounded values.
    assert losses == pytest.approx(expected, rel=2e-5, abs=1e-5)
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(parameter.detach(), weights[name], atol=1e-4, rtol=0)


N, TOKENS, SMOOTHING = 64, 12, 0.2
DIVERGENCES: dict[str, PolicyDivergence] = {
    "reverse_kl": "reverse_kl",
    "forward_kl": "forward_kl",
    "js_divergence": "js",
    "alpha_divergence": 0.3,
}


def loss_of_trl(
    token_logps: torch.Tensor,
    reference: torch.Tensor,
    mask: torch.Tensor,
    loss: str,
    divergence: str,
) -> torch.Tensor:
    """Call the loss of TRL's trainer with log-probabilities (2N, TOKENS) in place of a
    model's.
    """
    from trl import DPOTrainer

    def policy(**inputs: Any) -> SimpleNamespace:
        zeros = torch.zeros_like(token_logps)
        return SimpleNamespace(
            log_probs=token_logps * mask,
            entropy=zeros,
            mean_logits=zeros,
            is_top1=zeros.bool(),
        )

    chosen, rejected = reference.chunk(2)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            device=token_logps.device,
            gather=torch.Tensor.detach,
            gather_for_metrics=torch.Tensor.detach,
        ),
        args=SimpleNamespace(discopop_tau=0.05),
        aux_loss_enabled=False,
        ld_alpha=None,
        use_weighting=False,
        precompute_ref_logps=True,
        beta=BETA,
        label_smoothing=SMOOTHING,
        loss_types=[loss],
        loss_weights=[1.0],
        f_divergence_type=divergence,
        f_alpha_divergence_coef=0.7,  # 1 minus ours
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    # The first token is never predicted.
    completion_mask = torch.nn.functional.pad(mask, (1, 0))
    inputs = {
        "input_ids": torch.ones_like(completion_mask),
        "attention_mask": torch.ones_like(completion_mask),
        "completion_mask": completion_mask,
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    total: torch.Tensor = DPOTrainer._compute_loss(trainer, policy, inputs, False)
    return total


@pytest.mark.parametrize(
    ("kind", "divergence"),
    [
        *(
            (kind, divergence)
            for kind in (
                "sigmoid",
                "robust",
                "hinge",
                "ipo",
                "sigmoid_norm",
                "exo_pair",
                "discopop",
            )
            for divergence in DIVERGENCES
        ),
        *(
            (kind, "reverse_kl")
            for kind in ("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down")
        ),
    ],
)
def test_losses_and_gradients_of_random_log_probabilities_equal_those_of_trl(
    kind: PreferenceLoss, divergence: str
) -> None:
    numbers = torch.Generator().manual_seed(7)
    lengths = torch.randint(1, TOKENS + 1, (2 * N, 1), generator=numbers)
    mask = (torch.arange(TOKENS) < lengths).long()
    ours, theirs = (
        (
            -torch.rand(2 * N, TOKENS, generator=torch.Generator().manual_seed(8)) * 4
        ).requires_grad_()
        for _ in range(2)
    )
    # Of larger ones the exponential of TRL's discopop is infinite.
    gains = torch.randn(2 * N, generator=numbers) * 1.5
    reference = (ours * mask).sum(dim=1).detach() + gains
    expected = loss_of_trl(theirs, reference, mask, kind, divergence)
    settings = LossSettings(
        loss=kind,
        beta=BETA,
        label_smoothing=SMOOTHING if kind in ("robust", "exo_pair") else 0.0,
        divergence=DIVERGENCES[divergence],
    )
    pairs = PairLogps(
        *(ours * mask).sum(dim=1).chunk(2),
        *reference.chunk(2),
        *mask.sum(dim=1).chunk(2),
    )
    loss = preference_loss(pairs, settings)[0].mean()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    loss.backward()
    expected.backward()
    assert theirs.grad is not None
    assert theirs.grad.abs().max() > 0
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_loss_without_a_reference_equals_that_of_cpo() -> None:
    from trl.experimental.cpo import CPOTrainer

    chosen, rejected = torch.randn(2, N, generator=torch.Generator().manual_seed(7)) * 9
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device=chosen.device),
        beta=BETA,
        alpha=0.0,
        loss_type="sigmoid",
        label_smoothing=0.0,
    )
    expected, *rewards = CPOTrainer.cpo_loss(trainer, chosen, rejected)
    ones = torch.ones(N)
    losses, *ours = preference_loss(
        PairLogps(chosen, rejected, ones, ones, ones, ones),
        LossSettings(loss="cpo", beta=BETA),
    )
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(ours, rewards)
