"""The section `mix`: which tokens are trained on, in which shares, and how they are packed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from gristmill.mixtures.section import OutsidePath, Positive, Section

ALPHA = "alpha"
"""The key that asks for shares by size."""


def temperature(weights: Mapping[str, float]) -> float | None:
    """The exponent of shares by size; None where the weights are of sources."""
    return weights[ALPHA] if list(weights) == [ALPHA] else None


def _mean_something(weights: dict[str, float]) -> dict[str, float]:
    alpha = temperature(weights)
    if alpha is not None and alpha > 1:
        raise ValueError(f"alpha lies between 0 (all sources equal) and 1 (as large as they are), not at {alpha:g}")
    if alpha is None and not any(weights.values()):
        raise ValueError("every weight is 0, so the mixture is empty; give at least one source a weight")
    return weights


Weights = Annotated[dict[str, Annotated[float, Field(ge=0.0)]], AfterValidator(_mean_something)]
"""Source -> share relative to the others', or `{alpha: exponent}`."""


class MixStage(Section):
    """A part of the training order with weights of its own."""

    until: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Share of the training set at which it ends; only the last stage has none, and ends with the set."""
    weights: Weights | None = None
    """Shares of tokens within this stage, as in `mix.weights`, which hold if absent. A source that is not named has no
    part in it."""


class Mix(Section):
    """The packed training set."""

    tokens: Positive
    """Tokens of the training set's documents, rounded down to whole rows; padding does not count."""
    weights: Weights | None = None
    """Shares of tokens, relative to each other, instead of the sources' own `weight`: a source that is not named has
    no part in the mixture. Or `{alpha: 0.7}`: shares in proportion to the tokens that a source has, to that power
    (XLM-R, section 3.1, and mT5, section 3.1: 0.7 and 0.3); 1 leaves the proportions as they are, 0 makes all equal."""
    stages: tuple[MixStage, ...] = ()
    """Other weights for parts of the training order, one after another, as annealing wants them:
    `[{until: 0.8, weights: {...}}, {weights: {...}}]`. A document is repeated no more than its source allows over all
    stages together. A set with stages is read once: a training that asks for more rows is refused."""
    short: Literal["error", "redistribute"] = "error"
    """What happens where a source's share is more than its `max_epochs` or `max_tokens` allow, or less than its
    `min_tokens`. `error` says by how much and what would help; `redistribute` gives the source what its limit says and
    lets the others have the difference, by their weights, and warns of it."""
    sequence_length: Annotated[int, Field(ge=8)] = 512
    """Tokens per row."""
    packing: Literal["stream", "best_fit"] = "stream"
    """`stream`: documents back to back, each with its end-of-text token, cut wherever a row ends. `best_fit`: documents
    of at most a row stay whole, longer ones are cut into whole rows and a rest, and each part goes into the fullest row
    that has room for it, longest first (best-fit-decreasing: Ding et al. 2024); what rows have left over is padding,
    which is never trained on, and comes on top of `tokens`. The summary says what each packing would cut and pad.
    Held-out rows are always packed as `stream`, so that losses of different packings can be compared."""
    document_starts: Literal["any", "aligned"] = "any"
    """`aligned`: every row begins with a document's first token, and what does not fit into the row that a document
    begins in is dropped (as nanochat's loader crops), which the summary counts; `max_epochs` counts it as read."""
    exclude: OutsidePath | None = None
    """A list of documents that must not be trained on, an id (32 hexadecimal digits) a line: every row that holds any
    of them is emptied and left out of the training order, and held-out rows with any of them are dropped. All other
    rows stay what and where they are, so that a training which has read none of these goes on from its checkpoint
    (`pretrain.continue_from`). `gristmill takedown` makes such a list."""
    validation: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.005
    """Share of duplicate clusters held out of training, chosen by hash."""
    max_validation_rows: Positive = 1024
    """Rows per source of the validation set at the most."""
    shard_rows: Positive | None = None
    """Rows per shard; about 64 MB a shard if absent."""
    seed: int | None = None
    """Of the hashes that choose documents; the manifest's if absent."""

    @model_validator(mode="after")
    def _stages_follow_one_another(self) -> Mix:
        ends = [stage.until for stage in self.stages]
        if not ends:
            return self
        if any(end is None for end in ends[:-1]) or ends[-1] not in (None, 1.0):
            raise ValueError("every stage but the last needs `until`, and the last ends with the set: [{until: 0.8, "
                             "weights: ...}, {weights: ...}]")
        inner = [end for end in ends[:-1] if end is not None]
        if inner != sorted(set(inner)) or inner[-1:] == [1.0]:
            raise ValueError(f"the stages end at {inner} of the training set; each must end after the one before it, "
                             "and before 1")
        return self
