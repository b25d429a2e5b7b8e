"""muP: updates of activations do not depend on the width, with Adam's rule and with
Muon's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gristmill.mixtures.loader import ManifestError, parse_manifest
from gristmill.mixtures.schema.model import Model
from gristmill.mixtures.schema.optimizer import Optimizer, OptimizerKind
from gristmill.train.models.initialisation import FINAL_NORM
from gristmill.train.models.model_config import shape_of
from gristmill.train.models.transformer import Llama
from gristmill.train.models.weights import drawn
from gristmill.train.optim import muon, normuon
from gristmill.train.optim.mup import rate_factor
from gristmill.train.optim.optimizer import make_optimizers, update
from gristmill.train.optim.shared_stacks import share_out

WIDTHS = (64, 128, 256, 512)
BASE = 64
VOCAB, ROWS, LENGTH, STEPS, RATE = 128, 4, 16, 3, 0.002
GOOD = torch.tensor(False)


def model_of(width: int, base: int | None, seed: int = 0) -> Llama:
    shape = shape_of(
        Model(layers=2, width=width, heads=width // 64, mup_base_width=base),
        VOCAB,
        LENGTH,
    )
    model = Llama(shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(drawn(shape, seed, "gpt2", base)(name, parameter.shape))
    return model


def activation_changes(
    width: int, base: int | None, kind: OptimizerKind
) -> tuple[float, float]:
    """Return the root mean squares by which some steps change the last hidden states
    and the logits.
    """
    ids = torch.randint(
        0, VOCAB, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1)
    )
    model = model_of(width, base)
    section = Optimizer(kind=kind, learning_rate=RATE, weight_decay=0.0)
    optimizers = make_optimizers(model, section, width_factor=width / (base or width))
    hidden_states: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(
        lambda module, inputs: hidden_states.append(inputs[0].detach())
    )
    with torch.no_grad():
        before = model(ids[:, :-1])
    for _ in range(STEPS):
        logits = model(ids[:, :-1])
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), ids[:, 1:].flatten()
        ).backward()
        update(optimizers, RATE, GOOD)
    with torch.no_grad():
        after = model(ids[:, :-1])
    hook.remove()
    return rms(hidden_states[-1] - hidden_states[0]), rms(after - before)


def rms(tensor: Tensor) -> float:
    return math.sqrt(tensor.square().mean().item())


@pytest.mark.slow
def test_adam_changes_activations_alike_at_all_widths() -> None:
    """Coordinate check (Yang & Hu 2021, appendix D.1): constant with muP, growing with
    the width without it.
    """
    with_mup, without = (
        np.array([activation_changes(width, base, "adamw") for width in WIDTHS])
        for base in (BASE, None)
    )
    assert (with_mup.max(axis=0) / with_mup.min(axis=0) < 1.35).all(), with_mup
    assert (without[-1] / without[0] > 4.0).all(), without


@pytest.mark.parametrize("kind", ["muon", "normuon"])
def test_update_of_muon_has_the_same_spectral_norm_at_all_widths(
    kind: OptimizerKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Yang et al. 2023, condition 1: constant for square matrices; without muP it grows
    with the root of the width.
    """
    # products in bfloat16 are slow on a CPU
    for module in (muon, normuon):
        monkeypatch.setattr(module, "orthogonalised", nearest_orthogonal)
    for base, growth in ((BASE, 1.0), (None, 2.0)):
        norms = [spectral_norm_of_a_step(width, base, kind) for width in (64, 256)]
        assert norms[1] / norms[0] == pytest.approx(growth, rel=0.1), (base, norms)


def spectral_norm_of_a_step(width: int, base: int | None, kind: OptimizerKind) -> float:
    model = nn.ModuleDict(
        {
            "layers": nn.ModuleList([nn.Linear(width, width, bias=False)]),
            "norm": nn.RMSNorm(width),
        }
    )
    section = Optimizer(kind=kind, weight_decay=0.0)
    optimizers = make_optimizers(model, section, width_factor=width / (base or width))
    (matrix,) = model["layers"].parameters()
    before = matrix.detach().clone()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    update(optimizers, RATE, GOOD)
    return float(torch.linalg.matrix_norm(matrix.detach() - before, 2))


def nearest_orthogonal(matrices: Sequence[Tensor]) -> Tensor:
    u, _, vt = torch.linalg.svd(share_out(matrices), full_matrices=False)
    return u @ vt


def test_model_of_the_base_width_equals_the_plain_one() -> None:
    for scaled, plain in zip(
        model_of(64, 64).parameters(), model_of(64, None).parameters(), strict=True
    ):
        assert torch.equal(scaled, plain)


def test_initial_weights_and_rates_follow_table_8() -> None:
    """At four times the base width, deviations of hidden matrices are halved, those of
    embeddings kept, the final gain and rates of hidden matrices are a quarter, and a
    half for Muon.
    """
    wide, plain = (dict(model_of(256, base).named_parameters()) for base in (64, None))
    for name, parameter in wide.items():
        expected = (
            0.25
            if name == FINAL_NORM
            else 0.5
            if "layers." in name and parameter.ndim == 2
            else 1.0
        )
        torch.testing.assert_close(parameter, plain[name] * expected)
        assert rate_factor(name, parameter.ndim, 4.0, "adamw") == (
            0.25 if name == FINAL_NORM or expected == 0.5 else 1.0
        )
        assert rate_factor(name, parameter.ndim, 4.0, "muon") == expected


def test_decay_per_step_equals_that_of_the_base_width() -> None:
    model = model_of(256, 64)
    for optimizer in make_optimizers(
        model, Optimizer(kind="muon", weight_decay=0.3), width_factor=4.0
    ):
        update([optimizer], 0.01, GOOD)
        for group in optimizer.param_groups:
            decays = any(parameter.ndim == 2 for parameter in group["params"])
            assert group["lr"] * group["weight_decay"] == pytest.approx(
                0.003 if decays else 0.0
            )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("optimizer: {kind: adafactor}", "mup_base_width .*adamw"),
        ("masked: {}", "decoders"),
        ("model: {mup_base_width: 64, init: llama}", "mup_base_width .*init: gpt2"),
        ("model: {mup_base_width: 64, moe: {experts: 2}}", "mup_base_width .*dense"),
    ],
)
def test_setting_that_mup_cannot_scale_is_rejected(keys: str, message: str) -> None:
    section = keys if "model" in keys else f"model: {{mup_base_width: 64}}, {keys}"
    with pytest.raises(ManifestError, match=message):
        parse_manifest(
            '{name: small, sources: {prose: {path: "*.txt"}}, tokenizer: {}, mix: '
            "{tokens: 9000}, "
            f"pretrain: {{steps: 2, {section}}}}}",
            "m.yaml",
        )
