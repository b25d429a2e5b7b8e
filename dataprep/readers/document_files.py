"""Text of PDF, Word, EPUB and Docling files, as their pages or chapters.

Word and EPUB are HTML on the way, so that tables, lists and code become Markdown as
those of web pages do. Runs in the extracting process, see `extraction_process`.
"""

from __future__ import annotations

import io
import json
import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import unquote
from zipfile import ZipFile

from gristmill.dataprep.readers.charsets import AUTO, decode
from gristmill.dataprep.readers.html import Extracted, Options, all_text

LINE_HYPHEN = re.compile(
    r"(?<![\w-])(?P<begin>[\w-]*)"
    r"(?:[\x02\ufffe]|(?<=[^\W\d_])[-\u00ad\u2010] *(?=\r\n\w))(?:\r\n)?"
    r"(?=(?P<end>\w*))"
)
"""A word up to a hyphen at the end of a line, PDFium's mark for it or one without a
mark; and the beginning of the next line.
"""
COMPOUND = re.compile(r"\b[^\W\d_]+-[^\W\d_]+")
PARAGRAPH_JOINT = "\n\n"
EPUB_FIELDS = {
    "title": "title",
    "author": "creator",
    "language": "language",
    "published": "date",
}
"""Key of the metadata -> element of Dublin Core in the package of an EPUB."""


class DocumentError(ValueError):
    """A file cannot be read as its format; the message says what to do."""


def parse_pdf(content: bytes, options: Options) -> Extracted:
    """Read the text layer of a PDF, with the line breaks of its pages."""
    from pypdfium2 import PdfDocument

    parts, scanned = [], []
    with PdfDocument(content) as document:
        for number, page in enumerate(document, start=1):
            text = page.get_textpage().get_text_bounded().replace("\0", "")
            parts.append(text)
            if not text.strip() and next(page.get_objects(), None) is not None:
                scanned.append(number)
        information = document.get_metadata_dict()
    metadata = {
        "title": information.get("Title"),
        "author": information.get("Author"),
        "pages": len(parts),
    }
    return Extracted(join_hyphenated(parts), metadata, scanned=scanned)


def join_hyphenated(pages: Sequence[str]) -> list[str]:
    """Join the words that hyphens divide at line ends of a PDF's pages, and write line
    ends as newlines.

    The hyphen of a compound stays: if the next line does not begin with a lower-case
    letter, if the word has another hyphen (`state-of-the-art`), or if the compound
    stands within a line of the file.
    """
    compounds = {word.lower() for page in pages for word in COMPOUND.findall(page)}

    def join(word: re.Match[str]) -> str:
        begin, end = word["begin"], word["end"]
        is_compound = "-" in begin or f"{begin}-{end}".lower() in compounds
        hyphen = "-" if is_compound or not end[:1].islower() else ""
        return begin + hyphen

    return [LINE_HYPHEN.sub(join, page).replace("\r\n", "\n") for page in pages]


def parse_docx(content: bytes, options: Options) -> Extracted:
    """Read a Word document, without its pictures."""
    from mammoth import convert_to_html

    html = convert_to_html(io.BytesIO(content), convert_image=lambda image: []).value
    return Extracted([all_text(html, options)])


def parse_epub(content: bytes, options: Options) -> Extracted:
    """Read the chapters of an EPUB in reading order (EPUB 3.3, section 5.7), without
    its table of contents.

    Raises:
        DocumentError: it is encrypted.
    """
    with ZipFile(io.BytesIO(content)) as archive:
        container = _xml(archive.read("META-INF/container.xml"))
        package_name = container.find(".//{*}rootfile").get("full-path")
        package = _xml(archive.read(package_name))
        folder = posixpath.dirname(package_name)
        names = {
            item.get("id"): posixpath.normpath(
                posixpath.join(folder, unquote(item.get("href")))
            )
            for item in package.iterfind("{*}manifest/{*}item")
            if "nav" not in item.get("properties", "").split()
        }
        chapters = [
            names[reference.get("idref")]
            for reference in package.iterfind("{*}spine/{*}itemref")
            if reference.get("idref") in names and reference.get("linear") != "no"
        ]
        if "META-INF/encryption.xml" in archive.namelist():
            encryption = _xml(archive.read("META-INF/encryption.xml"))
            encrypted = {
                unquote(place.get("URI"))
                for place in encryption.iterfind(".//{*}CipherReference")
            }
            if not encrypted.isdisjoint(chapters):  # fonts alone are common
                raise DocumentError("the EPUB is encrypted; get it without protection")
        parts = [
            all_text(decode(archive.read(name), AUTO, html=True).text, options)
            for name in chapters
        ]
    metadata: dict[str, object] = {
        key: package.findtext(f".//{{http://purl.org/dc/elements/1.1/}}{element}")
        for key, element in EPUB_FIELDS.items()
    }
    metadata["chapters"] = len(parts)
    return Extracted(parts, metadata)


def parse_docling(content: bytes, options: Options) -> Extracted:
    """Read what Docling writes as JSON (DoclingDocument), without headers and footers
    of pages.

    Raises:
        DocumentError: it is other JSON.
    """
    document = json.loads(content)
    if document.get("schema_name") != "DoclingDocument":
        raise DocumentError("this JSON is not Docling's; remove `format: docling`")
    pages = {int(page): "" for page in document["pages"]} or {1: ""}
    page = min(pages)
    last_label = ""
    for item in _docling_items(document, document["body"]):
        for place in item.get("prov", ())[:1]:
            page = place["page_no"]
        label = item["label"]
        block = _docling_block(item, bool(options["markdown"]))
        if block:
            is_next_item = label == last_label == "list_item"
            joint = "\n" if is_next_item else PARAGRAPH_JOINT
            pages[page] += block if not pages[page] else joint + block
            last_label = label
    metadata = {
        "file": (document.get("origin") or {}).get("filename"),
        "pages": len(document["pages"]),
    }
    return Extracted([pages[number] for number in sorted(pages)], metadata)


def _docling_items(document: Any, parent: Any) -> Iterator[Any]:
    """Items below an item in reading order, those that hold content."""
    for reference in parent["children"]:
        _, kind, place = reference["$ref"].split("/")
        item = document[kind][int(place)]
        if item.get("content_layer", "body") == "body":
            yield item
            yield from _docling_items(document, item)


def _docling_block(item: Any, markdown: bool) -> str:
    """Text of an item; empty for groups and pictures."""
    label = item["label"]
    if "data" in item and "grid" in item["data"]:
        rows = [[cell["text"] for cell in row] for row in item["data"]["grid"]]
        if not markdown:
            return "\n".join("\t".join(row) for row in rows)
        rows[1:1] = [["---"] * len(rows[0])] if rows else []
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)
    text: str = item.get("text", "")
    if not markdown or not text:
        return text
    if label in ("title", "section_header"):
        return f"{'#' * (1 + item.get('level', 0))} {text}"
    if label == "list_item":
        return f"{item['marker'] if item.get('enumerated') else '-'} {text}"
    return {"code": f"```\n{text}\n```", "formula": f"$${text}$$"}.get(label, text)


PARSERS: dict[str, Callable[[bytes, Options], Extracted]] = {
    "pdf": parse_pdf,
    "docx": parse_docx,
    "epub": parse_epub,
    "docling": parse_docling,
}
"""Functions of the formats in `sources.DOCUMENT_FORMATS`."""


def _xml(content: bytes) -> Any:
    """Root of an XML file, without outside entities."""
    from lxml.etree import XMLParser, fromstring

    return fromstring(content, XMLParser(resolve_entities=False, no_network=True))
