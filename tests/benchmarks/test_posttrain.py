"""What the benchmark of post-training compares is the same work."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.train import bench_rollouts
from benchmarks.train.bench_posttrain import EXAMPLES_PER_UPDATE, batch, conversations, write_start
from gristmill.train.models.weights import load_model
from gristmill.train.objectives.losses import IGNORED, score_tokens


def test_packed_rows_have_the_loss_of_padded_ones_in_fewer_tokens(tmp_path: Path) -> None:
    write_start(tmp_path)
    model, examples = load_model(tmp_path), conversations(EXAMPLES_PER_UPDATE)
    losses, sizes = [], []
    for is_packed in (True, False):
        ids, targets, positions = batch(examples, is_packed)
        with torch.no_grad():
            nll, _ = model(ids, partial(score_tokens, targets=targets), positions=positions)
        assert int((targets != IGNORED).sum()) == sum(sum(mask) for _, mask in examples)
        losses.append(float(nll.double().sum()))
        sizes.append(ids.numel())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert sizes[0] < 0.6 * sizes[1]


def test_a_row_of_drawn_answers_counts_every_token_and_says_that_the_peer_is_missing(
    one_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PROMPTS": 2, "GROUP": 2, "NEW_TOKENS": 3, "TURNS": 1}.items():
        monkeypatch.setattr(bench_rollouts, name, value)
    monkeypatch.setattr(bench_rollouts, "find_spec", lambda name: None)
    (row,) = bench_rollouts.rows()
    assert row["name"] == "grpo_rollouts_vs_transformers"
    assert row["ours"] > 0.0
    assert (row["peer"], row["ratio"], row["note"]) == (None, None, "transformers is not installed")
