from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from gristmill.mixtures.model import Model
from gristmill.train.models.llama import Llama
from gristmill.train.models.shape import Shape, shape_of
from gristmill.train.models.weights import initial_tensor

MakeModel = Callable[[Shape], Llama]


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_transformers_llama(
    tied: bool, tiny_shape: Shape, make_model: MakeModel
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = replace(tiny_shape, tied_embeddings=tied, rope_theta=500.0, norm_eps=1e-3)
    model = make_model(shape)
    peer = LlamaForCausalLM(LlamaConfig(
        vocab_size=shape.padded_vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=24, rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0}, tie_word_embeddings=tied))
    missing, unexpected = peer.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if tied else [])
    ids = torch.randint(0, 100, (3, 24), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(ids), peer(ids).logits[:, :, :100].float(), atol=1e-4, rtol=1e-4)


def test_padding_rows_of_the_vocabulary_have_no_logits(tiny_shape: Shape, make_model: MakeModel) -> None:
    assert tiny_shape.padded_vocab_size == 128
    assert make_model(tiny_shape)(torch.zeros(1, 2, dtype=torch.int64)).shape == (1, 2, 100)


def test_a_token_never_sees_what_follows_it(tiny_shape: Shape, make_model: MakeModel) -> None:
    model, ids = make_model(tiny_shape), torch.arange(24)[None]
    changed = ids.clone()
    changed[0, 20:] = 5
    torch.testing.assert_close(model(ids)[:, :20], model(changed)[:, :20])
    assert not torch.allclose(model(ids)[:, 20:], model(changed)[:, 20:])


@pytest.mark.parametrize("tied", [True, False])
def test_the_number_of_parameters_is_counted_right(tied: bool, tiny_shape: Shape) -> None:
    shape = replace(tiny_shape, tied_embeddings=tied)
    assert shape.parameters == sum(parameter.numel() for parameter in Llama(shape).parameters())


def test_the_feed_forward_width_is_eight_thirds_rounded_up() -> None:
    assert shape_of(Model(width=128, heads=4), 10, 8).ffn_width == 384  # 341.3 -> 6 * 64


def test_initial_weights_depend_on_name_and_seed_alone() -> None:
    name, size = "model.layers.0.self_attn.q_proj.weight", torch.Size([64, 64])
    assert torch.equal(initial_tensor(name, size, 2, 1), initial_tensor(name, size, 2, 1))
    assert not torch.equal(initial_tensor(name, size, 2, 1), initial_tensor(name, size, 2, 2))
    assert not torch.equal(initial_tensor(name, size, 2, 1), initial_tensor(name.replace("0", "1"), size, 2, 1))


def test_initial_deviations_are_gpt_2s() -> None:
    size = torch.Size([256, 256])
    assert initial_tensor("a.q_proj.weight", size, 8, 0).std().item() == pytest.approx(0.02, rel=0.02)
    assert initial_tensor("a.o_proj.weight", size, 8, 0).std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert initial_tensor("a.norm.weight", torch.Size([4]), 8, 0).tolist() == [1.0] * 4
