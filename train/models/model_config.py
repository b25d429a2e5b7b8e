"""Sizes of a model, as stored beside its weights, and quantities derived from them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from gristmill.mixtures.objectives.token_objectives import Kind as Kind
from gristmill.mixtures.schema.model import Model, RopeScaling
from gristmill.mixtures.schema.pretrain import Pretrain
from gristmill.mixtures.user_code import Own

VOCAB_MULTIPLE = 128
"""The embedding is padded to a multiple of this number of rows, for matrix units
(OLMo-core: padded_vocab_size).
"""
LARGEST_SIZES = {
    "layers": 10_000,
    "width": 1 << 20,
    "heads": 1 << 16,
    "kv_heads": 1 << 16,
    "head_width": 1 << 16,
    "ffn_width": 1 << 24,
    "vocab_size": 1 << 26,
    "padded_vocab_size": 1 << 26,
    "sequence_length": 1 << 31,
}
"""Upper bounds far beyond any model, as a model of a config.json is built in memory
before its weights are read.
"""


ENCODED, DECODED = 0.9, 0.2
"""Encoded and decoded tokens of an encoder-decoder per token of a row, for counting
FLOPs.

15 % of the tokens are hidden in spans of 3 on average, each with a sentinel on both
sides. Other objectives are counted with the same numbers.
"""
BERT_FFN = 4
"""Ratio of BERT's feed-forward width to its width (section 3)."""
CHUNKS = 2
"""Chunks of a row per process in context parallelism (see context_parallel.py)."""
OWN = "own"
"""Key of config.json for the code and options of a user's model."""
TRANSFORMERS = "transformers"
"""Key of config.json for the shape of a module of transformers."""
JsonObject = dict[str, object]
ConfigJson = Mapping[str, Any]
"""Content of a config.json, ours or of transformers."""


class ShapeError(ValueError):
    """A config.json does not describe a valid model."""


class UnknownArchitectureError(ValueError):
    """A config.json describes an unsupported architecture."""


class WeightsError(ValueError):
    """The tensors of a folder do not match the model of its config.json."""


@dataclass(frozen=True)
class Published:
    """Settings of a published model's config.json that only its export needs.

    Attributes:
        model_type: its family.
        eos: ids that end a text.
        bos: id that begins one.
        sliding_window: maximum number of tokens that a token attends to, including
            itself; rows are not longer. None: all.
    """

    model_type: str
    eos: tuple[int, ...] = ()
    sliding_window: int | None = None
    bos: int | None = None


