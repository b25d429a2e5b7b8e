"""From a page's bytes to its main text, title and language, and the guarded process in which that is done.

An extractor is a function from (HTML, options) to (text, metadata); `Options` are those of the manifest's
ExtractOptions. Nothing here depends on the time of day, on earlier pages or on the network.

The process (`extraction_guard.Guard` starts it) reads pages from its standard input and writes one answer for each, in
their order. It ends at a page that takes too much processor time, and after a page for which the memory did not
suffice. Of the frames (`guarded.py`) a page is two, JSON and its content.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, BinaryIO
from unicodedata import normalize

from gristmill.dataprep.reading.encoding import UTF8, Errors, UndecodableError, declared_in_page, decode
from gristmill.dataprep.reading.guarded import begin, frame, limit_resource, read_frame

WARM_UP = b"<html><head><title>t</title></head><body><p>Some text.</p></body></html>"
MAX_PAGE_DATE = "2100-01-01"
"""Latest date that a page may bear. The date finder of trafilatura would take today, and give another result
tomorrow."""

Options = Mapping[str, Any]
Extractor = Callable[[str, Options], tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Extracted:
    """A page's text (empty where it has none), and what it says about itself."""

    text: str
    metadata: Mapping[str, Any]
    replaced: int = 0
    """How many bad sequences of the page became U+FFFD."""


def extract(
    content: bytes, encoding: str, charset: str, extractor: Extractor, options: Options, errors: Errors = "replace"
) -> Extracted:
    """Decode a page and extract its main text.

    Args:
        content: the page as stored.
        encoding: a codec's name, or `auto`.
        charset: what the server declared, or empty.
        extractor: see `find_extractor`.
        options: see ExtractOptions.
        errors: what becomes of bad bytes.

    Raises:
        UndecodableError: the bytes are not text.
    """
    decoded = decode(content, encoding, charset, html=True, errors=errors)
    text, metadata = extractor(decoded.text, options)
    metadata["charset"] = charset or declared_in_page(content)
    if decoded.encoding != UTF8:
        metadata["encoding"] = decoded.encoding
    return Extracted(text.strip(), metadata, decoded.replaced)


def with_resiliparse(html: str, options: Options) -> tuple[str, dict[str, Any]]:
    """Text by resiliparse with the settings of DCLM (baselines/mappers: main content, no alternative texts)."""
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.html import HTMLTree

    tree = HTMLTree.parse(html)
    root = None if tree.document is None else tree.document.query_selector("html")
    language = "" if root is None else root.getattr("lang", "")
    text = extract_plain_text(
        tree,
        main_content=options["favor"] != "recall",
        alt_texts=False,
        comments=options["comments"],
        links=options["links"],
        skip_elements=None if options["tables"] else ["table"],
    )
    return text, {"title": " ".join((tree.title or "").split()), "language": language}


def with_trafilatura(html: str, options: Options) -> tuple[str, dict[str, Any]]:
    """Text by trafilatura, comments behind it where they are asked for."""
    from trafilatura import bare_extraction

    found = bare_extraction(
        html,
        favor_precision=options["favor"] == "precision",
        favor_recall=options["favor"] == "recall",
        include_comments=options["comments"],
        include_tables=options["tables"],
        include_links=options["links"],
        with_metadata=True,
        date_extraction_params={"max_date": MAX_PAGE_DATE, "original_date": True, "extensive_search": False},
    )
    if found is None:
        return "", {}
    text = "\n".join(part for part in (found.text, found.comments) if part)
    text = normalize("NFC", text)  # as trafilatura.extract does with what it gives
    return text, {"title": found.title, "published": found.date, "language": found.language}


EXTRACTORS: dict[str, Extractor] = {"resiliparse": with_resiliparse, "trafilatura": with_trafilatura}
"""By the names that a source's `extract` uses."""


def find_extractor(name: str) -> Extractor:
    """An extractor by its name, or any other as `module:function`."""
    if name in EXTRACTORS:
        return EXTRACTORS[name]
    module, _, function = name.partition(":")
    found: Extractor = getattr(import_module(module), function)
    return found


def main() -> None:
    """Answer until the input ends. The one argument is JSON, see `Guard._start`."""
    settings, pages, answers = begin()
    logging.disable()  # libraries log what they think of a page; what matters comes back as its result
    extractor = find_extractor(settings["extractor"])
    extract(WARM_UP, "utf-8", "", extractor, settings["options"])  # imports, before the limits hold
    limit_resource(resource.RLIMIT_AS, settings["memory_bytes"])
    _answer(answers, {"ready": True})
    while (about := read_frame(pages)) is not None and (content := read_frame(pages)) is not None:
        signal.setitimer(signal.ITIMER_PROF, settings["seconds"])
        answer = _extract(json.loads(about), content, extractor, settings)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer(answers, answer)
        if "memory" in answer:
            return


def _extract(about: dict[str, Any], content: bytes, extractor: Extractor, settings: dict[str, Any]) -> dict[str, Any]:
    try:
        extracted = extract(
            content, about["encoding"], about["charset"], extractor, settings["options"], about["errors"]
        )
        return {"text": extracted.text, "metadata": dict(extracted.metadata), "replaced": extracted.replaced}
    except UndecodableError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"memory": True}
    except Exception as error:  # noqa: BLE001 - whatever a page does to an extractor, it is this page that is lost
        return {"error": f"the extractor failed: {type(error).__name__}: {' '.join(str(error).split())}"}


def _answer(sink: BinaryIO, answer: dict[str, Any]) -> None:
    sink.write(frame(answer))
    sink.flush()


if __name__ == "__main__":
    main()
