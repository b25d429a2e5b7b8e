"""Conversations in packed rows: complete, uncut, and with the loss that each has
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.mixtures.schema.pretrain import Pretrain
from gristmill.tokenize.loss_masks import LossMasks, mask_name, write_mask
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_files import PackedSetError
from gristmill.train.data.conversation_tokens import Conversation
from gristmill.train.data.example_rows import (
    packed_rows,
    replay_count,
    replayed_rows,
    write_example_rows,
)
from gristmill.train.loop.rows_read import rows_read
from gristmill.train.models.model_config import Shape
from gristmill.train.models.transformer import Llama
from gristmill.train.objectives.losses import next_tokens, weighted_nll
from gristmill.train.objectives.sft import AssistantTurns
from tests.packed_sets import verify

LENGTH = 24
TOKENIZER = {"vocab_size": 100, "eos": 0, "pad": 1, "sha256": "t"}


def piece(number: int, length: int) -> Conversation:
    ids = (np.arange(length) * 7 + number * 13) % 100
    trained = np.arange(length) % 3 != number % 3
    trained[0] = False
    return Conversation(ids, trained, False, f"{number:032x}")


def pieces(lengths: list[int]) -> list[Conversation]:
    return [piece(number, length) for number, length in enumerate(lengths)]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(2, LENGTH), min_size=1, max_size=40), st.booleans())
def test_every_piece_is_uncut_in_one_row(lengths: list[int], best_fit: bool) -> None:
    given_pieces = pieces(lengths)
    rows = packed_rows(given_pieces, LENGTH, best_fit)
    assert sorted(piece_.example for row in rows for piece_ in row) == [
        piece_.example for piece_ in given_pieces
    ]
    assert max(sum(len(piece_.ids) for piece_ in row) for row in rows) <= LENGTH
    assert (
        len(rows) == len(lengths)
        if not best_fit
        else len(rows) >= sum(lengths) / LENGTH
    )


@pytest.fixture
def packed(tmp_path: Path) -> PackedSet:
    sets = {
        "first": packed_rows(pieces([5, 9, 8, 20, 3, 12, 7]), LENGTH, True),
        "second": packed_rows([piece(90, 24)], LENGTH, True),
    }
    write_example_rows(tmp_path / "rows", sets, LENGTH, TOKENIZER, TOKENIZER["pad"])
    return PackedSet(tmp_path / "rows")


def test_rows_on_disk_have_tokens_masks_and_provenance(packed: PackedSet) -> None:
    verify(packed, deep=True)
    rows = np.arange(packed.rows)
    tokens, trained = packed.read(rows), LossMasks(packed).read(rows)
    pieces_by_id = {
        bytes.fromhex(example.example): example
        for example in [*pieces([5, 9, 8, 20, 3, 12, 7]), piece(90, 24)]
    }
    entries = packed.pieces(rows).to_pylist()
    assert {entry["id"] for entry in entries} == set(pieces_by_id)
    for entry in entries:
        span = slice(entry["start"], entry["start"] + entry["length"])
        assert (
            tokens[entry["row"], span].tolist()
            == pieces_by_id[entry["id"]].ids.tolist()
        )
        assert (
            trained[entry["row"], span].tolist()
            == pieces_by_id[entry["id"]].trained.tolist()
        )
        assert packed.sources[entry["source"]] == (
            "second" if entry["id"] == (90).to_bytes(16, "big") else "first"
        )
    assert LossMasks(packed).trained_per_row.tolist() == trained.sum(axis=1).tolist()
    filled = packed.boundaries(rows).filled()
    for row in rows:
        assert set(tokens[row, filled[row] :].tolist()) <= {TOKENIZER["pad"]}
        assert not trained[row, filled[row] :].any()


def test_missing_or_foreign_mask_is_rejected(packed: PackedSet) -> None:
    path = packed.folder / mask_name("train-00000.bin")
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(
        PackedSetError, match=rf"{len(content) - 1} bytes.* 4 rows .*{len(content)}"
    ):
        LossMasks(packed)
    path.unlink()
    with pytest.raises(PackedSetError, match="is missing"):
        LossMasks(packed)


def test_fingerprint_depends_on_the_masks(packed: PackedSet) -> None:
    before = LossMasks(packed).fingerprint
    name = mask_name("train-00000.bin")
    packed.manifest["train"]["shards"][0]["beside"][name] = write_mask(
        packed.folder / name, np.ones((packed.rows, LENGTH), dtype=bool)
    )
    assert LossMasks(packed).fingerprint != before


def loss_of(model: Llama, ids: np.ndarray, trained: np.ndarray) -> torch.Tensor:
    """Sum the loss of one conversation alone."""
    targets = next_tokens(torch.from_numpy(ids)[None], torch.from_numpy(trained)[None])

    def head(hidden: torch.Tensor, matrix: torch.Tensor) -> Any:
        return weighted_nll(
            hidden, matrix, targets, torch.ones_like(targets, dtype=torch.float32)
        )

    total: torch.Tensor = model(torch.from_numpy(ids)[None], head)[0]
    return total


def test_packed_loss_and_gradients_equal_those_of_single_conversations(
    packed: PackedSet, tiny_shape: Shape, make_model: Callable[[Shape], Llama]
) -> None:
    model = make_model(tiny_shape)
    objective = AssistantTurns(packed, 1, torch.ones(100), 1.0)
    rows = np.arange(packed.rows)
    batch = objective.prepare(rows)
    assert batch.positions is not None
    result = objective.loss(model, batch, 1.0)
    result.loss.backward()
    together = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    alone = sum(
        (
            loss_of(model, example.ids.astype(np.int64), example.trained)
            for example in [*pieces([5, 9, 8, 20, 3, 12, 7]), piece(90, 24)]
        ),
        torch.zeros(()),
    )
    alone.backward()
    assert result.loss.item() == pytest.approx(alone.item(), rel=1e-5)
    assert result.sums[0].item() == pytest.approx(alone.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(together[name], parameter.grad, atol=1e-4, rtol=1e-4)


def test_metrics_are_per_set_and_weighted_by_trained_tokens(
    packed: PackedSet, tiny_shape: Shape, make_model: Callable[[Shape], Llama]
) -> None:
    objective = AssistantTurns(packed, 1, torch.full((100,), 2.0), 1.0)
    rows = np.arange(packed.rows)
    result = objective.loss(make_model(tiny_shape), objective.prepare(rows), 1.0)
    report = objective.report(result.sums.tolist(), objective.weight(rows))
    by_set = report["sources"]
    assert sum(entry["tokens"] for entry in by_set.values()) == objective.weight(rows)
    mean = sum(
        entry["loss"] * entry["tokens"] for entry in by_set.values()
    ) / objective.weight(rows)
    assert report["loss"] == pytest.approx(mean)
    assert report["bits_per_byte"] == pytest.approx(report["loss"] / 2 / np.log(2))
    blame = objective.blame(rows, result.row_losses.detach().numpy())
    assert len(blame) == 8
    assert sum(entry["tokens"] for entry in blame) == objective.num_tokens(rows) == 88


def test_replayed_rows_equal_those_of_pretraining(mix_folder: Path) -> None:
    mix = PackedSet(mix_folder)
    rows = replayed_rows(
        rows_read(
            mix,
            Pretrain.model_validate({"steps": 16, "global_batch_size": 5, "seed": 3}),
            None,
        ),
        85,
    )
    order = mix.order(3).rows(np.arange(85) % 80)
    for row, number in zip(rows, order, strict=True):
        assert (
            np.concatenate([piece_.ids for piece_ in row]).tolist()
            == mix.read(np.array([number]))[0].tolist()
        )
        assert [piece_.trained.tolist() for piece_ in row] == [
            [False] + [True] * (len(piece_.ids) - 1) for piece_ in row
        ]


@pytest.mark.parametrize(
    ("tokens", "share", "rows"), [(8000, 0.0, 0), (8000, 0.2, 20), (8000, 0.5, 80)]
)
def test_replay_count_gives_the_share_of_all_tokens(
    tokens: int, share: float, rows: int
) -> None:
    assert replay_count(tokens, 100, share) == rows
