"""Goldfish loss: tokens without a loss depend on the tokens before them only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gristmill.mixtures.loader import ManifestError
from gristmill.mixtures.objectives.token_objectives import Goldfish
from gristmill.train.data.batch import filled_positions
from gristmill.train.objectives.goldfish import GoldfishMask
from gristmill.train.objectives.losses import IGNORED
from gristmill.train.objectives.next_token import NextToken
from gristmill.train.objectives.prediction_targets import Read
from tests.train.test_next_token import LENGTH, PAD, VOCAB, padded_set

CONTEXT = 5


def read(tokens: np.ndarray, positions: np.ndarray | None = None) -> Read:
    filled = np.full(len(tokens), tokens.shape[1])
    whole_rows = filled_positions(filled, tokens.shape[1])
    return Read(
        tokens.astype(np.uint16),
        whole_rows if positions is None else positions,
        np.arange(len(tokens)),
        np.zeros(len(tokens), np.int64),
    )


@pytest.mark.parametrize("k", [2, 4, 32])
def test_one_token_in_k_has_no_loss(k: int) -> None:
    tokens = np.random.default_rng(11).integers(0, 50_000, (200, 500))
    laid = GoldfishMask(Goldfish(k=k))(read(tokens), 0)
    predicted = laid.targets != IGNORED
    assert predicted[:, :12].all()  # tokens 1 to 12 have less than 13 before them
    assert not predicted[:, -1].any()
    share = 1 - predicted[:, 12:-1].mean()
    assert abs(share - 1 / k) < 5 * np.sqrt((k - 1) / k**2 / (200 * 487))
    assert (laid.targets[predicted] == tokens[:, 1:][predicted[:, :-1]]).all()
    assert (laid.inputs == tokens).all()


def test_exclusion_depends_on_the_context_alone() -> None:
    random = np.random.default_rng(3)
    mask = GoldfishMask(Goldfish(k=2, context=CONTEXT))
    passage = random.integers(0, 100, 60)
    tokens = random.integers(0, 100, (40, 100))
    starts = random.integers(0, 40, 40)
    for row, start in enumerate(starts):
        tokens[row, start : start + 60] = passage
    excluded = mask.excluded(read(tokens))
    expected = mask.excluded(read(passage[None]))[0, CONTEXT:]
    assert expected.any()
    for row, start in enumerate(starts):
        np.testing.assert_array_equal(
            excluded[row, start + CONTEXT : start + 60], expected
        )
    changed = np.repeat(passage[None], 60, axis=0)
    changed[np.arange(60), np.arange(60)] += 1  # row r has another token at place r
    differs = mask.excluded(read(changed)) != mask.excluded(read(passage[None]))
    row, place = np.nonzero(differs)
    assert set((place - row).tolist()) == set(range(1, CONTEXT + 1))


def test_order_of_the_context_matters() -> None:
    tokens = np.random.default_rng(7).integers(0, 50_000, (300, 4))
    mask = GoldfishMask(Goldfish(k=2, context=3))
    swapped = tokens[:, [1, 0, 2, 3]]
    changes = (mask.excluded(read(tokens)) != mask.excluded(read(swapped)))[:, 3]
    assert 0.35 < changes.mean() < 0.65  # two independent verdicts differ in half


def test_context_begins_with_the_document() -> None:
    tokens = np.random.default_rng(5).integers(0, 100, (50, 40))
    positions = np.tile(np.r_[0:25, 0:10, [-1] * 5], (50, 1)).astype(np.int32)
    excluded = GoldfishMask(Goldfish(k=2, context=CONTEXT)).excluded(
        read(tokens, positions)
    )
    assert not excluded[:, 25 : 25 + CONTEXT].any()
    assert not excluded[:, 35:].any()
    assert excluded[:, 25 + CONTEXT : 35].any(axis=0).all()
    laid = GoldfishMask(Goldfish(k=2, context=CONTEXT))(read(tokens, positions), 7)
    assert (laid.targets[:, 24:29] == tokens[:, 25:30]).all()
    assert (laid.targets[:, 34:] == IGNORED).all()


def test_loss_without_excluded_tokens_is_that_of_the_next_tokens(
    tiny_shape: Any, make_model: Any, tmp_path: Path
) -> None:
    packed, rows = padded_set(tmp_path, PAD), np.array([2, 1])
    model, num_bytes = make_model(tiny_shape), torch.ones(VOCAB)
    plain = NextToken(packed, 3, num_bytes, tiny_shape)
    masked = NextToken(
        packed, 3, num_bytes, tiny_shape, layout=GoldfishMask(Goldfish(context=LENGTH))
    )
    assert masked.weight(rows) == plain.weight(rows)
    losses = [
        objective.loss(model, objective.prepare(rows), 1.0).sums.tolist()
        for objective in (plain, masked)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    layout = GoldfishMask(Goldfish(k=2, context=3))
    fewer = NextToken(packed, 3, num_bytes, tiny_shape, layout=layout)
    batch = fewer.prepare(rows)
    assert batch.weight == fewer.weight(rows) < plain.weight(rows)
    assert fewer.loss(model, batch, 1.0).sums[2] == fewer.weight(rows)


def test_another_objective_beside_it_is_rejected(stage_config: Any) -> None:
    with pytest.raises(ManifestError, match="goldfish"):
        stage_config("pretrain", pretrain={"steps": 2, "prefix_lm": {}, "goldfish": {}})
