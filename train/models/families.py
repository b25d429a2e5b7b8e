"""Hugging Face's names for models that can be run here: their config.json, and their tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gristmill.mixtures.model import RopeScaling
from gristmill.train.models.shape import BUCKETS, MOST_DISTANCE, Shape

EXPERTS = re.compile(r"(model\.layers\.\d+\.mlp)\.experts\.(gate_up_proj|down_proj)")
ROUTER = re.compile(r"(model\.layers\.\d+\.mlp)\.gate\.weight")
SCALINGS = {
    "linear": {"factor": "factor"},
    "llama3": {"factor": "factor", "original_length": "original_max_position_embeddings",
               "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor"},
    "yarn": {"factor": "factor", "original_length": "original_max_position_embeddings", "beta_fast": "beta_fast",
             "beta_slow": "beta_slow", "attention_factor": "attention_factor"},
}  # fmt: skip
"""Kind of stretched positions -> our key -> theirs."""
NOTES = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "truncate")
"""Keys of rope_parameters that are not numbers of a kind; `partial_rotary_factor` and `truncate` are checked apart."""


class UnknownArchitectureError(ValueError):
    """A config.json describes a model whose arithmetic is not known here."""


@dataclass(frozen=True)
class ExpertNames:
    """Where a family keeps its experts: the folder of a layer's feed-forward, and the three matrices of an expert."""

    folder: str
    gate: str
    up: str
    down: str


EXPERT_NAMES = {
    "mixtral": ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
}  # fmt: skip
ENCODER, ENCODER_DECODER = "modernbert", "t5"
T5_LAYER = re.compile(r"model\.layers\.(\d+)\.(\w+)(?:\.(\w+))?\.weight")
T5_NAMES = {
    "model.embed_tokens.weight": "shared.weight", "lm_head.weight": "lm_head.weight",
    "model.encoder_norm.weight": "encoder.final_layer_norm.weight",
    "model.norm.weight": "decoder.final_layer_norm.weight",
    **{f"model.{side}_bias.weight": f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
       for side in ("encoder", "decoder")},
}  # fmt: skip
"""Our name -> T5's, of what is outside the layers."""
T5_MATRICES = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o",
               "gate_proj": "wi_0", "up_proj": "wi_1", "down_proj": "wo"}
PREFIX_LM = "prefix_lm"
"""A key of our own in config.json, which transformers keeps and does not use."""
ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
    ENCODER: "ModernBertForMaskedLM", ENCODER_DECODER: "T5ForConditionalGeneration",
}  # fmt: skip


def shape_from_hf(config: Mapping[str, Any]) -> Shape:
    """Read the config.json of a model of transformers.

    Raises:
        UnknownArchitectureError: it is another architecture, or has what this decoder does not; the message names it.
    """
    family = config.get("model_type")
    if family not in ARCHITECTURES:
        raise UnknownArchitectureError(f"config.json: model_type {family!r} is a model that this decoder cannot run; "
                                       f"it runs {', '.join(ARCHITECTURES)}")
    if family == ENCODER_DECODER:
        return _t5_shape(config)
    norm_eps = "norm_eps" if family == ENCODER else "rms_norm_eps"
    missing = [name for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size",
                                 "max_position_embeddings", norm_eps) if config.get(name) is None]
    if missing:
        raise UnknownArchitectureError(f"config.json of a {family} has no {', '.join(missing)}")
    found = _encoder_differences(config) if family == ENCODER else _differences(family, config)
    if different := [name for name, differs in found.items() if differs]:
        raise UnknownArchitectureError("config.json is of a model that this decoder cannot run: it computes something "
                                       f"else under {', '.join(different)}")
    if family == ENCODER:
        return _encoder_shape(config)
    heads, experts = int(config["num_attention_heads"]), _experts_of(config)
    theta, scaling = _rope(config)
    return Shape(
        layers=config["num_hidden_layers"], width=config["hidden_size"], heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_width=config.get("head_dim") or config["hidden_size"] // heads,
        ffn_width=config["moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"], rope_theta=theta,
        rope_scaling=scaling, norm_eps=config["rms_norm_eps"],
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qk_norm=family in ("qwen3", "qwen3_moe"), qkv_bias=family == "qwen2",
        document_mask=False, experts=experts, experts_per_token=config["num_experts_per_tok"] if experts else 0,
        load_balancing=config.get("router_aux_loss_coef", 0.0) if experts else 0.0,
        vocab_size=config["vocab_size"], padded_vocab_size=config["vocab_size"],
        sequence_length=config["max_position_embeddings"], prefix_lm=bool(config.get(PREFIX_LM, False)),
    )


