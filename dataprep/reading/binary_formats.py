"""Unsupported binary formats, with a library or a conversion for each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class BinaryFormat:
    """A format without a reader here.

    Attributes:
        name: of the format.
        extensions: of the files.
        library: Python library for a user's reader; empty if there is none.
        conversion: alternative, such as `convert it with pdftotext`.
        magic: the bytes at the start of a file (the `file` utility's database); empty
            if other files, or texts, may start so.
    """

    name: str
    extensions: tuple[str, ...]
    library: str = ""
    conversion: str = ""
    magic: bytes = b""


BINARY_FORMATS = (
    BinaryFormat("PDF", (".pdf",), "pypdf", "convert it with pdftotext", b"%PDF-"),
    BinaryFormat(
        "Word", (".docx",), "python-docx", "convert it with pandoc --to plain"
    ),
    BinaryFormat(
        "Word 97", (".doc",), "", "convert it with libreoffice --convert-to txt"
    ),
    BinaryFormat(
        "OpenDocument text", (".odt",), "odfpy", "convert it with pandoc --to plain"
    ),
    BinaryFormat(
        "rich text",
        (".rtf",),
        "striprtf",
        "convert it with pandoc --to plain",
        b"{\\rtf",
    ),
    BinaryFormat("EPUB", (".epub",), "ebooklib", "convert it with pandoc --to plain"),
    BinaryFormat("Kindle", (".mobi", ".azw3"), "", "convert it with ebook-convert"),
    BinaryFormat("DjVu", (".djvu",), "", "convert it with djvutxt", b"AT&TFORM"),
    BinaryFormat("PostScript", (".ps", ".eps"), "", "convert it with ps2ascii"),
    BinaryFormat("Excel", (".xlsx",), "openpyxl", "save it as CSV"),
    BinaryFormat("Excel 97", (".xls",), "xlrd", "save it as CSV"),
    BinaryFormat(
        "PowerPoint",
        (".pptx",),
        "python-pptx",
        "convert it with libreoffice --convert-to pdf and pdftotext",
    ),
    BinaryFormat("ORC", (".orc",), "pyarrow.orc", "write it as Parquet"),
    BinaryFormat("Avro", (".avro",), "fastavro", "write it as Parquet", b"Obj\x01"),
    BinaryFormat(
        "SQLite",
        (".sqlite", ".sqlite3", ".db"),
        "sqlite3",
        "write it as Parquet",
        b"SQLite format 3\x00",
    ),
    BinaryFormat("DuckDB", (".duckdb",), "duckdb", "write it as Parquet"),
    BinaryFormat(
        "HDF5", (".h5", ".hdf5"), "h5py", "write it as Parquet", b"\x89HDF\r\n\x1a\n"
    ),
    BinaryFormat("TFRecord", (".tfrecord",), "tfrecord", "write it as Parquet"),
    BinaryFormat("7-Zip", (".7z",), "", "unpack it with 7z x", b"7z\xbc\xaf\x27\x1c"),
    BinaryFormat("RAR", (".rar",), "", "unpack it with unrar x", b"Rar!\x1a\x07"),
    BinaryFormat(
        "image",
        (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".gif", ".webp"),
        "pytesseract",
        "read it with tesseract",
    ),
    BinaryFormat(
        "audio",
        (".mp3", ".wav", ".flac", ".ogg", ".m4a"),
        "whisper",
        "transcribe it with whisper",
    ),
    BinaryFormat(
        "video",
        (".mp4", ".mkv", ".webm", ".avi", ".mov"),
        "whisper",
        "transcribe it with whisper",
    ),
)
_OF_EXTENSION = {
    extension: form for form in BINARY_FORMATS for extension in form.extensions
}


def format_of_extension(extension: str) -> BinaryFormat | None:
    """Return the binary format of files with an extension (`.pdf`), or None."""
    return _OF_EXTENSION.get(extension)


def format_of_content(start: bytes) -> BinaryFormat | None:
    """Return the binary format of a file by its first bytes, or None."""
    return next(
        (
            form
            for form in BINARY_FORMATS
            if form.magic and start.startswith(form.magic)
        ),
        None,
    )


def how_to_read(form: BinaryFormat) -> str:
    """Sentence with the remedy for a file of a binary format."""
    if not form.library:
        return f"gristmill has no reader for {form.name} files: {form.conversion}"
    return (
        f"gristmill has no reader for {form.name} files: name a function of yours "
        "that yields the texts, with "
        f"{form.library} for example (read: {{use: ./readers.py:read_file}}, see docs/own-readers.md), or {form.conversion}"
    )


def answers(extensions: Iterable[str]) -> list[str]:
    """Sentences for the binary formats among some extensions, without repeats."""
    forms = dict.fromkeys(
        form
        for extension in extensions
        if (form := _OF_EXTENSION.get(extension.lower()))
    )
    return [how_to_read(form) for form in forms]
