"""Origins of the documents of a source: the period, and the crawler or the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CRAWL_FIELDS = {
    "software": "software",
    "http-header-user-agent": "user agent",
    "ispartof": "part of",
    "publisher": "publisher",
    "robots": "robots.txt",
}
"""Field of a `warcinfo` record -> its name for readers."""


@dataclass(frozen=True)
class Origin:
    """Origin of a source's documents.

    Attributes:
        source: its name.
        is_crawled: True if its files are records of a crawl.
        period: first and last day of the collection; empty if not recorded.
        evidence: of the period: `WARC-Date` of the kept documents' records, or `dates
            of the files`.
        crawls: statements of `warcinfo` records about the crawls.
        written_by: model that wrote the documents, or empty.
    """

    source: str
    is_crawled: bool = False
    period: Sequence[str] = ()
    evidence: str = ""
    crawls: Sequence[Mapping[str, str]] = ()
    written_by: str = ""

    @property
    def kind(self) -> str:
        """Kind of the source in words."""
        if self.written_by:
            return f"written by the model {self.written_by}"
        return "web crawl" if self.is_crawled else "files"

    @property
    def collected(self) -> str:
        """Period and its evidence; empty if not recorded."""
        days = " to ".join(dict.fromkeys(self.period))
        return days and f"{days} ({self.evidence})"

    @property
    def crawlers(self) -> str:
        """Statements about each crawl; empty if not recorded."""
        return " / ".join(
            "; ".join(
                f"{name}: {crawl[field]}"
                for field, name in CRAWL_FIELDS.items()
                if field in crawl
            )
            for crawl in self.crawls
        )
