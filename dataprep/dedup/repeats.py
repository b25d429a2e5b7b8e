"""Text that repeats between documents, as summaries list it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NotRequired

from typing_extensions import TypedDict

NAMED = 3
"""Clusters that a description names."""


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


class Cluster(TypedDict):
    """Cluster of duplicates; ids are in hexadecimal digits.

    Attributes:
        cluster: smallest id in it.
        locator: of the survivor.
        size: number of documents that the survivor represents, including itself.
        kind: of its duplicates (`duplicate_kinds`), if they were compared.
    """

    cluster: str
    survivor: str
    locator: NotRequired[str]
    size: int
    kind: NotRequired[str]


class Clusters(TypedDict):
    """Clusters of two or more documents.

    Attributes:
        cluster_sizes: number of clusters in each group of CLUSTER_SIZES.
    """

    cluster_sizes: dict[str, int]
    largest_clusters: list[Cluster]


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

    def describe(self, clusters: Sequence[Cluster]) -> str:
        """Describe the sample and the first of the largest clusters."""
        largest = "; ".join(
            f"{cluster['size']:,} like {cluster['survivor'][:16]}, {cluster['kind']}"
            for cluster in clusters[:NAMED]
        )
        meaning = "their meanings are not compared without a model (dedup.meaning)"
        if self.alike is not None:
            meaning = f"{self.alike:,} have the meaning of the kept text"
        return (
            f"largest clusters: {largest}; of {self.documents:,} sampled duplicates "
            f"{self.copies:,} are copies, {self.templates:,} have the kept text with "
            f"other values (a template), and {self.revisions:,} are revisions; {meaning}"
        )
