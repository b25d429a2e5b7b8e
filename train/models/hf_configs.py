"""Conversion between Hugging Face models and ours: config.json and tensor names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from gristmill.mixtures.model_families import describe_families
from gristmill.mixtures.schema.model import RopeScaling
from gristmill.train.models.initialisation import VOCABULARY_TENSORS
from gristmill.train.models.model_config import (
    ConfigJson,
    JsonObject,
    Published,
    Shape,
    ShapeError,
)
from gristmill.train.models.model_config import (
    UnknownArchitectureError as UnknownArchitectureError,
)
from gristmill.train.models.tensor_files import Planned, Tensors

SIZES = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "ffn_width": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "sequence_length": "max_position_embeddings",
}
"""Our sizes -> their keys in a config.json."""

EXPERTS = re.compile(r"(model\.layers\.\d+\.)mlp\.experts\.(gate_up_proj|down_proj)")
ROUTER = re.compile(r"(model\.layers\.\d+\.)mlp\.gate\.weight")
SCALINGS = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_length": "original_max_position_embeddings",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor",
        "original_length": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
    },
}
"""Kind of RoPE scaling -> our key -> Hugging Face's key."""
NOTES = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "truncate")
"""Other keys of rope_parameters; `partial_rotary_factor` and `truncate` are checked
separately.
"""


