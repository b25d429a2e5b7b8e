"""Matrix optimizers against the equations of their papers in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gristmill.mixtures.schema.optimizer import Optimizer, OptimizerKind
from gristmill.train.optim import normuon, soap_muon
from gristmill.train.optim.muon import newton_schulz
from gristmill.train.optim.optimizer import builder, update
from gristmill.train.optim.shared_stacks import share_out

LR, DECAY = 0.1, 0.5
SOAP = {"momentum": 0.9, "betas": (0.9, 0.8)}


def made(
    kind: OptimizerKind, weight: nn.Parameter, **settings: Any
) -> torch.optim.Optimizer:
    """Optimizer of one matrix of the layers."""
    section = Optimizer.model_validate(
        {"kind": kind, "learning_rate": LR, "weight_decay": DECAY, **settings}
    )
    return builder(kind)([weight], section)


def drawn(rows: int, columns: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, columns))


def polar(matrix: np.ndarray) -> np.ndarray:
    u, _, vt = np.linalg.svd(matrix, full_matrices=False)
    factor: np.ndarray = u @ vt
    return factor


def exact(matrix: Tensor) -> Tensor:
    """Compute exactly what Newton-Schulz approximates."""
    return torch.from_numpy(polar(matrix.double().numpy())).float()


def steps_of(
    optimizer: torch.optim.Optimizer, weight: nn.Parameter, gradients: list[np.ndarray]
) -> np.ndarray:
    for gradient in gradients:
        weight.grad = torch.from_numpy(gradient).float()
        optimizer.step()
    return weight.detach().double().numpy()


@pytest.mark.parametrize("shape", [(16, 48), (48, 16)])
def test_newton_schulz_brings_all_singular_values_near_one(
    shape: tuple[int, int],
) -> None:
    matrix = torch.from_numpy(drawn(*shape, 0)).float()
    orthogonalised = newton_schulz(matrix[None])[0].float()
    singular = torch.linalg.svdvals(orthogonalised)
    assert 0.6 < singular.min() <= singular.max() < 1.25
    assert (
        torch.nn.functional.cosine_similarity(
            orthogonalised.flatten(), exact(matrix).flatten(), dim=0
        )
        > 0.97
    )


@pytest.mark.parametrize("cautious", [False, True])
def test_normuon_equals_algorithm_1(
    cautious: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Li et al. 2025, algorithm 1, three steps; cautious decay with the mask of Chen et
    al. 2025.
    """
    monkeypatch.setattr(normuon, "orthogonalised", lambda t: exact(share_out(t)))
    start, gradients = drawn(4, 6, 1), [drawn(4, 6, 2 + step) for step in range(3)]
    weight = nn.Parameter(torch.from_numpy(start).float())
    updated = steps_of(
        made(
            "normuon", weight, momentum=0.9, betas=(0.9, 0.8), cautious_decay=cautious
        ),
        weight,
        gradients,
    )
    w, m, v = start, np.zeros((4, 6)), np.zeros((4, 1))
    for g in gradients:
        m = 0.9 * m + 0.1 * g
        o = polar(m)
        v = 0.8 * v + 0.2 * (o * o).mean(axis=1, keepdims=True)
        o = o / (np.sqrt(v) + 1e-8)
        u = 0.2 * math.sqrt(24) / np.linalg.norm(o) * o
        mask = (u * w >= 0) if cautious else 1.0
        w = w - LR * (u + DECAY * mask * w)
    np.testing.assert_allclose(updated, w, rtol=1e-4, atol=1e-5)


def test_normuon_update_has_the_size_of_adamw_and_equal_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(normuon, "orthogonalised", lambda t: exact(share_out(t)))
    weight = nn.Parameter(torch.zeros(32, 8))
    steps_of(
        made("normuon", weight, learning_rate=1.0, weight_decay=0.0),
        weight,
        [drawn(32, 8, 0)],
    )
    assert weight.detach().square().mean().sqrt().item() == pytest.approx(0.2, rel=1e-3)
    rows = weight.detach().norm(dim=1)
    assert (rows.max() / rows.min()).item() == pytest.approx(1.0, rel=1e-3)


