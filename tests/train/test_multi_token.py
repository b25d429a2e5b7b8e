"""Multi-token prediction: inputs and targets of each depth, its cost, and a model saved
without the heads.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gristmill.mixtures.load import ManifestError
from gristmill.train.models.decoder import logits_head
from gristmill.train.models.model_config import Shape
from gristmill.train.models.multi_token import MultiTokenLlama, further_targets
from gristmill.train.models.weights import drawn, load_model
from gristmill.train.objectives.losses import IGNORED, next_tokens, weighted_nll
from gristmill.train.planning.flops import flops_per_token
from gristmill.train.planning.memory import Form, Load, optimizer_bytes, rank_memory
from gristmill.train.planning.parallel_forms import forms
from tests.train.counted_step import count_step

LENGTH = 24
POSITIONS = torch.tensor([[*range(10), *range(9), *[-1] * 5]])


def model_of(shape: Shape) -> MultiTokenLlama:
    """Make a model with weights larger than the initial ones, so that a mistake
    shows.
    """
    model, tensor_of = MultiTokenLlama(shape), drawn(shape, 3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                tensor_of(name, parameter.shape) * (8.0 if parameter.ndim > 1 else 1.0)
            )
    return model


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(
        0, 100, (1, LENGTH), generator=torch.Generator().manual_seed(1)
    )


def test_losses_equal_the_equations_of_the_paper(
    tiny_shape: Shape, ids: torch.Tensor
) -> None:
    """DeepSeek-V3, equations 21 to 25, with slices instead of padding."""
    model = model_of(replace(tiny_shape, multi_token=2))
    targets = [next_tokens(ids), *further_targets(next_tokens(ids), None, 2)]
    heads = [
        partial(
            weighted_nll,
            targets=depth_targets,
            weights=torch.full(ids.shape, 1 / LENGTH),
        )
        for depth_targets in targets
    ]
    losses = [loss.item() for loss, _ in model(ids, heads[0], further=heads[1:])]
    hidden: torch.Tensor = model(ids, lambda hidden, matrix: hidden)
    matrix, embedding = model.output_matrix()[:100], model.model.embed_tokens
    expected = [
        F.cross_entropy((hidden @ matrix.T)[0, :-1], ids[0, 1:], reduction="sum").item()
        / LENGTH
    ]
    for depth, module in enumerate(model.further_layers, start=1):
        rotary = model.laid_out(ids[:, : LENGTH - depth], None, None)[1]
        joined = torch.cat(
            [
                module.hidden_norm(hidden[:, : LENGTH - depth]),  # type: ignore[operator]
                module.embedding_norm(embedding(ids[:, depth:])),
            ],
            dim=-1,
        )  # type: ignore[operator]
        hidden = module.block(module.projection(joined), rotary)  # type: ignore[operator]
        logits = module.norm(hidden) @ matrix.T  # type: ignore[operator]
        expected.append(
            F.cross_entropy(logits[0, :-1], ids[0, depth + 1 :], reduction="sum").item()
            / LENGTH
        )
    assert losses == pytest.approx(expected, rel=1e-5)


def test_each_depth_reads_one_more_token_within_its_document(
    tiny_shape: Shape, ids: torch.Tensor
) -> None:
    model = model_of(replace(tiny_shape, multi_token=2, document_mask=True))
    heads = [logits_head] * 2
    targets = further_targets(next_tokens(ids, POSITIONS >= 0), POSITIONS, 2)
    assert [
        (depth_targets[0] != IGNORED).nonzero().squeeze(1).tolist()
        for depth_targets in targets
    ] == [
        [*range(9), *range(10, 17)],
        [*range(8), *range(10, 16)],
    ]
    assert all(
        depth_targets[0, 3] == ids[0, 4 + depth]
        for depth, depth_targets in enumerate(targets, start=1)
    )
    before = model(ids, positions=POSITIONS, further=heads)
    for place in (0, 4, 12):
        changed_ids = ids.clone()
        changed_ids[0, place] = (changed_ids[0, place] + 1) % 100
        after = model(changed_ids, positions=POSITIONS, further=heads)
        for depth, (new_logits, old_logits) in enumerate(
            zip(after, before, strict=True)
        ):
            is_target = (
                targets[depth - 1][0] != IGNORED
                if depth
                else torch.ones(LENGTH, dtype=torch.bool)
            )
            affected = (
                (new_logits - old_logits).abs().amax(dim=-1)[0] > 1e-7
            ) & is_target
            end = 10 if place < 10 else 19
            positions = torch.arange(LENGTH)
            expected = (
                (positions >= place - depth)
                & (positions < end)
                & (positions >= (0 if place < 10 else 10))
                & is_target
            )
            assert torch.equal(affected, expected), (place, depth)


@pytest.mark.slow
def test_heads_are_dropped_and_do_not_change_the_decoder_at_zero_weight(
    run_stage: Any,
    tokenizer_folder: Path,
    mix_folder: Path,
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    inputs, config = (
        {"tokenizer": tokenizer_folder, "mix": mix_folder},
        {**pretrain_config, "steps": 2},
    )
    with_heads = run_stage(
        "pretrain",
        inputs,
        {**config, "multi_token": {"heads": 2, "weight": 1e-30}},
        tmp_path / "with",
    )
    plain = run_stage("pretrain", inputs, config, tmp_path / "without")
    ours, without = (
        load_file(tmp_path / name / "data" / "model" / "model.safetensors")
        for name in ("with", "without")
    )
    assert ours.keys() == without.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in without.items())
    assert with_heads["parameters"] == plain["parameters"]
    assert with_heads["flops_per_token"] > 1.5 * plain["flops_per_token"]
    line = json.loads(
        (tmp_path / "with" / "data" / "metrics.jsonl").read_text().splitlines()[0]
    )
    # ln 400
    assert {name: round(loss) for name, loss in line["multi_token"].items()} == {
        "ahead_2": 6,
        "ahead_3": 6,
    }
    run_stage(
        "export",
        {"tokenizer": tokenizer_folder, "pretrain": tmp_path / "with" / "data"},
        {},
        tmp_path / "out",
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "data").eval()
    ids = torch.arange(LENGTH)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            theirs(ids).logits,
            load_model(tmp_path / "with" / "data" / "model")(ids),
            atol=1e-5,
            rtol=1e-5,
        )


def test_plan_counts_the_heads(tiny_shape: Shape, ids: torch.Tensor) -> None:
    shape = replace(tiny_shape, multi_token=2)
    model = model_of(shape)
    assert shape.parameters == sum(
        parameter.numel() for parameter in model.parameters()
    )
    num_flops, _ = count_step(model, ids)
    assert flops_per_token(shape, LENGTH).whole * LENGTH == pytest.approx(
        num_flops, rel=1e-6
    )
    assert optimizer_bytes(shape, "adamw") == pytest.approx(8 * shape.parameters)
    plain, with_heads = (
        rank_memory(shape_, Form(), Load(2, LENGTH, 1))
        for shape_ in (tiny_shape, shape)
    )
    assert with_heads.parameters - plain.parameters == pytest.approx(
        4 * (shape.parameters - tiny_shape.parameters)
    )
    assert with_heads.activations == pytest.approx(2 * plain.activations)
    assert {form.tensor for form in forms(shape, 4, 8, 64)} == {1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": {"parallel": {"tensor": 2}}}, r"pretrain\.multi_token"),
        ({"pretrain": {"steps": 2, "multi_token": {}, "prefix_lm": {}}}, "prefix_lm"),
        (
            {
                "pretrain": {
                    "steps": 2,
                    "multi_token": {},
                    "model": {"moe": {"experts": 4}},
                }
            },
            r"model\.moe",
        ),
    ],
)
def test_setting_that_excludes_multi_token_is_rejected_before_any_work(
    stage_config: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ManifestError, match=message):
        stage_config(
            "pretrain", **{"pretrain": {"steps": 2, "multi_token": {}}, **changes}
        )
