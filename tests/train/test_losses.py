from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gristmill.train.models.transformer import logits_head
from gristmill.train.objectives import losses
from gristmill.train.objectives.losses import (
    IGNORED,
    Softcapped,
    next_tokens,
    score_tokens,
    sequence_logps,
    weighted_nll,
)

IDENTITY = torch.eye(2)


def test_targets_are_the_next_tokens() -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    assert next_tokens(ids).tolist() == [[6, 7, 8, IGNORED]]
    mask = torch.tensor([[False, False, True, True]])
    assert next_tokens(ids, mask).tolist() == [[IGNORED, 7, 8, IGNORED]]


def test_sft_loss_is_derived_by_hand() -> None:
    """Logits equal the hidden states. Token 1: logits (0, ln 3), target 1: p = 3/4,
    loss ln(4/3). Token 2: logits (0, 0), target 0: loss ln 2. Token 3 belongs to a
    prompt, and does not count. With weight 1/2 (two trained tokens): (ln(4/3) + ln 2) /
    2 = 0.4904146265.
    """
    hidden = torch.tensor(
        [[[0.0, math.log(3.0)], [0.0, 0.0], [9.0, -9.0]]], requires_grad=True
    )
    targets = torch.tensor([[1, 0, IGNORED]])
    total, nll = weighted_nll(hidden, IDENTITY, targets, torch.full((1, 3), 0.5))
    torch.testing.assert_close(total.item(), 0.4904146265, atol=1e-7, rtol=0)
    torch.testing.assert_close(
        nll, torch.tensor([[math.log(4 / 3), math.log(2.0), 0.0]])
    )
    total.backward()
    # d/d logits = weight * (softmax - onehot): 1/2 (1/4, -1/4), 1/2 (-1/2, 1/2), 0
    torch.testing.assert_close(
        hidden.grad, torch.tensor([[[0.125, -0.125], [-0.25, 0.25], [0.0, 0.0]]])
    )


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Hidden states, output matrix, weights and targets, in chunks of three
    positions.
    """
    monkeypatch.setattr(losses, "CHUNK_LOGITS", 3 * 11)
    generator = torch.Generator().manual_seed(0)
    return [
        *(
            torch.randn(size, generator=generator)
            for size in ((2, 4, 5), (11, 5), (2, 4))
        ),
        torch.tensor([[1, IGNORED, 6, 10], [0, 3, IGNORED, 2]]),
    ]


@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
def test_fused_loss_equals_the_plain_one(
    z_loss: float, inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced and run eagerly, in chunks of three positions, the last one shorter."""
    monkeypatch.setattr(
        losses,
        "_compiled_logit_gradients",
        lambda: torch.compile(losses._logit_gradients, fullgraph=True, backend="eager"),
    )
    hidden, matrix, weights, targets = inputs
    sides = []
    for fused in (False, True):
        parts = [part.clone().requires_grad_() for part in (hidden, matrix)]
        total, nll = weighted_nll(*parts, targets, weights, z_loss, fused)
        total.backward()
        sides.append((total, nll, *(part.grad for part in parts)))
    for plain, fused_one in zip(*sides, strict=True):
        torch.testing.assert_close(fused_one, plain, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_losses_of_logits_and_of_softcapped_products_equal_plain_ones(
    z_loss: float, cap: float | None, inputs: list[Tensor]
) -> None:
    """Against autograd over all logits: cap tanh(h W^T / cap), or the logits alone."""
    hidden, matrix, weights, targets = inputs
    ours, theirs = (
        [part.clone().requires_grad_() for part in (hidden, matrix)] for _ in "ab"
    )
    if cap is None:
        total, nll = weighted_nll(F.linear(*ours), None, targets, weights, z_loss)
        logits = F.linear(*theirs)
    else:
        output = Softcapped(ours[1], cap)
        total, nll = weighted_nll(ours[0], output, targets, weights, z_loss)
        logits = cap * torch.tanh(F.linear(*theirs) / cap)
        logps = sequence_logps(ours[0], output, targets)
        torch.testing.assert_close(logps, -nll.sum(dim=1), atol=1e-5, rtol=1e-5)
        assert torch.equal(logits_head(hidden, Softcapped(matrix, cap)), logits)
    assert not nll.requires_grad
    plain = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none"
    ).view(2, 4)
    squares = logits.logsumexp(dim=-1).square() * (targets != IGNORED)
    torch.testing.assert_close(nll, plain.detach(), atol=1e-6, rtol=1e-6)
    total.backward()
    ((plain + z_loss * squares) * weights).sum().backward()
    for tensor, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(tensor.grad, reference.grad, atol=1e-6, rtol=1e-5)