@dataclass(frozen=True)
class Shape:
    """Sizes and options of a decoder.

    Attributes:
        layers, width, heads, kv_heads, head_width, ffn_width: see
            `mixtures.schema.model.Model`.
        rope_theta, rope_scaling, norm_eps, tied_embeddings, qk_norm, document_mask:
            likewise.
        vocab_size: ids of the tokenizer; ids from here to `padded_vocab_size` are
            neither read nor predicted.
        padded_vocab_size: rows of the embedding.
        sequence_length: context: maximum row length that any stage trained on.
        qkv_bias: true if queries, keys and values have biases (Qwen2).
        rotary_share: share of a head's channels that rotary positions rotate (GLM-4:
            half).
        experts: feed-forward experts per block; 0 in a dense model.
        experts_per_token: experts that a token is routed to.
        load_balancing: weight of the load-balancing loss.
        norm_topk_prob: true if the weights of a token's experts are divided by their
            sum (Mixtral, most of Qwen3-MoE).
        prefix_lm: true if tokens of a prompt attend to each other in both directions
            (see objectives.prefix_rows).
        published: settings of a model that was trained elsewhere.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    ffn_width: int
    rope_theta: float
    norm_eps: float
    tied_embeddings: bool
    vocab_size: int
    padded_vocab_size: int
    sequence_length: int
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    rotary_share: float = 1.0
    document_mask: bool = False
    experts: int = 0
    experts_per_token: int = 0
    load_balancing: float = 0.0
    prefix_lm: bool = False
    norm_topk_prob: bool = True
    published: Published | None = field(default=None, compare=False)
    kind: ClassVar[Kind] = "decoder"
    __pydantic_config__ = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        window = None if self.published is None else self.published.sliding_window
        if window is not None and self.sequence_length > window:
            raise ShapeError(
                f"rows of {self.sequence_length:,} tokens are longer than the model's "
                f"sliding window of {window:,}, and attention here has no window; make "
                f"rows of {window:,} tokens or less (mix.sequence_length, or "
                "sequence_length of sft, reward, dpo or rl), or let transformers compute "
                "it (implementation: transformers beside model.path or init_from)"
            )
        for name, limit in LARGEST_SIZES.items():
            size = getattr(self, name)
            if type(size) is not int or not 1 <= size <= limit:
                raise ShapeError(
                    f"a model's {name} is a whole number from 1 to "
                    f"{limit:,}, not {size!r}"
                )

    @property
    def follows_end(self) -> bool | None:
        """True if the first token of a text attends to the end of text before it in
        training; None for a published model.
        """
        return None if self.published is not None else not self.document_mask

    @property
    def attention_width(self) -> int:
        """Channels of all query heads."""
        return self.heads * self.head_width

    @property
    def matrix_parameters(self) -> int:
        """Weights that every token is multiplied by: all matrices and the output head,
        without the embedding lookup.

        Of the experts only those that a token is routed to, and the router.
        """
        return self._matrices(self.experts_per_token)

    @property
    def parameters(self) -> int:
        """Number of weights."""
        lookup = 0 if self.tied_embeddings else self.padded_vocab_size * self.width
        kv_width = self.kv_heads * self.head_width
        biases = (self.attention_width + 2 * kv_width) * self.qkv_bias
        vectors = 2 * self.width + 2 * self.head_width * self.qk_norm + biases
        return (
            self._matrices(self.experts) + lookup + self.layers * vectors + self.width
        )

    def flops_per_token(self, length: int) -> int:
        """FLOPs of forward and backward pass per token, including attention (PaLM,
        appendix B).
        """
        return (
            6 * self.matrix_parameters
            + 12 * self.layers * self.attention_width * length
        )

    def _matrices(self, experts: int) -> int:
        """Weights of all matrices with this number of experts per block (0 if
        dense).
        """
        attention = 2 * self.width * self.head_width * (self.heads + self.kv_heads)
        feed_forward = (
            3 * max(experts, 1) * self.width * self.ffn_width
            + self.width * self.experts
        )
        return (
            self.layers * (attention + feed_forward)
            + self.padded_vocab_size * self.width
        )


class ForeignShape:
    """Sizes of a module other than the models of this package, with the part of the
    interface of `Shape` that applies.

    Attributes:
        vocab_size: number of predicted ids.
        sequence_length: maximum row length.
        document_mask: true if it gets positions within documents.
        parameters: number of its weights.
        matrix_parameters: weights that every token is multiplied by.
        layers, attention_width: of its attention; 0 if unknown.
    """

    vocab_size: int
    sequence_length: int
    document_mask: bool
    parameters: int
    layers: int = 0
    attention_width: int = 0
    experts: ClassVar[int] = 0
    kind: Kind = "decoder"
    prefix_lm: ClassVar[bool] = False

    @property
    def follows_end(self) -> bool | None:
        """See `Shape.follows_end`."""
        return not self.document_mask

    @property
    def matrix_parameters(self) -> int:
        """All weights, as operations are unknown (Kaplan et al. 2020, section 2.1)."""
        return self.parameters

    def flops_per_token(self, length: int) -> int:
        """See `Shape.flops_per_token`."""
        return (
            6 * self.matrix_parameters
            + 12 * self.layers * self.attention_width * length
        )


@dataclass(frozen=True)
class OwnShape(ForeignShape):
    """Known sizes of a user's model (see `ForeignShape`).

    Attributes:
        own: class or function, and its options.
        seed: of its initial weights.
    """

    own: Own
    vocab_size: int
    sequence_length: int
    document_mask: bool
    seed: int
    parameters: int = 0


@dataclass(frozen=True)
class TransformersShape(ForeignShape):
    """Sizes of a module of transformers (see `ForeignShape`).

    Attributes:
        kind: of its prediction.
        config: content of its config.json.
        files: content of its other JSON files by name: generation_config.json and those
            of a processor of images.
        context: maximum row length that its config.json allows; None if any.
        multiplied: weights that every token is multiplied by, of experts all; of an
            encoder-decoder weighted by `ENCODED` and `DECODED`.
    """

    config: dict[str, Any]
    files: dict[str, Any]
    vocab_size: int
    sequence_length: int
    context: int | None
    parameters: int
    multiplied: int
    layers: int
    attention_width: int
    document_mask: bool = False
    kind: Kind = "decoder"

    def __post_init__(self) -> None:
        if self.context is not None and self.sequence_length > self.context:
            raise ShapeError(
                f"rows of {self.sequence_length:,} tokens are longer than the "
                f"{self.context:,} positions in the config.json of this "
                f"{self.family}; make rows shorter (mix.sequence_length, or "
                "sequence_length of sft, dpo or rl)"
            )

    @property
    def follows_end(self) -> None:
        """See `Shape.follows_end`."""
        return None

    @property
    def family(self) -> str:
        """Its `model_type`."""
        return str(self.config["model_type"])

    @property
    def matrix_parameters(self) -> int:
        """Weights that every token is multiplied by."""
        return self.multiplied


StoredShape = Shape | TransformersShape
"""Shape of the model in a folder."""
AnyShape = StoredShape | OwnShape


def shape_of(model: Model, vocab_size: int, sequence_length: int) -> Shape:
    """Shape of a manifest's model section, with a vocabulary size and a row length."""
    moe = model.moe
    return Shape(
        layers=model.layers,
        width=model.width,
        heads=model.heads,
        kv_heads=model.kv_heads or model.heads,
        head_width=model.head_width or model.width // model.heads,
        ffn_width=model.feed_forward_width,
        rope_theta=model.rope_theta,
        norm_eps=model.norm_eps,
        tied_embeddings=model.tied_embeddings,
        vocab_size=vocab_size,
        padded_vocab_size=math.ceil(vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        sequence_length=sequence_length,
        rope_scaling=model.rope_scaling,
        qk_norm=model.qk_norm,
        document_mask=model.document_mask,
        experts=moe.experts if moe else 0,
        experts_per_token=moe.experts_per_token if moe else 0,
        load_balancing=moe.load_balancing if moe else 0.0,
    )


def shape_to_train(section: Pretrain, vocab_size: int, sequence_length: int) -> Shape:
    """Shape of a decoder for the section `pretrain`, from its sizes and objective."""
    shape = shape_of(section.model, vocab_size, sequence_length)
    if section.blank_infilling is not None:
        shape = replace(shape, qkv_bias=True, rotary_share=0.5)
    return replace(shape, prefix_lm=section.reads_prefixes)


def shape_to_json(shape: AnyShape) -> JsonObject:
    """Content of `config.json`."""
    values: JsonObject = TypeAdapter(type(shape)).dump_python(shape, mode="json")
    if isinstance(shape, TransformersShape):
        return {TRANSFORMERS: values}
    if isinstance(shape, Shape):
        if shape.published is None:
            del values["published"]
        if shape.norm_topk_prob:
            del values["norm_topk_prob"]
    return values


def shape_from_json(config: ConfigJson) -> Shape:
    """Shape of a `config.json`.

    Raises:
        ShapeError: a key is missing, unknown, or has a value of the wrong kind.
    """
    try:
        return TypeAdapter(Shape).validate_json(json.dumps(config), strict=True)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
            for problem in error.errors()
        ]
        raise ShapeError(
            f"config.json: {'; '.join(problems)}. It is neither of this version nor a "
            "model of transformers (with `model_type`); export the model with the "
            "version that saved it, or train it again"
        ) from error
