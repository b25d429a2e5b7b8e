"""The section `model`: shape and initial weights of the decoder, from sizes, a preset
or a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from gristmill.mixtures.base import (
    NotNegative,
    OutsidePath,
    Positive,
    PositiveFloat,
    RawSection,
    Section,
)
from gristmill.mixtures.user_code import BuiltInOrOwn

_LLAMA_3 = {"rope_theta": 500_000.0}
FFN_MULTIPLE = 64
"""Multiple to which the width of a feed-forward layer is rounded up if the manifest
does not set it.
"""

PRESETS: dict[str, RawSection] = {
    "llama-1m": {"layers": 4, "width": 128, "heads": 4},
    "llama-10m": {"layers": 6, "width": 384, "heads": 6},
    "llama-30m": {"layers": 10, "width": 512, "heads": 8},
    "llama-125m": {"layers": 12, "width": 768, "heads": 6},
    "llama-350m": {"layers": 24, "width": 1024, "heads": 8},
    "llama-1b": {
        "layers": 16,
        "width": 2048,
        "heads": 32,
        "kv_heads": 8,
        "ffn_width": 8192,
        **_LLAMA_3,
    },
    "llama-3b": {
        "layers": 28,
        "width": 3072,
        "heads": 24,
        "kv_heads": 8,
        "ffn_width": 8192,
        **_LLAMA_3,
    },
    "llama-8b": {
        "layers": 32,
        "width": 4096,
        "heads": 32,
        "kv_heads": 8,
        "ffn_width": 14336,
        "tied_embeddings": False,
        **_LLAMA_3,
    },
    "moe-4m": {"layers": 4, "width": 128, "heads": 4, "moe": {"experts": 8}},
    "moe-8x125m": {"layers": 12, "width": 768, "heads": 6, "moe": {"experts": 8}},
    "moe-8x7b": {
        "layers": 32,
        "width": 4096,
        "heads": 32,
        "kv_heads": 8,
        "ffn_width": 14336,
        "rope_theta": 1e6,
        "tied_embeddings": False,
        "moe": {"experts": 8},
    },
}
"""Preset -> the keys that are not defaults.

