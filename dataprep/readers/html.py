"""Extraction of a page's main text, title and language, and the child process that runs
it.

An extractor is a function from (HTML, options) to (text, metadata); `Options` are those
of the manifest's ExtractOptions. Results do not depend on the time of day, earlier
pages or the network.

The process (started by `extraction_guard.Guard`) reads pages from its standard input
and writes one answer for each, in order. It ends at a page that exceeds its CPU time,
and after a page that exceeds its memory. A page is a line of JSON and its content.
"""

from __future__ import annotations

import json
import logging
import resource
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TypedDict
from unicodedata import normalize

from gristmill.dataprep.licences.page_licence import page_licence
from gristmill.dataprep.readers.charsets import (
    UTF8,
    Errors,
    UndecodableError,
    declared_in_page,
    decode,
)
from gristmill.dataprep.readers.guarded import TimeLimited, begin, limit_resource

WARM_UP = b"<html><head><title>t</title></head><body><p>Some text.</p></body></html>"
MAX_PAGE_DATE = "2100-01-01"
"""Latest date of a page. The default of trafilatura's date finder is today, which would
change the result tomorrow.
"""

Options = Mapping[str, str | bool]
"""Fields of `mixtures.schema.sources.ExtractOptions`."""
Content = tuple[str, dict[str, object]]
"""Text of a page, and its metadata."""
Extractor = Callable[[str, Options], Content]
"""Function from HTML and options to a text and its metadata."""


class ExtractorAnswer(TypedDict, total=False):
    """One of the answers of the process.

    Attributes:
        ready: the process has started.
        text, metadata: of a page; the text is empty if it has none.
        replaced: number of U+FFFD put for invalid bytes.
        error: of a page.
        memory: the page took too much memory, and the process ends.
    """

    ready: bool
    text: str
    metadata: Mapping[str, object]
    replaced: int
    error: str
    memory: bool


def extract(
    content: bytes,
    encoding: str,
    charset: str,
    extractor: Extractor,
    options: Options,
    errors: Errors = "replace",
) -> ExtractorAnswer:
    """Decode a page and extract its main text.

    Args:
        content: stored bytes of the page.
        encoding: name of a codec, or `auto`.
        charset: declared by the server, or empty.
        extractor: see `find_extractor`.
        options: see ExtractOptions.
        errors: handling of invalid bytes.

    Raises:
        UndecodableError: the bytes are not text.
    """
    decoded = decode(content, encoding, charset, html=True, errors=errors)
    text, extracted = extractor(decoded.text, options)
    metadata = {**extracted, **page_licence(decoded.text)}
    metadata["charset"] = charset or declared_in_page(content)
    if decoded.encoding != UTF8:
        metadata["encoding"] = decoded.encoding
    return {
        "text": text.strip(),
        "metadata": metadata,
        "replaced": decoded.replaced,
    }


def with_resiliparse(html: str, options: Options) -> Content:
    """Extract with resiliparse and the settings of DCLM (baselines/mappers: main
    content, no alternative texts).
    """
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.html import HTMLTree

    tree = HTMLTree.parse(html)
    root = None if tree.document is None else tree.document.query_selector("html")
    language = "" if root is None else root.getattr("lang", "")
    text = extract_plain_text(
        tree,
        main_content=options["favor"] != "recall",
        alt_texts=False,
        comments=bool(options["comments"]),
        links=bool(options["links"]),
        skip_elements=None if options["tables"] else ["table"],
    )
    return text, {"title": " ".join((tree.title or "").split()), "language": language}


def with_trafilatura(html: str, options: Options) -> Content:
    """Extract with trafilatura, followed by comments if enabled."""
    from trafilatura import bare_extraction

    document = bare_extraction(
        html,
        favor_precision=options["favor"] == "precision",
        favor_recall=options["favor"] == "recall",
        include_comments=options["comments"],
        include_tables=options["tables"],
        include_links=options["links"],
        with_metadata=True,
        date_extraction_params={
            "max_date": MAX_PAGE_DATE,
            "original_date": True,
            "extensive_search": False,
        },
    )
    if document is None:
        return "", {}
    text = "\n".join(part for part in (document.text, document.comments) if part)
    text = normalize("NFC", text)  # like trafilatura.extract
    return text, {
        "title": document.title,
        "published": document.date,
        "language": document.language,
    }


EXTRACTORS: dict[str, Extractor] = {
    "resiliparse": with_resiliparse,
    "trafilatura": with_trafilatura,
}
"""Extractors by their names in a source's `extract`."""


def find_extractor(name: str) -> Extractor:
    """Extractor by its name, or any function as `module:function`."""
    if name in EXTRACTORS:
        return EXTRACTORS[name]
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


def main() -> None:
    """Answer until the requests end. The only argument is JSON, see `Guard._start`."""
    settings, pages, answers = begin()
    logging.disable()  # libraries log about each page; errors are part of the answers
    extractor = find_extractor(settings["extractor"])
    options: Options = settings["options"]
    # imports, before the limits apply
    extract(WARM_UP, "utf-8", "", extractor, options)
    limit_resource(resource.RLIMIT_AS, settings["memory_bytes"])
    answer: ExtractorAnswer = {"ready": True}
    answers.send_bytes(json.dumps(answer).encode())
    limited = TimeLimited(settings["seconds"])
    for page in pages:
        header, _, content = page.partition(b"\n")
        with limited:
            try:
                answer = extract(
                    content, extractor=extractor, options=options, **json.loads(header)
                )
            except UndecodableError as error:
                answer = {"error": str(error)}
            except MemoryError:
                answer = {"memory": True}
            except Exception as error:  # noqa: BLE001 - any error loses only this page
                message = f"{type(error).__name__}: {' '.join(str(error).split())}"
                answer = {"error": f"the extractor failed: {message}"}
        answers.send_bytes(json.dumps(answer).encode())
        if "memory" in answer:
            return


if __name__ == "__main__":
    main()
