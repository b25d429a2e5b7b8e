"""Model families: logits equal those of transformers, from its files and back into
them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.core.files import read_json, write_json
from gristmill.mixtures.model_families import FAMILIES as FAMILY_NAMES
from gristmill.mixtures.schema.model import RopeScaling
from gristmill.train.models.hf_configs import (
    ARCHITECTURES,
    UnknownArchitectureError,
    family_of,
    hf_config,
    shape_from_hf,
)
from gristmill.train.models.model_config import (
    Published,
    Shape,
    ShapeError,
    shape_from_json,
    shape_to_json,
)
from gristmill.train.models.rope import frequencies
from gristmill.train.models.tensor_files import write_tensors
from gristmill.train.models.transformer import Llama
from gristmill.train.models.weights import (
    WeightsError,
    check_model,
    load_model,
    read_shape,
    save_model,
)
from gristmill.train.stages.export import exported_tensors

VOCAB, LENGTH = 100, 24
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": False,
}
PLAIN = {"rope_type": "default", "rope_theta": 500.0}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONG_POSITIONS = {"max_position_embeddings": 4 * LENGTH}
FAMILIES = {
    "llama": ("LlamaConfig", {"rope_parameters": PLAIN}),
    "llama-linear": ("LlamaConfig", {"rope_parameters": LINEAR}),
    "llama-3.1": ("LlamaConfig", {"rope_parameters": LLAMA3, "head_dim": 16}),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "mistral": ("MistralConfig", {"rope_parameters": PLAIN, "sliding_window": None}),
    "mistral-window": (
        "MistralConfig",
        {"rope_parameters": PLAIN, "sliding_window": LENGTH, **LONG_POSITIONS},
    ),
    "qwen2": ("Qwen2Config", {"rope_parameters": PLAIN}),
    "qwen3": ("Qwen3Config", {"rope_parameters": PLAIN, "head_dim": 16}),
    "glm": (
        "GlmConfig",
        {
            "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5},
            "head_dim": 16,
            "pad_token_id": 0,
        },
    ),
    "glm-plain": (
        "GlmConfig",
        {
            "rope_parameters": {**YARN, "partial_rotary_factor": 0.5},
            "attention_bias": False,
            "pad_token_id": 0,
        },
    ),
    "mixtral": (
        "MixtralConfig",
        {"rope_parameters": PLAIN, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            "rope_parameters": PLAIN,
            "head_dim": 16,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe-sums": (
        "Qwen3MoeConfig",
        {
            "rope_parameters": PLAIN,
            "head_dim": 16,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": False,
        },
    ),
}


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(
        0, VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(0)
    )


def reference_model(name: str) -> Any:
    """Make a model of transformers with weights large enough for a mistake to show in
    the logits.
    """
    import transformers

    kind, further = FAMILIES[name]
    torch.manual_seed(1)
    config = getattr(transformers, kind)(**{**SIZES, **further})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in parameter_name else 0.0, 0.2)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_transformers_here_and_after_export(
    name: str, ids: torch.Tensor, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    theirs = reference_model(name)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    # the weights are in several files
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    ours = load_model(tmp_path / "theirs")
    with torch.no_grad():
        expected = theirs(ids).logits
        torch.testing.assert_close(ours(ids), expected, atol=1e-5, rtol=1e-4)
    save_model(tmp_path / "ours", ours.shape, dict(ours.named_parameters()))
    assert read_shape(tmp_path / "ours") == ours.shape
    exported = tmp_path / "exported"
    write_json(exported / "config.json", hf_config(ours.shape, "float32", [0], 1))
    write_tensors(
        exported / "model.safetensors",
        exported_tensors(tmp_path / "ours", ours.shape, torch.float32),
    )
    assert read_json(exported / "config.json")["model_type"] == theirs.config.model_type
    with torch.no_grad():
        reloaded, report = AutoModelForCausalLM.from_pretrained(
            exported, output_loading_info=True
        )
        assert not any(
            report[kind]
            for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        )
        torch.testing.assert_close(
            reloaded.eval()(ids).logits, expected, atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize(
    "rope", [LINEAR, LLAMA3, YARN, {**YARN, "beta_fast": 8.0, "attention_factor": 1.5}]
)
@pytest.mark.parametrize("channels", [8, 64])
def test_rotary_frequencies_equal_those_of_transformers(
    rope: dict[str, Any], channels: int
) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        **{**SIZES, "head_dim": channels},
        rope_parameters={**rope, "rope_theta": 10_000.0},
    )
    expected, their_scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](
        config, torch.device("cpu")
    )
    scaling = shape_from_hf(config.to_dict()).rope_scaling
    table, our_scale = frequencies(channels, 10_000.0, scaling, torch.device("cpu"))
    torch.testing.assert_close(table, expected, rtol=1e-6, atol=0)
    assert our_scale == pytest.approx(their_scale)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma2"}, "model_type 'gemma2'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        (
            {"rope_parameters": {**LINEAR, "rope_type": "dynamic"}},
            r"rope_parameters.rope_type",
        ),
        ({"rope_parameters": {**YARN, "mscale": 1.0}}, "rope_parameters"),
        (
            {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"rms_norm_eps": None}, "has no rms_norm_eps"),
    ],
)
def test_unsupported_config_is_rejected_by_key(
    change: dict[str, Any], message: str
) -> None:
    config = {"model_type": "llama", **SIZES, "rope_parameters": PLAIN}
    shape_from_hf(config)
    with pytest.raises((ShapeError, UnknownArchitectureError), match=message):
        shape_from_hf({**config, **change})


def test_rows_are_at_most_as_long_as_the_sliding_window() -> None:
    """Mistral 7B v0.1: positions to 32,768, a window of 4,096."""
    config = {
        "model_type": "mistral",
        **SIZES,
        "rope_parameters": PLAIN,
        "sliding_window": 8,
        "eos_token_id": 2,
    }
    shape = shape_from_hf(config)
    assert shape.sequence_length == 8
    with pytest.raises(ShapeError, match="sliding window"):
        replace(shape, sequence_length=9)
    assert shape_from_hf({**config, "sliding_window": None}).sequence_length == LENGTH
    assert (
        shape_from_hf(
            {**config, "model_type": "qwen2", "use_sliding_window": False}
        ).sequence_length
        == LENGTH
    )


def test_mistral_keeps_its_window_and_end_of_text_ids() -> None:
    config = {
        "model_type": "mistral",
        **SIZES,
        "rope_parameters": PLAIN,
        "sliding_window": 8,
        "eos_token_id": 2,
    }
    shape = shape_from_json(
        json.loads(json.dumps(shape_to_json(shape_from_hf(config))))
    )
    assert shape.published == Published("mistral", (2,), 8)
    exported = hf_config(shape, "float32", [2], 1)
    assert (exported["architectures"], exported["sliding_window"]) == (
        ["MistralForCausalLM"],
        8,
    )
    assert exported["max_position_embeddings"] == 8


def test_list_of_families_matches_the_architectures() -> None:
    assert FAMILY_NAMES.keys() == ARCHITECTURES.keys()
    with pytest.raises(UnknownArchitectureError) as error:
        shape_from_hf({"model_type": "gemma2"})
    assert all(model_type in str(error.value) for model_type in ARCHITECTURES)


def test_config_of_older_transformers_is_read() -> None:
    scaling = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    older = {
        "model_type": "llama",
        **SIZES,
        "rope_theta": 500.0,
        "rope_scaling": scaling,
    }
    newer = {"model_type": "llama", **SIZES, "rope_parameters": LLAMA3}
    assert shape_from_hf(older) == shape_from_hf(newer)


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({}, "llama"),
        ({"qkv_bias": True}, "qwen2"),
        ({"qk_norm": True}, "qwen3"),
        ({"qkv_bias": True, "rotary_share": 0.5}, "glm"),
        ({"rotary_share": 0.5}, "glm"),
        ({"experts": 4, "experts_per_token": 2}, "mixtral"),
        ({"experts": 4, "experts_per_token": 2, "qk_norm": True}, "qwen3_moe"),
        (
            {
                "rope_scaling": RopeScaling(
                    kind="yarn", factor=2.0, original_length=8, beta_fast=16.0
                )
            },
            "llama",
        ),
    ],
)
def test_shape_round_trips_through_both_config_files(
    changes: dict[str, Any], family: str, tiny_shape: Shape
) -> None:
    shape = replace(tiny_shape, padded_vocab_size=VOCAB, **changes)
    assert family_of(shape) == family
    assert shape_from_json(json.loads(json.dumps(shape_to_json(shape)))) == shape
    assert (
        shape_from_hf(json.loads(json.dumps(hf_config(shape, "float32", [0], 1))))
        == shape
    )


def test_config_with_a_missing_and_an_unknown_key_is_rejected(
    tiny_shape: Shape, tmp_path: Path
) -> None:
    config = shape_to_json(tiny_shape)
    del config["norm_eps"]
    write_json(tmp_path / "config.json", {**config, "gates": 3})
    with pytest.raises(
        ShapeError, match=f"^{tmp_path}: config.json: norm_eps: .*; gates: "
    ):
        read_shape(tmp_path)


def test_weights_that_do_not_fit_their_config_are_rejected(
    tiny_shape: Shape, make_model: Callable[[Shape], Llama], tmp_path: Path
) -> None:
    save_model(tmp_path, tiny_shape, dict(make_model(tiny_shape).named_parameters()))
    for changes, message in (
        ({"ffn_width": 64}, r"gate_proj.weight .*\D48, 32\D.*\D64, 32\D"),
        ({"layers": 3}, "has no tensor model.layers.2."),
    ):
        write_json(
            tmp_path / "config.json", shape_to_json(replace(tiny_shape, **changes))
        )
        with pytest.raises(WeightsError, match=message):
            load_model(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "model.safetensors",
            b"no safetensors",
            "model.safetensors is not a safetensors file",
        ),
        (
            "model.safetensors",
            b"\xff" * 64,
            "model.safetensors is not a safetensors file",
        ),
        ("model.safetensors.index.json", b"[1]", "model.safetensors.index.json"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": [1]}',
            "`weight_map`",
        ),
        ("config.json", b"{", "config.json"),
        ("config.json", b"[]", "config.json"),
    ],
)
def test_damaged_file_of_a_model_is_named(
    tiny_shape: Shape,
    make_model: Callable[[Shape], Llama],
    tmp_path: Path,
    file: str,
    content: bytes,
    message: str,
) -> None:
    save_model(tmp_path, tiny_shape, dict(make_model(tiny_shape).named_parameters()))
    assert check_model(tmp_path) == tiny_shape
    (tmp_path / file).write_bytes(content)
    for read in (load_model, check_model):
        with pytest.raises(WeightsError, match=re.escape(message)):
            read(tmp_path)


@pytest.mark.parametrize("value", [1e9, 10**9, 0, -1, "12", None, [2], True])
@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings"]
)
def test_invalid_sizes_are_rejected_before_building_a_model(
    tmp_path: Path, key: str, value: Any
) -> None:
    config = {
        **SIZES,
        "model_type": "llama",
        "rope_parameters": PLAIN,
        "hidden_act": "silu",
        key: value,
    }
    write_json(tmp_path / "config.json", config)
    if key == "max_position_embeddings" and value == 10**9 and isinstance(value, int):
        assert read_shape(tmp_path).sequence_length == value
        return
    with pytest.raises(
        (ShapeError, UnknownArchitectureError),
        match=r"whole number from 1 to|wrong kind|has no",
    ):
        read_shape(tmp_path)