def test_muon_equals_that_of_pytorch() -> None:
    """Up to the rounding of products in bfloat16."""
    start, gradients = drawn(12, 8, 3), [drawn(12, 8, 4 + step) for step in range(3)]
    ours, theirs = (nn.Parameter(torch.from_numpy(start).float()) for _ in range(2))
    peer = torch.optim.Muon(
        [theirs],
        lr=LR,
        weight_decay=DECAY,
        momentum=0.95,
        adjust_lr_fn="match_rms_adamw",
    )
    np.testing.assert_allclose(
        steps_of(made("muon", ours), ours, gradients),
        steps_of(peer, theirs, gradients),
        atol=5e-3,
    )


def test_cautious_muon_decays_along_the_update_only() -> None:
    start, gradients = drawn(12, 8, 3), [drawn(12, 8, 4)]
    cautious = nn.Parameter(torch.from_numpy(start).float())
    decayed = steps_of(made("muon", cautious, cautious_decay=True), cautious, gradients)
    single = nn.Parameter(torch.from_numpy(start).float())
    update = start - steps_of(made("muon", single, weight_decay=0.0), single, gradients)
    decays = update * start >= 0
    assert 20 < decays.sum() < 76
    np.testing.assert_allclose(
        decayed, start - update - LR * DECAY * decays * start, atol=1e-5
    )


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_soap_muon_equals_its_equations(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six steps with a power iteration after every second update. The first step only
    makes the basis. A wide matrix is the transpose of a tall one.
    """
    monkeypatch.setattr(soap_muon, "newton_schulz", exact)
    start, gradients = drawn(*shape, 1), [drawn(*shape, 2 + step) for step in range(6)]
    weight = nn.Parameter(torch.from_numpy(start).float())
    updated = steps_of(
        made("soap_muon", weight, **SOAP, precondition_every=2), weight, gradients
    )
    wide = shape[0] < shape[1]
    w = start.T if wide else start
    m, v, c, q = np.zeros((6, 4)), np.zeros((6, 4)), np.zeros((4, 4)), np.zeros((4, 4))
    for done, gradient in enumerate(gradients):
        g = gradient.T if wide else gradient
        if done:
            m = 0.9 * m + 0.1 * g
            v = 0.8 * v + 0.2 * (g @ q) ** 2
            o = polar((m @ q / np.sqrt(v)) @ q.T)
            w = w - LR * (0.2 * math.sqrt(6) * o + DECAY * w)
        c = 0.8 * c + 0.2 * g.T @ g
        if done == 0:
            q = np.linalg.eigh(c)[1][:, ::-1]
        elif done % 2 == 0:
            order = np.argsort(-np.diag(q.T @ c @ q))
            q, v = np.linalg.qr(c @ q[:, order])[0], v[:, order]
    np.testing.assert_allclose(updated, w.T if wide else w, rtol=1e-3, atol=1e-4)


def test_soap_muon_repeats_a_skipped_power_iteration() -> None:
    """Skipped steps leave the same weights, wherever in the period they are."""

    def trained(bad_before: tuple[int, ...]) -> Tensor:
        weight = nn.Parameter(torch.from_numpy(drawn(6, 4, 1)).float())
        optimizer = made("soap_muon", weight, **SOAP, precondition_every=3)
        for step in range(8):
            for is_bad in (*[True] * (step in bad_before), False):
                gradient = drawn(6, 4, 90 + step if is_bad else 2 + step)
                weight.grad = torch.from_numpy(gradient).float()
                update([optimizer], LR, torch.tensor(is_bad))
        return weight.detach()

    assert all(torch.equal(trained((step, step + 2)), trained(())) for step in range(6))


def test_cautious_decay_is_for_orthogonal_updates() -> None:
    with pytest.raises(ValueError, match=r"cautious_decay .*muon and normuon.* adamw"):
        Optimizer(cautious_decay=True)
