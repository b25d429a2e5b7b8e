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
from gristmill.flows.report.stage_summaries import ReadSources
from gristmill.flows.running.session import Session
from gristmill.mixtures.schema.sources import INGEST

CRAWL = "warc"
"""Format of records of a crawl."""
_CRAWL_DAYS = """
    WITH dated AS (
        SELECT source, left(json_extract_string(metadata, '$.date'), 10) AS day
        FROM documents WHERE kept
    )
    SELECT source, min(day), max(day) FROM dated WHERE day <> '' GROUP BY source
"""


def source_origins(session: Session, facts: Facts) -> list[Origin]:
    """Origins of the sources of documents, in the manifest's order."""
    generated = session.manifest.generated_sources
    read = facts.summary(INGEST, ReadSources).sources
    listed = session.plan[INGEST].recipe["sources"]
    crawls = {name for name, source in read.items() if CRAWL in source.formats}
    days = {}
    if crawls:
        with ask(committed_corpus(session), _CRAWL_DAYS) as answer:
            days = {name: period for name, *period in answer.rows() if name in crawls}
    origins = []
    for name in session.manifest.text_sources:
        if name in generated:
            model = generated[name].generate.model
            origins.append(Origin(name, written_by=model.called))
            continue
        period, evidence = days.get(name, ()), "WARC-Date"
        if not period:
            period = file_days(listed[name].get("listing", ()))
            evidence = "dates of the files"
        origins.append(
            Origin(name, name in crawls, period, evidence, read[name].crawls)
        )
    return origins


def file_days(files: Sequence[ListedFile]) -> list[str]:
    """First and last day on which local files were changed, by their stamps; archives
    without dates leave 0.
    """
    stamps = [int(file["stamp"]) for file in files if file["stamp"].isdigit()]
    days = [
        datetime.fromtimestamp(stamp / 1e9, UTC).date().isoformat()
        for stamp in filter(None, stamps)
    ]
    return [min(days), max(days)] if days else []
