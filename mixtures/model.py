"""The section `model`: the shape of the decoder, by its sizes or by a preset's name, and what it starts from."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from gristmill.mixtures.base import OutsidePath, Positive, PositiveFloat, Section
from gristmill.mixtures.user_code import BuiltInOrOwn

_LLAMA_3 = {"rope_theta": 500_000.0}
FFN_MULTIPLE = 64
"""What the width of a feed-forward layer is rounded up to, where none is given."""

PRESETS: dict[str, dict[str, Any]] = {
    "llama-1m": {"layers": 4, "width": 128, "heads": 4},
    "llama-10m": {"layers": 6, "width": 384, "heads": 6},
    "llama-30m": {"layers": 10, "width": 512, "heads": 8},
    "llama-125m": {"layers": 12, "width": 768, "heads": 6},
    "llama-350m": {"layers": 24, "width": 1024, "heads": 8},
    "llama-1b": {"layers": 16, "width": 2048, "heads": 32, "kv_heads": 8, "ffn_width": 8192, **_LLAMA_3},
    "llama-3b": {"layers": 28, "width": 3072, "heads": 24, "kv_heads": 8, "ffn_width": 8192, **_LLAMA_3},
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

1m to 30m count the weights of the layers; 125m and 350m are the depths and widths of GPT-2 small and medium (Radford et
al. 2019) with heads of 128 channels, which fill matrix units (modded-nanogpt); 1b and 3b are Llama 3.2's (config.json
of meta-llama/Llama-3.2-1B and -3B, without the stretched context), 8b is Llama 3's (Grattafiori et al. 2024, table 3).
`moe-8x7b` is Mixtral's (Jiang et al. 2024, table 1); `moe-8x125m` and `moe-4m` are the dense ones with eight experts.
"""


def expand(values: Any) -> Any:
    """A section `model` whose preset is replaced by the keys that it stands for; the name itself stays.

    Raises:
        ValueError: no preset has that name.
    """
    if not isinstance(values, dict) or values.get("preset") is None:
        return values
    name = values["preset"]
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is none of {', '.join(PRESETS)}")
    return {**PRESETS[name], **values}


Initialisation = Literal["gpt2", "llama", "neox", "mitchell"]
NOT_OF_THE_SHAPE = ("init_from", "document_mask")
"""Keys that go with `init_from`; all others are the checkpoint's own."""


class RopeScaling(Section):
    """How rotary positions are stretched, for contexts longer than a model was trained on.

    The frequencies are those of transformers' modeling_rope_utils.
    """

    kind: Literal["linear", "llama3", "yarn"]
    """`linear`: all frequencies over `factor` (Chen et al. 2023). `llama3`: only the slow ones, with a ramp between
    (Llama 3.1). `yarn`: likewise by rotations, with warmer attention (Peng et al. 2023)."""
    factor: PositiveFloat
    """How many times longer contexts become."""
    original_length: Positive | None = None
    """`llama3`, `yarn`: tokens per row before the stretching."""
    low_freq_factor: PositiveFloat = 1.0
    """`llama3`: wavelengths over `original_length` / this are stretched in full (Llama 3.1: 1)."""
    high_freq_factor: PositiveFloat = 4.0
    """`llama3`: wavelengths under `original_length` / this are left alone (Llama 3.1: 4)."""
    beta_fast: PositiveFloat = 32.0
    """`yarn`: channels with more rotations in `original_length` are left alone (Peng et al. 2023: 32)."""
    beta_slow: PositiveFloat = 1.0
    """`yarn`: channels with fewer rotations are stretched in full (Peng et al. 2023: 1)."""
    attention_factor: PositiveFloat | None = None
    """`yarn`: what queries and keys are multiplied with; 0.1 ln(`factor`) + 1 if absent (Peng et al. 2023, eq. 22)."""

    @model_validator(mode="after")
    def _keys_of_its_kind(self) -> RopeScaling:
        if self.kind != "linear" and self.original_length is None:
            raise ValueError(f"kind {self.kind} needs original_length, the tokens per row before the stretching")
        own = {
            "linear": set[str](),
            "llama3": {"original_length", "low_freq_factor", "high_freq_factor"},
            "yarn": {"original_length", "beta_fast", "beta_slow", "attention_factor"},
        }[self.kind]
        changed = {
            name
            for name, field in type(self).model_fields.items()
            if name not in ("kind", "factor") and getattr(self, name) != field.default
        }
        if changed - own:
            raise ValueError(f"kind {self.kind} has no {', '.join(sorted(changed - own))}; remove it")
        return self


class Moe(Section):
    """A mixture of experts in place of every feed-forward layer, routed as Mixtral does (Jiang et al. 2024)."""

    experts: Positive
    """Feed-forward layers to choose from, each `ffn_width` wide."""
    experts_per_token: Positive = 2
    """How many of them each token goes through, by the largest router probabilities (Mixtral: 2)."""
    load_balancing: float = Field(default=0.01, ge=0.0)
    """Weight of the loss that keeps experts equally busy (Fedus et al. 2021, equations 4 to 6: 0.01), taken row by row
    (DeepSeek-V3, section 2.1.2), so that it does not depend on how a batch is cut."""

    @model_validator(mode="after")
    def _enough_experts(self) -> Moe:
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} is more than experts {self.experts}")
        return self


class GivenModel(Section):
    """A model that was trained elsewhere, to be tuned, measured or exported without `sources`, `mix` or `pretrain`.

    The tokenizer and the chat template come from its folder unless the section `tokenizer` gives others."""

    path: OutsidePath
    """A folder that transformers loads, or one that `export` wrote: config.json, model.safetensors (or its shards) and
    tokenizer.json, of one of the decoders of docs/reference/model-families.md."""