def test_chunks_are_larger_on_a_gpu() -> None:
    """Chunks of 2^22 and 2^28 logits of 32,768 ids."""
    assert losses.chunk_rows(torch.empty(1 << 15, 2, device="meta")) == 128
    with torch._subclasses.FakeTensorMode():
        assert losses.chunk_rows(torch.empty(1 << 15, 2, device="cuda")) == 8192


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 7),
    st.integers(1, 9),
    st.integers(2, 11),
    st.integers(1, 40),
    st.integers(0, 2**31),
)
def test_chunked_loss_and_gradients_equal_those_of_pytorch(
    n: int, t: int, v: int, chunk: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden, matrix, weights = (
        torch.randn(size, generator=generator, dtype=torch.float32)
        for size in ((n, t, 5), (v, 5), (n, t))
    )
    targets = torch.randint(0, v, (n, t), generator=generator)
    targets[torch.rand(n, t, generator=generator) < 0.3] = IGNORED
    ours = [part.clone().requires_grad_() for part in (hidden, matrix)]
    theirs = [part.clone().requires_grad_() for part in (hidden, matrix)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "CHUNK_LOGITS", chunk)
        total, nll = weighted_nll(*ours, targets, weights)
        scored, correct = score_tokens(hidden, matrix, targets)
    logits = F.linear(*theirs)
    plain = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none"
    ).view(n, t)
    torch.testing.assert_close(nll, plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scored, plain, atol=1e-5, rtol=1e-5)
    assert torch.equal(correct, logits.argmax(-1) == targets)
    (3.0 * total).backward()
    (3.0 * (plain * weights).sum()).backward()
    for tensor, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(tensor.grad, reference.grad, atol=1e-5, rtol=1e-4)


def test_log_probability_is_summed_in_float32() -> None:
    """512 tokens of probability 1/2 each: -512 ln 2 = -354.891; bfloat16 would give
    -354 or -356.
    """
    hidden = torch.zeros(1, 512, 2, dtype=torch.bfloat16)
    logps = sequence_logps(
        hidden, IDENTITY.bfloat16(), torch.zeros(1, 512, dtype=torch.int64)
    )
    assert logps.dtype == torch.float32
    assert logps.item() == pytest.approx(-354.8914, abs=1e-3)


def test_log_probability_covers_answer_tokens_only() -> None:
    hidden = torch.tensor([[[0.0, math.log(3.0)], [0.0, 0.0], [0.0, 5.0]]])
    targets = torch.tensor([[1, 0, IGNORED]])
    assert sequence_logps(hidden, IDENTITY, targets).tolist() == pytest.approx(
        [math.log(3 / 4) + math.log(1 / 2)]
    )


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 5),
    st.integers(1, 40),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_chunked_log_probabilities_and_gradients_equal_those_of_whole_logits(
    n: int, chunk: int, ignored_share: float, trains_matrix: bool, seed: int
) -> None:
    """Of any function of the sums: here their squares."""
    generator = torch.Generator().manual_seed(seed)
    hidden, matrix = (
        torch.randn(size, generator=generator) for size in ((n, 6, 5), (9, 5))
    )
    targets = torch.randint(0, 9, (n, 6), generator=generator)
    targets[torch.rand(n, 6, generator=generator) < ignored_share] = IGNORED
    ours, theirs = (
        [
            hidden.clone().requires_grad_(),
            matrix.clone().requires_grad_(trains_matrix),
        ]
        for _ in range(2)
    )
    logits = F.linear(*theirs)
    nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    expected = -nll.view(n, 6).sum(dim=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "CHUNK_LOGITS", chunk)
        logps = sequence_logps(*ours, targets)
        logps.square().sum().backward()
    torch.testing.assert_close(logps, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        sequence_logps(logits.detach(), None, targets), expected, atol=1e-5, rtol=1e-5
    )
    expected.square().sum().backward()
    for tensor, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(tensor.grad, reference.grad, atol=1e-4, rtol=1e-4)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 40), st.sampled_from([1e-4, 0.3]), st.integers(0, 2**31))
def test_z_loss_and_gradients_equal_their_definition(
    chunk: int, z_loss: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden, matrix, weights = (
        torch.randn(size, generator=generator) for size in ((2, 3, 5), (7, 5), (2, 3))
    )
    targets = torch.tensor([[1, IGNORED, 6], [0, 3, 2]])
    ours, theirs = (
        [part.clone().requires_grad_() for part in (hidden, matrix)] for _ in range(2)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "CHUNK_LOGITS", chunk)
        total, nll = weighted_nll(*ours, targets, weights, z_loss)
    logits = F.linear(*theirs)
    plain = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none"
    ).view(2, 3)
    expected = (
        (plain + z_loss * logits.logsumexp(-1).square() * (targets != IGNORED))
        * weights
    ).sum()
    # the reported loss excludes the z-loss
    torch.testing.assert_close(nll, plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(total, expected, atol=1e-4, rtol=1e-5)
    total.backward()
    expected.backward()
    for tensor, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(tensor.grad, reference.grad, atol=1e-4, rtol=1e-4)
