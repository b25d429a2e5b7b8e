"""Text that repeats between documents, as summaries list it."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import TypedDict


class Repeat(TypedDict):
    """Repeated passage.

    Attributes:
        text: its beginning.
        document: id of the document with the first copy, in hexadecimal digits.
        begin: first byte in that document.
    """

    words: int
    copies: int
    text: str
    document: str
    begin: int


@dataclass(frozen=True)
class RepeatedUnit:
    """Unit of many documents.

    Attributes:
        documents: number of documents with it.
        text: its beginning.
        document: id of the document that keeps it, or would with `cut_all`.
    """

    documents: int
    text: str
    document: str
