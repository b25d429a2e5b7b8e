"""The child process that extracts text from pages and document files.

The process (started by `extraction_guard.Guard`) reads requests from its standard input
and writes one answer for each, in order. It ends at a request that exceeds its CPU time
or its memory. A request is a line of JSON and the content of a page or file.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
from typing import TypedDict

from gristmill.dataprep.readers.charsets import Errors, UndecodableError
from gristmill.dataprep.readers.document_files import PARSERS, DocumentError
from gristmill.dataprep.readers.guarded import TimeLimited, begin, limit_resource
from gristmill.dataprep.readers.html import (
    Extracted,
    Extractor,
    Options,
    extract,
    find_extractor,
)
from gristmill.dataprep.readers.records import one_line

WARM_UP = b"<html><head><title>t</title></head><body><p>Some text.</p></body></html>"
READY = b"ready"
"""Message of the process once it has started."""
OUT_OF_MEMORY = signal.SIGUSR1
"""Signal that ends the process when a request needs more memory than it has."""


class Request(TypedDict):
    """Line of JSON before a content; see `records.Page`."""

    form: str
    encoding: str
    charset: str
    errors: Errors


def answer_of(
    request: Request, content: bytes, extractor: Extractor, options: Options
) -> Extracted:
    """Extract the text of a page or file; errors of its own become the answer.

    Raises:
        MemoryError: it needs more memory than the limit.
    """
    form = request["form"]
    try:
        if form in PARSERS:
            return PARSERS[form](content, options)
        return extract(
            content,
            request["encoding"],
            request["charset"],
            extractor,
            options,
            request["errors"],
        )
    except (UndecodableError, DocumentError) as error:
        return Extracted(error=str(error))
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - any error loses only this page
        message = f"{type(error).__name__}: {one_line(error)}"
        return Extracted(error=f"the extractor failed: {message}")


def main() -> None:
    """Answer until the requests end. The only argument is JSON, see `Guard._start`."""
    settings, requests, answers = begin()
    logging.disable()  # libraries log about each page; errors are part of the answers
    extractor = find_extractor(settings["extractor"])
    options: Options = settings["options"]
    # imports, before the limits apply
    extract(WARM_UP, "utf-8", "", extractor, options)
    limit_resource(resource.RLIMIT_AS, settings["memory_bytes"])
    answers.send_bytes(READY)
    limited = TimeLimited(settings["seconds"])
    for message in requests:
        header, _, content = message.partition(b"\n")
        try:
            with limited:
                answer = answer_of(json.loads(header), content, extractor, options)
            answers.send_bytes(json.dumps(vars(answer)).encode())
        except MemoryError:
            signal.raise_signal(OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
