"""Quality of the text that each extractor takes from a page.

Three sets of pages are measured:

- trafilatura's own evaluation: snippets of the main text, and of the boilerplate. A
  snippet counts as kept if it occurs in the extracted text, except for white space
  (adbar/trafilatura, tests/eval_common.py). Those whose licence permits redistribution
  lie in `checkout.data_folder` below `web/trafilatura_cc`;
- Wikipedia, whose own marks tell the article from what surrounds it, in the same folder
  (mlfoundations/dclm, and one of trafilatura's). They have tables, code and formulas;
- the documentation of this checkout, in the HTML of a common Markdown library with a
  site's navigation around it. They have tables and code.

Against a reference text the score is ROUGE-N F1 with N = 5 (Lin 2004), which
MinerU-HTML reports on WebMainBench (arXiv 2511.16397). Structure counts as kept if a
table's row is a line of the text, if a code block is in it with its line breaks and
indentation, except for blank lines, and if a formula's LaTeX is in it, except for white
space.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import zstandard
from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.html import HTMLTree

from benchmarks.checkout import ROOT, data_folder
from benchmarks.measuring import Row, row
from gristmill.dataprep.readers.extraction_guard import (
    ExtractorError,
    Guard,
    extract_pages,
)
from gristmill.dataprep.readers.records import Page, Reading, Record
from gristmill.mixtures.base import RawSection
from gristmill.mixtures.schema.sources import ExtractOptions

SNIPPETS = "web/trafilatura_cc"
WIKIPEDIA = "web/dclm_wikipedia_html.tar.zst"
WIKIPEDIA_SNIPPETS_PAGE = "en.wikipedia.org.tsne.html"
"""Page of Wikipedia among those with snippets."""
SETTINGS: dict[str, tuple[str, RawSection]] = {
    "resiliparse": ("resiliparse", {}),
    "trafilatura": ("trafilatura", {}),
    "trafilatura, favor precision": ("trafilatura", {"favor": "precision"}),
    "readability": ("readability", {}),
    "justext": ("justext", {}),
    "resiliparse, markdown": ("resiliparse", {"markdown": True}),
    "trafilatura, markdown": ("trafilatura", {"markdown": True}),
    "readability, markdown": ("readability", {"markdown": True}),
}
ALL_TEXT: tuple[str, RawSection] = ("resiliparse", {"favor": "recall"})
"""The peer: all text that a browser shows."""
ROUGE_WORDS = 5
ARTICLE = "#mw-content-text"
NOT_ARTICLE = (
    "style, script, table.navbox, div.navbox, .navbox, .metadata, .mw-editsection, "
    ".reflist, .references, .toc, #toc, .noprint, .mw-jump-link, .printfooter, #catlinks"
)
"""Elements inside Wikipedia's content that are not the article: navigation, notices,
references, categories.
"""
FORMULA = ".mwe-math-element"
DOCUMENTATION_PAGES = 40


@dataclass(frozen=True)
class Snippets:
    """Snippets of a page's main text and of its boilerplate."""

    main_text: Sequence[str]
    boilerplate: Sequence[str]


@dataclass(frozen=True)
class Score:
    """Precision and recall of the main text's snippets among those that are kept, and
    their harmonic mean.
    """

    precision: float
    recall: float
    f1: float


@dataclass(frozen=True)
class Reference:
    """Main text of a page, and the structure in it.

    Attributes:
        html: the page.
        text: main text, with formulas as LaTeX.
        rows: of all tables, their cells with words; rows of one cell are left out.
        code: blocks.
        formulas: LaTeX without white space.
    """

    html: bytes
    text: str
    rows: Sequence[Sequence[str]]
    code: Sequence[str]
    formulas: Sequence[str]


def rows() -> Iterator[Row]:
    """Measure each score of each extractor; the peer keeps all text of the page."""
    yield from snippet_rows()
    yield from reference_rows("documentation", documentation())
    wikipedia = data_folder() / WIKIPEDIA
    if wikipedia.exists():
        yield from reference_rows("Wikipedia", wikipedia_articles())
    else:
        yield row("Wikipedia", None, None, "", f"{wikipedia} is not there")


