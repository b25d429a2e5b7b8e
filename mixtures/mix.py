"""The section `mix`: which tokens are trained on, in which shares, and how they are packed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gristmill.mixtures.section import Positive, Section


class Mix(Section):
    """The packed training set."""

    tokens: Positive
    """Tokens of the training set's documents, rounded down to whole rows; padding does not count."""
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
    validation: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.005
    """Share of duplicate clusters held out of training, chosen by hash."""
    max_validation_rows: Positive = 1024
    """Rows per source of the validation set at the most."""
    shard_rows: Positive | None = None
    """Rows per shard; about 64 MB a shard if absent."""
    seed: int | None = None
    """Of the hashes that choose documents; the manifest's if absent."""
