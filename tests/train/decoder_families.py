"""Tiny decoders of transformers with random weights, one of each family that
`.ci/model_families.py` tries.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gristmill.core.files import read_json

VOCAB, LENGTH = 400, 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
HEADS = {"head_dim": 8}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
GATED_DELTA = {
    **HEADS,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
LLAMA_4 = {
    **HEADS,
    **EXPERTS,
    "intermediate_size_mlp": 48,
    "attention_chunk_size": 6,
    "layer_types": ["chunked_attention", "full_attention"],
    "no_rope_layers": [1, 0],
    "interleave_moe_layer_step": 2,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 8,
    "deepstack_visual_indexes": [0],
}
QWEN_IMAGES = {
    "image_token_id": 390,
    "video_token_id": 391,
    "vision_start_token_id": 392,
    "vision_end_token_id": 393,
}
SECTIONS = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2Config", {**HEADS, **WINDOWS, "query_pre_attn_scalar": 8}),
    "gemma3_text": (
        "Gemma3TextConfig",
        {**HEADS, **WINDOWS, "query_pre_attn_scalar": 8},
    ),
    "gemma4_text": (
        "Gemma4TextConfig",
        {
            **HEADS,
            **WINDOWS,
            "final_logit_softcapping": 20.0,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
        },
    ),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", WINDOWS),
    "phi3": ("Phi3Config", {"sliding_window": 6}),
    "phi": ("PhiConfig", {}),
    "gpt_oss": ("GptOssConfig", {**HEADS, **WINDOWS, **EXPERTS}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 12,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "llama4_text": ("Llama4TextConfig", LLAMA_4),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "granite": ("GraniteConfig", {"logits_scaling": 4.0, "residual_multiplier": 0.5}),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "falcon": (
        "FalconConfig",
        {"num_kv_heads": 2, "new_decoder_architecture": True, "alibi": False},
    ),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "gpt2": ("GPT2Config", {}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 6}),
    "glm4": ("Glm4Config", HEADS),
    "ernie4_5": ("Ernie4_5Config", HEADS),
    "opt": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bloom": ("BloomConfig", {}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **GATED_DELTA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "mamba2": (
        "Mamba2Config",
        {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "expand": 2},
    ),
    "minimax": (
        "MiniMaxConfig",
        {
            **HEADS,
            "layer_types": ["linear_attention", "full_attention"],
            "block_size": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **HEADS,
            "layers_block_type": ["mamba", "attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 1,
        },
    ),
    "gemma3": (
        "Gemma3Config",
        {
            "text_config": {
                **SIZES,
                **HEADS,
                **WINDOWS,
                "query_pre_attn_scalar": 8,
            },
            "vision_config": VISION,
            "mm_tokens_per_image": 4,
        },
    ),
    "gemma4": (
        "Gemma4Config",
        {
            "text_config": {
                **SIZES,
                **HEADS,
                "global_head_dim": 16,
                "pad_token_id": 1,
                "vocab_size_per_layer_input": VOCAB,
                "hidden_size_per_layer_input": 8,
            },
            "vision_config": None,
            "audio_config": None,
        },
    ),
    "llama4": (
        "Llama4Config",
        {
            "text_config": {**SIZES, **LLAMA_4},
            "vision_config": {
                **VISION,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
        },
    ),
    "mistral3": (
        "Mistral3Config",
        {
            "text_config": {**SIZES, **HEADS, "model_type": "mistral"},
            "vision_config": {**VISION, **HEADS, "model_type": "pixtral"},
        },
    ),
    "qwen3_5": (
        "Qwen3_5Config",
        {
            "text_config": {**SIZES, **GATED_DELTA},
            "vision_config": QWEN_VISION,
            **QWEN_IMAGES,
        },
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        {
            "text_config": {**SIZES, **HEADS, "rope_parameters": SECTIONS},
            "vision_config": QWEN_VISION,
            **QWEN_IMAGES,
        },
    ),
}
"""Family -> its configuration in transformers, and further settings. Those with a
`text_config` read images too.
"""
SEPARATED = set(FAMILIES) - {
    *(
        "bloom",
        "falcon",
        "gpt_oss",
        "lfm2",
        "mamba2",
        "minimax",
        "nemotron_h",
        "opt",
        "qwen3_next",
    ),
    "qwen3_5",
}
"""Families whose classes compute each document of a row as if it were alone."""


def tiny_decoder(family: str) -> Any:
    """Make a decoder with weights large enough for a mistake to show in the logits."""
    import transformers

    kind, further = FAMILIES[family]
    reads_images = "text_config" in further
    sizes = {} if reads_images else SIZES
    auto: Any = (
        transformers.AutoModelForImageTextToText
        if reads_images
        else transformers.AutoModelForCausalLM
    )
    torch.manual_seed(1)
    config = getattr(transformers, kind)(**{**sizes, **further})
    model = auto.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.15)
            elif "norm" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def save_tiny_decoder(family: str, folder: Path) -> Any:
    """Save `tiny_decoder` as transformers does; returns it."""
    model = tiny_decoder(family)
    model.save_pretrained(folder)
    return model


def hf_model(folder: Path) -> Any:
    import transformers

    (name,) = read_json(folder / "config.json")["architectures"]
    kind = getattr(transformers, name)
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def random_ids(rows: int, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, VOCAB, (rows, tokens), generator=generator)
