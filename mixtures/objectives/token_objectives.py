"""What `pretrain` predicts of packed rows, besides the next token: the objectives of docs/objectives.md."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from gristmill.mixtures.model import Model
from gristmill.mixtures.section import Fraction, Section

MASK_TOKENS = ("<|mask|>", "[MASK]", "<mask>")
"""What tokenizers call the token that stands for a masked one: here, BERT and ModernBERT, RoBERTa."""


class Masked(Section):
    """Masked language modelling: an encoder fills in tokens that were masked (Devlin et al. 2019, section 3.1).

    The tokenizer needs a mask token: `tokenizer: {special_tokens: ["<|mask|>"]}`.
    """

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
            raise ValueError(f"mask_share {self.mask_share} and random_share {self.random_share} are more than 1 "
                             "together; the rest of the chosen tokens stays as it is")
        return self


NOT_OF_AN_ENCODER = ("use", "kv_heads", "head_width", "moe", "rope_scaling", "qk_norm")
"""Keys of `pretrain.model` that an encoder does not have."""


def objective_problem(pretrain: Any) -> str | None:
    """What an objective of the section `pretrain` does not go with, in a sentence; None where nothing is wrong."""
    return None if pretrain.masked is None else _encoder_problem(pretrain)


def _encoder_problem(pretrain: Any) -> str | None:
    if other := [key for key in NOT_OF_AN_ENCODER
                 if getattr(pretrain.model, key) != Model.model_fields[key].default]:
        return f"model.{other[0]} means nothing to the encoder that `masked` trains; remove one of both"
    if pretrain.float8 != "off":
        return "float8 needs a decoder, whose layers it multiplies in 8 bits; remove it beside `masked`"
    if pretrain.tasks:
        return (f"tasks: {pretrain.tasks[0].name} asks for likelihoods of answers, which an encoder that fills in "
                "masked tokens does not give; remove `tasks` beside `masked`")
    return None
