"""The sections `tokenizer` and `mix`: from text to the packed training set."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gristmill.mixtures.section import OutsidePath, Positive, Section


class Tokenizer(Section):
    """A byte-level BPE trained here, or any tokenizer.json."""

    path: OutsidePath | None = None
    """A tokenizer.json to use instead of training one."""
    vocab_size: Annotated[int, Field(ge=264)] = 8192
    """256 bytes, the special tokens and the merges together."""
    sample_bytes: Positive = 50_000_000
    """Text that the merges are learnt from."""
    weights: dict[str, Annotated[float, Field(ge=0.0)]] | None = None
    """Shares of the sample per source; equal shares if absent (so that a new mixture keeps the tokenizer)."""
    seed: int | None = None
    """Of the hashes that choose documents; the manifest's if absent."""


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
