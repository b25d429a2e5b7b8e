"""Small PDF, Word and EPUB files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.dataprep.archive_files import make_zip

PIXEL = b"q 99 0 0 99 9 9 cm BI /W 1 /H 1 /BPC 8 /CS /G ID \x00 EI Q"
"""Content of a page that is one picture, as a scanner writes it."""


def make_pdf(pages: Sequence[Sequence[str] | bytes], title: str = "") -> bytes:
    """PDF of pages with lines of text, or with a given content."""
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"",
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        f"<< /Title ({title}) >>".encode(),
    ]
    numbers = []
    for page in pages:
        if not isinstance(page, bytes):
            lines = "".join(f"({line}) Tj T*\n" for line in page)
            page = f"BT /F1 12 Tf 14 TL 72 720 Td\n{lines}ET".encode("latin-1")
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(page), page))
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources "
            b"<< /Font << /F1 3 0 R >> >> /Contents %d 0 R >>" % len(objects)
        )
        numbers.append(b"%d 0 R" % len(objects))
    objects[1] = b"<< /Type /Pages /Kids [%s] /Count %d >>" % (
        b" ".join(numbers),
        len(numbers),
    )
    content = b"%PDF-1.4\n"
    places = []
    for number, value in enumerate(objects, start=1):
        places.append(b"%010d 00000 n \n" % len(content))
        content += b"%d 0 obj\n%s\nendobj\n" % (number, value)
    trailer = b"<< /Size %d /Root 1 0 R /Info 4 0 R >>" % (len(objects) + 1)
    return (
        b"%sxref\n0 %d\n0000000000 65535 f \n%strailer\n%s\nstartxref\n%d\n%%%%EOF\n"
        % (
            content,
            len(objects) + 1,
            b"".join(places),
            trailer,
            len(content),
        )
    )


def make_docx(body: str) -> bytes:
    """Word document with the body in WordprocessingML."""
    office = "http://schemas.openxmlformats.org"
    return make_zip(
        {
            "[Content_Types].xml": f'<Types xmlns="{office}/package/2006/content-types">'
            '<Default Extension="rels" ContentType="application/'
            'vnd.openxmlformats-package.relationships+xml"/><Override '
            'PartName="/word/document.xml" ContentType="application/vnd.openxmlformats'
            '-officedocument.wordprocessingml.document.main+xml"/></Types>',
            "_rels/.rels": f'<Relationships xmlns="{office}/package/2006/relationships">'
            f'<Relationship Id="r1" Type="{office}/officeDocument/2006/relationships/'
            'officeDocument" Target="word/document.xml"/></Relationships>',
            "word/document.xml": '<w:document xmlns:w="'
            f'{office}/wordprocessingml/2006/main"><w:body>{body}</w:body></w:document>',
        }
    )


def paragraph(text: str, style: str = "") -> str:
    """Paragraph of a Word document."""
    properties = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
    return f"<w:p>{properties}<w:r><w:t>{text}</w:t></w:r></w:p>"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Table of a Word document."""
    lines = "".join(
        "<w:tr>"
        + "".join(f"<w:tc>{paragraph(cell)}</w:tc>" for cell in row)
        + "</w:tr>"
        for row in rows
    )
    return f"<w:tbl>{lines}</w:tbl>"


def make_epub(chapters: Mapping[str, str], encrypted: Sequence[str] = ()) -> bytes:
    """EPUB with chapters by file name, in this order, and a table of contents."""
    items = "".join(
        f'<item id="c{number}" href="{name.replace(" ", "%20")}" '
        'media-type="application/xhtml+xml"/>'
        for number, name in enumerate(chapters)
    )
    spine = "".join(f'<itemref idref="c{number}"/>' for number in range(len(chapters)))
    members = {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": '<container xmlns="urn:oasis:names:tc:opendocument:'
        'xmlns:container"><rootfiles><rootfile full-path="book/package.opf"/>'
        "</rootfiles></container>",
        "book/package.opf": '<package xmlns="http://www.idpf.org/2007/opf"><metadata '
        'xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>On mills</dc:title>'
        "<dc:language>en</dc:language></metadata><manifest>"
        f'<item id="toc" href="toc.xhtml" properties="nav"/>{items}</manifest>'
        f'<spine><itemref idref="toc"/>{spine}</spine></package>',
        "book/toc.xhtml": "<html><body><nav>Contents</nav></body></html>",
        **{
            f"book/{name}": f'<?xml version="1.0" encoding="utf-8"?><html><body>{body}'
            "</body></html>"
            for name, body in chapters.items()
        },
    }
    if encrypted:
        members["META-INF/encryption.xml"] = "<encryption>" + "".join(
            f'<CipherReference URI="{place}"/>' for place in encrypted
        )
        members["META-INF/encryption.xml"] += "</encryption>"
    return make_zip(members)
