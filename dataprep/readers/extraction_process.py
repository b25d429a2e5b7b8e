"""The child process that extracts text from pages and document files.

The process (started by `extraction_guard.Guard`) reads requests from its standard input
and writes one answer for each, in order. It ends at a request that exceeds its CPU
time, and after one that exceeds its memory. A request is a line of JSON and the content
of a page or file.
"""

from __future__ import annotations

import json
import logging
import resource
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from gristmill.dataprep.readers.charsets import UndecodableError
from gristmill.dataprep.readers.document_files import PARSERS, DocumentError
from gristmill.dataprep.readers.guarded import TimeLimited, begin, limit_resource
from gristmill.dataprep.readers.html import Extractor, Options, extract, find_extractor

WARM_UP = b"<html><head><title>t</title></head><body><p>Some text.</p></body></html>"


class ExtractorAnswer(TypedDict, total=False):
    """One of the answers of the process.

    Attributes:
        ready: the process has started.
        parts: texts of a page (one), or of the pages or chapters of a file.
        metadata: of the page or file.
        replaced: number of U+FFFD put for invalid bytes.
        scanned: numbers of a PDF's pages without a text layer.
        error: of the page or file.
        memory: it took too much memory, and the process ends.
    """

    ready: bool
    parts: Sequence[str]
    metadata: Mapping[str, object]
    replaced: int
    scanned: Sequence[int]
    error: str
    memory: bool


class Request(TypedDict):
    """Line of JSON before a content; see `records.Page`."""

    form: str
    encoding: str
    charset: str
    errors: Literal["replace", "strict"]


def answer_of(
    request: Request, content: bytes, extractor: Extractor, options: Options
) -> ExtractorAnswer:
    """Extract the text of a page or file; errors of its own become the answer."""
    form = request["form"]
    try:
        if form in PARSERS:
            parsed = PARSERS[form](content, options)
            return {
                "parts": parsed.parts,
                "metadata": parsed.metadata,
                "replaced": 0,
                "scanned": parsed.scanned,
            }
        page = extract(
            content,
            request["encoding"],
            request["charset"],
            extractor,
            options,
            request["errors"],
        )
        return {
            "parts": [page["text"]],
            "metadata": page["metadata"],
            "replaced": page["replaced"],
        }
    except (UndecodableError, DocumentError) as error:
        return {"error": str(error)}
    except MemoryError:
        return {"memory": True}
    except Exception as error:  # noqa: BLE001 - any error loses only this page
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return {"error": f"the extractor failed: {message}"}


def main() -> None:
    """Answer until the requests end. The only argument is JSON, see `Guard._start`."""
    settings, requests, answers = begin()
    logging.disable()  # libraries log about each page; errors are part of the answers
    extractor = find_extractor(settings["extractor"])
    options: Options = settings["options"]
    # imports, before the limits apply
    extract(WARM_UP, "utf-8", "", extractor, options)
    limit_resource(resource.RLIMIT_AS, settings["memory_bytes"])
    answer: ExtractorAnswer = {"ready": True}
    answers.send_bytes(json.dumps(answer).encode())
    limited = TimeLimited(settings["seconds"])
    for message in requests:
        header, _, content = message.partition(b"\n")
        with limited:
            answer = answer_of(json.loads(header), content, extractor, options)
        answers.send_bytes(json.dumps(answer).encode())
        if "memory" in answer:
            return


if __name__ == "__main__":
    main()