def is_scorer(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a model that scores a text instead of writing one (see models.reward)."""
    return any(str(name).endswith("ForSequenceClassification") for name in config.get("architectures") or ())


def _experts_of(config: Mapping[str, Any]) -> int:
    """Qwen3-MoE's are `num_experts` in files of transformers 4."""
    if config["model_type"] not in EXPERT_NAMES:
        return 0
    return int(config.get("num_local_experts") or config["num_experts"])


def _differences(family: str, config: Mapping[str, Any]) -> dict[str, bool]:
    """What a config.json may say that would make the model compute something else than this decoder."""
    window = config.get("sliding_window")
    uses_window = config.get("use_sliding_window", family in ("mistral", "mixtral"))
    rope = _rope_parameters(config)
    kind = rope.get("rope_type", "default")
    known = {*NOTES, *SCALINGS.get(kind, {}).values(), "original_max_position_embeddings"}
    return {
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "sliding_window": bool(uses_window and window and window < config["max_position_embeddings"]),
        "rope_parameters.rope_type": kind not in ("default", *SCALINGS),
        "rope_parameters": bool({name for name, value in rope.items() if value is not None} - known),
        "partial_rotary_factor": rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0,
        "rope_parameters.truncate": rope.get("truncate", True) is not True,
        "decoder_sparse_step": config.get("decoder_sparse_step", 1) != 1,
        "mlp_only_layers": bool(config.get("mlp_only_layers")),
        "norm_topk_prob": family == "qwen3_moe" and not config.get("norm_topk_prob", False),
        "router_jitter_noise": bool(config.get("router_jitter_noise")),
    }


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 5 writes rope_parameters; earlier ones rope_theta and, for stretched contexts, rope_scaling."""
    older = dict(config.get("rope_scaling") or {})
    if "type" in older:
        older.setdefault("rope_type", older["type"])
    return dict(config.get("rope_parameters") or {"rope_theta": config.get("rope_theta"), **older})


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    rope = _rope_parameters(config)
    if rope.get("rope_theta") is None:
        raise UnknownArchitectureError("config.json has no rope_theta, the base of the rotary positions")
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return float(rope["rope_theta"]), None
    values = {ours: rope[theirs] for ours, theirs in SCALINGS[kind].items() if rope.get(theirs) is not None}
    if kind != "linear":
        values.setdefault("original_length", config["max_position_embeddings"])
    return float(rope["rope_theta"]), RopeScaling.model_validate({"kind": kind, **values})


def family_of(shape: Shape) -> str:
    """The model_type under which transformers runs a shape."""
    if shape.kind != "decoder":
        return ENCODER if shape.encoder else ENCODER_DECODER
    if shape.experts:
        return "qwen3_moe" if shape.qk_norm else "mixtral"
    if shape.qkv_bias:
        return "qwen2"
    return "qwen3" if shape.qk_norm else "llama"


def hf_config(shape: Shape, dtype: str, eos: list[int], pad: int) -> dict[str, Any]:
    """The config.json of a model for transformers; the vocabulary has its true size, without the rows that pad it.

    The rotary base stands under both names: `rope_parameters` is what transformers 5 reads, `rope_theta` and
    `rope_scaling` what earlier ones and other engines do.
    """
    family = family_of(shape)
    if family == ENCODER:
        return _encoder_config(shape, dtype, eos, pad)
    if family == ENCODER_DECODER:
        return _t5_config(shape, dtype, eos, pad)
    rope = _rope_to_hf(shape)
    scaling = {"rope_scaling": {name: value for name, value in rope.items() if name != "rope_theta"}}
    return {
        "architectures": [ARCHITECTURES[family]], "model_type": family, "vocab_size": shape.vocab_size,
        "hidden_size": shape.width, "intermediate_size": shape.ffn_width, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_width,
        "hidden_act": "silu", "max_position_embeddings": shape.sequence_length, "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta, "rope_parameters": rope, **(scaling if shape.rope_scaling else {}),
        "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
        **({"use_sliding_window": False} if family.startswith("qwen") else {}),
        **(_experts_to_hf(shape, family) if shape.experts else {}),
        "tie_word_embeddings": shape.tied_embeddings, "dtype": dtype, "torch_dtype": dtype,
        "bos_token_id": None, "eos_token_id": eos, "pad_token_id": pad,
        **({PREFIX_LM: True} if shape.prefix_lm else {}),
    }  # fmt: skip


def _encoder_shape(config: Mapping[str, Any]) -> Shape:
    heads, width = int(config["num_attention_heads"]), config["hidden_size"]
    theta = _encoder_rope(config).get("rope_theta") or config.get("global_rope_theta")
    if theta is None:
        raise UnknownArchitectureError("config.json has no rope_theta, the base of the rotary positions")
    return Shape(
        layers=config["num_hidden_layers"], width=width, heads=heads, kv_heads=heads, head_width=width // heads,
        ffn_width=config["intermediate_size"], rope_theta=float(theta), norm_eps=config["norm_eps"],
        tied_embeddings=bool(config.get("tie_word_embeddings", True)), vocab_size=config["vocab_size"],
        padded_vocab_size=config["vocab_size"], sequence_length=config["max_position_embeddings"], encoder=True,
    )


def _encoder_differences(config: Mapping[str, Any]) -> dict[str, bool]:
    """What a ModernBERT's config.json may say that would make it compute something else than the encoder here, in which
    all layers see their whole row. What is absent has transformers' default."""
    layers = config.get("layer_types")
    every = config.get("global_attn_every_n_layers", 3)
    return {
        "layer_types": every != 1 if layers is None else set(layers) != {"full_attention"},
        "hidden_activation": config.get("hidden_activation", "gelu") != "gelu",
        "classifier_activation": config.get("classifier_activation", "gelu") != "gelu",
        "decoder_bias": bool(config.get("decoder_bias", True)),
        **{name: bool(config.get(name, False)) for name in ("norm_bias", "attention_bias", "mlp_bias",
                                                            "classifier_bias")},
        "rope_parameters.rope_type": _encoder_rope(config).get("rope_type", "default") != "default",
    }


def _encoder_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    return dict((config.get("rope_parameters") or {}).get("full_attention") or {})


def _encoder_config(shape: Shape, dtype: str, eos: list[int], pad: int) -> dict[str, Any]:
    rope = _rope_to_hf(shape)
    return {
        "architectures": [ARCHITECTURES[ENCODER]], "model_type": ENCODER, "vocab_size": shape.vocab_size,
        "hidden_size": shape.width, "intermediate_size": shape.ffn_width, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "max_position_embeddings": shape.sequence_length,
        "norm_eps": shape.norm_eps, "hidden_activation": "gelu", "classifier_activation": "gelu",
        "layer_types": ["full_attention"] * shape.layers, "global_attn_every_n_layers": 1,
        "global_rope_theta": shape.rope_theta, "rope_parameters": {"full_attention": rope, "sliding_attention": rope},
        "norm_bias": False, "attention_bias": False, "mlp_bias": False, "decoder_bias": False,
        "classifier_bias": False, "attention_dropout": 0.0, "embedding_dropout": 0.0, "mlp_dropout": 0.0,
        "tie_word_embeddings": shape.tied_embeddings, "dtype": dtype, "torch_dtype": dtype,
        "bos_token_id": None, "eos_token_id": eos, "pad_token_id": pad, "cls_token_id": None, "sep_token_id": None,
    }  # fmt: skip


def _t5_config(shape: Shape, dtype: str, eos: list[int], pad: int) -> dict[str, Any]:
    return {
        "architectures": [ARCHITECTURES[ENCODER_DECODER]], "model_type": ENCODER_DECODER,
        "vocab_size": shape.vocab_size, "d_model": shape.width, "d_kv": shape.head_width, "d_ff": shape.ffn_width,
        "num_layers": shape.layers, "num_decoder_layers": shape.layers, "num_heads": shape.heads,
        "relative_attention_num_buckets": BUCKETS, "relative_attention_max_distance": MOST_DISTANCE,
        "n_positions": shape.sequence_length, "layer_norm_epsilon": shape.norm_eps, "dropout_rate": 0.0,
        "feed_forward_proj": "gated-gelu", "is_encoder_decoder": True, "tie_word_embeddings": False, "dtype": dtype,
        "torch_dtype": dtype, "eos_token_id": eos[0], "pad_token_id": pad, "decoder_start_token_id": pad,
    }  # fmt: skip


def _t5_shape(config: Mapping[str, Any]) -> Shape:
    """T5 v1.1's, as the encoder-decoder here has it.

    Raises:
        UnknownArchitectureError: it computes something else.
    """
    missing = [name for name in ("num_layers", "d_model", "num_heads", "d_kv", "d_ff", "vocab_size")
               if config.get(name) is None]
    if missing:
        raise UnknownArchitectureError(f"config.json of a {ENCODER_DECODER} has no {', '.join(missing)}")
    found = {
        "feed_forward_proj": config.get("feed_forward_proj") != "gated-gelu",
        "tie_word_embeddings": config.get("tie_word_embeddings", True) is not False,
        "num_decoder_layers": config.get("num_decoder_layers") not in (None, config["num_layers"]),
        "relative_attention_num_buckets": config.get("relative_attention_num_buckets", BUCKETS) != BUCKETS,
        "relative_attention_max_distance":
            config.get("relative_attention_max_distance", MOST_DISTANCE) != MOST_DISTANCE,
    }
    if different := [name for name, differs in found.items() if differs]:
        raise UnknownArchitectureError("config.json is of a T5 that the encoder-decoder here, which is T5 v1.1's, "
                                       f"cannot run: it computes something else under {', '.join(different)}")
    heads = int(config["num_heads"])
    return Shape(
        layers=config["num_layers"], width=config["d_model"], heads=heads, kv_heads=heads, head_width=config["d_kv"],
        ffn_width=config["d_ff"], rope_theta=1e4, norm_eps=config.get("layer_norm_epsilon", 1e-6),
        tied_embeddings=False, vocab_size=config["vocab_size"], padded_vocab_size=config["vocab_size"],
        sequence_length=config.get("n_positions", 512), encoder_decoder=True)


def _t5_name(name: str, shape: Shape) -> str:
    """T5's name of one of our tensors."""
    found = T5_LAYER.fullmatch(name)
    if found is None:
        return T5_NAMES[name]
    of_decoder, number = divmod(int(found[1]), shape.layers)
    part, matrix = found[2], T5_MATRICES.get(found[3] or "")
    last = 2 if of_decoder else 1
    place, inner = {
        "input_layernorm": (0, "layer_norm"), "self_attn": (0, "SelfAttention"),
        "cross_layernorm": (1, "layer_norm"), "cross_attn": (1, "EncDecAttention"),
        "post_attention_layernorm": (last, "layer_norm"), "mlp": (last, "DenseReluDense"),
    }[part]
    path = f"{'decoder' if of_decoder else 'encoder'}.block.{number}.layer.{place}.{inner}"
    return f"{path}.{matrix}.weight" if matrix else f"{path}.weight"


def _experts_to_hf(shape: Shape, family: str) -> dict[str, Any]:
    own = {"sliding_window": None} if family == "mixtral" else {
        "num_experts": shape.experts, "moe_intermediate_size": shape.ffn_width, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": []}  # fmt: skip
    return {"num_local_experts": shape.experts, "num_experts_per_tok": shape.experts_per_token,
            "router_aux_loss_coef": shape.load_balancing, **own}


def _rope_to_hf(shape: Shape) -> dict[str, Any]:
    scaling = shape.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": shape.rope_theta}
    values = {theirs: getattr(scaling, ours) for ours, theirs in SCALINGS[scaling.kind].items()}
    return {"rope_type": scaling.kind, "rope_theta": shape.rope_theta,
            **{name: value for name, value in values.items() if value is not None}}


def tensors_behind(name: str, shape: Shape, family: str) -> list[list[str]]:
    """Which tensors of Hugging Face's files make up one of ours: the rows of each list joined, the results stacked.

    A single list of a single name is the tensor itself.
    """
    if family == ENCODER_DECODER:
        return [[_t5_name(name, shape)]]
    if family not in EXPERT_NAMES:
        return [[name]]
    names = EXPERT_NAMES[family]
    if found := ROUTER.fullmatch(name):
        return [[f"{_folder(found[1], names)}.gate.weight"]]
    if found := EXPERTS.fullmatch(name):
        matrices = (names.gate, names.up) if found[2] == "gate_up_proj" else (names.down,)
        return [[f"{_folder(found[1], names)}.experts.{number}.{matrix}.weight" for matrix in matrices]
                for number in range(shape.experts)]
    return [[name]]


def split_for_hf(name: str, tensor: Tensor, shape: Shape) -> dict[str, Tensor]:
    """One of our tensors as Hugging Face's files have it; undoes `tensors_behind`."""
    parts = tensors_behind(name, shape, family_of(shape))
    if len(parts) == 1 and len(parts[0]) == 1:
        return {parts[0][0]: tensor}
    return {inner: piece for expert, names in zip(tensor, parts, strict=True)
            for inner, piece in zip(names, torch.chunk(expert, len(names)), strict=True)}


def _folder(ours: str, names: ExpertNames) -> str:
    return ours.removesuffix("mlp") + names.folder
