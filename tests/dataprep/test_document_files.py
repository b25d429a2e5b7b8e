"""PDF, Word, EPUB and Docling files: text, structure, pages, scans, damage."""

import io
import json
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gristmill.core.stage_context import Context
from gristmill.dataprep.readers import ingest, sources
from gristmill.dataprep.readers.document_files import PARSERS, DocumentError, parse_epub
from gristmill.dataprep.readers.extraction_guard import JOINT, part_ends
from gristmill.dataprep.readers.sources import DOCUMENT_FORMATS, SourceError
from gristmill.mixtures.schema.sources import ExtractOptions
from tests.dataprep.archive_files import make_zip
from tests.dataprep.binary_documents import (
    PIXEL,
    make_docx,
    make_epub,
    make_pdf,
    paragraph,
    table,
)
from tests.dataprep.own_steps import written

MakeContext = Callable[..., Context]
PAGES = [["The mill grinds slowly,", "yet exceedingly small."], ["A second page."]]
PLAIN = ExtractOptions().model_dump()
MARKDOWN = ExtractOptions(markdown=True).model_dump()
DOCX = make_docx(
    paragraph("On mills", "Heading1")
    + paragraph("The mill grinds.")
    + table([["Flour", "Sacks"], ["Wheat", "12"]])
)
DOCLING = {
    "schema_name": "DoclingDocument",
    "version": "1.3.0",
    "name": "mills",
    "origin": {
        "mimetype": "application/pdf",
        "binary_hash": 1,
        "filename": "mills.pdf",
    },
    "body": {
        "self_ref": "#/body",
        "children": [{"$ref": f"#/texts/{number}"} for number in range(3)],
        "content_layer": "body",
        "name": "_root_",
        "label": "unspecified",
    },
    "texts": [
        {
            "self_ref": f"#/texts/{number}",
            "parent": {"$ref": "#/body"},
            "children": [],
            "content_layer": "body",
            "label": label,
            "prov": [
                {
                    "page_no": page,
                    "bbox": {"l": 0, "t": 9, "r": 9, "b": 0},
                    "charspan": [0, len(text)],
                }
            ],
            "orig": text,
            "text": text,
        }
        for number, (label, page, text) in enumerate(
            [
                ("title", 1, "On mills"),
                ("formula", 1, "a_1 = b_2"),
                ("text", 2, "A second page."),
            ]
        )
    ],
    "pages": {
        str(page): {"size": {"width": 9, "height": 9}, "page_no": page}
        for page in (1, 2)
    },
}


def read(
    folder: Path, make_context: MakeContext, **source: Any
) -> tuple[ingest.IngestSummary, list[dict[str, Any]]]:
    config = {
        "sources": {"files": {"path": str(folder), **source}},
        "ingest": {"max_quarantined": 0.9},
    }
    with tempfile.TemporaryDirectory() as out_folder:
        out = Path(out_folder)
        summary = ingest.run({}, config, out, make_context("work"))
        return summary, [
            {**row, "metadata": json.loads(row["metadata"])} for row in written(out)
        ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    return tmp_path / "files"


def test_every_document_format_has_a_parser() -> None:
    assert set(PARSERS) == set(DOCUMENT_FORMATS)


def test_pdf_is_one_document_with_the_ends_of_its_pages(
    folder: Path, make_context: MakeContext
) -> None:
    (folder / "mills.pdf").write_bytes(make_pdf(PAGES, title="On mills"))
    summary, (document,) = read(folder, make_context)
    first, second = "\n".join(PAGES[0]), PAGES[1][0]
    assert document["text"] == f"{first}{JOINT}{second}"
    assert document["locator"] == "mills.pdf"
    assert document["metadata"] == {
        "title": "On mills",
        "pages": 2,
        "part_ends": [len(first), len(document["text"])],
    }
    assert summary.counts["read"] == 1


def test_pdf_is_split_into_pages_with_locators(
    folder: Path, make_context: MakeContext
) -> None:
    (folder / "mills.pdf").write_bytes(make_pdf([*PAGES, b""]))
    summary, documents = read(folder, make_context, split="pages")
    assert [row["locator"] for row in documents] == ["mills.pdf#1", "mills.pdf#2"]
    assert documents[1]["text"] == "A second page."
    assert summary.counts["dropped"] == {"extract/empty": 1}


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["an exam-", "ple of U-", "Boot"], "an example of U-Boot"),
        (["state-of-the-", "art"], "state-of-the-art"),
        (
            ["a well-known fact, a well-", "known one"],
            "a well-known fact, a well-known one",
        ),
        (["pages 1-", "2 and a", "dash -", "here"], "pages 1-\n2 and a\ndash -\nhere"),
        (["Gr\xf6-", "\xdfe"], "Gr\xf6\xdfe"),
        (["two- ", "fold"], "twofold"),
    ],
)
def test_words_divided_at_line_ends_are_joined(lines: list[str], text: str) -> None:
    assert PARSERS["pdf"](make_pdf([lines]), PLAIN).parts == [text]


def test_scanned_pages_are_quarantined_and_the_others_kept(
    folder: Path, make_context: MakeContext
) -> None:
    (folder / "mixed.pdf").write_bytes(make_pdf([PAGES[1], PIXEL, b"", PIXEL]))
    (folder / "scan.pdf").write_bytes(make_pdf([PIXEL]))
    summary, (document,) = read(folder, make_context)
    assert document["text"] == "A second page."
    assert summary.counts["quarantined"] == 2
    assert summary.counts["dropped"] == {}
    mixed, scan = summary.quarantined
    assert "2 of 4 pages have no text layer (2, 4)" in mixed["error"]
    assert (scan["file"], scan["record"]) == ("scan.pdf", 1)
    assert "OCR" in scan["error"]


