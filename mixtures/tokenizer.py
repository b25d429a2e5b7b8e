"""The section `tokenizer`: what turns text into tokens."""

from __future__ import annotations

from typing import Annotated

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
