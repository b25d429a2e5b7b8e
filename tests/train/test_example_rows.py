"""Conversations in packed rows: nothing is lost, nothing is cut, and each has the loss that it has alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.tokenize.loss_masks import LossMasks, mask_name, write_mask
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_files import PackedSetError
from gristmill.train.data.example_rows import Piece, packed_rows, replay_count, replayed_rows, write_example_rows
from gristmill.train.loop.rows_read import rows_read
from gristmill.train.models.decoder import Llama
from gristmill.train.models.model_config import Shape
from gristmill.train.objectives.losses import next_tokens, weighted_nll
from gristmill.train.objectives.sft_objective import AssistantTurns

LENGTH = 24
TOKENIZER = {"vocab_size": 100, "eos": 0, "pad": 1, "sha256": "t"}


def piece(number: int, length: int) -> Piece:
    ids = (np.arange(length) * 7 + number * 13) % 100
    trained = np.arange(length) % 3 != number % 3
    trained[0] = False
    return Piece(number.to_bytes(16, "big"), ids, trained)


def pieces(lengths: list[int]) -> list[Piece]:
    return [piece(number, length) for number, length in enumerate(lengths)]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(2, LENGTH), min_size=1, max_size=40), st.booleans())
def test_every_piece_is_whole_in_one_row(lengths: list[int], best_fit: bool) -> None:
    given_pieces = pieces(lengths)
    rows = packed_rows(given_pieces, LENGTH, best_fit)
    assert sorted(one.id for row in rows for one in row) == [one.id for one in given_pieces]
    assert max(sum(len(one.ids) for one in row) for row in rows) <= LENGTH
    assert len(rows) == len(lengths) if not best_fit else len(rows) >= sum(lengths) / LENGTH


@pytest.fixture
def packed(tmp_path: Path) -> PackedSet:
    sets = {
        "first": packed_rows(pieces([5, 9, 8, 20, 3, 12, 7]), LENGTH, True),
        "second": packed_rows([piece(90, 24)], LENGTH, True),
    }
    write_example_rows(tmp_path / "rows", sets, LENGTH, TOKENIZER, TOKENIZER["pad"])
    return PackedSet(tmp_path / "rows")


def test_rows_on_disk_hold_tokens_masks_and_who_they_are_of(packed: PackedSet) -> None:
    packed.verify(deep=True)
    rows = np.arange(packed.rows)
    tokens, trained = packed.read(rows), LossMasks(packed).read(rows)
    known = {one.id: one for one in [*pieces([5, 9, 8, 20, 3, 12, 7]), piece(90, 24)]}
    found = packed.pieces(rows).to_pylist()
    assert {one["id"] for one in found} == set(known)
    for one in found:
        place = slice(one["start"], one["start"] + one["length"])
        assert tokens[one["row"], place].tolist() == known[one["id"]].ids.tolist()
        assert trained[one["row"], place].tolist() == known[one["id"]].trained.tolist()
        assert packed.sources[one["source"]] == ("second" if one["id"] == (90).to_bytes(16, "big") else "first")
    assert LossMasks(packed).trained_per_row.tolist() == trained.sum(axis=1).tolist()
    filled = packed.boundaries(rows).filled()
    for row in rows:
        assert set(tokens[row, filled[row] :].tolist()) <= {TOKENIZER["pad"]}
        assert not trained[row, filled[row] :].any()


def test_a_mask_that_is_missing_or_of_another_set_is_an_error(packed: PackedSet) -> None:
    path = packed.folder / mask_name("train-00000.bin")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(PackedSetError, match=rf"has {len(whole) - 1} bytes, but the masks of 4 rows take {len(whole)}"):
        LossMasks(packed)
    path.unlink()
    with pytest.raises(PackedSetError, match="is missing"):
        LossMasks(packed)


def test_the_fingerprint_names_what_is_trained_too(packed: PackedSet) -> None:
    before = LossMasks(packed).fingerprint
    name = mask_name("train-00000.bin")
    packed.manifest["train"]["shards"][0]["beside"][name] = write_mask(
        packed.folder / name, np.ones((packed.rows, LENGTH), dtype=bool)
    )
    assert LossMasks(packed).fingerprint != before


def loss_of(model: Llama, ids: np.ndarray, trained: np.ndarray) -> torch.Tensor:
    """The summed loss of one conversation on its own."""
    targets = next_tokens(torch.from_numpy(ids)[None], torch.from_numpy(trained)[None])

    def head(hidden: torch.Tensor, matrix: torch.Tensor) -> Any:
        return weighted_nll(hidden, matrix, targets, torch.ones_like(targets, dtype=torch.float32))

    total: torch.Tensor = model(torch.from_numpy(ids)[None], head)[0]
    return total


def test_packed_loss_and_gradients_are_those_of_each_conversation_alone(
    packed: PackedSet, tiny_shape: Shape, make_model: Callable[[Shape], Llama]
) -> None:
    model = make_model(tiny_shape)
    objective = AssistantTurns(packed, 1, torch.ones(100), 1.0)
    rows = np.arange(packed.rows)
    batch = objective.prepare(rows)
    assert batch.positions is not None
    measured = objective.loss(model, batch, 1.0)
    measured.loss.backward()
    together = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad()
    alone = sum(
        (
            loss_of(model, one.ids.astype(np.int64), one.trained)
            for one in [*pieces([5, 9, 8, 20, 3, 12, 7]), piece(90, 24)]
        ),
        torch.zeros(()),
    )
    alone.backward()
    assert measured.loss.item() == pytest.approx(alone.item(), rel=1e-5)
    assert measured.sums[0].item() == pytest.approx(alone.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(together[name], parameter.grad, atol=1e-4, rtol=1e-4)


def test_metrics_tell_sets_apart_and_weigh_by_trained_tokens(
    packed: PackedSet, tiny_shape: Shape, make_model: Callable[[Shape], Llama]
) -> None:
    objective = AssistantTurns(packed, 1, torch.full((100,), 2.0), 1.0)
    rows = np.arange(packed.rows)
    measured = objective.loss(make_model(tiny_shape), objective.prepare(rows), 1.0)
    report = objective.report(measured.sums.tolist(), objective.weight(rows))
    by_set = report["sources"]
    assert sum(one["tokens"] for one in by_set.values()) == objective.weight(rows)
    mean = sum(one["loss"] * one["tokens"] for one in by_set.values()) / objective.weight(rows)
    assert report["loss"] == pytest.approx(mean)
    assert report["bits_per_byte"] == pytest.approx(report["loss"] / 2 / np.log(2))
    blamed = objective.blame(rows, measured.row_losses.detach().numpy())
    assert len(blamed) == 8
    assert sum(one["tokens"] for one in blamed) == objective.num_tokens(rows) == 88


def test_replayed_rows_are_pre_trainings_own_with_a_loss_on_all_but_first_tokens(mix_folder: Path) -> None:
    mix = PackedSet(mix_folder)
    rows = replayed_rows(rows_read(mix, {"steps": 16, "global_batch_size": 5, "seed": 3}, None), 85)
    order = mix.order(3).rows(np.arange(85) % 80)
    for row, number in zip(rows, order, strict=True):
        assert np.concatenate([one.ids for one in row]).tolist() == mix.read(np.array([number]))[0].tolist()
        assert [one.trained.tolist() for one in row] == [[False] + [True] * (len(one.ids) - 1) for one in row]


@pytest.mark.parametrize(("tokens", "share", "rows"), [(8000, 0.0, 0), (8000, 0.2, 20), (8000, 0.5, 80)])
def test_a_share_of_all_tokens_is_replayed(tokens: int, share: float, rows: int) -> None:
    assert replay_count(tokens, 100, share) == rows
