"""Cost of packing: rows, padding and cut documents."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PackingCost:
    """Cost of packing the tokens [0, end) of a stream.

    Attributes:
        rows: of the packing.
        tokens: of documents in them.
        padding_tokens: in them.
        documents: that begin before the end.
        split_documents: documents cut at a row end.
        split_tokens: tokens of these in [0, end).
    """

    rows: int
    tokens: int
    padding_tokens: int
    documents: int
    split_documents: int
    split_tokens: int