def test_damaged_files_lose_only_themselves(
    folder: Path, make_context: MakeContext
) -> None:
    for form in ("pdf", "docx", "epub"):
        (folder / f"bad.{form}").write_bytes(b"%PDF-1.7 no more")
    (folder / "empty.pdf").write_bytes(b"")
    (folder / "good.pdf").write_bytes(make_pdf(PAGES))
    summary, (document,) = read(folder, make_context)
    assert document["locator"] == "good.pdf"
    assert {row["file"] for row in summary.quarantined} == {
        "bad.pdf",
        "bad.docx",
        "bad.epub",
        "empty.pdf",
    }


@pytest.mark.slow
def test_file_that_unpacks_to_more_than_the_memory_is_lost_alone(
    folder: Path, make_context: MakeContext
) -> None:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("META-INF/container.xml", bytes(600 << 20))
    (folder / "bomb.epub").write_bytes(sink.getvalue())
    (folder / "good.epub").write_bytes(make_epub({"a.xhtml": "<p>Two</p>"}))
    config = {
        "sources": {"files": {"path": str(folder)}},
        "ingest": {"max_quarantined": 0.9, "extract_memory_bytes": 512 << 20},
    }
    summary = ingest.run({}, config, folder.parent / "out", make_context("work"))
    assert summary.counts["kept"] == 1
    (row,) = summary.quarantined
    assert (row["file"], "512 MiB" in row["error"]) == ("bomb.epub", True)


def test_word_document_has_its_paragraphs_and_tables(
    folder: Path, make_context: MakeContext
) -> None:
    (folder / "mills.docx").write_bytes(DOCX)
    _, (document,) = read(folder, make_context)
    assert document["text"].splitlines()[0] == "On mills"
    assert "Wheat" in document["text"]
    _, (document,) = read(folder, make_context, extract_options={"markdown": True})
    assert document["text"].startswith("# On mills\n\nThe mill grinds.\n\n")
    assert "| Wheat | 12 |" in document["text"]


def test_epub_has_its_chapters_in_reading_order(
    folder: Path, make_context: MakeContext
) -> None:
    chapters = {
        "z first.xhtml": "<h1>One</h1><p>The mill.</p>",
        "a.xhtml": "<p>Two</p>",
    }
    (folder / "mills.epub").write_bytes(make_epub(chapters))
    _, (document,) = read(folder, make_context)
    assert document["text"].split() == ["One", "The", "mill.", "Two"]
    assert document["metadata"]["title"] == "On mills"
    assert document["metadata"]["chapters"] == 2
    _, documents = read(folder, make_context, split="chapters")
    assert [row["locator"] for row in documents] == ["mills.epub#1", "mills.epub#2"]


def test_encrypted_epub_is_refused_but_not_one_with_encrypted_fonts() -> None:
    chapters = {"a.xhtml": "<p>Two</p>"}
    with pytest.raises(DocumentError):
        parse_epub(make_epub(chapters, ["book/a.xhtml"]), PLAIN)
    assert parse_epub(make_epub(chapters, ["book/font.otf"]), PLAIN).parts == ["Two"]


def test_docling_json_is_read_by_page(folder: Path, make_context: MakeContext) -> None:
    (folder / "mills.json").write_text(json.dumps(DOCLING, indent=2))
    _, documents = read(
        folder,
        make_context,
        format="docling",
        split="pages",
        extract_options={"markdown": True},
    )
    assert [row["text"] for row in documents] == [
        "# On mills\n\n$$a_1 = b_2$$",
        "A second page.",
    ]
    assert documents[0]["metadata"] == {"file": "mills.pdf", "pages": 2}


def test_documents_in_archives_are_read(
    folder: Path, make_context: MakeContext
) -> None:
    (folder / "all.zip").write_bytes(
        make_zip({"a/mills.json": json.dumps(DOCLING), "b/notes.txt": "x"})
    )
    _, (document,) = read(folder / "all.zip", make_context, format="docling")
    assert document["locator"] == "all.zip/a/mills.json"


def test_olmocr_output_keeps_the_pdf_and_its_pages(
    folder: Path, make_context: MakeContext
) -> None:
    record = {
        "id": "0c5c",
        "text": "The mill.\nA second page.",
        "source": "olmocr",
        "metadata": {"Source-File": "s3://papers/mills.pdf", "pdf-total-pages": 2},
        "attributes": {"pdf_page_numbers": [[0, 10, 1], [10, 24, 2]]},
    }
    (folder / "output_1.jsonl").write_text(json.dumps(record) + "\n")
    _, (document,) = read(
        folder,
        make_context,
        id_field="metadata.Source-File",
        metadata_fields=["metadata.pdf-total-pages", "attributes.pdf_page_numbers"],
    )
    assert document["locator"] == "s3://papers/mills.pdf"
    assert document["metadata"] == {
        "metadata.pdf-total-pages": 2,
        "attributes.pdf_page_numbers": [[0, 10, 1], [10, 24, 2]],
    }


def test_missing_library_is_named_with_its_extra(
    folder: Path, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "mills.pdf").write_bytes(make_pdf(PAGES))
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    with pytest.raises(SourceError, match=r"pypdfium2.*gristmill\[documents\]"):
        read(folder, make_context)


def test_ends_of_parts_leave_out_empty_ones() -> None:
    assert part_ends(["", "ab", "", "c"]) == [0, 2, 2, 5]
