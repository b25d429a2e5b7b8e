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
        magic: the bytes at the start of a file (the `file` utility's database); None
            if other files, or texts, may start so.
    """

    name: str
    extensions: tuple[str, ...]
    library: str
    conversion: str
    magic: bytes | None


_MAGICS = {
    "PDF": b"%PDF-",
    "rich text": b"{\\rtf",
    "DjVu": b"AT&TFORM",
    "Avro": b"Obj\x01",
    "SQLite": b"SQLite format 3\x00",
    "HDF5": b"\x89HDF\r\n\x1a\n",
    "7-Zip": b"7z\xbc\xaf\x27\x1c",
    "RAR": b"Rar!\x1a\x07",
}
_TABLE = """
PDF               | .pdf | | set `format: pdf`
Word 97           | .doc | | convert it with libreoffice --convert-to txt
OpenDocument text | .odt | odfpy | convert it with pandoc --to plain
rich text         | .rtf | striprtf | convert it with pandoc --to plain
Kindle            | .mobi .azw3 | | convert it with ebook-convert
DjVu              | .djvu | | convert it with djvutxt
PostScript        | .ps .eps | | convert it with ps2ascii
Excel             | .xlsx | openpyxl | save it as CSV
Excel 97          | .xls | xlrd | save it as CSV
PowerPoint        | .pptx | python-pptx | convert it with libreoffice --convert-to pdf and pdftotext
ORC               | .orc | pyarrow.orc | write it as Parquet
Avro              | .avro | fastavro | write it as Parquet
SQLite            | .sqlite .sqlite3 .db | sqlite3 | write it as Parquet
DuckDB            | .duckdb | duckdb | write it as Parquet
HDF5              | .h5 .hdf5 | h5py | write it as Parquet
TFRecord          | .tfrecord | tfrecord | write it as Parquet
7-Zip             | .7z | | unpack it with 7z x
RAR               | .rar | | unpack it with unrar x
image             | .png .jpg .jpeg .tif .tiff .gif .webp | pytesseract | read it with tesseract
audio             | .mp3 .wav .flac .ogg .m4a | whisper | transcribe it with whisper
video             | .mp4 .mkv .webm .avi .mov | whisper | transcribe it with whisper
"""
"""Name, extensions, library and conversion of each format; see BinaryFormat."""
BINARY_FORMATS = tuple(
    BinaryFormat(
        name, tuple(extensions.split()), library, conversion, _MAGICS.get(name)
    )
    for name, extensions, library, conversion in (
        map(str.strip, line.split("|")) for line in _TABLE.strip().splitlines()
    )
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