class Model(BuiltInOrOwn):
    """A Llama-style decoder, or a model of your own."""

    takes: ClassVar[tuple[str, ...] | None] = ("vocab_size",)
    offers: ClassVar[tuple[str, ...]] = ("sequence_length",)
    added = ("mup_base_width",)

    preset: str | None = Field(default=None, exclude=True)
    """Name of sizes that other keys override: `llama-1m`, `llama-10m`, `llama-30m`, `llama-125m`, `llama-350m`,
    `llama-1b`, `llama-3b`, `llama-8b`, `moe-4m`, `moe-8x125m`, `moe-8x7b`."""
    init_from: OutsidePath | None = None
    """A folder as Hugging Face has it (config.json, safetensors) whose model is trained on, of one of the families of
    docs/reference/model-families.md. Its config.json then decides the shape, and the tokenizer has to be its own
    (`tokenizer: {path: .../tokenizer.json}`); the rows of the mixture become its context length. Rows that are longer
    than its sliding window are an error."""
    layers: Positive = 4
    """Decoder blocks."""
    width: Positive = 128
    """Width of the residual stream (transformers: hidden_size)."""
    heads: Positive = 4
    """Query heads."""
    kv_heads: Positive | None = None
    """Key and value heads (grouped-query attention); as many as `heads` if absent."""
    head_width: Positive | None = None
    """Channels per head; `width` over `heads` if absent."""
    ffn_width: Positive | None = None
    """Width of the SwiGLU layer; 8/3 of `width`, rounded up to a multiple of 64, if absent."""
    moe: Moe | None = None
    """A mixture of experts in place of each feed-forward layer; dense if absent."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary position embedding."""
    rope_scaling: RopeScaling | None = None
    """Stretched rotary positions; plain ones if absent."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon of RMSNorm."""
    qk_norm: bool = False
    """Normalise queries and keys per head before they are rotated (Qwen3), which keeps attention logits small."""
    tied_embeddings: bool = True
    """Use the input embedding as output layer too."""
    document_mask: bool = False
    """Let a token attend only to its own document, whose positions then count from 0; otherwise to its whole row."""
    init: Initialisation = "gpt2"
    """First weights. `gpt2`: normal, deviation 0.02, what ends in a residual connection over sqrt(2 layers) (Radford et
    al. 2019, section 2.3; Megatron-LM). `llama`: torchtitan's Llama 3: embeddings with deviation 1, inner matrices
    0.02, residual ends and up projections 0.02 / sqrt(2 (layer + 1)), the output layer 1 / sqrt(`width`) cut at 3
    deviations. `neox`: sqrt(2 / (5 `width`)) (Nguyen & Salazar 2019) and 2 / (layers sqrt(`width`)) at residual ends
    (GPT-NeoX-20B, Black et al. 2022). `mitchell`: 1 / sqrt(fan in), over sqrt(2 (layer + 1)) at residual ends, cut at
    3 deviations (OLMo, Groeneveld et al. 2024)."""

    mup_base_width: Positive | None = None
    """The width at which learning rate and initialisation were found: first weights, and the rates of matrices, are
    scaled such that they hold at `width` (muP: Yang & Hu 2021, "Tensor Programs V", table 8), where the channels of a
    head stay as they were. A model of that width itself is as without this key. See docs/size-and-laws.md."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("init_from") is not None:
            # Defaults are what a dump of this section holds; only what differs was asked for.
            fields = cls.model_fields
            given = [
                name
                for name, value in values.items()
                if name in fields and name not in NOT_OF_THE_SHAPE and value != fields[name].default
            ]
            if given:
                raise ValueError(f"with init_from the checkpoint's config.json decides {', '.join(given)}; remove it")
        return expand(values)

    @model_validator(mode="after")
    def _own_has_its_options(self) -> Model:
        if unused := self.unused_beside_own("document_mask"):
            raise ValueError(
                f"model.{unused[0]} means nothing to a model of your own; give it as an option, under "
                "`with`, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _can_be_scaled(self) -> Model:
        if self.mup_base_width is not None and (self.init != "gpt2" or self.moe is not None):
            what = "init: gpt2" if self.init != "gpt2" else "dense layers, whose every matrix it knows"
            raise ValueError(f"mup_base_width needs {what}; remove one of the two")
        return self

    @model_validator(mode="after")
    def _divisible(self) -> Model:
        if self.head_width is None and self.width % self.heads:
            raise ValueError(f"width {self.width} must be an even multiple of heads {self.heads}")
        if (self.head_width or self.width // self.heads) % 2:
            raise ValueError(f"width {self.width} must be an even multiple of heads {self.heads}, or head_width even")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        return self

    @property
    def feed_forward_width(self) -> int:
        """Width of the SwiGLU layer: what is given, or what follows from `width`."""
        return self.ffn_width or math.ceil(8 * self.width / 3 / FFN_MULTIPLE) * FFN_MULTIPLE

    @property
    def layer_weights(self) -> int:
        """Weights of all matrices in the layers; of the experts those that a token goes through, and the router."""
        channels = self.head_width or self.width // self.heads
        attention = 2 * self.width * channels * (self.heads + (self.kv_heads or self.heads))
        experts = (self.moe.experts_per_token, self.moe.experts) if self.moe else (1, 0)
        return self.layers * (
            attention + 3 * self.width * self.feed_forward_width * experts[0] + self.width * experts[1]
        )
