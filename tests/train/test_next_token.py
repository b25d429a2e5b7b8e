"""The pre-training objective on rows that end in padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gristmill.tokenize.packed import PackedSet
from gristmill.train.loop.objective import UNTRAINED
from gristmill.train.objectives.next_token import NextToken
from tests.packed_sets import piece_table, write_packed_set

PAD, EOS, LENGTH, VOCAB = 1, 0, 24, 100


def padded_set(folder: Path, padding: int) -> PackedSet:
    """Write three rows of 24 tokens, two full and one of 10, whose documents contain
    the id of the padding.
    """
    rows = np.random.default_rng(4).integers(2, VOCAB, (3, LENGTH))
    rows[:, 5] = PAD
    rows[1, 10:] = padding
    write_packed_set(
        folder,
        rows,
        {"all": 3},
        {"vocab_size": VOCAB, "eos": EOS, "pad": PAD, "sha256": ""},
        pieces=piece_table(
            row=[0, 1, 1, 2],
            start=[0, 0, 4, 0],
            length=[LENGTH, 4, 6, LENGTH],
            id=[b"d" * 16] * 4,
        ),
    )
    return PackedSet(folder)


def loss_and_gradient(
    packed: PackedSet, model: Any, rows: np.ndarray
) -> tuple[float, list[float], torch.Tensor]:
    objective = NextToken(packed, 3, torch.ones(VOCAB), model.shape)
    model.zero_grad()
    loss, sums, _ = objective.loss(
        model, objective.prepare(rows), 1.0 / objective.weight(rows)
    )
    loss.backward()
    return (
        loss.item(),
        sums.tolist(),
        torch.cat([p.grad.flatten() for p in model.parameters()]),
    )


def test_padding_is_neither_trained_nor_counted(
    tiny_shape: Any, make_model: Any, tmp_path: Path
) -> None:
    model, rows = make_model(tiny_shape), np.array([1, 0])
    with_pad = loss_and_gradient(padded_set(tmp_path / "pad", PAD), model, rows)
    with_text = loss_and_gradient(padded_set(tmp_path / "text", 57), model, rows)
    assert with_pad[0] == with_text[0]
    assert with_pad[1] == with_text[1]
    assert torch.equal(with_pad[2], with_text[2])
    predicted = (LENGTH - 1) + (10 - 1)
    assert with_pad[1][2] == predicted
    assert with_pad[0] == pytest.approx(with_pad[1][0] / predicted)


def test_document_token_with_the_padding_id_is_trained(
    tiny_shape: Any, make_model: Any, tmp_path: Path
) -> None:
    packed = padded_set(tmp_path, PAD)
    objective = NextToken(packed, 3, torch.ones(VOCAB), tiny_shape)
    assert objective.weight(np.array([0])) == LENGTH - 1
    assert objective.weight(np.array([0, 1, 2])) == 2 * (LENGTH - 1) + 9
    assert objective.weight(np.array([], dtype=np.int64)) == 0
    assert objective.num_tokens(np.array([0, 1])) == 2 * LENGTH
    _, sums, _ = objective.loss(
        make_model(tiny_shape), objective.prepare(np.array([0])), 1.0
    )
    assert sums[2] == LENGTH - 1


def test_every_document_is_blamed_for_its_own_losses(
    tiny_shape: Any, make_model: Any, tmp_path: Path
) -> None:
    """Row 1 has pieces of 4 and 6 tokens, then padding; each loss is one position
    before its token.
    """
    objective = NextToken(padded_set(tmp_path, PAD), 3, torch.ones(VOCAB), tiny_shape)
    rows = np.array([2, 1])
    result = objective.loss(make_model(tiny_shape), objective.prepare(rows), 1.0)
    losses = result.row_losses.numpy()
    assert (losses[1, 9:] == UNTRAINED).all()
    assert losses[losses != UNTRAINED].sum() == pytest.approx(
        result.sums[0].item(), rel=1e-6
    )
    blame = {
        (entry["row"], entry["start"]): entry for entry in objective.blame(rows, losses)
    }
    assert blame[1, 0]["loss"] == pytest.approx(losses[1, :3].mean(), rel=1e-6)
    assert blame[1, 4]["loss"] == pytest.approx(losses[1, 3:9].mean(), rel=1e-6)
    assert blame[2, 0]["loss"] == pytest.approx(
        losses[0, : LENGTH - 1].mean(), rel=1e-6
    )
    assert (blame[1, 4]["id"], blame[1, 4]["source"], blame[1, 4]["tokens"]) == (
        b"d".hex() * 16,
        "all",
        6,
    )
    assert blame[1, 4]["head"] == objective.packed.read(np.array([1]))[0, 4:10].tolist()
