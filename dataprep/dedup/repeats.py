"""Text that repeats between documents, as summaries list it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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


DuplicateKind = Literal["copy", "template", "revision"]
"""See `duplicate_kinds`."""


@dataclass(frozen=True)
class DuplicateSample:
    """Sampled duplicates by kind.

    Attributes:
        documents: number of duplicates in the sample.
        copies, templates, revisions: of these.
        alike: of these, those with the same meaning as their survivor; None if no model
            compared them.
    """

    documents: int
    copies: int
    templates: int
    revisions: int
    alike: int | None = None

    def describe(self) -> str:
        """Describe the sample in a sentence."""
        meaning = "their meanings are not compared without a model (dedup.meaning)"
        if self.alike is not None:
            meaning = f"{self.alike:,} have the meaning of the kept text"
        return (
            f"of {self.documents:,} sampled duplicates {self.copies:,} are copies, "
            f"{self.templates:,} have the kept text with other values (a template), "
            f"and {self.revisions:,} are revisions; {meaning}"
        )
