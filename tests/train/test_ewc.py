"""Elastic weight consolidation: penalty by hand, Fisher information against plain
loops, and its effect.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gristmill.mixtures.sections.posttraining import Sft
from gristmill.tokenize.packed import PackedSet
from gristmill.train.models.decoder import Llama
from gristmill.train.models.model_config import Shape, shape_of
from gristmill.train.models.weights import load_model
from gristmill.train.objectives.losses import draw_targets, next_tokens, uniforms
from gristmill.train.objectives.next_token import NextToken
from gristmill.train.optimizers.ewc import ElasticWeights, fisher_diagonal
from tests.train.jsonl import read_metrics, write_jsonl


def test_penalty_is_derived_by_hand() -> None:
    """Move (1, -2), F = (3, 0.5), lambda = 4: 4 / 2 (3 * 1 + 0.5 * 4) = 10; gradients 4
    F (1, -2) = (12, -4).
    """
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)  # so that a move of (1, -2) is exact
    elastic = ElasticWeights(model, {"weight": torch.tensor([[3.0, 0.5]])}, 4.0)
    with torch.no_grad():
        model.weight += torch.tensor([[1.0, -2.0]])
    model.weight.grad = torch.tensor([[0.5, 0.5]])
    assert elastic.add_gradients().item() == pytest.approx(10.0)
    assert model.weight.grad.tolist() == [[12.5, -3.5]]


def test_fisher_information_is_the_mean_squared_gradient_of_rows(
    make_model: Callable[[Shape], Llama], mix_folder: Path
) -> None:
    from gristmill.mixtures.sections.model import Model

    packed = PackedSet(mix_folder)
    section = Model(layers=1, width=16, heads=2, kv_heads=1, ffn_width=24)
    model = make_model(
        shape_of(
            section, packed.manifest["tokenizer"]["vocab_size"], packed.sequence_length
        )
    )
    objective = NextToken(packed, 3, torch.ones(model.shape.vocab_size), model.shape)
    rows = np.array([4, 9, 2])
    expected = {
        name: torch.zeros_like(parameter)
        for name, parameter in model.named_parameters()
    }
    for draw, row in enumerate(rows):
        ids = torch.from_numpy(packed.tokens(np.array([row])).astype(np.int64))
        targets = next_tokens(ids)
        labels = model(
            ids, partial(draw_targets, targets=targets, uniforms=uniforms(ids, draw))
        )
        total = F.cross_entropy(model(ids)[0, :-1], labels[0, :-1], reduction="sum")
        for (name, _), gradient in zip(
            model.named_parameters(),
            torch.autograd.grad(total, list(model.parameters())),
            strict=True,
        ):
            expected[name] += gradient**2 / (ids.shape[1] - 1) / len(rows)
    fisher = fisher_diagonal(model, objective, rows)
    for name, diagonal in fisher.items():
        torch.testing.assert_close(diagonal, expected[name], rtol=1e-3, atol=1e-7)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
def test_ewc_keeps_weights_closer_and_logs_its_penalty(
    run_stage: Any,
    tokenizer_folder: Path,
    mix_folder: Path,
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    inputs = {"tokenizer": tokenizer_folder, "mix": mix_folder}
    run_stage(
        "pretrain", inputs, {**pretrain_config, "steps": 6}, tmp_path / "pretrain"
    )
    inputs["pretrain"] = tmp_path / "pretrain" / "data"
    write_jsonl(
        tmp_path / "sft.jsonl",
        [
            {
                "messages": [
                    {"role": "user", "content": word},
                    {"role": "assistant", "content": f"A {word}."},
                ]
            }
            for word in ("json", "text", "file", "name")
        ],
    )
    config = {
        "steps": 6,
        "global_batch_size": 4,
        "micro_batch_size": 4,
        "seed": 1,
        "log_every": 1,
        "sequence_length": 64,
        "schedule": {"warmup_steps": 1},
        "data": [{"path": str(tmp_path / "sft.jsonl")}],
        "optimizer": {"learning_rate": 0.01},
    }
    reads = {"steps": 6, "global_batch_size": 6, "batch_ramp": [], "seed": 11}
    prose_losses = {}
    for name, changes in (
        ("free", {}),
        ("anchored", {"ewc": {"weight": 1e4, "fisher_rows": 8}, "reads": reads}),
    ):
        run_stage(
            "sft", inputs, {**config, **changes, "validate_every": 6}, tmp_path / name
        )
        lines = read_metrics(tmp_path / name)
        prose_losses[name] = next(
            line["validation"]["prose"]["loss"]
            for line in lines
            if "validation" in line
        )
    penalties = [line["elastic_penalty"] for line in lines if "elastic_penalty" in line]
    assert len(penalties) == 6
    assert penalties[0] == 0.0
    assert penalties[1] > 0
    assert prose_losses["anchored"] < prose_losses["free"]
    start = load_model(inputs["pretrain"] / "model")
    distances = {
        name: sum(
            float((parameter - start.get_parameter(parameter_name)).square().sum())
            for parameter_name, parameter in load_model(
                tmp_path / name / "data" / "model"
            ).named_parameters()
        )
        for name in ("free", "anchored")
    }
    assert distances["anchored"] < distances["free"]


def test_ewc_and_lora_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"sft\.ewc and sft\.lora exclude each other"):
        Sft.model_validate(
            {"steps": 1, "data": [{"path": "x"}], "ewc": {"weight": 1}, "lora": {}}
        )
