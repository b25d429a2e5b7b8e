"""The section `mix`: which tokens are trained on, in which shares, and how they are packed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gristmill.mixtures.section import Positive, Section


class Mix(Section):
    """The packed training set."""

    tokens: Positive
    """Tokens of the training set, rounded down to whole rows."""
    sequence_length: Annotated[int, Field(ge=8)] = 512
    """Tokens per row."""
    packing: Literal["stream"] = "stream"
    """`stream`: documents back to back, with the end-of-text token between them."""
    validation: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.005
    """Share of duplicate clusters held out of training, chosen by hash."""
    max_validation_rows: Positive = 1024
    """Rows per source of the validation set at the most."""
    shard_rows: Positive | None = None
    """Rows per shard; about 64 MB a shard if absent."""
    seed: int | None = None
    """Of the hashes that choose documents; the manifest's if absent."""
