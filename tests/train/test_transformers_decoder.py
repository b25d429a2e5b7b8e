"""Decoders of transformers: loaded, trained, generated from and exported with its own
classes, next to the same modules in plain PyTorch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gristmill.core.files import read_json, write_json
from gristmill.mixtures.schema.evaluation import Export
from gristmill.mixtures.schema.posttraining import Lora
from gristmill.train.adapters.lora import LoraLinear
from gristmill.train.generation.scheduler import generate
from gristmill.train.models import transformers_decoder
from gristmill.train.models.gguf_model import GgufError
from gristmill.train.models.hf_configs import UnknownArchitectureError
from gristmill.train.models.model_config import TransformersShape
from gristmill.train.models.transformers_decoder import (
    LogitMap,
    NotCausalError,
    check_module,
    module_of,
)
from gristmill.train.models.weights import (
    WeightsError,
    check_model,
    load_model,
    read_shape,
)
from gristmill.train.stages.export import write_folder
from tests.train.decoder_families import (
    FAMILIES,
    SEPARATED,
    VOCAB,
    hf_model,
    random_ids,
    save_tiny_decoder,
    tiny_decoder,
)

QUICK = ("gemma2", "gpt2")
PARAMETRISED = [
    pytest.param(family, marks=() if family in QUICK else pytest.mark.slow)
    for family in FAMILIES
]


@pytest.mark.parametrize("family", PARAMETRISED)
@torch.no_grad()
def test_logits_and_exported_files_are_those_of_transformers(
    family: str, run_stage: Any, given_model: Any, tmp_path: Path
) -> None:
    given = given_model(family)
    published = tmp_path / family
    ids = random_ids(2, 20)
    expected = hf_model(published)(ids, use_cache=False).logits
    for folder in (published, given["model"] / "model"):
        shape = check_model(folder, implementation="transformers")
        assert isinstance(shape, TransformersShape)
        logits = load_model(folder)(ids)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    out = tmp_path / "exported"
    write_folder(
        given["model"] / "model", given["tokenizer"], Export(dtype="fp32"), out
    )
    tensors = load_file(published / "model.safetensors")
    exported = load_file(out / "model.safetensors")
    assert exported.keys() == tensors.keys()
    assert all(torch.equal(exported[name], tensors[name]) for name in tensors)
    assert read_json(out / "config.json") == read_json(published / "config.json")
    assert torch.equal(hf_model(out)(ids, use_cache=False).logits, expected)


def test_published_model_is_built_once_while_it_opens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_tiny_decoder("gpt2", tmp_path)
    built: list[str] = []

    def count(config: Any) -> Any:
        built.append(config["model_type"])
        return module_of(config)

    monkeypatch.setattr(transformers_decoder, "module_of", count)
    transformers_decoder._without_weights.cache_clear()
    first, second = load_model(tmp_path), load_model(tmp_path)
    assert built == ["gpt2"]
    assert not {*first.parameters()} & {*second.parameters()}
    state = second.state_dict()
    assert all(torch.equal(state[name], x) for name, x in first.state_dict().items())
    assert first.state_dict().keys() == state.keys()


@pytest.mark.parametrize("family", PARAMETRISED)
def test_documents_of_a_row_are_computed_as_if_alone(
    family: str, tmp_path: Path
) -> None:
    save_tiny_decoder(family, tmp_path)
    model: Any = load_model(tmp_path)
    check_module(model, torch.float32)
    assert model.separates_documents == (family in SEPARATED)
    ids = random_ids(1, 30)
    lengths = (3, 12, 9)
    positions = torch.cat([torch.arange(length) for length in lengths])
    positions = torch.cat((positions, torch.full((6,), -1)))[None]
    packed = model(ids, positions=positions)[:, : sum(lengths)]
    alone = torch.cat([model(part) for part in ids[:, :24].split(lengths, 1)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "factor", "cap"),
    [
        ("gemma2", 1.0, 30.0),
        ("gemma4_text", 1.0, 20.0),
        ("granite", 0.25, None),
        ("cohere", 0.25, None),
        ("phi", 1.0, None),
    ],
)
@torch.no_grad()
def test_heads_get_hidden_states_and_the_output_matrix(
    family: str, factor: float, cap: float | None, tmp_path: Path
) -> None:
    """Phi's output layer has a bias, a further column of the matrix."""
    theirs = save_tiny_decoder(family, tmp_path)
    model: Any = load_model(tmp_path)
    assert model.logit_map == LogitMap(factor, cap)
    ids = random_ids(2, 20)
    hidden, matrix = model(ids, lambda hidden, output: (hidden, output))
    if cap is not None:
        assert matrix.cap == cap
        matrix = matrix.matrix
    width = 32 + (family == "phi")
    assert (hidden.shape, matrix.shape) == ((2, 20, width), (VOCAB, width))
    expected = theirs(ids, use_cache=False).logits
    torch.testing.assert_close(model(ids), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("change", ["squares", "adapter"])
@torch.no_grad()
def test_heads_get_logits_of_other_output_layers(change: str, tmp_path: Path) -> None:
    save_tiny_decoder("olmo2", tmp_path)
    model: Any = load_model(tmp_path)
    assert model.logit_map is not None
    before = model(random_ids(1, 9))
    if change == "squares":
        model.lm_head.register_forward_hook(lambda *call: call[2].square())
        before = before.square()
    else:
        model.lm_head = LoraLinear(model.lm_head, Lora(rank=2)).float()
        model.lm_head.weight.copy_(hf_model(tmp_path).lm_head.weight)
        model.lm_head.lora_B.weight.zero_()
    check_module(model, torch.float32)
    assert model.logit_map is None
    torch.testing.assert_close(model(random_ids(1, 9)), before)


def test_tensors_are_read_by_name_and_converted_ones_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of GPT-NeoX name the output layer otherwise than its module."""
    from transformers import AutoModelForCausalLM

    whole: Any = AutoModelForCausalLM.from_pretrained
    loaded = []

    def count(folder: Path, **options: Any) -> Any:
        loaded.append(Path(folder).name)
        return whole(folder, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", count)
    for family in ("gemma2", "gpt_neox", "deepseek_v3"):
        published = tmp_path / family
        tiny_decoder(family).save_pretrained(published, max_shard_size="20KB")
        assert len(list(published.glob("*.safetensors"))) > 1
        load_model(published)
    assert loaded == ["deepseek_v3"]


@pytest.mark.parametrize("family", ["gemma2", "deepseek_v3"])
def test_missing_and_mismatched_tensors_are_refused(
    family: str, tmp_path: Path
) -> None:
    save_tiny_decoder(family, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    norm = tensors.pop("model.norm.weight")
    for changed in ({}, {"model.norm.weight": norm[:5].clone()}):
        save_file({**tensors, **changed}, file, metadata={"format": "pt"})
        with pytest.raises(WeightsError):
            load_model(tmp_path)


@pytest.mark.parametrize("family", PARAMETRISED)
@torch.no_grad()
def test_greedy_continuations_are_those_of_transformers(
    family: str, tmp_path: Path
) -> None:
    theirs = save_tiny_decoder(family, tmp_path)
    prompts = [ids.tolist() for ids in (random_ids(1, 9)[0], random_ids(1, 4)[0])]
    ours = generate(load_model(tmp_path), prompts, 12, {0})
    for prompt, continuation in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        while ids.shape[1] < len(prompt) + 12:
            token = theirs(ids, use_cache=False).logits[0, -1].argmax()
            if token == 0:
                break
            ids = torch.cat((ids, token.view(1, 1)), dim=1)
        assert continuation == ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", PARAMETRISED)
def test_gguf_of_classes_of_transformers_is_refused(
    family: str, run_stage: Any, given_model: Any, tmp_path: Path
) -> None:
    with pytest.raises(GgufError):
        run_stage("export", given_model(family), {"gguf": ["f16"]}, tmp_path / "export")


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"model_type": "no-such-model"}, UnknownArchitectureError),
        ({"architectures": ["Gemma2ForTokenClassification"]}, UnknownArchitectureError),
        ({"quantization_config": {"quant_method": "gptq"}}, WeightsError),
    ],
)
def test_other_folders_are_refused(
    config: dict[str, Any], error: type[Exception], tmp_path: Path
) -> None:
    save_tiny_decoder("gemma2", tmp_path)
    before = read_json(tmp_path / "config.json")
    write_json(tmp_path / "config.json", {**before, **config})
    with pytest.raises(error):
        check_model(tmp_path)


def test_implementation_chooses_the_code(tmp_path: Path) -> None:
    save_tiny_decoder("gemma2", tmp_path)
    with pytest.raises(UnknownArchitectureError):
        read_shape(tmp_path, "own")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightsError):
        check_model(tmp_path)


def test_module_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    save_tiny_decoder("gemma2", tmp_path)
    model: Any = load_model(tmp_path)
    model.config.is_causal = False
    with pytest.raises(NotCausalError):
        check_module(model, torch.float32)
