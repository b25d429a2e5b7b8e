"""Objectives of `pretrain` on packed rows besides the next token, as in
docs/objectives.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from gristmill.mixtures.base import (
    Fraction,
    InnerFraction,
    Positive,
    Section,
    Share,
)
from gristmill.mixtures.objectives.span_objectives import (
    BlankInfilling,
    SpanCorruption,
    Spans,
    Ul2,
)
from gristmill.mixtures.schema.model import Model

MASK_TOKENS = ("<|mask|>", "[MASK]", "<mask>")
"""Names of the mask token in tokenizers: here, in BERT and ModernBERT, in RoBERTa."""


class Masked(Section):
    """Masked language modelling: an encoder fills in masked tokens (Devlin et al. 2019,
    section 3.1).

    The tokenizer needs a mask token: `tokenizer: {special_tokens: ["<|mask|>"]}`.
    """

    added = ("shape",)

    shape: Literal["modernbert", "bert"] = "modernbert"
    """Class of a new encoder. `modernbert`: rotary positions, gated GELU, norms before attention and
    feed-forward, no biases (Warner et al. 2024). `bert`: learned positions, GELU, norms
    after residual connections, biases; `model.ffn_width` is 4 `width` if absent (Devlin
    et al. 2019).
    """
    rate: InnerFraction = 0.3
    """Share of the tokens that are chosen for prediction (ModernBERT, Warner et al.
    2024, section 2.2.1: 0.3; BERT: 0.15).
    """
    mask_share: Fraction = 0.8
    """Share of the chosen tokens that the mask token replaces (BERT: 0.8)."""
    random_share: Fraction = 0.1
    """Share of the chosen tokens that a random token replaces (BERT: 0.1); the others
    stay unchanged.
    """
    whole_words: bool = False
    """Choose all tokens of a word or none of them. Blanks and line breaks separate
    words, as in transformers' collator, so this does not suit languages written without
    blanks.
    """

    def _problems(self) -> Iterator[str]:
        if self.mask_share + self.random_share > 1.0:
            yield (
                f"mask_share {self.mask_share} and random_share {self.random_share} "
                "add up to more than 1; "
                "the remainder of the chosen tokens stays unchanged"
            )


NOT_OF_AN_ENCODER_DECODER: tuple[str, ...] = (
    "use",
    "kv_heads",
    "moe",
    "rope_theta",
    "rope_scaling",
    "qk_norm",
    "document_mask",
    "init",
    "mup_base_width",
)
"""Keys of `pretrain.model` that an encoder-decoder does not have."""


class PrefixLm(Section):
    """Prefix language modelling: a decoder reads the beginning of each document in both
    directions and predicts the remainder (Raffel et al. 2020, section 3.2.1).

    Each document has one prefix; without `model.document_mask` the whole row counts as
    one document.
    """

    least: Fraction = 0.0
    """Smallest share of a document that its prefix covers; the share is drawn uniformly
    from here to `most` (T5: 0).
    """
    most: Share = 1.0
    """Largest share (T5: 1). The S-denoiser of UL2 (Tay et al. 2022, section 3.1) has
    `least` and `most` 0.75.
    """

    def _problems(self) -> Iterator[str]:
        if self.least > self.most:
            yield (
                f"least {self.least} is more than most {self.most}; "
                "give the smaller share as least"
            )


NOT_OF_AN_ENCODER = (
    "use",
    "kv_heads",
    "head_width",
    "moe",
    "rope_scaling",
    "qk_norm",
    "init",
    "mup_base_width",
)
"""Keys of `pretrain.model` that an encoder does not have."""


NOT_OF_A_BERT = ("rope_theta", "tied_embeddings")
"""Further keys that an encoder of BERT's shape does not have."""


Kind = Literal["decoder", "encoder", "encoder_decoder", "classifier"]
"""Use of tokens by a model: predict the next one, fill in masked ones, fill in hidden
spans, or classify texts.
"""


class Goldfish(Section):
    """Goldfish loss: the next-token loss without a part of the tokens, so that a model
    cannot repeat passages word for word (Hans et al. 2024, arXiv 2406.10209).

    A token has no loss if a hash of the `context` tokens before it falls into the first
    of `k` equal parts. So every copy of a passage leaves out the same tokens.
    """

    k: Annotated[int, Field(ge=2)] = 4
    """One token in `k` has no loss (Hans et al. 2024 compare 3, 4, 8 and more)."""
    context: Positive = 13
    """Tokens that are hashed (Hans et al. 2024: 13). The first `context`
    tokens of a row, or with `model.document_mask` of a document, always have a loss.
    """


