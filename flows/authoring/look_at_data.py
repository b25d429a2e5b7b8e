"""Inspection of undescribed data: its format, its text field, and the amount of
text.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import PurePosixPath
from statistics import fmean
from typing import Any

from gristmill.core.files import as_path
from gristmill.dataprep.documents import open_table
from gristmill.dataprep.readers.binary_formats import answers, format_of_content
from gristmill.dataprep.readers.compression import (
    CorruptFileError,
    RecordTooLongError,
    read_chunks,
    split_compression,
)
from gristmill.dataprep.readers.json_array import is_array, json_lines
from gristmill.dataprep.readers.parquet import table_rows
from gristmill.dataprep.readers.pythondocs import is_python_source
from gristmill.dataprep.readers.records import field_of
from gristmill.dataprep.readers.sources import (
    DOCUMENT_FORMATS,
    SourceError,
    SourceFile,
    StoredFile,
    find_at,
    find_files,
)
from gristmill.flows.authoring.page_text import (
    is_html,
    text_per_stored_byte,
    text_share,
)
from gristmill.flows.planning.quantities import counted, size
from gristmill.mixtures.schema.sources import DocumentFiles
from gristmill.mixtures.yaml_text import join_first

SAMPLE_FILES = 3
SAMPLE_ROWS = 200
SAMPLE_BYTES = 4 << 20
COMPRESSED_RATIO = 3.0
"""Bytes of text per stored byte of archives and compressed files: zstd's and gzip's
usual ratio on English prose.
"""
COUNTED_BYTES = 32 << 20
"""Bytes unpacked of a compressed file to measure its ratio; larger files are assumed to
have COMPRESSED_RATIO.
"""
TEXT_NAMES = tuple(
    "text content raw_content body document article markdown story code".split()
)
"""Usual names of the text field; otherwise the field with the longest strings is
taken.
"""
OLMOCR_FIELDS = (
    "metadata.Source-File",
    "metadata.pdf-total-pages",
    "attributes.pdf_page_numbers",
)
"""Fields of olmOCR's output: the PDF, its pages, and their places in the text."""
DOCLING = b'"schema_name": "DoclingDocument"'
"""In the first bytes of Docling's JSON."""
MAGIC = {b"PAR1": "parquet", b"WARC/": "warc", b"%PDF-": "pdf"}
"""First bytes of a file -> its format."""
ID_NAMES = (
    OLMOCR_FIELDS[0],
    "id",
    "uuid",
    "doc_id",
    "document_id",
    "_id",
    "url",
    "uri",
)
CODE_EXTENSIONS = tuple(
    (
        ".py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .js .ts .rb .sh .sql .r .jl "
        ".lua .scala .kt .swift"
    ).split()
)
PATH_NAMES = (
    "max_stars_repo_path",
    "path",
    "file_path",
    "filepath",
    "filename",
    "file_name",
)
"""Fields with the path of a code file, as in The Stack (Kocetkov et al. 2022) and
similar data sets.
"""
EXTENSION_NAMES = ("ext", "extension")
LANGUAGE_NAMES = ("lang", "language", "programming_language")
CODE_LANGUAGES = frozenset(
    "c c# c++ csharp cuda go haskell java javascript jsx julia kotlin objective-c perl "
    "php python r ruby rust scala shell swift typescript".split()
)
"""Names of programming languages in code data sets, except those that are also codes of
natural languages (`lua`, `css`).
"""
ROW_FORMATS = ("parquet", "arrow", "jsonl", "csv")
EXAMPLE_FIELDS = (
    (("chosen", "rejected"), "preferences", "dpo"),
    (("messages",), "conversations", "sft"),
    (("conversations",), "conversations", "sft"),
    (("instruction", "output"), "instructions", "sft"),
)
"""Fields of fine-tuning rows, the kind of such rows, and the section that reads
them.
"""
SHOWN_FIELDS = 20
BOOK_BYTES = 500_000
"""Size above which a text file is most likely a book, or several documents (Gopher's
rules keep at most 100,000 words).
"""
BOOK_PARAGRAPHS = 4000
"""Characters of the documents cut from a book: a few printed pages."""
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Look:
    """Findings about one source.

    Attributes:
        path: path as given.
        format: format for the manifest; `auto` if the file names determine it.
        text_field, id_field: fields of rows; None if the format has no fields, or the
            default name is right.
        extract: True if the texts are HTML.
        files: number of inputs.
        stored_bytes: size of the inputs.
        text_bytes: estimated bytes of text; None if unknown before reading.
        is_code: True if most of the files, or rows, are programs.
        path_field: field with the path of each program; None if the locator is the
            path.
        metadata_fields: fields of metadata; empty if the default ones are right.
        split: characters per document of split long texts; None for no splitting.
        remarks: sentences about points to check.
        formats: (format with its compression, number of files, their bytes), the
            largest first.
        ignored: extension of a folder's unread files -> their number.
    """

    path: str
    format: str
    files: int
    stored_bytes: int
    text_bytes: int | None
    text_field: str | None = None
    id_field: str | None = None
    extract: bool = False
    is_code: bool = False
    path_field: str | None = None
    metadata_fields: tuple[str, ...] = ()
    split: int | None = None
    remarks: tuple[str, ...] = ()
    formats: tuple[tuple[str, int, int], ...] = ()
    ignored: Mapping[str, int] = field(default_factory=dict)

    def describe(self) -> str:
        """Describe the source in one line, and each remark in a further one."""
        parts = {
            f"{counted(self.files, 'file')}, {size(self.stored_bytes)}": True,
            f"format {self.format}": self.format != "auto",
            f"text in field {self.text_field!r}": self.text_field,
            f"ids in field {self.id_field!r}": self.id_field,
            "HTML, to be extracted": self.extract,
            "source code": self.is_code,
            f"about {size(self.text_bytes or 0)} of text": self.text_bytes,
        }
        facts = ", ".join(text for text, is_shown in parts.items() if is_shown)
        return "\n  ".join([facts, *self.remarks])


