"""Estimate of the text in HTML pages, from a sample extracted as `ingest` would."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from gristmill.core.files import as_path
from gristmill.dataprep.readers.compression import Metered
from gristmill.dataprep.readers.extraction_guard import Guard, extract_pages
from gristmill.dataprep.readers.ingest import DEFAULT_EXTRACTOR
from gristmill.dataprep.readers.readers import read_file
from gristmill.dataprep.readers.records import Page, Read, Reading, Record
from gristmill.dataprep.readers.sources import SourceFile
from gristmill.mixtures.schema.sources import ExtractOptions

SAMPLE_BYTES = 4 << 20
"""Stored bytes of a sample: some hundred pages, which take about a second."""
SAMPLE_FILES = 10
CHECKED_CHARACTERS = 10_000
LEAST_TAGS = 3
TAG_SHARE = 0.05
"""Share of characters in tags. 291 pages of Debian's documentation have 0.054 or more,
341 texts in Markdown and reStructuredText of Python packages 0.026 or less.
"""
_START = re.compile(
    r"\s*(?:<\?xml[^>]*>\s*|<!--.*?-->\s*)*<(?:!doctype html|html|head|body)\b",
    re.IGNORECASE | re.DOTALL,
)
_TAG = re.compile(
    r"</?(?:a|article|b|blockquote|body|br|code|div|em|h[1-6]|head|i|img|li|ol|p|pre|script|section|span|strong|table"
    r"|tbody|td|th|tr|ul)\b[^<>]*>",
    re.IGNORECASE,
)


def is_html(text: str) -> bool:
    """Return True if a text is an HTML page or fragment."""
    beginning = text[:CHECKED_CHARACTERS].lstrip("\ufeff")
    if _START.match(beginning):
        return True
    tags = _TAG.findall(beginning)
    if len(tags) < LEAST_TAGS:
        return False
    is_fragment = _TAG.match(beginning.lstrip()) is not None and text.rstrip().endswith(
        ">"
    )
    return is_fragment or sum(map(len, tags)) > TAG_SHARE * len(beginning)


def text_per_stored_byte(files: Sequence[SourceFile]) -> float:
    """Estimate the bytes of extracted text per stored byte of HTML or WARC files from
    their first records.
    """
    step = max(1, len(files) // SAMPLE_FILES)
    chosen = files[::step][:SAMPLE_FILES]
    reading = Reading()
    text_bytes = stored_bytes = 0
    with Guard(DEFAULT_EXTRACTOR, ExtractOptions().model_dump()) as guard:
        for file in chosen:
            meter = Metered(as_path(file.location))
            for record in extract_pages(
                read_file(file, reading, meter=meter), guard, reading
            ):
                text_bytes += _text_bytes(record)
                if meter.read_bytes > SAMPLE_BYTES // len(chosen):
                    break
            stored_bytes += meter.read_bytes or file.size
    return text_bytes / stored_bytes if stored_bytes else 0.0


def text_share(pages: Iterable[str]) -> float:
    """Return the bytes of extracted text per byte of some pages."""
    reading = Reading()
    contents = [page.encode() for page in pages]
    items = [
        Page(number, "", content, "utf-8")
        for number, content in enumerate(contents, start=1)
    ]
    with Guard(DEFAULT_EXTRACTOR, ExtractOptions().model_dump()) as guard:
        text_bytes = sum(map(_text_bytes, extract_pages(items, guard, reading)))
    return text_bytes / max(sum(map(len, contents)), 1)


def _text_bytes(record: Read) -> int:
    return len(record.text.encode()) if isinstance(record, Record) else 0
