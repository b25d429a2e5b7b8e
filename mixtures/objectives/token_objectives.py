"""What `pretrain` predicts of packed rows, besides the next token: the objectives of docs/objectives.md."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gristmill.mixtures.base import Fraction, Positive, PositiveFloat, Section
from gristmill.mixtures.model import Model
from gristmill.mixtures.objectives.span_objectives import BlankInfilling, SpanCorruption, Spans, Ul2

MASK_TOKENS = ("<|mask|>", "[MASK]", "<mask>")
"""What tokenizers call the token that stands for a masked one: here, BERT and ModernBERT, RoBERTa."""


class Masked(Section):
    """Masked language modelling: an encoder fills in tokens that were masked (Devlin et al. 2019, section 3.1).

    The tokenizer needs a mask token: `tokenizer: {special_tokens: ["<|mask|>"]}`.
    """

    added = ("shape",)

    shape: Literal["modernbert", "bert"] = "modernbert"
    """`modernbert`: rotary positions, gated GELU, norms before attention and feed-forward, no biases (Warner et al.
    2024). `bert`: learned positions, GELU, norms behind residual connections, biases; `model.ffn_width` is 4 `width` if
    absent (Devlin et al. 2019)."""
    rate: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.3
    """Share of the tokens that are chosen and predicted (ModernBERT, Warner et al. 2024, section 2.2.1: 0.3; BERT:
    0.15)."""
    mask_share: Fraction = 0.8
    """Share of the chosen ones in whose place the mask token stands (BERT: 0.8)."""
    random_share: Fraction = 0.1
    """Share of them in whose place any token of the vocabulary stands (BERT: 0.1); the others stay as they are."""
    whole_words: bool = False
    """Choose all tokens of a word or none; words are what blanks and line breaks separate, as in transformers'
    collator, so that this is not for languages that are written without blanks."""

    @model_validator(mode="after")
    def _shares_of_one(self) -> Masked:
        if self.mask_share + self.random_share > 1.0:
            raise ValueError(
                f"mask_share {self.mask_share} and random_share {self.random_share} are more than 1 "
                "together; the rest of the chosen tokens stays as it is"
            )
        return self


NOT_OF_AN_ENCODER_DECODER = (
    "use",
    "kv_heads",
    "moe",
    "rope_theta",
    "rope_scaling",
    "qk_norm",
    "document_mask",
    "mup_base_width",
)
"""Keys of `pretrain.model` that an encoder-decoder does not have."""


class PrefixLm(Section):
    """Prefix language modelling: a decoder reads the beginning of each document in both directions, and predicts the
    rest of it (Raffel et al. 2020, section 3.2.1).

    What is one document to the model has one prefix: the whole row without `model.document_mask`.
    """

    least: Fraction = 0.0
    """The smallest share of a document that its prefix is; the share is drawn evenly from here to `most` (T5: 0)."""
    most: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """The largest (T5: 1). The S-denoiser of UL2 (Tay et al. 2022, section 3.1) has `least` and `most` 0.75."""

    @model_validator(mode="after")
    def _ordered(self) -> PrefixLm:
        if self.least > self.most:
            raise ValueError(f"least {self.least} is more than most {self.most}; give the smaller share as least")
        return self


class MultiToken(Section):
    """Multi-token prediction: further tokens are predicted at each place, by heads that are dropped at the end."""

    heads: Positive = 1
    """Further tokens, each by a block of its own behind the one before (DeepSeek-V3, section 2.2: 1)."""
    weight: PositiveFloat = 0.3
    """What the mean of their losses is multiplied with before it is added (DeepSeek-V3, section 4.2: 0.3, and 0.1 in
    the last third)."""


NOT_OF_AN_ENCODER = ("use", "kv_heads", "head_width", "moe", "rope_scaling", "qk_norm")
"""Keys of `pretrain.model` that an encoder does not have."""


NOT_OF_A_BERT = ("rope_theta", "tied_embeddings", "mup_base_width")
"""Further ones that an encoder of BERT's shape does not have."""


Kind = Literal["decoder", "encoder", "encoder_decoder"]
"""What a model does with tokens: predict the next one, fill in masked ones, or fill in hidden spans."""


