"""The sections `sources` and `ingest`: where documents come from and how they are read."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gristmill.mixtures.section import Fraction, OutsidePath, Positive, PositiveFloat, Section


class Source(Section):
    """One named source of documents."""

    path: OutsidePath
    """A file, a glob, a folder, an fsspec URL, `python-docs://` or `python-stdlib://`."""
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    """`auto` decides by file extension."""
    text_field: str = "text"
    """Column or JSON key that holds the text (JSONL and Parquet)."""
    id_field: str | None = None
    """Column or key kept as the document's locator; otherwise path and record number."""
    metadata_fields: tuple[str, ...] | None = None
    """Keys kept as metadata; all scalar ones if absent."""
    limit: Positive | None = None
    """Read at most this many documents."""
    licence: str | None = None
    """A note kept with the run; nothing is derived from it."""
    weight: Annotated[float, Field(ge=0.0)] = 1.0
    """Share of the mixture's tokens, relative to the other weights."""
    max_epochs: PositiveFloat = 1.0
    """How often a document may be repeated in the mixture."""
    where: str | None = None
    """SQL condition over the measured columns, evaluated when mixing: `"quality >= 0.6"`."""


class Ingest(Section):
    """How sources are cut into document shards."""

    shard_bytes: Positive = 16_000_000
    """Text bytes per document shard (UTF-8)."""
    max_quarantined: Fraction = 0.05
    """Share of records that may be unreadable before the stage fails."""
