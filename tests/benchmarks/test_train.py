"""Benchmarks of training: both sides do the same work, and models have the sizes of
their names.
"""

from __future__ import annotations

import json
import math
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.train import planted, rollouts, rule_dialects, sizes, tuned_script
from benchmarks.train.held_out_bits import STRIDE, WINDOW, bits_per_byte
from benchmarks.train.tuning import (
    EXAMPLES_PER_UPDATE,
    batch,
    conversations,
    write_start,
)
from gristmill.mixtures.loader import load_manifest
from gristmill.mixtures.schema.model import Model
from gristmill.train.distributed.process_groups import single_process
from gristmill.train.models.model_config import shape_of
from gristmill.train.models.weights import load_model
from gristmill.train.objectives.losses import IGNORED, score_tokens
from tests.train.decoder_families import LENGTH, save_tiny_decoder


def test_packed_rows_have_the_loss_of_padded_ones_in_fewer_tokens(
    tmp_path: Path,
) -> None:
    write_start(tmp_path)
    model, examples = load_model(tmp_path), conversations(EXAMPLES_PER_UPDATE)
    losses, sizes = [], []
    for is_packed in (True, False):
        ids, targets, positions = batch(examples, is_packed)
        with torch.no_grad():
            nll, _ = model(
                ids, partial(score_tokens, targets=targets), positions=positions
            )
        assert int((targets != IGNORED).sum()) == sum(sum(mask) for _, mask in examples)
        losses.append(float(nll.double().sum()))
        sizes.append(ids.numel())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert sizes[0] < 0.6 * sizes[1]


@pytest.mark.slow
def test_model_of_a_folder_is_measured_beside_its_class(tmp_path: Path) -> None:
    save_tiny_decoder("gemma2", tmp_path / "small")
    speed, _, memory = sizes.rows(tmp_path / "small")
    assert speed.name == f"small, 0M, T={LENGTH}, vs transformers"
    for row in (speed, memory):
        assert row.ours is not None
        assert row.peer is not None
        assert min(row.ours, row.peer) > 0


def test_answers_of_several_turns_have_the_tokens_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "PROMPTS", 1)
    monkeypatch.setattr(rollouts, "GROUP", 2)
    with single_process() as world:
        sampler = rollouts.make_sampler(tmp_path, world)
        assert rollouts.draw_turns(sampler) == 2 * rollouts.NEW_TOKENS
        assert rollouts.draw(sampler) == 2 * rollouts.NEW_TOKENS


@pytest.mark.parametrize(
    "tokens", [1, 2, STRIDE, WINDOW, WINDOW + 1, WINDOW + STRIDE, 3 * WINDOW - 1]
)
def test_every_held_out_token_is_scored_once_from_the_ones_before(
    tokens: int, tmp_path: Path
) -> None:
    """The model gives the next id of a count modulo 8 a probability of 1/2, and the
    others 1/14 each.
    """
    file = tmp_path / "held_out.json"

    def logits_of(ids: torch.Tensor) -> torch.Tensor:
        successors = torch.nn.functional.one_hot((ids + 1) % 8, 8)
        return successors * math.log(7)

    count = [number % 8 for number in range(tokens + 1)]
    file.write_text(json.dumps({"documents": [count], "bytes": tokens}))
    assert bits_per_byte(logits_of, file) == pytest.approx(1.0)
    count[-1] = (count[-1] + 1) % 8
    file.write_text(json.dumps({"documents": [count, [0, 1]], "bytes": 1}))
    assert bits_per_byte(logits_of, file) == pytest.approx(tokens + math.log2(14))


def test_tuned_script_learns_to_count() -> None:
    settings = tuned_script.Settings(8, 1, 16, 2, seed=0, seconds=0.0)
    ids = np.arange(8 * 128, dtype=np.uint16) % 8
    steps = 40
    model, tokens = tuned_script.train(
        settings, ids, lambda tokens: tokens / tuned_script.STEP_TOKENS / steps
    )
    assert tokens == steps * tuned_script.STEP_TOKENS
    row = torch.arange(64)[None] % 8
    assert (model(row[:, :-1]).argmax(dim=-1) == row[:, 1:]).all()
    factors = [tuned_script.rate_factor(share) for share in (0, 0.01, 0.3, 0.7, 1.0)]
    assert factors == pytest.approx([0, 0.5, 1, 0.5, 0])


@pytest.mark.parametrize(
    "size", [*sizes.ON_GPU, *sizes.ON_CPU], ids=lambda size: size.name
)
def test_sizes_are_what_their_names_say(size: sizes.Size) -> None:
    assert isinstance(size.model, Model)
    name, length = size.name.split(", T=")
    shape = shape_of(size.model, size.vocab, size.length)
    unit = {"M": 1e6, "B": 1e9}[name[-1]]
    assert shape.parameters / unit == pytest.approx(float(name[:-1]), rel=0.04)
    assert size.length == int(length)
    assert size.rows % size.micro_rows == 0


def test_planted_sets_share_no_document_and_arms_have_their_shares(
    tmp_path: Path,
) -> None:
    pieces = [f"Piece {number} has words. It is documentation." for number in range(90)]
    parts = planted.split(pieces)
    assert [len(part) for part in parts] == [2, 79, 9]
    assert sorted(chain(*parts)) == sorted(pieces)
    planted.write_corpus(tmp_path, pieces)
    manifest = str(tmp_path / "planted.yaml")
    for arm, keys in planted.planted_arms().items():
        settings = [f"{key}={value}" for key, value in keys.get("set", {}).items()]
        loaded = load_manifest(manifest, settings)
        weights = {name: source.weight for name, source in loaded.sources.items()}
        if arm in planted.HARMS:
            source, share = planted.HARMS[arm]
            assert weights[source] / sum(weights.values()) == pytest.approx(share)
    words = [
        sorted(word for text in texts for word in text.split())
        for texts in (pieces, planted.shuffle_sentences(pieces))
    ]
    assert words[0] == words[1]


def test_each_dialect_is_an_arm_against_the_default(tmp_path: Path) -> None:
    manifest = str(rule_dialects.write_manifest(tmp_path))
    arms = rule_dialects.settings(tmp_path)["arms"]
    read = []
    for arm in ("", "datatrove", "dolma", "curator", "redpajama"):
        changes = arms[arm]["set"] if arm else {}
        settings = [f"{key}={value}" for key, value in changes.items()]
        loaded = load_manifest(manifest, settings)
        rules = loaded.steps["filter"].config.rules  # type: ignore[attr-defined]
        read.append((rules.gopher_quality.dialect, rules.gopher_repetition.dialect))
    names = ["dclm", "datatrove", "dolma", "curator", "redpajama"]
    assert read == [(name, name) for name in names]


def test_pieces_of_a_text_are_its_first_lines() -> None:
    line = "words " * 100
    (short,) = rule_dialects.pieces_of("a\nb")
    pieces = list(rule_dialects.pieces_of("\n".join([line] * 20)))
    assert short == "a\nb"
    assert pieces == ["\n".join([line] * 3)] * rule_dialects.PIECES_EACH