class Objectives(Section):
    """Objective of a pre-training: the next token, unless one of these is set."""

    masked: Masked | None = None
    """Train an encoder that fills in masked tokens, instead of a decoder. See
    docs/objectives.md.
    """
    prefix_lm: PrefixLm | None = None
    """Let the tokens at the beginning of a document attend in both directions, and
    predict the remainder.
    """
    span_corruption: SpanCorruption | None = None
    """Train an encoder-decoder that fills in hidden spans, instead of a decoder."""
    ul2: Ul2 | None = None
    """Train an encoder-decoder, or a decoder, with a mixture of denoisers."""
    blank_infilling: BlankInfilling | None = None
    """Train a decoder of GLM-4's shape that fills in blanks one after the other."""
    goldfish: Goldfish | None = None
    """Leave a part of the next tokens out of the loss, against memorisation. Validation
    and `evaluate` measure all tokens.
    """

    @property
    def kind(self) -> Kind:
        """Kind of model: predicts the next token, fills in masked tokens, or fills in
        hidden spans.
        """
        if self.masked is not None:
            return "encoder"
        spans = self.span_corruption is not None or (
            self.ul2 is not None and self.ul2.shape == "encoder_decoder"
        )
        return "encoder_decoder" if spans else "decoder"

    @property
    def reads_prefixes(self) -> bool:
        """True for a decoder that reads the beginning of its input in both
        directions.
        """
        if self.prefix_lm is not None or self.blank_infilling is not None:
            return True
        return self.ul2 is not None and self.kind == "decoder"

    @property
    def spans(self) -> tuple[str, Spans] | None:
        """The objective that hides spans of rows, with its key; None if there is
        none.
        """
        sections = ((key, getattr(self, key)) for key in SPAN_OBJECTIVES)
        return next(
            ((key, section) for key, section in sections if section is not None), None
        )


SPAN_OBJECTIVES = ("span_corruption", "ul2", "blank_infilling")
"""Those of `OBJECTIVES` that hide spans."""
OBJECTIVES = ("masked", "prefix_lm", *SPAN_OBJECTIVES)
"""Keys of `pretrain` that replace the prediction of the next token."""


NOT_OF_A_GLM = ("moe", "qk_norm")
"""Keys of `pretrain.model` that GLM-4's shape does not have."""


def objective_problems(pretrain: Any) -> Iterator[str]:
    """Yield what contradicts an objective of the section `pretrain`."""
    model = pretrain.model
    objectives = [name for name in OBJECTIVES if getattr(pretrain, name) is not None]
    objective = objectives[0] if objectives else ""
    if len(objectives) > 1:
        yield f"{' and '.join(objectives)} are different objectives; give one of them"
    if objectives and pretrain.goldfish is not None:
        yield f"goldfish masks next tokens, which {objective} replaces; remove one of the two"
    if objectives and model.use is not None:
        yield f"{objective} needs a built-in model; remove it, or model.use"
    changes_rope = any(
        phase.rope_theta is not None or phase.rope_scaling is not None
        for phase in pretrain.phases
    )
    if changes_rope and (model.use is not None or pretrain.kind != "decoder"):
        yield (
            "phases: rope_theta and rope_scaling belong to the built-in decoder; "
            "remove them, or train that model"
        )
    if objective in ("ul2", "blank_infilling") and model.document_mask:
        yield (
            f"{objective} hides spans of whole rows, whose documents "
            "model.document_mask separates; remove one of the two"
        )
    if objective == "blank_infilling":
        yield from _unused_keys(model, NOT_OF_A_GLM, "GLM", objective)
        channels = model.head_width or model.width // model.heads
        if channels % 4 and model.init_from is None:
            yield (
                "blank_infilling rotates half of a head's channels in pairs: "
                f"{channels} must be a multiple of 4"
            )
    if pretrain.kind == "decoder":
        return
    name = pretrain.kind.replace("_", "-")
    unsupported = (
        NOT_OF_AN_ENCODER if pretrain.kind == "encoder" else NOT_OF_AN_ENCODER_DECODER
    )
    if pretrain.masked is not None and pretrain.masked.shape == "bert":
        if model.init_from is not None:
            yield (
                "with model.init_from the checkpoint's config.json decides "
                "masked.shape; remove it"
            )
        name = "BERT"
        unsupported = (*unsupported, *NOT_OF_A_BERT)
    yield from _unused_keys(model, unsupported, name, objective)
    if pretrain.float8 != "off":
        yield (
            "float8 multiplies a decoder's layers in 8 bits; remove it beside "
            f"`{objective}`"
        )
    for task in pretrain.tasks:
        yield (
            f"tasks: {task.name} asks for likelihoods of answers, which "
            f"an {name} does not compute; remove `tasks` beside `{objective}`"
        )


def _unused_keys(
    model: Model, keys: Iterable[str], name: str, objective: str
) -> Iterator[str]:
    for key in keys:
        if getattr(model, key) != Model.model_fields[key].default:
            yield (
                f"model.{key} has no effect on the {name} that "
                f"`{objective}` trains; remove one of the two"
            )