class Objectives(Section):
    """What a pre-training predicts: the next token, unless one of these says otherwise."""

    masked: Masked | None = None
    """Train an encoder that fills in masked tokens, in place of a decoder. See docs/objectives.md."""
    prefix_lm: PrefixLm | None = None
    """Let the tokens of a document's beginning see each other in both directions, and predict the rest."""
    span_corruption: SpanCorruption | None = None
    """Train an encoder-decoder that fills in hidden spans, in place of a decoder."""
    ul2: Ul2 | None = None
    """Train an encoder-decoder, or a decoder, by a mixture of denoisers."""
    blank_infilling: BlankInfilling | None = None
    """Train a decoder of GLM-4's shape that fills in blanks, one after the other."""
    multi_token: MultiToken | None = None
    """Predict further tokens beside the next one, by heads that are dropped when the training ends."""

    @property
    def kind(self) -> Kind:
        """What the model does with tokens: predict the next one, fill in masked ones, or fill in hidden spans."""
        if self.masked is not None:
            return "encoder"
        spans = self.span_corruption is not None or (self.ul2 is not None and self.ul2.shape == "encoder_decoder")
        return "encoder_decoder" if spans else "decoder"

    @property
    def reads_prefixes(self) -> bool:
        """Whether it is a decoder that reads the beginning of what it is given in both directions."""
        return any(one is not None for one in (self.prefix_lm, self.blank_infilling)) or (
            self.ul2 is not None and self.kind == "decoder"
        )

    @property
    def spans(self) -> tuple[str, Spans] | None:
        """The objective that hides spans of rows, and its key; None where there is none."""
        given = ((key, getattr(self, key)) for key in SPAN_OBJECTIVES)
        return next(((key, section) for key, section in given if section is not None), None)


SPAN_OBJECTIVES = ("span_corruption", "ul2", "blank_infilling")
"""Those of OBJECTIVES that hide spans."""
OBJECTIVES = ("masked", "prefix_lm", *SPAN_OBJECTIVES)
"""Keys of `pretrain` of which each says what is predicted in place of the next token."""


def objective_problem(pretrain: Any) -> str | None:
    """What an objective of the section `pretrain` does not go with, in a sentence; None where nothing is wrong."""
    given = [name for name in OBJECTIVES if getattr(pretrain, name) is not None]
    if len(given) > 1:
        return f"{' and '.join(given)} are different things to predict; give one of them"
    if given and pretrain.model.use is not None:
        return f"{given[0]} needs a model that is built in; remove it, or model.use"
    turned = any(phase.rope_theta is not None or phase.rope_scaling is not None for phase in pretrain.phases)
    if turned and (pretrain.model.use is not None or pretrain.kind != "decoder"):
        return "phases: rope_theta and rope_scaling are the built-in decoder's; remove them, or train that"
    if given in (["ul2"], ["blank_infilling"]) and pretrain.model.document_mask:
        return (
            f"{given[0]} hides spans of whole rows, whose documents model.document_mask keeps apart; remove one of "
            "the two"
        )
    if given == ["blank_infilling"] and (problem := _glm_problem(pretrain.model)) is not None:
        return problem
    if pretrain.multi_token is not None:
        others = [
            *given,
            *(f"model.{key}" for key in ("use", "moe", "mup_base_width") if getattr(pretrain.model, key) is not None),
        ]
        if others:
            return f"multi_token adds to a dense decoder that predicts the next token; remove it, or {others[0]}"
    return None if pretrain.kind == "decoder" else _other_kind_problem(pretrain, given[0])


NOT_OF_A_GLM = ("moe", "qk_norm")
"""Keys of `pretrain.model` that GLM-4's shape does not have."""


def _glm_problem(model: Model) -> str | None:
    if other := [key for key in NOT_OF_A_GLM if getattr(model, key) != Model.model_fields[key].default]:
        return f"model.{other[0]} means nothing to the GLM that `blank_infilling` trains; remove one of both"
    channels = model.head_width or model.width // model.heads
    if channels % 4 and model.init_from is None:
        return f"blank_infilling turns half of a head's channels in pairs: {channels} must be a multiple of 4"
    return None


def _other_kind_problem(pretrain: Any, objective: str) -> str | None:
    name = pretrain.kind.replace("_", "-")
    not_known: tuple[str, ...] = NOT_OF_AN_ENCODER if pretrain.kind == "encoder" else NOT_OF_AN_ENCODER_DECODER
    if pretrain.masked is not None and pretrain.masked.shape == "bert":
        if pretrain.model.init_from is not None:
            return "with model.init_from the checkpoint's config.json decides masked.shape; remove it"
        name, not_known = "BERT", (*not_known, *NOT_OF_A_BERT)
    if other := [key for key in not_known if getattr(pretrain.model, key) != Model.model_fields[key].default]:
        return f"model.{other[0]} means nothing to the {name} that `{objective}` trains; remove one of both"
    if pretrain.float8 != "off":
        return f"float8 needs a decoder, whose layers it multiplies in 8 bits; remove it beside `{objective}`"
    if pretrain.tasks:
        return (
            f"tasks: {pretrain.tasks[0].name} asks for likelihoods of answers, which an {name} does not give; "
            f"remove `tasks` beside `{objective}`"
        )
    return None