def snippet_rows() -> Iterator[Row]:
    """Measure the snippets that plain text keeps."""
    folder = data_folder() / SNIPPETS
    if not (folder / "evaldata.json").exists():
        yield row(
            "main text extraction", None, None, "", f"{folder} has no labelled pages"
        )
        return
    labelled = read_labels(folder / "evaldata.json")
    pages = read_pages(folder / "html.tar.zst")
    everything = score(labelled, extract_all(pages, *ALL_TEXT))
    for name, (extractor, options) in SETTINGS.items():
        if options.get("markdown"):
            continue
        texts = texts_or_refusal(pages, extractor, options)
        if isinstance(texts, str):
            yield row(f"{name}: snippets", None, None, "", texts)
            continue
        ours = score(labelled, texts)
        for measure in ("precision", "recall", "f1"):
            yield row(
                f"{name}: {measure}",
                getattr(ours, measure),
                getattr(everything, measure),
                "share",
                f"{len(labelled)} pages; peer: all text of the page",
            )


def reference_rows(kind: str, references: Mapping[str, Reference]) -> Iterator[Row]:
    """Measure text and structure against reference texts."""
    pages = {name: reference.html for name, reference in references.items()}
    everything = reference_scores(references, extract_all(pages, *ALL_TEXT))
    for name, (extractor, options) in SETTINGS.items():
        texts = texts_or_refusal(pages, extractor, options)
        if isinstance(texts, str):
            yield row(f"{kind}, {name}", None, None, "", texts)
            continue
        for measure, (value, number) in reference_scores(references, texts).items():
            yield row(
                f"{kind}, {name}: {measure}",
                value,
                everything[measure][0],
                "share",
                f"{number}; peer: all text of the page",
            )


def reference_scores(
    references: Mapping[str, Reference], texts: Mapping[str, str]
) -> dict[str, tuple[float, str]]:
    """Score of each measure that the pages have, and what it counts."""
    pairs = [(part, texts.get(name, "")) for name, part in references.items()]
    scores = {
        "ROUGE-5 F1": (
            fmean(rouge(part.text, text) for part, text in pairs),
            f"mean of {len(pairs)} pages",
        )
    }
    for measure, unit, verdicts in (
        (
            "tables kept",
            "rows",
            [v for part, text in pairs for v in kept_rows(part, text)],
        ),
        (
            "code kept",
            "blocks",
            [v for part, text in pairs for v in kept_code(part, text)],
        ),
        (
            "formulas kept",
            "formulas",
            [v for part, text in pairs for v in kept_formulas(part, text)],
        ),
    ):
        if verdicts:
            scores[measure] = fmean(verdicts), f"{len(verdicts):,} {unit}"
    return scores


def rouge(reference: str, text: str, number: int = ROUGE_WORDS) -> float:
    """ROUGE-N F1: harmonic mean of the shares of common n-grams of words."""
    expected, found = (
        Counter(zip(*(words(side)[shift:] for shift in range(number)), strict=False))
        for side in (reference, text)
    )
    common = (expected & found).total()
    return 2 * common / (expected.total() + found.total()) if common else 0.0


def kept_rows(reference: Reference, text: str) -> list[bool]:
    """True for each table row that is a line of the text, whatever separates its
    cells.
    """
    lines = {tuple(words(line)) for line in text.splitlines()}
    return [tuple(words(" ".join(cells))) in lines for cells in reference.rows]


def kept_code(reference: Reference, text: str) -> list[bool]:
    """True for each block that is in the text with its line breaks and indentation."""
    text = _full_lines(text)
    return [_full_lines(block) in text for block in reference.code]


def kept_formulas(reference: Reference, text: str) -> list[bool]:
    """True for each formula whose LaTeX is in the text."""
    joined = "".join(text.split())
    return [formula in joined for formula in reference.formulas]


def words(text: str) -> list[str]:
    """Words of a text, without punctuation, Markdown and the tags that it may hold."""
    return re.findall(r"[^\W_]+", re.sub(r"</?(?:sub|sup|u)>", "", text))