1m to 30m count the weights of the layers; 125m and 350m are the depths and widths of
GPT-2 small and medium (Radford et al. 2019) with heads of 128 channels, which fill
matrix units (modded-nanogpt); 1b and 3b are Llama 3.2's (config.json of
meta-llama/Llama-3.2-1B and -3B, without the stretched context), 8b is Llama 3's
(Grattafiori et al. 2024, table 3). `moe-8x7b` is Mixtral's (Jiang et al. 2024, table
1); `moe-8x125m` and `moe-4m` are the dense ones with eight experts.
"""


def expand(values: Any) -> Any:
    """Replace the preset of a section `model` by the keys that it stands for; the
    preset's name stays.

    Raises:
        ValueError: no preset has that name.
    """
    if not isinstance(values, dict) or values.get("preset") is None:
        return values
    name = values["preset"]
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is not one of {', '.join(PRESETS)}")
    return {**PRESETS[name], **values}


Initialisation = Literal["gpt2", "llama", "neox", "mitchell"]
Implementation = Literal["auto", "own", "transformers"]
NOT_OF_THE_SHAPE = ("init_from", "document_mask", "implementation")
"""Keys that are allowed beside `init_from`; the checkpoint decides all others."""


class RopeScaling(Section):
    """Stretching of rotary positions, for contexts longer than those that a model was
    trained on.

    The frequencies are those of transformers' modeling_rope_utils.
    """

    kind: Literal["linear", "llama3", "yarn"]
    """`linear`: divide all frequencies by `factor` (Chen et al. 2023). `llama3`: divide
    only the low ones, with a ramp between (Llama 3.1). `yarn`: likewise by rotations,
    with warmer attention (Peng et al. 2023).
    """
    factor: PositiveFloat
    """Factor by which contexts become longer."""
    original_length: Positive | None = None
    """`llama3`, `yarn`: tokens per row before stretching."""
    low_freq_factor: PositiveFloat = 1.0
    """`llama3`: wavelengths above `original_length` / this are stretched in full (Llama
    3.1: 1).
    """
    high_freq_factor: PositiveFloat = 4.0
    """`llama3`: wavelengths below `original_length` / this are unchanged (Llama 3.1:
    4).
    """
    beta_fast: PositiveFloat = 32.0
    """`yarn`: channels with more rotations in `original_length` are unchanged (Peng et
    al. 2023: 32).
    """
    beta_slow: PositiveFloat = 1.0
    """`yarn`: channels with fewer rotations are stretched in full (Peng et al. 2023:
    1).
    """
    attention_factor: PositiveFloat | None = None
    """`yarn`: factor of queries and keys; 0.1 ln(`factor`) + 1 if absent (Peng et al.
    2023, eq. 22).
    """

    def _problems(self) -> Iterator[str]:
        if self.kind != "linear" and self.original_length is None:
            yield (
                f"kind {self.kind} needs original_length, the tokens "
                "per row before the stretching"
            )
        keys_of_kind = {
            "linear": set[str](),
            "llama3": {"original_length", "low_freq_factor", "high_freq_factor"},
            "yarn": {"original_length", "beta_fast", "beta_slow", "attention_factor"},
        }[self.kind]
        foreign = {*self.changed_keys()} - keys_of_kind - {"kind", "factor"}
        if foreign:
            yield f"kind {self.kind} has no {', '.join(sorted(foreign))}; remove it"


class Moe(Section):
    """A mixture of experts that replaces every feed-forward layer, routed as in Mixtral
    (Jiang et al. 2024).
    """

    experts: Positive
    """Number of feed-forward layers to choose from, each `ffn_width` wide."""
    experts_per_token: Positive = 2
    """Number of experts that process each token: those with the largest router
    probabilities (Mixtral: 2).
    """
    load_balancing: NotNegative = 0.01
    """Weight of the loss that keeps experts equally busy (Fedus et al. 2021, equations
    4 to 6: 0.01), computed per row (DeepSeek-V3, section 2.1.2), so that it does not
    depend on how a batch is split.
    """

    def _problems(self) -> Iterator[str]:
        if self.experts_per_token > self.experts:
            yield (
                f"experts_per_token {self.experts_per_token} is more "
                f"than experts {self.experts}"
            )


class GivenModel(Section):
    """A model trained elsewhere, to be tuned, measured or exported without `sources`,
    `mix` or `pretrain`.

    The tokenizer and the chat template come from its folder unless the section
    `tokenizer` sets others.
    """

    added = ("implementation",)

    path: OutsidePath
    """A folder that transformers loads or that `export` wrote, or `hf://NAME@COMMIT`
    (see docs/how-to/data/hub.md): config.json, model.safetensors (or its shards) and
    tokenizer.json, of any causal decoder of the installed transformers
    (docs/reference/model-families.md).
    """
    implementation: Implementation = "auto"
    """`own`: compute it with gristmill's decoder, which knows some families. `auto`:
    likewise where it does, else with the class of transformers. `transformers`: always
    with that class. Code in the folder is never run.
    """


class Model(BuiltInOrOwn):
    """A Llama-style decoder, or a model of your own."""

    takes: ClassVar[tuple[str, ...] | None] = ("vocab_size",)
    offers: ClassVar[tuple[str, ...]] = ("sequence_length",)
    added = ("mup_base_width", "implementation")

    preset: str | None = Field(default=None, exclude=True)
    """Name of a set of sizes, which other keys override: `llama-1m`, `llama-10m`,
    `llama-30m`, `llama-125m`, `llama-350m`, `llama-1b`, `llama-3b`, `llama-8b`,
    `moe-4m`, `moe-8x125m`, `moe-8x7b`.
    """
    init_from: OutsidePath | None = None
    """A folder in Hugging Face's format (config.json, safetensors), or
    `hf://NAME@COMMIT`, whose model is trained further: any causal decoder of the
    installed transformers, or one of its encoders and encoder-decoders. Its config.json decides the shape, and the tokenizer must be its own (`tokenizer: {path:
    .../tokenizer.json}`); the mixture's row length becomes its context length. Rows
    longer than its sliding window are an error.
    """
    implementation: Implementation = "auto"
    """Code that computes the model of `init_from`: see `model.implementation`."""
    layers: Positive = 4
    """Number of decoder blocks."""
    width: Positive = 128
    """Width of the residual stream (transformers: hidden_size)."""
    heads: Positive = 4
    """Number of query heads."""
    kv_heads: Positive | None = None
    """Number of key and value heads (grouped-query attention); the same as `heads` if
    absent.
    """
    head_width: Positive | None = None
    """Channels per head; `width` / `heads` if absent."""
    ffn_width: Positive | None = None
    """Width of the SwiGLU layer; 8/3 of `width`, rounded up to a multiple of 64, if
    absent.
    """
    moe: Moe | None = None
    """A mixture of experts in place of each feed-forward layer; dense if absent."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary position embedding."""
    rope_scaling: RopeScaling | None = None
    """Stretched rotary positions; plain ones if absent."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon of RMSNorm."""
    qk_norm: bool = False
    """Normalise queries and keys per head before they are rotated (Qwen3), which keeps
    attention logits small.
    """
    tied_embeddings: bool = True
    """Use the input embedding as the output layer too."""
    document_mask: bool = False
    """Let a token attend only to its own document, whose positions then count from 0;
    otherwise it attends to its whole row.
    """
    init: Initialisation = "gpt2"
    """Initial weights. `gpt2`: normal with deviation 0.02, divided by sqrt(2 layers)
    where a matrix ends in a residual connection (Radford et al. 2019, section 2.3;
    Megatron-LM). `llama`: torchtitan's Llama 3: embeddings with deviation 1, inner
    matrices 0.02, residual ends and up projections 0.02 / sqrt(2 (layer + 1)), the
    output layer 1 / sqrt(`width`) cut at 3 deviations. `neox`: sqrt(2 / (5 `width`))
    (Nguyen & Salazar 2019) and 2 / (layers sqrt(`width`)) at residual ends
    (GPT-NeoX-20B, Black et al. 2022). `mitchell`: 1 / sqrt(fan in), divided by sqrt(2
    (layer + 1)) at residual ends, cut at 3 deviations (OLMo, Groeneveld et al. 2024).
    """

    mup_base_width: Positive | None = None
    """Width at which the learning rate and the initialisation were tuned. Initial
    weights and the learning rates of matrices are scaled so that they hold at `width`
    (muP: Yang & Hu 2021, "Tensor Programs V", table 8); the channels per head must stay
    the same. A model of exactly that width trains as without this key. See
    docs/size-and-laws.md.
    """

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("init_from") is not None:
            # A dump of this section holds all defaults; only a value that differs was
            # set by the user.
            fields = cls.model_fields
            conflicting_keys = [
                name
                for name, value in values.items()
                if name in fields
                and name not in NOT_OF_THE_SHAPE
                and value != fields[name].default
            ]
            if conflicting_keys:
                raise ValueError(
                    "with init_from the checkpoint's config.json decides "
                    f"{', '.join(conflicting_keys)}; remove it"
                )
        return expand(values)

    def _problems(self) -> Iterator[str]:
        yield from self.unused_beside_own("model", "document_mask")
        if self.implementation != "auto" and self.init_from is None:
            yield "implementation goes with init_from; remove it"
        if self.mup_base_width is not None and self.init != "gpt2":
            yield "mup_base_width needs init: gpt2; remove one of the two"
        if self.mup_base_width is not None and self.moe is not None:
            yield (
                "mup_base_width needs dense layers, all of whose matrices it knows; "
                "remove one of the two"
            )
        if self.head_width is None and self.width % self.heads:
            yield f"width {self.width} must be an even multiple of heads {self.heads}"
        if (self.head_width or self.width // self.heads) % 2:
            yield (
                f"width {self.width} must be an even multiple of heads "
                f"{self.heads}, or head_width even"
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            yield f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}"

    @property
    def feed_forward_width(self) -> int:
        """Width of the SwiGLU layer: `ffn_width`, or a width derived from `width`."""
        return (
            self.ffn_width
            or math.ceil(8 * self.width / 3 / FFN_MULTIPLE) * FFN_MULTIPLE
        )

    @property
    def layer_weights(self) -> int:
        """Number of weights in the matrices of the layers; of experts, only those that
        process a token, and the router.
        """
        channels = self.head_width or self.width // self.heads
        attention = (
            2 * self.width * channels * (self.heads + (self.kv_heads or self.heads))
        )
        expert_copies = self.moe.experts_per_token if self.moe else 1
        router_outputs = self.moe.experts if self.moe else 0
        feed_forward = 3 * self.width * self.feed_forward_width * expert_copies
        return self.layers * (attention + feed_forward + self.width * router_outputs)
