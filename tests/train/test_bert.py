"""BERT's own shape: the same logits as transformers, from its files and back, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM

from gristmill.core.files import write_json
from gristmill.mixtures.engine import Compute
from gristmill.mixtures.load import ManifestError
from gristmill.mixtures.training import Pretrain
from gristmill.tokenize.packed import PackedSet
from gristmill.train.models.bert import Bert
from gristmill.train.models.decoder import configure
from gristmill.train.models.hf_configs import UnknownArchitectureError, hf_config, shape_from_hf
from gristmill.train.models.model_config import shape_from_json, shape_to_json, shape_to_train
from gristmill.train.models.tensor_files import write_tensors
from gristmill.train.models.weights import WeightsError, check_model, load_model, read_shape, save_model
from gristmill.train.planning.flops import flops_per_token
from gristmill.train.planning.measured_step import _count
from gristmill.train.stages.export import exported_tensors
from tests.train.test_masked_rows import ENCODER, MASK, made_inputs

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
def inputs(tmp_path_factory: pytest.TempPathFactory, texts: dict[str, str]) -> dict[str, Path]:
    return made_inputs(tmp_path_factory, texts, [MASK])


@pytest.fixture
def config(pretrain_config: dict[str, Any]) -> dict[str, Any]:
    return {**pretrain_config, "model": {**ENCODER, "norm_eps": 1e-12}, "masked": {"shape": "bert", "rate": 0.15}}


@pytest.fixture(scope="module")
def theirs() -> Any:
    """transformers' model, with weights and biases large enough for a mistake to show in the logits."""
    torch.manual_seed(1)
    model = BertForMaskedLM(BertConfig(**SIZES)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("LayerNorm.weight") else 0.0, 0.2)
    return model


def drawn_ids(rows: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(0))


def test_a_bert_of_transformers_gives_the_same_logits_here_and_after_its_export(theirs: Any, tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path / "theirs")
    assert check_model(tmp_path / "theirs", "encoder").bert
    ours, ids = load_model(tmp_path / "theirs", kind="encoder"), drawn_ids(3)
    with torch.no_grad():
        expected = theirs(ids).logits
        torch.testing.assert_close(ours(ids), expected, atol=1e-5, rtol=1e-4)
    save_model(tmp_path / "ours", ours.shape, dict(ours.named_parameters()))
    assert read_shape(tmp_path / "ours") == ours.shape
    exported = tmp_path / "exported"
    write_json(exported / "config.json", hf_config(ours.shape, "float32", [0], 1))
    write_tensors(exported / "model.safetensors", exported_tensors(tmp_path / "ours", ours.shape, torch.float32))
    with torch.no_grad():
        back, report = AutoModelForMaskedLM.from_pretrained(exported, output_loading_info=True)
        assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert torch.equal(back.eval()(ids).logits, expected)


def test_documents_are_apart_with_positions_of_their_own_and_padding_is_seen_by_none(
    theirs: Any, tmp_path: Path
) -> None:
    theirs.save_pretrained(tmp_path)
    ours, ids = load_model(tmp_path, kind="encoder"), drawn_ids(1)
    positions = torch.tensor([[*range(10), *range(9), *[-1] * 5]])
    with torch.no_grad():
        found = ours(ids, positions=positions)
        for part in (slice(0, 10), slice(10, 19)):
            torch.testing.assert_close(found[:, part], theirs(ids[:, part]).logits, atol=1e-5, rtol=1e-4)
        padded = ours(ids, positions=torch.tensor([[*range(19), *[-1] * 5]]))
        mask = (torch.arange(LENGTH) < 19).long()[None]
        torch.testing.assert_close(
            padded[:, :19], theirs(ids, attention_mask=mask).logits[:, :19], atol=1e-5, rtol=1e-4
        )
    with pytest.raises(ValueError, match="a row of 25 tokens is longer than the 24 positions"):
        ours(drawn_ids(1, 25))


