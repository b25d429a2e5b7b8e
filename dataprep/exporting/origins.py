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
        crawled: first and last day of the records' WARC-Date, among the kept documents.
        dated: first and last day on which its files were changed.
        crawls: statements of `warcinfo` records about the crawls.
        written_by: model that wrote the documents, or empty.
    """

    source: str
    is_crawled: bool = False
    crawled: tuple[str, str] | None = None
    dated: tuple[str, str] | None = None
    crawls: Sequence[Mapping[str, str]] = ()
    written_by: str = ""

    @property
    def period(self) -> tuple[str, str] | None:
        """First and last day of the collection, or None if nothing is recorded."""
        return self.crawled or self.dated

    @property
    def last_day(self) -> str:
        """Last day of the period and its evidence; empty if nothing is recorded."""
        return self._with_evidence(self.period[1:] if self.period else ())

    def describe_period(self) -> str:
        """Period and its evidence; empty if nothing is recorded."""
        return self._with_evidence(self.period or ())

    def _with_evidence(self, days: Sequence[str]) -> str:
        evidence = "WARC-Date" if self.crawled else "dates of the files"
        return f"{' to '.join(dict.fromkeys(days))} ({evidence})" if days else ""

    def describe_crawlers(self) -> list[str]:
        """Statements about each crawl."""
        return [
            "; ".join(
                f"{name}: {crawl[field]}"
                for field, name in CRAWL_FIELDS.items()
                if field in crawl
            )
            for crawl in self.crawls
        ]

    def describe(self) -> str:
        """Everything that is recorded, in one line."""
        kind = "files"
        if self.written_by:
            kind = f"written by the model {self.written_by}"
        elif self.is_crawled:
            kind = "web crawl"
        facts = [kind, self.describe_period(), *self.describe_crawlers()]
        return f"{self.source}: {', '.join(filter(None, facts))}"
