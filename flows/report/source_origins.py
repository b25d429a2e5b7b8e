"""Origins of the sources: from the files' listing, the summary of `ingest`, and the
dates of the documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from gristmill.dataprep.exporting.origins import Origin
from gristmill.dataprep.readers.pythondocs import ListedFile
from gristmill.flows.questions.find_documents import committed_corpus
from gristmill.flows.questions.query import ask
from gristmill.flows.report.facts import Facts
from gristmill.flows.report.stage_summaries import ReadSource, ReadSources
from gristmill.flows.running.session import Session
from gristmill.mixtures.schema.sources import INGEST

CRAWL = "warc"
"""Format of records of a crawl."""
DATE_LENGTH = len("2024-05-18")


def source_origins(session: Session, facts: Facts) -> list[Origin]:
    """Origins of the sources of documents, in the manifest's order."""
    read = facts.summary(INGEST, ReadSources).sources
    listed = session.plan[INGEST].recipe["sources"]
    days = _crawl_days(
        session, [name for name, source in read.items() if CRAWL in source.formats]
    )
    origins = []
    for name in session.manifest.text_sources:
        if name in session.manifest.generated_sources:
            model = session.manifest.generated_sources[name].generate.model
            origins.append(Origin(name, written_by=str(model.model or model.folder)))
            continue
        source = read.get(name, ReadSource())
        files: Sequence[ListedFile] = listed[name].get("listing", ())
        origins.append(
            Origin(
                name,
                CRAWL in source.formats,
                days.get(name),
                _file_days(files),
                source.crawls,
            )
        )
    return origins


def _file_days(files: Sequence[ListedFile]) -> tuple[str, str] | None:
    """First and last day on which local files were changed, by their stamps; archives
    without dates leave 0.
    """
    stamps = [
        int(file["stamp"])
        for file in files
        if file["stamp"].isdigit() and int(file["stamp"]) > 0
    ]
    if not stamps:
        return None
    first, last = (
        datetime.fromtimestamp(stamp / 1e9, UTC).date().isoformat()
        for stamp in (min(stamps), max(stamps))
    )
    return first, last


def _crawl_days(session: Session, sources: Sequence[str]) -> dict[str, tuple[str, str]]:
    """First and last day of the kept documents of crawls."""
    if not sources:
        return {}
    names = ", ".join(f"'{name}'" for name in sources)
    date = f"left(json_extract_string(metadata, '$.date'), {DATE_LENGTH})"
    sql = (
        f"SELECT source, min({date}), max({date}) FROM documents WHERE kept AND source "
        f"IN ({names}) AND {date} <> '' GROUP BY source"
    )
    with ask(committed_corpus(session), sql) as answer:
        return {source: (first, last) for source, first, last in answer.rows()}