def _full_lines(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


def documentation() -> dict[str, Reference]:
    """Pages of this checkout's documentation, as a site shows them."""
    from markdown_it import MarkdownIt

    markdown = MarkdownIt("commonmark").enable("table")
    paths = sorted(
        path
        for path in (ROOT / "docs").rglob("*.md")
        if not path.name.startswith("bench-")
    )
    titles = [path.stem.replace("-", " ").capitalize() for path in paths]
    step = max(1, len(paths) // DOCUMENTATION_PAGES)
    references = {}
    for place in range(0, len(paths), step):
        content = markdown.render(paths[place].read_text("utf-8"))
        page = site_page(titles[place], content, titles)
        references[str(paths[place].relative_to(ROOT))] = reference_of(content, page)
    return references


def site_page(title: str, content: str, titles: Sequence[str]) -> bytes:
    """Page of a documentation site: content between navigation and footer."""
    links = "".join(f'<li><a href="/{name}/">{name}</a></li>' for name in titles)
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{title}'
        "</title></head><body><header><a href='/'>Documentation</a> <form><input "
        "placeholder='Search'></form></header><div class='container'><nav "
        f"class='sidebar'><ul>{links}</ul></nav><main><article>{content}</article>"
        "</main></div><footer><p>Previous | Next</p><p>Copyright of the authors. Built "
        "with a site generator.</p></footer></body></html>"
    ).encode()


def wikipedia_articles() -> dict[str, Reference]:
    """Articles of Wikipedia, without what its own marks set apart."""
    pages = read_pages(data_folder() / WIKIPEDIA)
    snippets = data_folder() / SNIPPETS / "html.tar.zst"
    if snippets.exists():
        name = WIKIPEDIA_SNIPPETS_PAGE
        pages[name] = read_pages(snippets)[name]
    references = {}
    for name, page in sorted(pages.items()):
        document: Any = HTMLTree.parse_from_bytes(page).document
        article = document.query_selector(ARTICLE)
        for element in article.query_selector_all(NOT_ARTICLE):
            element.decompose()
        references[name] = reference_of(article.html, page)
    return references


def reference_of(article: str, page: bytes) -> Reference:
    """Main text and structure of a page.

    Args:
        article: HTML of the main text alone.
        page: the whole page.
    """
    tree: Any = HTMLTree.parse(article)
    formulas = []
    for formula in tree.document.query_selector_all(FORMULA):
        source = " ".join(formula.query_selector("annotation").text.split())
        styled = re.fullmatch(r"\{\\displaystyle (.*)\}", source)
        source = styled[1] if styled else source
        formulas.append("".join(source.split()))
        formula.replace_with(tree.create_text_node(source))
    table_rows = [
        [text for cell in line.children if words(text := " ".join(cell.text.split()))]
        for line in tree.document.query_selector_all("tr")
        if line.query_selector("table") is None
    ]
    return Reference(
        page,
        extract_plain_text(tree, list_bullets=False, alt_texts=False),
        [cells for cells in table_rows if len(cells) > 1],
        [block.text for block in tree.document.query_selector_all("pre")],
        formulas,
    )


def read_labels(path: Path) -> dict[str, Snippets]:
    """Read the snippets by the name of the page's file."""
    entries = json.loads(path.read_text("utf-8")).values()
    return {
        entry["file"]: Snippets(entry["with"], entry["without"]) for entry in entries
    }


def read_pages(path: Path) -> dict[str, bytes]:
    """Read the pages of an archive by the names of their files."""
    content = zstandard.ZstdDecompressor().stream_reader(path.read_bytes()).read()
    pages = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            stream = archive.extractfile(member)
            if stream is not None:
                pages[Path(member.name).name] = stream.read()
    return pages


def texts_or_refusal(
    pages: Mapping[str, bytes], extractor: str, options: RawSection
) -> dict[str, str] | str:
    """Texts of the pages; the message if the extractor's library is not installed."""
    try:
        return extract_all(pages, extractor, options)
    except ExtractorError as error:
        return str(error)


def extract_all(
    pages: Mapping[str, bytes], extractor: str, options: RawSection
) -> dict[str, str]:
    """Return the text of every page by its name, extracted as by `ingest`."""
    items = map(partial(Page, 1), pages, pages.values())
    chosen = ExtractOptions.model_validate(options).model_dump()
    with Guard(extractor, chosen) as guard:
        records = list(extract_pages(items, guard, Reading()))
    return {
        record.locator: record.text for record in records if isinstance(record, Record)
    }


def score(labelled: Mapping[str, Snippets], texts: Mapping[str, str]) -> Score:
    """Count snippets over all pages; a page without text keeps none."""
    kept = wrongly_kept = total = 0
    for name, snippets in labelled.items():
        text = _plain(texts.get(name, ""))
        kept += sum(_plain(snippet) in text for snippet in snippets.main_text)
        wrongly_kept += sum(_plain(snippet) in text for snippet in snippets.boilerplate)
        total += len(snippets.main_text)
    precision = kept / (kept + wrongly_kept) if kept else 0.0
    recall = kept / total if total else 0.0
    return Score(
        precision,
        recall,
        2 * precision * recall / (precision + recall) if kept else 0.0,
    )


def _plain(text: str) -> str:
    return " ".join(text.split())
