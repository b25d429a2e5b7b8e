from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from gristmill.mixtures.schema.model import PRESETS, Initialisation, Model
from gristmill.train.models.initialisation import initial_tensor
from gristmill.train.models.model_config import Shape, shape_of
from gristmill.train.models.transformer import Llama

MakeModel = Callable[[Shape], Llama]


@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_those_of_transformers(
    tied: bool, tiny_shape: Shape, make_model: MakeModel
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = replace(tiny_shape, tied_embeddings=tied, rope_theta=500.0, norm_eps=1e-3)
    model = make_model(shape)
    peer = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.padded_vocab_size,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=24,
            rms_norm_eps=1e-3,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
            tie_word_embeddings=tied,
        )
    )
    missing, unexpected = peer.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if tied else [])
    ids = torch.randint(0, 100, (3, 24), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        model(ids), peer(ids).logits[:, :, :100].float(), atol=1e-4, rtol=1e-4
    )


def test_padding_ids_have_no_logits(tiny_shape: Shape, make_model: MakeModel) -> None:
    assert tiny_shape.padded_vocab_size == 128
    assert make_model(tiny_shape)(torch.zeros(1, 2, dtype=torch.int64)).shape == (
        1,
        2,
        100,
    )


def test_attention_is_causal(tiny_shape: Shape, make_model: MakeModel) -> None:
    model, ids = make_model(tiny_shape), torch.arange(24)[None]
    changed = ids.clone()
    changed[0, 20:] = 5
    torch.testing.assert_close(model(ids)[:, :20], model(changed)[:, :20])
    assert not torch.allclose(model(ids)[:, 20:], model(changed)[:, 20:])


@pytest.mark.parametrize(
    "changes",
    [
        {"tied_embeddings": True},
        {"tied_embeddings": False},
        {"head_width": 16, "qk_norm": True},
        {"qkv_bias": True},
        {"experts": 3, "experts_per_token": 2},
    ],
)
def test_shape_counts_the_parameters(
    changes: dict[str, Any], tiny_shape: Shape
) -> None:
    shape = replace(tiny_shape, **changes)
    assert shape.parameters == sum(
        parameter.numel() for parameter in Llama(shape).parameters()
    )


def test_ffn_width_is_eight_thirds_rounded_up() -> None:
    # 341.3 -> 6 * 64
    assert shape_of(Model(width=128, heads=4), 10, 8).ffn_width == 384


def test_flops_count_the_active_experts(tiny_shape: Shape) -> None:
    """Two of five experts count as two dense layers and a router of 5 x 32, in each of
    two layers.
    """
    two_of_five = replace(tiny_shape, experts=5, experts_per_token=2)
    extra_weights = 2 * (3 * 32 * 48 + 5 * 32)
    assert (
        two_of_five.flops_per_token(8) - tiny_shape.flops_per_token(8)
        == 6 * extra_weights
    )


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_explicit_keys_override_a_preset(name: str) -> None:
    preset = shape_of(Model(preset=name), 1000, 8)
    assert preset.width == PRESETS[name]["width"]
    assert shape_of(Model(preset=name, layers=2), 1000, 8) == replace(preset, layers=2)


@pytest.mark.parametrize(
    ("name", "vocab_size", "parameters"),
    [
        ("llama-1b", 128_256, 1_235_814_400),
        ("llama-3b", 128_256, 3_212_749_824),
        ("llama-8b", 128_256, 8_030_261_248),
        ("moe-8x7b", 32_000, 46_702_792_704),
    ],
)
def test_large_presets_have_the_published_parameters(
    name: str, vocab_size: int, parameters: int
) -> None:
    """Published files of Llama-3.2-1B, Llama-3.2-3B, Meta-Llama-3-8B and
    Mixtral-8x7B.
    """
    assert shape_of(Model(preset=name), vocab_size, 8).parameters == parameters


def test_unknown_preset_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'llama-2m'.* llama-1m, llama-10m"):
        Model(preset="llama-2m")


def test_preset_is_equivalent_to_its_keys() -> None:
    assert (
        Model(preset="llama-10m").model_dump()
        == Model(layers=6, width=384, heads=6).model_dump()
    )


def test_key_that_a_checkpoint_decides_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"layers, preset"):
        Model.model_validate(
            {"init_from": "somewhere", "layers": 3, "preset": "llama-1m"}
        )
    section = Model.model_validate({"init_from": "somewhere", "document_mask": True})
    assert Model.model_validate(section.model_dump()) == section


@pytest.mark.parametrize("init", ["gpt2", "llama", "neox", "mitchell"])
def test_initial_weights_depend_on_name_and_seed_only(
    init: Initialisation, tiny_shape: Shape
) -> None:
    name, size = "model.layers.0.self_attn.q_proj.weight", torch.Size([64, 64])

    def first(name: str, seed: int) -> torch.Tensor:
        return initial_tensor(name, size, tiny_shape, init, seed)

    assert torch.equal(first(name, 1), first(name, 1))
    assert not torch.equal(first(name, 1), first(name, 2))
    assert not torch.equal(first(name, 1), first(name.replace("0", "1"), 1))


@pytest.mark.parametrize(
    ("init", "name", "deviation"),
    [
        ("gpt2", "model.layers.1.self_attn.q_proj.weight", 0.02),
        ("gpt2", "model.layers.1.self_attn.o_proj.weight", 0.02 / 4),
        ("gpt2", "model.embed_tokens.weight", 0.02),
        ("llama", "model.layers.1.self_attn.q_proj.weight", 0.02),
        ("llama", "model.layers.1.mlp.up_proj.weight", 0.02 / 2),
        ("llama", "model.layers.7.mlp.down_proj.weight", 0.02 / 4),
        ("llama", "model.embed_tokens.weight", 1.0),
        ("llama", "lm_head.weight", 0.9866 / 16),
        ("neox", "model.layers.1.self_attn.q_proj.weight", (2 / 5 / 256) ** 0.5),
        ("neox", "model.layers.1.mlp.down_proj.weight", 2 / 8 / 16),
        ("mitchell", "model.layers.1.self_attn.q_proj.weight", 0.9866 / 16),
        ("mitchell", "model.layers.7.mlp.down_proj.weight", 0.9866 / 16 / 4),
    ],
)
def test_initial_deviations_equal_the_published_ones(
    init: Initialisation, name: str, deviation: float, tiny_shape: Shape
) -> None:
    """With 8 layers of width 256; truncation at 3 deviations leaves 0.9866 of the
    deviation.
    """
    shape = replace(tiny_shape, layers=8, width=256, tied_embeddings=False)
    drawn = initial_tensor(name, torch.Size([256, 256]), shape, init, 0)
    assert drawn.std().item() == pytest.approx(deviation, rel=0.02)


def test_norms_start_at_one_and_biases_at_zero(tiny_shape: Shape) -> None:
    assert (
        initial_tensor("a.norm.weight", torch.Size([4]), tiny_shape, "gpt2", 0).tolist()
        == [1.0] * 4
    )
    assert (
        initial_tensor("a.q_proj.bias", torch.Size([4]), tiny_shape, "gpt2", 0).tolist()
        == [0.0] * 4
    )