EXPERT_NAMES = {
    "mixtral": (
        "block_sparse_moe",
        {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
    ),
    "qwen3_moe": (
        "mlp",
        {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
    ),
}
"""Family with experts -> module of a layer's feed-forward, and our stacked matrices ->
those of an expert.
"""
GLM = "glm"
FUSED = re.compile(r"(model\.layers\.\d+\.mlp\.)(gate|up)_proj\.weight")
"""Two of our matrices that GLM-4 fuses into `gate_up_proj`, gate first."""
TURNED = re.compile(r"model\.layers\.\d+\.self_attn\.([qk])_proj\.(weight|bias)")
"""Queries and keys, of which GLM-4 rotates adjacent channels, and this decoder channels
half a head apart.
"""
PREFIX_LM = "prefix_lm"
"""Custom key of config.json, which transformers keeps and ignores."""
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    GLM: "GlmForCausalLM",
}


def shape_from_hf(config: ConfigJson) -> Shape:
    """Shape of a transformers model, from its config.json.

    Raises:
        UnknownArchitectureError: the architecture is unknown, or has unsupported
            features; the message names them.
    """
    family = config.get("model_type")
    if family not in ARCHITECTURES:
        raise UnknownArchitectureError(
            f"config.json: model_type {family!r} is not supported by the built-in decoder, which loads "
            f"{describe_families()}"
        )
    sizes = {*SIZES.values(), "rms_norm_eps"} - {"intermediate_size"}
    if missing := sorted(name for name in sizes if config.get(name) is None):
        raise ShapeError(f"config.json of a {family} has no {', '.join(missing)}")
    differences = _differences(family, config)
    if different := [name for name, differs in differences.items() if differs]:
        raise UnknownArchitectureError(
            "config.json is of a model that this decoder cannot run: it computes "
            f"something else under {', '.join(different)}"
        )
    heads = int(config["num_attention_heads"])
    experts = 0
    if family in EXPERT_NAMES:
        # transformers 4 writes `num_experts` for Qwen3-MoE.
        experts = int(config.get("num_local_experts") or config["num_experts"])
    theta, scaling = _rope(config)
    ends = config.get("eos_token_id")
    if not isinstance(ends, list):
        ends = [] if ends is None else [int(ends)]
    window = None  # Rows of at most this length get full attention.
    if config.get("use_sliding_window", family in ("mistral", "mixtral")):
        window = config.get("sliding_window") or None
    return Shape(
        layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_width=config.get("head_dim") or config["hidden_size"] // heads,
        ffn_width=config[
            "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"
        ],
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=config["rms_norm_eps"],
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        qkv_bias=family == "qwen2"
        or (family == GLM and bool(config.get("attention_bias", True))),
        rotary_share=_rotary_share(config) if family == GLM else 1.0,
        document_mask=False,
        experts=experts,
        experts_per_token=config["num_experts_per_tok"] if experts else 0,
        load_balancing=config.get("router_aux_loss_coef", 0.0) if experts else 0.0,
        vocab_size=config["vocab_size"],
        padded_vocab_size=config["vocab_size"],
        sequence_length=min(
            config["max_position_embeddings"],
            window or config["max_position_embeddings"],
        ),
        prefix_lm=bool(config.get(PREFIX_LM, False)),
        norm_topk_prob=family != "qwen3_moe"
        or bool(config.get("norm_topk_prob", False)),
        published=Published(family, tuple(ends), window, config.get("bos_token_id")),
    )


def is_scorer(config: ConfigJson) -> bool:
    """Return True if a config.json describes a model that scores texts (see
    models.reward_model).
    """
    return any(
        str(name).endswith("ForSequenceClassification")
        for name in config.get("architectures") or ()
    )


def _differences(family: str, config: ConfigJson) -> dict[str, bool]:
    """Settings of a config.json under which the model would compute something else than
    this decoder.
    """
    rope = _rope_parameters(config)
    kind = rope.get("rope_type", "default")
    known_keys = {
        *NOTES,
        *SCALINGS.get(kind, {}).values(),
        "original_max_position_embeddings",
    }
    return {
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(config.get("attention_bias")) and family != GLM,
        "mlp_bias": bool(config.get("mlp_bias")),
        "rope_parameters.rope_type": kind not in ("default", *SCALINGS),
        "rope_parameters": bool(
            {name for name, value in rope.items() if value is not None} - known_keys
        ),
        "partial_rotary_factor": _rotary_share(config) != 1.0 and family != GLM,
        "rope_parameters.truncate": rope.get("truncate", True) is not True,
        "decoder_sparse_step": config.get("decoder_sparse_step", 1) != 1,
        "mlp_only_layers": bool(config.get("mlp_only_layers")),
        "router_jitter_noise": bool(config.get("router_jitter_noise")),
    }


def _rotary_share(config: ConfigJson) -> float:
    """Share of a head's channels that rotary positions rotate; by default half for
    GLM-4.
    """
    default = 0.5 if config["model_type"] == GLM else 1.0
    share = _rope_parameters(config).get(
        "partial_rotary_factor", config.get("partial_rotary_factor")
    )
    return float(default if share is None else share)


def _rope_parameters(config: ConfigJson) -> ConfigJson:
    """RoPE parameters: `rope_parameters` of transformers 5, else `rope_theta` and
    `rope_scaling`.
    """
    legacy = dict(config.get("rope_scaling") or {})
    if "type" in legacy:
        legacy.setdefault("rope_type", legacy["type"])
    return dict(
        config.get("rope_parameters")
        or {"rope_theta": config.get("rope_theta"), **legacy}
    )


def _rope(config: ConfigJson) -> tuple[float, RopeScaling | None]:
    rope = _rope_parameters(config)
    if rope.get("rope_theta") is None:
        raise UnknownArchitectureError(
            "config.json has no rope_theta, the base of the rotary positions"
        )
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return float(rope["rope_theta"]), None
    values = {
        ours: rope[theirs]
        for ours, theirs in SCALINGS[kind].items()
        if rope.get(theirs) is not None
    }
    if kind != "linear":
        values.setdefault("original_length", config["max_position_embeddings"])
    return float(rope["rope_theta"]), RopeScaling.model_validate(
        {"kind": kind, **values}
    )


def family_of(shape: Shape) -> str:
    """model_type of a shape in transformers."""
    if shape.experts:
        return "qwen3_moe" if shape.qk_norm else "mixtral"
    if shape.rotary_share != 1.0:
        return GLM
    if shape.qkv_bias:
        return "qwen2"
    if shape.qk_norm:
        return "qwen3"
    # Mistral and Llama compute the same; only the published config distinguishes them.
    return (
        "mistral"
        if shape.published is not None and shape.published.model_type == "mistral"
        else "llama"
    )


def hf_config(
    shape: Shape, dtype: str, eos: list[int], pad: int, bos: int | None = None
) -> JsonObject:
    """The config.json of a model for transformers, with the vocabulary size without
    padding; `bos` applies to decoders.

    The rotary base is written under both names: transformers 5 reads `rope_parameters`,
    earlier versions and other engines read `rope_theta` and `rope_scaling`.
    """
    family = family_of(shape)
    rope = _rope_to_hf(shape)
    scaling = {
        "rope_scaling": {
            name: value for name, value in rope.items() if name != "rope_theta"
        }
    }
    window = None if shape.published is None else shape.published.sliding_window
    experts: JsonObject = {}
    if shape.experts:
        experts = {
            "num_local_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
            "router_aux_loss_coef": shape.load_balancing,
        }
    if family == "qwen3_moe":
        experts |= {
            "num_experts": shape.experts,
            "moe_intermediate_size": shape.ffn_width,
            "norm_topk_prob": shape.norm_topk_prob,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        **{theirs: getattr(shape, ours) for ours, theirs in SIZES.items()},
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": rope,
        **(scaling if shape.rope_scaling else {}),
        "attention_bias": family == GLM and shape.qkv_bias,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        **({"partial_rotary_factor": shape.rotary_share} if family == GLM else {}),
        **({"use_sliding_window": False} if family.startswith("qwen") else {}),
        **({"sliding_window": window} if family in ("mistral", "mixtral") else {}),
        **experts,
        "tie_word_embeddings": shape.tied_embeddings,
        "dtype": dtype,
        "torch_dtype": dtype,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        **({PREFIX_LM: True} if shape.prefix_lm else {}),
    }


def _rope_to_hf(shape: Shape) -> JsonObject:
    scaling = shape.rope_scaling
    rope: JsonObject = {
        "rope_type": "default" if scaling is None else scaling.kind,
        "rope_theta": shape.rope_theta,
    }
    if shape.rotary_share != 1.0:
        rope["partial_rotary_factor"] = shape.rotary_share
    if scaling is not None:
        for ours, theirs in SCALINGS[scaling.kind].items():
            if (value := getattr(scaling, ours)) is not None:
                rope[theirs] = value
    return rope


def tensors_behind(name: str, shape: Shape, family: str) -> list[list[str]]:
    """Hugging Face tensors that form one of ours: each list is concatenated by rows,
    the results are stacked.

    A single list of a single name is the tensor itself, or contains it (see
    `part_of_hf`).
    """
    if family == GLM and (fused := FUSED.fullmatch(name)):
        return [[f"{fused[1]}gate_up_proj.weight"]]
    if family not in EXPERT_NAMES:
        return [[name]]
    module, matrices = EXPERT_NAMES[family]
    if match := ROUTER.fullmatch(name):
        return [[f"{match[1]}{module}.gate.weight"]]
    if match := EXPERTS.fullmatch(name):
        return [
            [
                f"{match[1]}{module}.experts.{number}.{matrix}.weight"
                for matrix in matrices[match[2]]
            ]
            for number in range(shape.experts)
        ]
    return [[name]]


def part_of_hf(name: str, tensor: Tensor, shape: Shape, family: str) -> Tensor:
    """Extract one of our tensors, in our layout, from the tensor of
    `tensors_behind`.
    """
    if family != GLM:
        return tensor
    if fused := FUSED.fullmatch(name):
        return tensor.chunk(2)[fused[2] == "up"]
    if match := TURNED.fullmatch(name):
        heads = _heads_of(match[1], shape)
        return (
            tensor.reshape(heads, -1, 2, *tensor.shape[1:])
            .transpose(1, 2)
            .reshape(tensor.shape)
        )
    return tensor


def _heads_of(letter: str, shape: Shape) -> int:
    return shape.heads if letter == "q" else shape.kv_heads


def interleave_halves(tensor: Tensor, heads: int) -> Tensor:
    """Interleave the rows of the two halves of each head of a tensor (heads * c, ...)."""
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def split_for_hf(name: str, tensor: Tensor, shape: Shape) -> Tensors:
    """Convert one of our tensors to Hugging Face's; the inverse of `tensors_behind` and
    `part_of_hf`.

    Parts of a fused tensor share its name: concatenate them by rows, in the order of
    our tensors.
    """
    family = family_of(shape)
    if family == GLM and (match := TURNED.fullmatch(name)):
        tensor = interleave_halves(tensor, _heads_of(match[1], shape))
    parts = tensors_behind(name, shape, family)
    if len(parts) == 1 and len(parts[0]) == 1:
        return {parts[0][0]: tensor}
    return {
        inner: piece
        for expert, names in zip(tensor, parts, strict=True)
        for inner, piece in zip(names, torch.chunk(expert, len(names)), strict=True)
    }


def planned_for_hf(
    sizes: Mapping[str, Sequence[int]],
    read: Callable[[str], Tensor],
    shape: Shape,
    dtype: torch.dtype,
) -> dict[str, Planned]:
    """Tensors of a model under Hugging Face's names, without padding rows, created when
    they are written.

    Args:
        sizes: shape of each of our tensors.
        read: returns one of them.
        shape: of the model.
        dtype: of the result.
    """

    def split(name: str, tensor: Tensor) -> Tensors:
        if name in VOCABULARY_TENSORS:
            tensor = tensor[: shape.vocab_size]
        return split_for_hf(name, tensor, shape)

    def make(inner: str, names: Sequence[str]) -> Tensor:
        parts = [split(name, read(name))[inner].to(dtype) for name in names]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    part_sizes: dict[str, dict[str, torch.Size]] = {}
    for name, size in sizes.items():
        for inner, part in split(name, torch.empty(size, device="meta")).items():
            part_sizes.setdefault(inner, {})[name] = part.shape
    return {
        inner: Planned(
            dtype,
            (sum(size[0] for size in parts.values()), *next(iter(parts.values()))[1:]),
            partial(make, inner, [*parts]),
        )
        for inner, parts in part_sizes.items()
    }