def look_at(name: str, path: str) -> Look:
    """Inspect a file, glob, folder or URL: its listing, and the first rows of a few
    files.

    Raises:
        SourceError: the path has no readable data, or its rows have no text.
    """
    if is_python_source(path):
        return Look(path, "auto", 1, 0, None, is_code="stdlib" in path)
    kind, entries = find_at(f"source {name!r}", path)
    format_name: str | None = "auto"
    if kind == "folder" and {"dataset_dict.json", "state.json"} & {
        item.name for item in entries
    }:
        format_name = "hf"
    listing = None
    while listing is None:
        section = {"path": path, "format": format_name}
        source = DocumentFiles.model_validate(section)
        try:
            listing = find_files(name, source)
        except SourceError:
            format_name = sniff(entries) if entries else None
            if source.format != "auto" or format_name is None:
                raise
            continue
        first = listing.files[0]
        if (
            source.format == "auto"
            and first.name.endswith(".json")
            and DOCLING in _beginning(first)[0][:4096]
        ):
            format_name, listing = "docling", None
    look = _look_at_files(name, path, source.format, listing.files)
    groups = files_by_format(listing.files)
    if len(groups) > 1:
        text_bytes = sum(text_bytes_of(path, files) for files in groups.values())
        look = replace(look, text_bytes=text_bytes)
    remarks = list(look.remarks)
    num_texts = sum(file.format == "text" for file in listing.files)
    if num_texts and any(file.format in ROW_FORMATS for file in listing.files):
        # One source would treat files of rows and files of one text alike.
        remarks.append(
            f"{num_texts:,} of {len(listing.files):,} files hold one text each "
            "beside files of rows: separate sources (`gristmill new --source "
            "NAME='GLOB'` for each) can have separate weights and rules"
        )
    formats = [
        (kind, len(files), sum(file.size for file in files))
        for kind, files in groups.items()
    ]
    return replace(
        look,
        remarks=(*remarks, *answers(listing.ignored)),
        formats=tuple(sorted(formats, key=lambda entry: (-entry[2], entry[0]))),
        ignored=listing.ignored,
    )


