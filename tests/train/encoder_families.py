"""Tiny encoders and encoder-decoders of transformers with random weights, one of each
family that `.ci/model_families.py` tries.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB, LENGTH = 400, 32
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "pad_token_id": None,
}
T5_SIZES = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", SIZES),
    "modernbert": (
        "ModernBertConfig",
        {
            **SIZES,
            **dict.fromkeys(("bos_token_id", "eos_token_id")),
            **dict.fromkeys(("cls_token_id", "sep_token_id")),
            "local_attention": 8,
            "global_attn_every_n_layers": 2,
        },
    ),
    "roberta": (
        "RobertaConfig",
        {**SIZES, "pad_token_id": 1, "max_position_embeddings": LENGTH + 2},
    ),
    "t5": (
        "T5Config",
        {**T5_SIZES, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
}
"""Family -> its configuration in transformers."""
ENCODERS = ("bert", "modernbert", "roberta")
"""Families that fill in masked tokens."""


def save_tiny_encoder(family: str, folder: Path) -> Any:
    """Save a model with weights large enough for a mistake to show in the logits."""
    name, sizes = FAMILIES[family]
    torch.manual_seed(1)
    auto_class = "AutoModelForSeq2SeqLM" if family == "t5" else "AutoModelForMaskedLM"
    config = getattr(transformers, name)(**sizes)
    model = getattr(transformers, auto_class).from_config(config).eval()
    with torch.no_grad():
        if family == "t5":
            model.lm_head.weight = torch.nn.Parameter(torch.empty(VOCAB, 32))
        for name, parameter in model.named_parameters():
            is_gain = "norm" in name.lower() and name.endswith("weight")
            parameter.normal_(1.0 if is_gain else 0.0, 0.15)
    model.save_pretrained(folder)
    # Read again, as T5's class scales the logits of a model that was not read.
    return getattr(transformers, auto_class).from_pretrained(folder).eval()
