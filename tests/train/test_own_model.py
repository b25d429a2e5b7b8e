"""User-defined models: trained, resumed, sharded and evaluated; wrong models and
unsupported stages are rejected.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.mixtures.loader import ManifestError
from gristmill.train.models.weights import WeightsError, check_model, load_model
from tests.train.test_resume import train, write_stage
from tests.train.trained import assert_same_output, losses_of, weights_of

BIGRAM = """
import torch
from torch import nn
class Bigram(nn.Module):
    def __init__(self, vocab_size, width=16, sequence_length=None):
        super().__init__()
        assert sequence_length == 32
        self.embed, self.out = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)
        self.register_buffer("scale", torch.ones(1), persistent=False)
    def forward(self, tokens):
        return self.out(self.embed(tokens) * self.scale)
"""


@pytest.fixture
def with_model(
    stage_config: Any, pretrain_config: dict[str, Any], tmp_path: Path
) -> Any:
    """Settings of a pre-training of a model in model.py: (source, name, keys of its
    section, ...) -> settings.
    """

    def configured(
        source: str, name: str, model: dict[str, Any] | None = None, **section: Any
    ) -> dict[str, Any]:
        (tmp_path / "model.py").write_text(source)
        config: dict[str, Any] = stage_config(
            "pretrain",
            pretrain={
                **pretrain_config,
                "model": {"use": f"./model.py:{name}", **(model or {})},
                **section,
            },
        )
        return config

    return configured


@pytest.mark.slow
def test_model_learns_and_is_saved_by_its_state(
    run_stage: Any, with_model: Any, inputs: dict[str, Path], tmp_path: Path
) -> None:
    config = with_model(
        BIGRAM, "Bigram", {"with": {"width": 24}}, average={"decay": 0.5}
    )
    (tmp_path / "model.py").unlink()
    summary = run_stage("pretrain", inputs, config, tmp_path / "run")
    assert summary["parameters"] == 400 * 24 + 24 * 400 + 400
    assert summary["last_loss"] < summary["first_loss"] - 0.05
    weights = weights_of(tmp_path / "run")
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == {
        "embed.weight": (400, 24),
        "out.weight": (400, 24),
        "out.bias": (400,),
    }
    model = load_model(tmp_path / "run" / "data" / "model", runs_own_code=True)
    ids = torch.arange(6).view(2, 3)
    expected = (
        weights["embed.weight"][ids] @ weights["out.weight"].T + weights["out.bias"]
    )
    assert torch.allclose(model(ids), expected, atol=1e-5)
    # The validation loss is that of the saved model.
    assert set(summary["validation"]) == {"prose", "code"}
    assert (tmp_path / "run" / "data" / "model-average" / "model.safetensors").exists()
    evaluation = run_stage(
        "evaluate",
        {**inputs, "pretrain": tmp_path / "run" / "data"},
        {"prompts": ["The"], "max_new_tokens": 5, "bootstrap_samples": 10},
        tmp_path / "evaluate",
    )
    for source, measures in evaluation["models"]["pretrain"]["sources"].items():
        assert measures["loss"] == pytest.approx(
            summary["validation"][source]["loss"], rel=0.02
        )
    samples = json.loads(
        (tmp_path / "evaluate" / "data" / "evaluation.json").read_text()
    )
    assert samples["models"]["pretrain"]["samples"][0]["completion"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_model_resumes_to_the_same_bits(
    run_stage: Any,
    with_model: Any,
    inputs: dict[str, Path],
    tmp_path: Path,
    stop_pretraining: Any,
    precision: str,
) -> None:
    """In bfloat16, FSDP wraps the module even in one process."""
    config = with_model(
        BIGRAM.replace(" * self.scale", ""), "Bigram", precision=precision
    )
    run_stage("pretrain", inputs, config, tmp_path / "whole")
    stop_pretraining(inputs, config, tmp_path / "cut")
    run_stage("pretrain", inputs, config, tmp_path / "cut")
    assert_same_output(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.parallel
def test_two_ranks_train_the_same_model(
    run_stage: Any, with_model: Any, inputs: dict[str, Path], tmp_path: Path
) -> None:
    config = with_model(BIGRAM, "Bigram")
    run_stage("pretrain", inputs, config, tmp_path / "one")
    write_stage(tmp_path / "two", "pretrain", inputs, config, 4)
    train(tmp_path / "two", 2)
    assert losses_of(tmp_path / "two") == pytest.approx(
        losses_of(tmp_path / "one"), abs=1e-4
    )
    one_rank, two_ranks = weights_of(tmp_path / "one"), weights_of(tmp_path / "two")
    assert all(
        torch.allclose(one_rank[name], two_ranks[name], atol=1e-4) for name in one_rank
    )


@pytest.mark.slow
def test_model_may_take_positions_in_documents(
    run_stage: Any, with_model: Any, inputs: dict[str, Path], tmp_path: Path
) -> None:
    source = BIGRAM.replace(
        "def forward(self, tokens):",
        "def forward(self, tokens, positions):\n"
        "        assert positions.shape == tokens.shape and int(positions.max()) < 32",
    )
    config = with_model(source, "Bigram", {"document_mask": True})
    summary = run_stage("pretrain", inputs, config, tmp_path / "run")
    assert summary["last_loss"] < summary["first_loss"]


MODULE = "import torch\nfrom torch import nn\nclass M(nn.Module):\n"
EMBEDDING = MODULE + (
    "    def __init__(self, vocab_size):\n        super().__init__()\n"
    "        self.e = nn.Embedding(vocab_size, vocab_size)\n"
)


@pytest.mark.parametrize(
    ("source", "model", "message"),
    [
        (
            MODULE + "    def __init__(self): ...",
            {},
            r"model.py, line 3: M\(\) cannot be called with \(vocab_size\)",
        ),
        (
            "def M(vocab_size): return vocab_size",
            {},
            "model.py, line 1: M returned int",
        ),
        (
            "def M(vocab_size):\n    return vocab_size / 0",
            {},
            r"M failed: ZeroDivisionError: .* \(model.py, line 2\)",
        ),
        (
            EMBEDDING + "    def forward(self): ...",
            {},
            r"line 3: M.forward\(\) cannot be called with \(tokens\)",
        ),
        (
            EMBEDDING + "    def forward(self, tokens): ...",
            {"document_mask": True},
            r"be called with \(tokens, positions\)",
        ),
        (
            EMBEDDING + "    def forward(self, tokens): return self.e(tokens)[..., 1:]",
            {},
            r"shape \(2, 16, 399\) .* shape \(2, 16, 400",
        ),
        (
            EMBEDDING + "    def forward(self, tokens): return tokens",
            {},
            r"returned a tensor of shape \(2, 16\) for tokens",
        ),
        (
            EMBEDDING
            + "    def forward(self, tokens): return self.e(tokens.roll(-1, 1))",
            {},
            "M returned logits that depend",
        ),
        (
            EMBEDDING + "    def forward(self, tokens): return self.e(tokens) / 0",
            {},
            "NaN or Inf",
        ),
        (
            EMBEDDING + "        self.half()\n    def forward(self, tokens): return "
            "self.e(tokens)",
            {},
            "line 3: M has the parameter e.weight, which is not float32",
        ),
        (
            EMBEDDING + "        self.register_buffer('b', torch.ones(1))\n    def "
            "forward(self, tokens): ...",
            {},
            "buffer b; .*persistent=False",
        ),
        (
            MODULE + "    def __init__(self, vocab_size): super().__init__()\n    def "
            "forward(self, tokens): ...",
            {},
            "M has no parameters",
        ),
        (
            EMBEDDING
            + "    def forward(self, tokens):\n        return self.missing(tokens)",
            {},
            r"model:M failed: AttributeError: 'M' object has no attribute 'missing' \(model.py, line 8\)",
        ),
    ],
)
def test_wrong_model_is_rejected_with_file_and_line(
    run_stage: Any,
    with_model: Any,
    inputs: dict[str, Path],
    tmp_path: Path,
    source: str,
    model: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        run_stage("pretrain", inputs, with_model(source, "M", model), tmp_path / "run")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"sft": {"data": [{"path": "a.jsonl"}], "steps": 1}}, "sft: .*decoder"),
        ({"dpo": {"data": [{"path": "a.jsonl"}], "steps": 1}}, "dpo: .*decoder"),
        ({"export": {}}, "export: .*decoder"),
        ({"engine": {"parallel": {"tensor": 2}}}, "engine.parallel.tensor: .*decoder"),
        (
            {"engine": {"compute": {"compile": "block"}}},
            "engine.compute.compile: .*decoder",
        ),
    ],
)
def test_section_that_needs_the_decoder_is_rejected(
    stage_config: Any, tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    (tmp_path / "model.py").write_text(BIGRAM)
    with pytest.raises(ManifestError, match=message):
        stage_config(
            "pretrain",
            pretrain={"steps": 2, "model": {"use": "./model.py:Bigram"}},
            **sections,
        )


@pytest.mark.parametrize(
    ("model", "section", "message"),
    [
        ({"layers": 3}, {}, "layers .*`with`"),
        ({}, {"optimizer": {"kind": "muon"}}, "optimizer.kind cannot be muon"),
        ({}, {"float8": "rowwise"}, "float8 .*decoder"),
    ],
)
def test_key_without_effect_on_a_user_model_is_rejected(
    with_model: Any, model: dict[str, Any], section: dict[str, Any], message: str
) -> None:
    with pytest.raises(ManifestError, match=message):
        with_model(BIGRAM, "Bigram", model, **section)


@pytest.mark.slow
def test_code_in_a_model_folder_runs_only_in_its_own_run(
    run_stage: Any, with_model: Any, inputs: dict[str, Path], tmp_path: Path
) -> None:
    run_stage(
        "pretrain", inputs, with_model(BIGRAM, "Bigram", steps=1), tmp_path / "run"
    )
    folder = tmp_path / "run" / "data" / "model"
    for use in (load_model, check_model):
        with pytest.raises(WeightsError, match="model:Bigram"):
            use(folder)
