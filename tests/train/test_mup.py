"""muP: what a step does to activations does not depend on the width, with Adam's rule and with Muon's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from gristmill.mixtures.load import ManifestError, parse_manifest
from gristmill.mixtures.model import Model
from gristmill.mixtures.training import Optimizer, OptimizerKind
from gristmill.train.models.decoder import Llama
from gristmill.train.models.initialisation import FINAL_NORM
from gristmill.train.models.model_config import shape_of
from gristmill.train.models.weights import drawn
from gristmill.train.optim import normuon
from gristmill.train.optim.mup import rate_factor
from gristmill.train.optim.optimizer import make_optimizers, update

WIDTHS = (64, 128, 256, 512)
BASE = 64
VOCAB, ROWS, LENGTH, STEPS, RATE = 128, 4, 16, 3, 0.002
GOOD = torch.tensor(False)


def model_of(width: int, base: int | None, seed: int = 0) -> Llama:
    shape = shape_of(Model(layers=2, width=width, heads=width // 64, mup_base_width=base), VOCAB, LENGTH)
    model = Llama(shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(drawn(shape, seed, "gpt2", base)(name, parameter.shape))
    return model


def moved(width: int, base: int | None, kind: OptimizerKind) -> tuple[float, float]:
    """How far some steps move the hidden states before the last norm's gain, and the logits: root mean squares."""
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    model = model_of(width, base)
    section = Optimizer(kind=kind, learning_rate=RATE, weight_decay=0.0)
    optimizers = make_optimizers(model, section, width_factor=width / (base or width))
    seen: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda module, given: seen.append(given[0].detach()))
    with torch.no_grad():
        before = model(ids[:, :-1])
    for _ in range(STEPS):
        logits = model(ids[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        update(optimizers, RATE, GOOD)
    with torch.no_grad():
        after = model(ids[:, :-1])
    hook.remove()
    return rms(seen[-1] - seen[0]), rms(after - before)


def rms(tensor: Tensor) -> float:
    return math.sqrt(tensor.square().mean().item())


def test_a_step_of_adam_moves_activations_alike_at_all_widths() -> None:
    """The coordinate check (Yang & Hu 2021, appendix D.1): flat with muP; without it, it grows with the width."""
    flat, plain = ([moved(width, base, "adamw") for width in WIDTHS] for base in (BASE, None))
    for number, what in enumerate(("hidden states", "logits")):
        with_mup, without = [one[number] for one in flat], [one[number] for one in plain]
        assert max(with_mup) / min(with_mup) < 1.35, (what, with_mup)
        assert without[-1] / without[0] > 4.0, (what, without)


@pytest.mark.parametrize("kind", ["muon", "normuon"])
def test_a_step_of_muon_has_the_same_spectral_norm_at_all_widths(
    kind: OptimizerKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Yang et al. 2023, condition 1: of a square matrix it is not to depend on the width; plain, it grows as a root."""
    monkeypatch.setattr(normuon, "newton_schulz", nearest_orthogonal)  # products in bfloat16 are slow on a CPU
    for base, growth in ((BASE, 1.0), (None, 2.0)):
        norms = [spectral_norm_of_a_step(width, base, kind) for width in (64, 256)]
        assert norms[1] / norms[0] == pytest.approx(growth, rel=0.1), (base, norms)


def spectral_norm_of_a_step(width: int, base: int | None, kind: OptimizerKind) -> float:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(width, width, bias=False)]), "norm": nn.RMSNorm(width)})
    # Cautious, but without decay: Muon by our own products.
    section = Optimizer(kind=kind, weight_decay=0.0, cautious_decay=True)
    optimizers = make_optimizers(model, section, width_factor=width / (base or width))
    (matrix,) = model["layers"].parameters()
    before = matrix.detach().clone()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    update(optimizers, RATE, GOOD)
    return float(torch.linalg.matrix_norm(matrix.detach() - before, 2))


def nearest_orthogonal(matrix: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right


def test_a_model_of_the_base_width_is_the_plain_one_bit_by_bit() -> None:
    for one, other in zip(model_of(64, 64).parameters(), model_of(64, None).parameters(), strict=True):
        assert torch.equal(one, other)


def test_first_weights_and_rates_follow_table_8() -> None:
    """At four times the base width: deviations of hidden matrices halve, embeddings keep theirs, the last gain and the
    rates of hidden matrices are a quarter, Muon's a half."""
    wide, plain = (dict(model_of(256, base).named_parameters()) for base in (64, None))
    for name, parameter in wide.items():
        expected = 0.25 if name == FINAL_NORM else 0.5 if "layers." in name and parameter.ndim == 2 else 1.0
        torch.testing.assert_close(parameter, plain[name] * expected)
        assert rate_factor(name, parameter.ndim, 4.0, "adamw") == (
            0.25 if name == FINAL_NORM or expected == 0.5 else 1.0
        )
        assert rate_factor(name, parameter.ndim, 4.0, "muon") == expected


def test_decay_per_step_is_that_of_the_base_width() -> None:
    model = model_of(256, 64)
    for optimizer in make_optimizers(model, Optimizer(kind="muon", weight_decay=0.3), width_factor=4.0):
        update([optimizer], 0.01, GOOD)
        for group in optimizer.param_groups:
            decays = any(parameter.ndim == 2 for parameter in group["params"])
            assert group["lr"] * group["weight_decay"] == pytest.approx(0.003 if decays else 0.0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("optimizer: {kind: sophia}", "mup_base_width scales the rates of adamw"),
        ("masked: {}", "knows the matrices of decoders"),
        ("model: {mup_base_width: 64, init: llama}", "mup_base_width needs init: gpt2"),
        ("model: {mup_base_width: 64, moe: {experts: 2}}", "mup_base_width needs dense layers"),
    ],
)
def test_what_mup_cannot_scale_is_refused(keys: str, message: str) -> None:
    given = keys if "model" in keys else f"model: {{mup_base_width: 64}}, {keys}"
    with pytest.raises(ManifestError, match=message):
        parse_manifest(
            '{name: small, sources: {prose: {path: "*.txt"}}, tokenizer: {}, mix: {tokens: 9000}, '
            f"pretrain: {{steps: 2, {given}}}}}",
            "m.yaml",
        )
