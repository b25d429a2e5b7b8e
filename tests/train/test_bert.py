"""BERT's shape: logits equal those of transformers, from its files and back, and
unsupported settings are rejected.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM

from gristmill.core.files import write_json
from gristmill.mixtures.loader import ManifestError
from gristmill.mixtures.schema.engine import Compute
from gristmill.mixtures.schema.pretrain import Pretrain
from gristmill.tokenize.packed import PackedSet
from gristmill.train.models.encoder import Bert
from gristmill.train.models.hf_configs import (
    UnknownArchitectureError,
    hf_config,
    shape_from_hf,
)
from gristmill.train.models.model_config import (
    ShapeError,
    shape_from_json,
    shape_to_json,
    shape_to_train,
)
from gristmill.train.models.tensor_files import write_tensors
from gristmill.train.models.transformer import configure
from gristmill.train.models.weights import (
    WeightsError,
    check_model,
    load_model,
    read_shape,
    save_model,
)
from gristmill.train.planning.flops import flops_per_token
from gristmill.train.stages.export import exported_tensors
from tests.train.counted_step import count_step
from tests.train.test_masked_rows import ENCODER, MASK, make_inputs

VOCAB, LENGTH = 100, 24
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
}


@pytest.fixture(scope="module")
def inputs(
    tmp_path_factory: pytest.TempPathFactory, texts: dict[str, str]
) -> dict[str, Path]:
    return make_inputs(tmp_path_factory, texts, [MASK])


@pytest.fixture
def config(pretrain_config: dict[str, Any]) -> dict[str, Any]:
    return {
        **pretrain_config,
        "model": {**ENCODER, "norm_eps": 1e-12},
        "masked": {"shape": "bert", "rate": 0.15},
    }


@pytest.fixture(scope="module")
def reference_model() -> Any:
    """A model of transformers with weights and biases large enough for a mistake to
    show in the logits.
    """
    torch.manual_seed(1)
    model = BertForMaskedLM(BertConfig(**SIZES)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("LayerNorm.weight") else 0.0, 0.2)
    return model


def drawn_ids(rows: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(
        1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(0)
    )


def test_logits_equal_those_of_transformers_here_and_after_export(
    reference_model: Any, tmp_path: Path
) -> None:
    reference_model.save_pretrained(tmp_path / "reference_model")
    assert check_model(tmp_path / "reference_model", "encoder").bert
    ours, ids = load_model(tmp_path / "reference_model", kind="encoder"), drawn_ids(3)
    with torch.no_grad():
        expected = reference_model(ids).logits
        torch.testing.assert_close(ours(ids), expected, atol=1e-5, rtol=1e-4)
    save_model(tmp_path / "ours", ours.shape, dict(ours.named_parameters()))
    assert read_shape(tmp_path / "ours") == ours.shape
    exported = tmp_path / "exported"
    write_json(exported / "config.json", hf_config(ours.shape, "float32", [0], 1))
    write_tensors(
        exported / "model.safetensors",
        exported_tensors(tmp_path / "ours", ours.shape, torch.float32),
    )
    with torch.no_grad():
        reloaded, report = AutoModelForMaskedLM.from_pretrained(
            exported, output_loading_info=True
        )
        assert not any(
            report[kind]
            for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        )
        assert torch.equal(reloaded.eval()(ids).logits, expected)


def test_documents_are_separate_and_padding_is_masked(
    reference_model: Any, tmp_path: Path
) -> None:
    reference_model.save_pretrained(tmp_path)
    ours, ids = load_model(tmp_path, kind="encoder"), drawn_ids(1)
    positions = torch.tensor([[*range(10), *range(9), *[-1] * 5]])
    with torch.no_grad():
        logits = ours(ids, positions=positions)
        for part in (slice(0, 10), slice(10, 19)):
            torch.testing.assert_close(
                logits[:, part],
                reference_model(ids[:, part]).logits,
                atol=1e-5,
                rtol=1e-4,
            )
        padded = ours(ids, positions=torch.tensor([[*range(19), *[-1] * 5]]))
        mask = (torch.arange(LENGTH) < 19).long()[None]
        torch.testing.assert_close(
            padded[:, :19],
            reference_model(ids, attention_mask=mask).logits[:, :19],
            atol=1e-5,
            rtol=1e-4,
        )
    with pytest.raises(ValueError, match=r"25 tokens .* 24 positions"):
        ours(drawn_ids(1, 25))


@pytest.mark.slow
def test_trained_bert_is_exported_evaluated_and_trained_further(
    run_stage: Any, inputs: dict[str, Path], config: dict[str, Any], tmp_path: Path
) -> None:
    run_stage("pretrain", inputs, {**config, "steps": 3}, tmp_path / "run")
    run_stage(
        "export",
        {"tokenizer": inputs["tokenizer"], "pretrain": tmp_path / "run" / "data"},
        {},
        tmp_path / "out",
    )
    folder = tmp_path / "out" / "data"
    reference_model, report = AutoModelForMaskedLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert isinstance(reference_model, BertForMaskedLM)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert reference_model.config.layer_norm_eps == 1e-12
    rows = torch.from_numpy(
        PackedSet(inputs["mix"]).read(np.arange(4)).astype(np.int64)
    )
    for ours in (
        load_model(tmp_path / "run" / "data" / "model", kind="encoder"),
        load_model(folder, kind="encoder"),
    ):
        with torch.no_grad():
            torch.testing.assert_close(
                ours(rows), reference_model.eval()(rows).logits, atol=1e-5, rtol=1e-5
            )
        assert ours.shape.parameters == sum(
            parameter.numel() for parameter in ours.parameters()
        )
    bias = reference_model.cls.predictions.bias
    assert bias.shape == (ours.shape.vocab_size,)
    assert bias.abs().max() > 0
    assert "A bert encoder" in (folder / "README.md").read_text()
    evaluation = run_stage(
        "evaluate",
        {**inputs, "pretrain": tmp_path / "run" / "data"},
        {"seed": 2},
        tmp_path / "eval",
    )
    for measures in evaluation["models"]["pretrain"]["sources"].values():
        assert 0 < measures["masked_loss"] < math.log(10 * ours.shape.vocab_size)
    with pytest.raises(WeightsError, match="is an encoder"):
        load_model(folder)
    again = {
        **config,
        "model": {"init_from": str(folder)},
        "masked": {},
        "optimizer": {"learning_rate": 1e-9},
    }
    run_stage("pretrain", inputs, {**again, "steps": 1}, tmp_path / "again")
    after = load_model(
        tmp_path / "again" / "data" / "model", kind="encoder"
    ).state_dict()
    for name, tensor in ours.state_dict().items():
        assert torch.allclose(after[name], tensor, atol=1e-6), name


def test_rows_longer_than_the_positions_are_rejected(
    run_stage: Any,
    inputs: dict[str, Path],
    config: dict[str, Any],
    reference_model: Any,
    tmp_path: Path,
) -> None:
    """Rows of the set have 32 tokens, and 400 ids."""
    wide = BertForMaskedLM(BertConfig(**{**SIZES, "vocab_size": 400}))
    wide.save_pretrained(tmp_path / "reference_model")
    with pytest.raises(WeightsError, match=r"24 learned positions.* 32 tokens"):
        run_stage(
            "pretrain",
            inputs,
            {
                **config,
                "masked": {},
                "model": {"init_from": str(tmp_path / "reference_model")},
            },
            tmp_path / "run",
        )


def test_checkpointing_keeps_gradients_and_flops_match_the_count() -> None:
    section = Pretrain.model_validate(
        {
            "steps": 1,
            "masked": {"shape": "bert"},
            "model": {"layers": 2, "width": 64, "heads": 4},
        }
    )
    shape = shape_to_train(section, 256, 128)
    assert (shape.bert, shape.ffn_width) == (True, 256)
    assert shape_from_json(shape_to_json(shape)) == shape
    model, ids, gradients = Bert(shape), torch.randint(0, 256, (2, 128)), []
    assert shape.parameters == sum(
        parameter.numel() for parameter in model.parameters()
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    for checkpointing in ("off", "full"):
        configure(
            model, Compute.model_validate({"activation_checkpointing": checkpointing})
        )
        model.zero_grad()
        model(ids).square().mean().backward()
        gradients.append(
            torch.cat(
                [
                    parameter_.grad.flatten()
                    for parameter_ in model.parameters()
                    if parameter_.grad is not None
                ]
            )
        )
    assert torch.equal(*gradients)
    assert (gradients[0] != 0).float().mean() > 0.9
    num_flops, _ = count_step(Bert(shape), ids)
    assert flops_per_token(shape, 128).whole * ids.numel() == pytest.approx(
        num_flops, rel=0.05
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"type_vocab_size": 1}, "type_vocab_size"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"hidden_size": None}, "has no hidden_size"),
    ],
)
def test_unsupported_bert_config_is_rejected_by_key(
    change: dict[str, Any], message: str
) -> None:
    config = {"model_type": "bert", **SIZES}
    assert shape_from_hf(config).norm_eps == 1e-12
    with pytest.raises((ShapeError, UnknownArchitectureError), match=message):
        shape_from_hf({**config, **change})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"rope_theta": 500.0}, "rope_theta"),
        ({"tied_embeddings": False}, "tied_embeddings"),
        ({"qk_norm": True}, "qk_norm"),
        ({"init_from": "folder"}, "masked.shape"),
    ],
)
def test_model_key_that_bert_lacks_is_rejected_before_any_work(
    stage_config: Any, model: dict[str, Any], message: str
) -> None:
    with pytest.raises(ManifestError, match=message):
        stage_config(
            "pretrain",
            tokenizer={"vocab_size": 300, "special_tokens": [MASK]},
            pretrain={"steps": 2, "masked": {"shape": "bert"}, "model": model},
        )
