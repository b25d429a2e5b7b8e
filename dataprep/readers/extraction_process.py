"""The child process that extracts text from pages and document files.

The process (started by `extraction_guard.Guard`) reads pages from its standard input
and writes one answer for each, in order. It ends at a page that exceeds its CPU time or
its memory.
"""

from __future__ import annotations

import logging
import pickle
import resource
import signal

from gristmill.dataprep.readers.charsets import UndecodableError
from gristmill.dataprep.readers.compression import one_line
from gristmill.dataprep.readers.document_files import PARSERS, DocumentError
from gristmill.dataprep.readers.guarded import (
    OUT_OF_MEMORY,
    TimeLimited,
    begin,
    limit_resource,
)
from gristmill.dataprep.readers.html import (
    Extracted,
    Extractor,
    Options,
    extract,
    find_extractor,
)
from gristmill.dataprep.readers.records import HTML, Page

WARM_UP = b"<html><head><title>t</title></head><body><p>Some text.</p></body></html>"
READY = b"ready"
"""Message of the process once it has started."""


def answer_of(page: Page, extractor: Extractor, options: Options) -> Extracted:
    """Extract the text of a page or file; errors of its own become the answer.

    Raises:
        MemoryError: it needs more memory than the limit.
    """
    try:
        if page.form != HTML:
            return PARSERS[page.form](page.content, options)
        return extract(
            page.content, page.encoding, page.charset, extractor, options, page.errors
        )
    except (UndecodableError, DocumentError) as error:
        return Extracted(error=str(error))
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - any error loses only this page
        message = f"{type(error).__name__}: {one_line(error)}"
        return Extracted(error=f"the extractor failed: {message}")


def main() -> None:
    """Answer until the pages end."""
    settings, pages, answers = begin()
    logging.disable()  # libraries log about each page; errors are part of the answers
    extractor = find_extractor(settings["extractor"])
    options: Options = settings["options"]
    # imports, before the limits apply
    extract(WARM_UP, "utf-8", "", extractor, options)
    limit_resource(resource.RLIMIT_AS, settings["memory_bytes"])
    answers.send_bytes(READY)
    limited = TimeLimited(settings["seconds"])
    for message in pages:
        try:
            with limited:
                answer = answer_of(pickle.loads(message), extractor, options)
            answers.send_bytes(pickle.dumps(answer))
        except MemoryError:
            signal.raise_signal(OUT_OF_MEMORY)
