"""Conversion between Hugging Face's encoders and encoder-decoders and ours: config.json
and tensor names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gristmill.train.models.model_config import (
    BUCKETS,
    MOST_DISTANCE,
    TOKEN_TYPES,
    ConfigJson,
    Shape,
    ShapeError,
    UnknownArchitectureError,
)

ENCODER, BERT, ENCODER_DECODER = "modernbert", "bert", "t5"
BERT_NAMES = {
    "model.layers.": "bert.encoder.layer.",
    "model.": "bert.",
    "head.": "cls.predictions.transform.",
    "output_bias": "cls.predictions.bias",
}
"""Prefixes of our names -> BERT's; the first that fits."""
T5_LAYER = re.compile(r"model\.layers\.(\d+)\.block\.(.+)")
T5_NAMES = {
    "model.embed_tokens.weight": "shared.weight",
    "lm_head.weight": "lm_head.weight",
    "model.encoder_norm.weight": "encoder.final_layer_norm.weight",
    "model.norm.weight": "decoder.final_layer_norm.weight",
    **{
        f"model.{side}_bias.weight": f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        for side in ("encoder", "decoder")
    },
}
"""Our names -> T5's, outside the layers."""
SIZES = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "ffn_width": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "sequence_length": "max_position_embeddings",
}
"""Sizes of an encoder in a config.json."""
T5_SIZES = {
    "vocab_size": "vocab_size",
    "width": "d_model",
    "head_width": "d_kv",
    "ffn_width": "d_ff",
    "layers": "num_layers",
    "heads": "num_heads",
}


def sizes_to_hf(shape: Shape, names: Mapping[str, str] = SIZES) -> dict[str, object]:
    """Sizes of a model under the given names of a config.json."""
    return {theirs: getattr(shape, ours) for ours, theirs in names.items()}


def _shape(config: ConfigJson, names: Mapping[str, str], **settings: Any) -> Shape:
    """Shape with the sizes of a config.json under the given names."""
    sizes = {ours: config[theirs] for ours, theirs in names.items()}
    sizes.setdefault("head_width", sizes["width"] // sizes["heads"])
    return Shape(
        kv_heads=sizes["heads"],
        padded_vocab_size=sizes["vocab_size"],
        **sizes,
        **settings,
    )


def require_sizes(config: ConfigJson, family: str, *names: str) -> None:
    """Raise ShapeError if a config.json lacks a size."""
    if missing := [name for name in names if config.get(name) is None]:
        raise ShapeError(f"config.json of a {family} has no {', '.join(missing)}")


def refuse_differences(model: str, differences: Mapping[str, bool]) -> None:
    """Raise UnknownArchitectureError if a model differs from the one here under any
    setting.
    """
    if different := [name for name, differs in differences.items() if differs]:
        raise UnknownArchitectureError(
            f"config.json is of {model}: it computes something else under "
            f"{', '.join(different)}"
        )


def encoder_shape(config: ConfigJson) -> Shape:
    """Shape of a ModernBERT."""
    theta = _encoder_rope(config).get("rope_theta") or config.get("global_rope_theta")
    if theta is None:
        raise UnknownArchitectureError(
            "config.json has no rope_theta, the base of the rotary positions"
        )
    return _shape(
        config,
        SIZES,
        rope_theta=float(theta),
        norm_eps=config["norm_eps"],
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        encoder=True,
    )


def encoder_differences(config: ConfigJson) -> dict[str, bool]:
    """Settings of a config.json under which a ModernBERT would differ from this encoder
    with full attention.

    Missing settings have the defaults of transformers.
    """
    layers = config.get("layer_types")
    every = config.get("global_attn_every_n_layers", 3)
    return {
        "layer_types": every != 1
        if layers is None
        else set(layers) != {"full_attention"},
        "hidden_activation": config.get("hidden_activation", "gelu") != "gelu",
        "classifier_activation": config.get("classifier_activation", "gelu") != "gelu",
        "decoder_bias": bool(config.get("decoder_bias", True)),
        **{
            name: bool(config.get(name, False))
            for name in ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")
        },
        "rope_parameters.rope_type": _encoder_rope(config).get("rope_type", "default")
        != "default",
    }


def _encoder_rope(config: ConfigJson) -> ConfigJson:
    return dict((config.get("rope_parameters") or {}).get("full_attention") or {})


def encoder_config(
    shape: Shape, dtype: str, eos: list[int], pad: int
) -> dict[str, object]:
    """Config.json of a ModernBERT."""
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta}
    return {
        "architectures": ["ModernBertForMaskedLM"],
        "model_type": ENCODER,
        **sizes_to_hf(shape),
        "norm_eps": shape.norm_eps,
        "hidden_activation": "gelu",
        "classifier_activation": "gelu",
        "layer_types": ["full_attention"] * shape.layers,
        "global_attn_every_n_layers": 1,
        "global_rope_theta": shape.rope_theta,
        "rope_parameters": {"full_attention": rope, "sliding_attention": rope},
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "decoder_bias": False,
        "classifier_bias": False,
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
        "mlp_dropout": 0.0,
        "tie_word_embeddings": shape.tied_embeddings,
        "dtype": dtype,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "cls_token_id": None,
        "sep_token_id": None,
    }


