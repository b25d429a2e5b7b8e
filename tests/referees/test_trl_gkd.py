"""TRL's loss of generalised knowledge distillation for five updates against ours: losses, and the weights that come."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gristmill.mixtures.posttraining import BETA, Distill, Divergence
from gristmill.train.models.decoder import Llama
from gristmill.train.models.weights import load_model
from gristmill.train.objectives.distillation import distilled_nll, kept_of
from gristmill.train.objectives.losses import IGNORED

# Looked for, not imported: it takes seconds, and only the process that runs these tests needs it.
pytestmark = [
    pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed"),
    pytest.mark.xdist_group("trl"),
]

STEPS, RATE, TEMPERATURE = 5, 1e-2, 2.0


@pytest.mark.parametrize(("kind", "beta"), [("forward", 0.0), ("reverse", 1.0), ("jsd", 0.3)])
def test_five_updates_are_theirs(kind: Divergence, beta: float, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl.experimental.gkd import GKDTrainer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.3,
    )
    theirs, teacher = LlamaForCausalLM(config), LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "start")
    ours = load_model(tmp_path / "start").requires_grad_(True)
    settings = Distill(
        teacher="pretrain", kind=kind, beta=beta if kind == "jsd" else BETA, temperature=TEMPERATURE, weight=1.0
    )
    updates = [torch.optim.AdamW(model.parameters(), RATE) for model in (theirs, ours)]
    for step in range(STEPS):
        ids = torch.randint(0, 64, (3, 12), generator=torch.Generator().manual_seed(step))
        targets = torch.cat([ids[:, 1:], torch.full((3, 1), IGNORED)], dim=1)
        targets[:, : step + 2] = IGNORED
        with torch.no_grad():
            taught = teacher(ids).logits
        expected = GKDTrainer.generalized_jsd_loss(
            theirs(ids, use_cache=False).logits, taught, targets, beta, TEMPERATURE
        )
        found = our_loss(ours, ids, targets, taught, settings)
        assert found.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
        for loss, update in zip((expected, found), updates, strict=True):
            update.zero_grad()
            loss.backward()
            update.step()
    moved = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, moved[name], atol=1e-4, rtol=1e-4)


def our_loss(model: Llama, ids: Tensor, targets: Tensor, taught: Tensor, settings: Distill) -> Tensor:
    """The mean over trained tokens, without the square of the temperature, which TRL leaves out (Hinton et al. 2015
    multiply with it so that the gradient's size does not depend on the temperature)."""
    trained = targets != IGNORED
    weights = trained.float() / trained.sum() / settings.temperature**2
    kept = kept_of(taught[trained], settings.temperature, None)
    total, _, _ = model(ids, partial(distilled_nll, targets=targets, weights=weights, taught=kept, settings=settings))
    return total
