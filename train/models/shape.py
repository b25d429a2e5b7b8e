"""The sizes of a model: what is written beside its weights, and what follows from it by arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gristmill.mixtures.model import Model

VOCAB_MULTIPLE = 128
"""Rows of the embedding are padded to this multiple, which matrix units prefer (OLMo-core: padded_vocab_size)."""
FFN_MULTIPLE = 64


@dataclass(frozen=True)
class Shape:
    """Everything that a decoder is built from.

    Attributes:
        layers, width, heads, kv_heads, ffn_width, rope_theta, norm_eps, tied_embeddings: see `mixtures.training.Model`.
        vocab_size: ids that the tokenizer has; ids from here to `padded_vocab_size` are never read nor predicted.
        padded_vocab_size: rows of the embedding.
        sequence_length: tokens per row that the model was trained on.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn_width: int
    rope_theta: float
    norm_eps: float
    tied_embeddings: bool
    vocab_size: int
    padded_vocab_size: int
    sequence_length: int

    @property
    def head_width(self) -> int:
        """Channels per attention head."""
        return self.width // self.heads

    @property
    def matrix_parameters(self) -> int:
        """Weights that every token is multiplied with: all matrices and the output head, not the embedding lookup."""
        attention = 2 * self.width * self.width + 2 * self.width * self.kv_heads * self.head_width
        return self.layers * (attention + 3 * self.width * self.ffn_width) + self.padded_vocab_size * self.width

    @property
    def parameters(self) -> int:
        """All weights."""
        lookup = 0 if self.tied_embeddings else self.padded_vocab_size * self.width
        return self.matrix_parameters + lookup + (2 * self.layers + 1) * self.width

    def flops_per_token(self, length: int) -> int:
        """Floating-point operations of forward and backward per token, attention included (PaLM, appendix B)."""
        return 6 * self.matrix_parameters + 12 * self.layers * self.width * length


def shape_of(model: Model, vocab_size: int, sequence_length: int) -> Shape:
    """Resolve a manifest's model section against a tokenizer and a row length."""
    return Shape(
        layers=model.layers, width=model.width, heads=model.heads, kv_heads=model.kv_heads or model.heads,
        ffn_width=model.ffn_width or math.ceil(8 * model.width / 3 / FFN_MULTIPLE) * FFN_MULTIPLE,
        rope_theta=model.rope_theta, norm_eps=model.norm_eps, tied_embeddings=model.tied_embeddings,
        vocab_size=vocab_size, padded_vocab_size=math.ceil(vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        sequence_length=sequence_length,
    )


def shape_to_json(shape: Shape) -> dict[str, Any]:
    """What `config.json` holds."""
    return asdict(shape)


def shape_from_json(value: Mapping[str, Any]) -> Shape:
    """Read `config.json` back.

    Raises:
        TypeError: a key is missing or unknown.
    """
    return Shape(**value)


def shape_from_llama(config: Mapping[str, Any]) -> Shape:
    """Read the config.json of a LlamaForCausalLM (see `export.llama_config`).

    Raises:
        ValueError: it is another architecture, or a Llama with what this decoder does not have.
    """
    heads, width = int(config.get("num_attention_heads", 1)), int(config.get("hidden_size", 0))
    # transformers 5 writes rope_parameters, earlier ones rope_theta and, for stretched contexts, rope_scaling.
    older = {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})}
    rope = config.get("rope_parameters") or older
    different = {
        "model_type": config.get("model_type") != "llama",
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "rope_parameters": rope.get("rope_type", "default") != "default",
        "head_dim": config.get("head_dim", width // heads) != width // heads,
    }
    if any(different.values()):
        names = ", ".join(name for name, differs in different.items() if differs)
        raise ValueError(f"config.json is of a model that this decoder cannot run: its {names} is not plain Llama's")
    return Shape(
        layers=config["num_hidden_layers"], width=width, heads=heads,
        kv_heads=config.get("num_key_value_heads", heads), ffn_width=config["intermediate_size"],
        rope_theta=rope["rope_theta"], norm_eps=config["rms_norm_eps"],
        tied_embeddings=config.get("tie_word_embeddings", False), vocab_size=config["vocab_size"],
        padded_vocab_size=config["vocab_size"], sequence_length=config["max_position_embeddings"],
    )