def bert_config(
    shape: Shape, dtype: str, eos: list[int], pad: int
) -> dict[str, object]:
    """Config.json of a BERT."""
    return {
        "architectures": ["BertForMaskedLM"],
        "model_type": BERT,
        **sizes_to_hf(shape),
        "type_vocab_size": TOKEN_TYPES,
        "layer_norm_eps": shape.norm_eps,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
        "dtype": dtype,
        "torch_dtype": dtype,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }


def bert_shape(config: ConfigJson) -> Shape:
    """Shape of a BERT.

    Raises:
        UnknownArchitectureError: it differs from this encoder, or its file lacks a
            size.
    """
    require_sizes(config, BERT, *SIZES.values())
    differences = {
        "hidden_act": config.get("hidden_act", "gelu") != "gelu",
        "position_embedding_type": config.get("position_embedding_type")
        not in (None, "absolute"),
        "type_vocab_size": config.get("type_vocab_size", TOKEN_TYPES) != TOKEN_TYPES,
        "tie_word_embeddings": not config.get("tie_word_embeddings", True),
        **{
            name: bool(config.get(name))
            for name in ("is_decoder", "add_cross_attention")
        },
    }
    refuse_differences("a BERT that the encoder here cannot run", differences)
    return _shape(
        config,
        SIZES,
        rope_theta=1e4,
        norm_eps=config.get("layer_norm_eps", 1e-12),
        tied_embeddings=True,
        encoder=True,
        bert=True,
    )


def bert_name(name: str) -> str:
    """BERT's name of one of our tensors."""
    prefix = next(prefix for prefix in BERT_NAMES if name.startswith(prefix))
    return BERT_NAMES[prefix] + name.removeprefix(prefix)


def t5_config(shape: Shape, dtype: str, eos: list[int], pad: int) -> dict[str, object]:
    """Config.json of a T5."""
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": ENCODER_DECODER,
        **sizes_to_hf(shape, T5_SIZES),
        "num_decoder_layers": shape.layers,
        "relative_attention_num_buckets": BUCKETS,
        "relative_attention_max_distance": MOST_DISTANCE,
        "n_positions": shape.sequence_length,
        "layer_norm_epsilon": shape.norm_eps,
        "dropout_rate": 0.0,
        "feed_forward_proj": "gated-gelu",
        "is_encoder_decoder": True,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "torch_dtype": dtype,
        "eos_token_id": eos[0],
        "pad_token_id": pad,
        "decoder_start_token_id": pad,
    }


def t5_shape(config: ConfigJson) -> Shape:
    """Shape of a T5 v1.1.

    Raises:
        UnknownArchitectureError: it differs from this encoder-decoder.
    """
    require_sizes(config, ENCODER_DECODER, *T5_SIZES.values())
    differences = {
        "feed_forward_proj": config.get("feed_forward_proj") != "gated-gelu",
        "tie_word_embeddings": config.get("tie_word_embeddings", True) is not False,
        "num_decoder_layers": config.get("num_decoder_layers")
        not in (None, config["num_layers"]),
        **{
            name: config.get(name, expected) != expected
            for name, expected in (
                ("relative_attention_num_buckets", BUCKETS),
                ("relative_attention_max_distance", MOST_DISTANCE),
            )
        },
    }
    refuse_differences(
        "a T5 that the encoder-decoder here, which is T5 v1.1's, cannot run",
        differences,
    )
    return _shape(
        config,
        T5_SIZES,
        rope_theta=1e4,
        norm_eps=config.get("layer_norm_epsilon", 1e-6),
        tied_embeddings=False,
        sequence_length=config.get("n_positions", 512),
        encoder_decoder=True,
    )


def t5_name(name: str, shape: Shape) -> str:
    """T5's name of one of our tensors."""
    match = T5_LAYER.fullmatch(name)
    if match is None:
        return T5_NAMES[name]
    of_decoder, number = divmod(int(match[1]), shape.layers)
    return f"{'decoder' if of_decoder else 'encoder'}.block.{number}.{match[2]}"
