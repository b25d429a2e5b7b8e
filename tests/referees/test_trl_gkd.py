"""Our distillation losses against TRL's generalised knowledge distillation: losses and
weights of five updates on labels, losses and gradients on a student's answers.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gristmill.mixtures.schema.posttraining import BETA, Distill, Divergence
from gristmill.train.models.transformer import Llama
from gristmill.train.models.weights import load_model
from gristmill.train.objectives.distillation import distilled_nll, kept_of
from gristmill.train.objectives.losses import IGNORED
from gristmill.train.rl.policy import answer_distributions, opinion_of
from gristmill.train.rl.policy_gradient import token_weights
from gristmill.train.rl.rollout import Part
from tests.referees.tiny_models import TINY

# Importing it takes seconds, which collection need not spend.
pytestmark = [
    pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed"),
    pytest.mark.xdist_group("trl"),
]

STEPS, RATE, TEMPERATURE = 5, 1e-2, 2.0


@pytest.mark.parametrize(
    ("kind", "beta"), [("forward", 0.0), ("reverse", 1.0), ("jsd", 0.3)]
)
def test_losses_and_weights_equal_those_of_trl(
    kind: Divergence, beta: float, tmp_path: Path
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl.experimental.gkd import GKDTrainer

    torch.manual_seed(0)
    config = LlamaConfig(**{**TINY, "max_position_embeddings": 32})
    theirs, teacher = LlamaForCausalLM(config), LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "start")
    ours = load_model(tmp_path / "start").requires_grad_(True)
    settings = Distill(
        teacher="pretrain",
        kind=kind,
        beta=beta if kind == "jsd" else BETA,
        temperature=TEMPERATURE,
        weight=1.0,
    )
    updates = [torch.optim.AdamW(model.parameters(), RATE) for model in (theirs, ours)]
    for step in range(STEPS):
        ids = torch.randint(
            0, 64, (3, 12), generator=torch.Generator().manual_seed(step)
        )
        targets = torch.cat([ids[:, 1:], torch.full((3, 1), IGNORED)], dim=1)
        targets[:, : step + 2] = IGNORED
        with torch.no_grad():
            teacher_logits = teacher(ids).logits
        expected = GKDTrainer.generalized_jsd_loss(
            theirs(ids, use_cache=False).logits,
            teacher_logits,
            targets,
            beta,
            TEMPERATURE,
        )
        loss_ = our_loss(ours, ids, targets, teacher_logits, settings)
        assert loss_.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
        for loss, update in zip((expected, loss_), updates, strict=True):
            update.zero_grad()
            loss.backward()
            update.step()
    their_parameters = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter, their_parameters[name], atol=1e-4, rtol=1e-4
        )


def our_loss(
    model: Llama,
    ids: Tensor,
    targets: Tensor,
    teacher_logits: Tensor,
    settings: Distill,
) -> Tensor:
    """Average over trained tokens without the factor temperature², which Hinton et al.
    2015 apply and TRL does not.
    """
    trained = targets != IGNORED
    weights = trained.float() / trained.sum() / settings.temperature**2
    kept = kept_of(teacher_logits[trained], settings.temperature, None)
    total, _, _ = model(
        ids,
        partial(
            distilled_nll,
            targets=targets,
            weights=weights,
            taught=kept,
            settings=settings,
        ),
    )
    return total


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_losses_and_gradients_on_answers_equal_those_of_trl(
    beta: float, tmp_path: Path
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl.experimental.gkd import GKDTrainer

    torch.manual_seed(0)
    config = LlamaConfig(**{**TINY, "max_position_embeddings": 32})
    for name in ("student", "teacher"):
        LlamaForCausalLM(config).save_pretrained(tmp_path / name)
    student, teacher = (
        load_model(tmp_path / name).requires_grad_(name == "student")
        for name in ("student", "teacher")
    )
    ids = torch.randint(0, 64, (3, 12))
    sizes, lengths = torch.tensor([[2], [5], [3]]), torch.tensor([[6], [7], [1]])
    places = torch.arange(7)
    mask = places < lengths
    columns = torch.where(mask, sizes - 1 + places, 0)
    part = Part(ids, columns, mask, torch.where(mask, ids.gather(1, columns + 1), 0))
    distributions = answer_distributions(teacher, part, TEMPERATURE)
    divergences = opinion_of(
        student, part, TEMPERATURE, distributions, beta
    ).divergences
    loss = (divergences * token_weights(mask, "token", 7)).sum() / len(ids)
    loss.backward()
    gradients = [parameter.grad for parameter in student.parameters()]
    student.zero_grad()
    targets = torch.full((3, 12), IGNORED)
    for row, (size, length) in enumerate(zip(sizes, lengths, strict=True)):
        answer = slice(int(size), int(size + length))
        targets[row, int(size) - 1 : int(size + length) - 1] = ids[row, answer]
    with torch.no_grad():
        teacher_logits = teacher(ids)
    expected = GKDTrainer.generalized_jsd_loss(
        student(ids), teacher_logits, targets, beta, TEMPERATURE
    )
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for ours, parameter in zip(gradients, student.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad)
