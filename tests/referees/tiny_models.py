"""Tiny models and word tokenizers of transformers, and settings of TRL's trainers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
"""Keys of a configuration; weights are large enough for a mistake to show."""


def tiny_model(family: str) -> Any:
    """Make a model of a family of transformers, with its own weights for each."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **TINY, head_dim=8)
    return AutoModelForCausalLM.from_config(config)


def word_tokenizer(words: Iterable[str]) -> Any:
    """Make a tokenizer whose tokens are whole words, after `<unk>`, `<s>`, `</s>` and
    `<pad>`.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<unk>", "<s>", "</s>", "<pad>", *words]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
    )


def trainer_settings(folder: Path, steps: int, learning_rate: float) -> dict[str, Any]:
    """Settings of a trainer that logs every step: AdamW at a constant rate, without
    weight decay.
    """
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "gradient_checkpointing": False,
        "max_steps": steps,
        "learning_rate": learning_rate,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch",
        "weight_decay": 0.0,
        "disable_tqdm": True,
        "save_strategy": "no",
    }
