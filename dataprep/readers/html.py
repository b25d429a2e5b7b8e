"""Extraction of a page's main text, title and language.

An extractor is a function from (HTML, options) to (text, metadata); `Options` are those
of the manifest's ExtractOptions. Results do not depend on the time of day, earlier
pages or the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unicodedata import normalize

from gristmill.dataprep.readers.charsets import (
    UTF8,
    Errors,
    declared_in_page,
    decode,
)
from gristmill.dataprep.readers.formulas import write_formulas
from gristmill.dataprep.readers.page_rights import page_rights

if TYPE_CHECKING:
    from resiliparse.parse.html import HTMLTree

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


@dataclass(frozen=True)
class Extracted:
    """Content of a page or document file, or the error that prevents its extraction.

    Attributes:
        parts: text of the page (one), or of each page or chapter of the file.
        metadata: of the page or file; empty values are left out later.
        replaced: number of U+FFFD put for invalid bytes.
        scanned: numbers of a PDF's pages that show something, but have no text layer.
    """

    parts: Sequence[str] = ()
    metadata: Mapping[str, object] = field(default_factory=dict)
    replaced: int = 0
    scanned: Sequence[int] = ()
    error: str = ""


def extract(
    content: bytes,
    encoding: str,
    charset: str,
    extractor: Extractor,
    options: Options,
    errors: Errors = "replace",
) -> Extracted:
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
    metadata = {**extracted, **page_rights(decoded.text)}
    metadata["charset"] = charset or declared_in_page(content)
    if decoded.encoding != UTF8:
        metadata["encoding"] = decoded.encoding
    return Extracted([text], metadata, decoded.replaced)


def parse(html: str) -> HTMLTree:
    """Parse a page as browsers do."""
    from resiliparse.parse.html import HTMLTree

    return HTMLTree.parse(html)


def with_resiliparse(html: str, options: Options) -> Content:
    """Extract with resiliparse and the settings of DCLM (baselines/mappers: main
    content, no alternative texts).
    """
    from resiliparse.extract.html2text import extract_plain_text

    tree = parse(html)
    if options["markdown"]:
        write_formulas(tree)
        write_tables(tree)
    text = extract_plain_text(
        tree,
        preserve_formatting="minimal_html" if options["markdown"] else True,
        main_content=options["favor"] != "recall",
        alt_texts=False,
        comments=bool(options["comments"]),
        links=bool(options["links"]),
        skip_elements=None if options["tables"] else ["table"],
    )
    if options["markdown"]:
        text = to_markdown(text, options)
    return text, page_metadata(tree)


def write_tables(tree: HTMLTree) -> None:
    """Write the lines of Markdown around the cells of tables, which resiliparse leaves
    in lines.
    """
    for table in tree.document.query_selector_all("table") if tree.document else ():
        rows = [[*row.children] for row in table.query_selector_all("tr")]
        if table.query_selector("table") or max(map(len, rows), default=0) < 2:
            continue  # layout
        for cells in rows:
            for cell in cells:
                cell.prepend(tree.create_text_node("| "))
            if cells:
                cells[-1].append(tree.create_text_node(" |"))
        rule: Any = tree.create_element("tr")
        rule.append(tree.create_element("td"))
        rule.first_child.text = "| --- " * len(rows[0]) + "|"
        first_row: Any = table.query_selector("tr")
        first_row.after(rule)


def page_metadata(tree: HTMLTree) -> dict[str, object]:
    """Title and language of a page."""
    root = None if tree.document is None else tree.document.query_selector("html")
    language = "" if root is None else root.getattr("lang", "")
    return {"title": " ".join((tree.title or "").split()), "language": language}


def to_markdown(html: str, options: Options) -> str:
    """Markdown of HTML without boilerplate, in which no character is escaped."""
    from markdownify import ATX, markdownify

    return markdownify(
        html,
        heading_style=ATX,
        bullets="-",
        escape_asterisks=False,
        escape_underscores=False,
        strip=["img"] if options["links"] else ["a", "img"],
    )


def with_trafilatura(html: str, options: Options) -> Content:
    """Extract with trafilatura, followed by comments if enabled."""
    from trafilatura import bare_extraction

    if options["markdown"]:
        tree = parse(html)
        # trafilatura turns these into dollars, and does not escape what is inside
        write_formulas(tree, r"\({}\)", r" \[{}\] ")
        html = str(tree)
    document = bare_extraction(
        html,
        favor_precision=options["favor"] == "precision",
        favor_recall=options["favor"] == "recall",
        include_comments=options["comments"],
        include_tables=options["tables"],
        include_links=options["links"],
        include_formatting=options["markdown"],
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


def with_readability(html: str, options: Options) -> Content:
    """Extract with readability-lxml (arc90's Readability); all text of what it keeps is
    taken.
    """
    from readability import Document

    tree = parse(html)
    if not _has_text(tree):
        return "", {}
    if options["markdown"]:
        write_formulas(tree)
        html = str(tree)
    content = Document(html).summary(html_partial=True)
    return all_text(content, options), page_metadata(tree)


def all_text(html: str, options: Options) -> str:
    """All text of HTML without boilerplate."""
    if not options["markdown"]:
        return with_resiliparse(html, {**options, "favor": "recall"})[0]
    tree = parse(html)
    write_formulas(tree)
    body: Any = tree.body
    if not options["tables"]:
        for table in body.query_selector_all("table"):
            table.remove()  # a nested one may follow
    return to_markdown(body.html, options)


def with_justext(html: str, options: Options) -> Content:
    """Extract the paragraphs that jusText takes for text, by the stop words of all its
    languages, as trafilatura calls it (external.py).
    """
    from justext import justext

    tree = parse(html)
    if not _has_text(tree):
        return "", {}
    paragraphs = justext(html.encode(), justext_stop_words(), encoding=UTF8)
    text = "\n".join(part.text for part in paragraphs if not part.is_boilerplate)
    return text, page_metadata(tree)


def _has_text(tree: HTMLTree) -> bool:
    """False for pages that lxml refuses to parse as empty, too."""
    return tree.body is not None and bool((tree.body.text or "").strip())


@cache
def justext_stop_words() -> frozenset[str]:
    """Stop words of all languages of jusText."""
    from justext import get_stoplist, get_stoplists

    return frozenset().union(*map(get_stoplist, get_stoplists()))


EXTRACTORS: dict[str, Extractor] = {
    "resiliparse": with_resiliparse,
    "trafilatura": with_trafilatura,
    "readability": with_readability,
    "justext": with_justext,
}
"""Extractors by their names in a source's `extract`."""


def find_extractor(name: str) -> Extractor:
    """Extractor by its name, or any function as `module:function`."""
    if name in EXTRACTORS:
        return EXTRACTORS[name]
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)