def test_a_trained_one_is_exported_measured_and_trained_on(
    run_stage: Any, inputs: dict[str, Path], config: dict[str, Any], tmp_path: Path
) -> None:
    run_stage("pretrain", inputs, {**config, "steps": 3}, tmp_path / "run")
    run_stage("export", {"tokenizer": inputs["tokenizer"], "pretrain": tmp_path / "run" / "data"}, {}, tmp_path / "out")
    folder = tmp_path / "out" / "data"
    theirs, told = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert isinstance(theirs, BertForMaskedLM)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert theirs.config.layer_norm_eps == 1e-12
    rows = torch.from_numpy(PackedSet(inputs["mix"]).read(np.arange(4)).astype(np.int64))
    for ours in (load_model(tmp_path / "run" / "data" / "model", kind="encoder"), load_model(folder, kind="encoder")):
        with torch.no_grad():
            torch.testing.assert_close(ours(rows), theirs.eval()(rows).logits, atol=1e-5, rtol=1e-5)
        assert ours.shape.parameters == sum(one.numel() for one in ours.parameters())
    bias = theirs.cls.predictions.bias
    assert bias.shape == (ours.shape.vocab_size,)
    assert bias.abs().max() > 0
    assert "A bert encoder" in (folder / "README.md").read_text()
    found = run_stage("evaluate", {**inputs, "pretrain": tmp_path / "run" / "data"}, {"seed": 2}, tmp_path / "eval")
    for measured in found["models"]["pretrain"]["sources"].values():
        assert 1 < measured["pseudo_perplexity"] < 10 * ours.shape.vocab_size
    with pytest.raises(WeightsError, match="is an encoder, which fills in masked tokens and cannot write text"):
        load_model(folder)
    again = {**config, "model": {"init_from": str(folder)}, "masked": {}, "optimizer": {"learning_rate": 1e-9}}
    run_stage("pretrain", inputs, {**again, "steps": 1}, tmp_path / "again")
    after = load_model(tmp_path / "again" / "data" / "model", kind="encoder").state_dict()
    for name, tensor in ours.state_dict().items():
        assert torch.allclose(after[name], tensor, atol=1e-6), name


def test_rows_longer_than_its_positions_are_refused(
    run_stage: Any, inputs: dict[str, Path], config: dict[str, Any], theirs: Any, tmp_path: Path
) -> None:
    """The set's rows have 32 tokens, and 400 ids."""
    wide = BertForMaskedLM(BertConfig(**{**SIZES, "vocab_size": 400}))
    wide.save_pretrained(tmp_path / "theirs")
    with pytest.raises(WeightsError, match="has 24 learned positions, but rows have 32 tokens"):
        run_stage(
            "pretrain",
            inputs,
            {**config, "masked": {}, "model": {"init_from": str(tmp_path / "theirs")}},
            tmp_path / "run",
        )


def test_forgotten_activations_change_no_gradient_and_plan_counts_what_is_computed() -> None:
    section = Pretrain.model_validate(
        {"steps": 1, "masked": {"shape": "bert"}, "model": {"layers": 2, "width": 64, "heads": 4}}
    )
    shape = shape_to_train(section, 256, 128)
    assert (shape.bert, shape.ffn_width) == (True, 256)
    assert shape_from_json(shape_to_json(shape)) == shape
    model, ids, found = Bert(shape), torch.randint(0, 256, (2, 128)), []
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    for forgotten in ("off", "full"):
        configure(model, Compute.model_validate({"activation_checkpointing": forgotten}))
        model.zero_grad()
        model(ids).square().mean().backward()
        found.append(torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None]))
    assert torch.equal(*found)
    assert (found[0] != 0).float().mean() > 0.9
    counted, _ = _count(Bert(shape), ids)
    assert flops_per_token(shape, 128).whole * ids.numel() == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"type_vocab_size": 1}, "type_vocab_size"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"hidden_size": None}, "has no hidden_size"),
    ],
)
def test_a_bert_that_computes_something_else_is_refused_by_the_name_of_its_key(
    change: dict[str, Any], named: str
) -> None:
    config = {"model_type": "bert", **SIZES}
    assert shape_from_hf(config).norm_eps == 1e-12
    with pytest.raises(UnknownArchitectureError, match=named):
        shape_from_hf({**config, **change})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"rope_theta": 500.0}, "rope_theta has no effect on the BERT that `masked` trains"),
        ({"tied_embeddings": False}, "tied_embeddings has no effect on the BERT"),
        ({"qk_norm": True}, "qk_norm has no effect on the BERT"),
        ({"init_from": "folder"}, "config.json decides masked.shape; remove it"),
    ],
)
def test_what_it_does_not_have_is_refused_before_any_work(
    stage_config: Any, model: dict[str, Any], message: str
) -> None:
    with pytest.raises(ManifestError, match=message):
        stage_config(
            "pretrain",
            tokenizer={"vocab_size": 300, "special_tokens": [MASK]},
            pretrain={"steps": 2, "masked": {"shape": "bert"}, "model": model},
        )
