"""PEFT loads our adapter files and computes the same, with adapters apart and
merged.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from gristmill.mixtures.schema.posttraining import Lora
from gristmill.train.adapters.lora import adapt, adapted_tensors, merged
from gristmill.train.adapters.peft_files import save_adapter
from gristmill.train.models.transformer import Llama
from gristmill.train.models.weights import load_model, read_shape, stored

# Importing it takes seconds, which collection need not spend.
pytestmark = pytest.mark.skipif(
    find_spec("peft") is None, reason="peft is not installed"
)


@pytest.mark.parametrize(
    "lora",
    [
        Lora(rank=4, alpha=8),
        Lora(rank=4, alpha=6, rslora=True, targets=("q_proj", "down_proj")),
        Lora(rank=4, alpha=8, dora=True),
        Lora(rank=2, alpha=3, rslora=True, dora=True, targets=("v_proj", "up_proj")),
    ],
)
def test_logits_and_merged_weights_equal_those_of_peft(
    lora: Lora, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.2,
            tie_word_embeddings=False,
        )
    ).save_pretrained(tmp_path / "base")
    ours = Llama(read_shape(tmp_path / "base"))
    adapt(ours, lora)
    tensor_of = adapted_tensors(stored(tmp_path / "base"), lora, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(tensor_of(name, parameter.shape))
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    tensors = {name: parameter.detach() for name, parameter in ours.named_parameters()}
    save_adapter(tmp_path / "adapter", lora, tensors)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    import peft

    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    ids = torch.randint(0, 64, (2, 16), generator=generator)
    with torch.no_grad():
        expected = theirs(ids, use_cache=False).logits
        assert (expected - load_model(tmp_path / "base")(ids)).abs().max() > 0.05
        torch.testing.assert_close(ours(ids), expected, atol=2e-5, rtol=0)
        merged_state = theirs.merge_and_unload().state_dict()
    for name, tensor in merged(tensors, lora).items():
        torch.testing.assert_close(tensor, merged_state[name], atol=1e-5, rtol=0)