def files_by_format(files: Sequence[SourceFile]) -> dict[str, list[SourceFile]]:
    """Group files by format and compression."""
    groups: dict[str, list[SourceFile]] = {}
    for file in files:
        kind = f"{file.format} {file.compression}".strip()
        groups.setdefault(kind, []).append(file)
    return groups


def text_bytes_of(path: str, files: Sequence[SourceFile]) -> int:
    """Estimate the bytes of text of files of one format; 0 if they cannot be read."""
    try:
        return _look_at_files("", path, "auto", files).text_bytes or 0
    except SourceError:
        return 0


def _look_at_files(
    name: str, path: str, format_name: str, files: Sequence[SourceFile]
) -> Look:
    chosen = []
    for group in files_by_format(files).values():
        places = sorted({0, len(group) // 2, len(group) - 1})
        chosen += [group[place] for place in places[:SAMPLE_FILES]]
    samples = {
        file.name: rows for file in chosen if (rows := sample_rows(file)) is not None
    }
    if not samples:
        return _look_at_texts(path, format_name, files, chosen)
    stored = sum(file.size for file in files)
    rows = [row for sample in samples.values() for row in sample]
    if not rows:
        damage = [
            f": {file.name}: {str(error).rstrip('.')}"
            for file in chosen
            if (error := _damage(file)) is not None
        ]
        raise SourceError(
            f"source {name!r}: no row of {path} can be read as "
            f"{chosen[0].format}{''.join(damage[:1])}; give another path, or "
            "write the manifest by hand with the right `format:`"
        )
    columns = {key for row in rows for key in row}
    example_remarks = [
        f"rows with {' and '.join(keys)} look like {kind}: `{section}: {{data: "
        "[{path: ...}]}` reads them; here they would be documents"
        for keys, kind, section in EXAMPLE_FIELDS
        if columns.issuperset(keys)
    ][:1]
    text_name = text_field(rows)
    if text_name is None:
        names = sorted(map(str, rows[0]))
        advice = "".join(example_remarks) or "give a path whose rows have one"
        raise SourceError(
            f"source {name!r}: no field of {path} holds text; its fields are "
            f"{join_first(names, SHOWN_FIELDS)}; {advice}"
        )
    texts = [
        value for row in rows if isinstance(value := _scalars(row).get(text_name), str)
    ]
    remarks = []
    if len(texts) < len(rows):
        others = [
            name
            for name, sample in samples.items()
            if any(text_name not in _scalars(row) for row in sample)
        ]
        remarks.append(
            f"{len(rows) - len(texts)} of {len(rows)} rows sampled have no "
            f"{text_name!r} ({join_first(others, SAMPLE_FILES)}): they will be "
            "quarantined; read files with another field as a source of their own"
        )
    path_field = code_path_field(rows)
    is_olmocr = all(
        field_of(row, name) is not None for row in rows for name in OLMOCR_FIELDS
    )
    is_page = sum(map(is_html, texts)) * 2 > len(texts)
    row_bytes = sum(map(_row_bytes, rows))
    share = sum(len(text.encode()) for text in texts) / max(row_bytes, 1)
    text_bytes = stored * _content_ratio(chosen) * share
    if is_page:
        text_bytes *= text_share(texts)
    return Look(
        path,
        format_name,
        len(files),
        stored,
        int(text_bytes),
        text_field=None if text_name == "text" else text_name,
        id_field=id_field(rows),
        extract=is_page,
        is_code=path_field is not None or names_code(rows),
        path_field=path_field,
        metadata_fields=OLMOCR_FIELDS if is_olmocr else (),
        remarks=(*remarks, *example_remarks),
    )


def _look_at_texts(
    path: str,
    format_name: str,
    files: Sequence[SourceFile],
    chosen: Sequence[SourceFile],
) -> Look:
    """Inspect files without rows; texts as long as books are to be split."""
    is_code = _most_are_code([file.name for file in files], len(files))
    books = [
        file
        for file in files
        if file.format == "text"
        and file.size * (COMPRESSED_RATIO if file.compression else 1) > BOOK_BYTES
    ]
    split: int | None = None
    remarks: tuple[str, ...] = ()
    if books and not is_code:
        split = BOOK_PARAGRAPHS
        remark = f"it is longer than {size(BOOK_BYTES)}, and is cut into paragraphs"
        if len(files) > 1:
            remark = (
                f"{len(books)} of {len(files)} files are longer than "
                f"{size(BOOK_BYTES)}, and are cut into paragraphs"
            )
        remarks = (remark,)
    is_page = {file.format for file in chosen} <= {"html", "warc", *DOCUMENT_FORMATS}
    ratio = text_per_stored_byte(files) if is_page else _content_ratio(chosen)
    stored = sum(file.size for file in files)
    return Look(
        path,
        format_name,
        len(files),
        stored,
        int(stored * ratio),
        is_code=is_code,
        split=split,
        remarks=remarks,
    )


def sniff(entries: Sequence[StoredFile]) -> str | None:
    """Detect the format of files from the first bytes of the first one; None if it is
    not text.
    """
    first = min(entries, key=lambda item: item.name)
    compression = split_compression(first.name)[1]
    start = _read_beginning(first.location, compression, SAMPLE_BYTES)[0][:4096]
    for magic, format_name in MAGIC.items():
        if start.startswith(magic):
            return format_name
    if DOCLING in start:
        return "docling"
    try:
        text = start.decode("utf-8", "strict" if len(start) < 4096 else "ignore")
    except UnicodeDecodeError:
        return None
    if format_of_content(start) or "\0" in text:
        return None
    if is_html(text):
        return "html"
    if is_array(start) or isinstance(_parsed(text.partition("\n")[0]), dict):
        return "jsonl"
    return "text"


def sample_rows(file: SourceFile) -> list[Row] | None:
    """Return the first readable rows of a file as mappings; None for formats without
    rows.
    """
    path = as_path(file.location)
    if file.format not in ROW_FORMATS:
        return None
    if file.format in ("parquet", "arrow"):
        rows = islice(table_rows(path, file.format), SAMPLE_ROWS)
        return [row for _, row in rows if isinstance(row, dict)]
    if file.format == "jsonl":
        json_rows: list[Row] = []
        num_bytes = 0
        with contextlib.suppress(CorruptFileError):
            for line in json_lines(path, file.compression):
                if isinstance(line, RecordTooLongError):
                    break
                num_bytes += len(line)
                row = _parsed(line.decode("utf-8", "replace"))
                if isinstance(row, dict):
                    json_rows.append(row)
                if num_bytes >= SAMPLE_BYTES or len(json_rows) == SAMPLE_ROWS:
                    break
        return json_rows
    text = _beginning(file)[0].decode("utf-8", "replace")
    if len(text) >= SAMPLE_BYTES:  # the last line is most likely cut
        text = text[: text.rfind("\n") + 1] or text
    delimiter = "\t" if split_compression(file.name)[0] == ".tsv" else ","
    csv.field_size_limit(SAMPLE_BYTES)
    return list(
        islice(
            csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter),
            SAMPLE_ROWS,
        )
    )


def _parsed(line: str) -> object:
    try:
        value: object = json.loads(line)
        return value
    except ValueError:
        return None


def _damage(file: SourceFile) -> Exception | None:
    """Return the first error of a file of rows that has no readable row."""
    if file.format not in ("parquet", "arrow"):
        return _beginning(file)[1]
    rows = table_rows(as_path(file.location), file.format)
    return next((row for _, row in rows if isinstance(row, ValueError)), None)


def _beginning(file: SourceFile) -> tuple[bytes, Exception | None]:
    return _read_beginning(file.location, file.compression, SAMPLE_BYTES)


def _read_beginning(
    location: str, compression: str, most: int
) -> tuple[bytes, Exception | None]:
    """Return the first bytes of a file's content, up to any damage, and the damage."""
    content = bytearray()
    try:
        for chunk in read_chunks(as_path(location), compression):
            content += chunk
            if len(content) >= most:
                break
    except (CorruptFileError, RecordTooLongError) as error:
        return bytes(content), error
    return bytes(content[:most]), None


def _content_ratio(files: Sequence[SourceFile]) -> float:
    """Return the content bytes per stored byte of some files: measured if that is
    quick, else estimated.
    """
    stored = sum(file.size for file in files)
    if not stored:
        return 1.0
    content_bytes: list[float] = []
    for file in files:
        num_bytes: float = file.size
        if file.format == "parquet":
            rows = sample_rows(file)
            num_bytes = 0.0
            if rows:  # none of a damaged file
                with open_table(as_path(file.location)) as table:
                    num_bytes = fmean(map(_row_bytes, rows)) * table.metadata.num_rows
        elif file.format == "zip":
            num_bytes = file.size * COMPRESSED_RATIO
        elif file.compression:
            content, damage = _read_beginning(
                file.location, file.compression, COUNTED_BYTES + 1
            )
            num_bytes = len(content)
            if damage is not None or len(content) > COUNTED_BYTES:
                num_bytes = max(file.size * COMPRESSED_RATIO, len(content))
        content_bytes.append(num_bytes)
    return sum(content_bytes) / stored


def _most_are_code(paths: Sequence[str], total: int) -> bool:
    suffixes = [PurePosixPath(path).suffix.lower() for path in paths]
    return sum(suffix in CODE_EXTENSIONS for suffix in suffixes) * 2 > total


def text_field(rows: Sequence[Row]) -> str | None:
    """Return the dotted name of the text field: a usual name with long strings, else
    the longest field.
    """
    lengths: dict[str, list[int]] = {}
    for row in rows:
        for key, value in _scalars(row).items():
            if isinstance(value, str):
                lengths.setdefault(key, []).append(len(value))
    means = {key: sum(sizes) / len(rows) for key, sizes in lengths.items()}
    if not means or max(means.values()) == 0:
        return None
    longest = max(means, key=lambda key: (means[key], key))
    usual = [
        key
        for name in TEXT_NAMES
        for key in means
        if key.rpartition(".")[2].lower() == name
    ]
    return next((key for key in usual if means[key] * 2 >= means[longest]), longest)


def code_path_field(rows: Sequence[Row]) -> str | None:
    """Return the field with the path of a program in most rows, or None."""
    for name in PATH_NAMES:
        paths = [path for row in rows if isinstance(path := row.get(name), str)]
        if _most_are_code(paths, len(rows)):
            return name
    return None


def names_code(rows: Sequence[Row]) -> bool:
    """Return True if most rows name a program's extension or a programming language."""
    num_extensions = num_languages = 0
    for row in rows:
        extensions = [str(row.get(name)).lower() for name in EXTENSION_NAMES]
        languages = [str(row.get(name)).lower() for name in LANGUAGE_NAMES]
        num_extensions += any(
            f".{extension.lstrip('.')}" in CODE_EXTENSIONS for extension in extensions
        )
        num_languages += not CODE_LANGUAGES.isdisjoint(languages)
    return max(num_extensions, num_languages) * 2 > len(rows)


def id_field(rows: Sequence[Row]) -> str | None:
    """Return a field named like an identifier that is unique in the sampled rows, or
    None.
    """
    for name in ID_NAMES:
        values = [field_of(row, name) for row in rows]
        ids = [str(value) for value in values if value not in (None, "")]
        if len(ids) == len(rows) == len(set(ids)):
            return name
    return None


def _scalars(row: Row) -> dict[str, Any]:
    """Return a row's scalars by name; those of nested objects as `outer.inner`."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": item for inner, item in value.items()}
            continue
        flat[str(key)] = value
        if isinstance(value, bytes):
            # A column of bytes may hold pages.
            with contextlib.suppress(UnicodeDecodeError):
                flat[str(key)] = value.decode()
    return flat


def _row_bytes(row: Row) -> int:
    return len(json.dumps(row, ensure_ascii=False, default=str).encode())
