"""Looking at data that nobody has described yet: its format, which field holds the text, how much text there is."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path, PurePosixPath
from statistics import fmean
from typing import Any, Literal

from gristmill.core.files import as_path
from gristmill.dataprep.documents import open_table
from gristmill.dataprep.reading.binary_formats import answers, format_of_content
from gristmill.dataprep.reading.compression import CorruptFileError, RecordTooLongError, read_chunks, split_compression
from gristmill.dataprep.reading.jsonl.json_array import is_array, json_lines
from gristmill.dataprep.reading.pythondocs import is_python_source
from gristmill.dataprep.reading.sources import Found, SourceError, SourceFile, SourceListing, find_at, find_files
from gristmill.dataprep.reading.tables import table_rows
from gristmill.dataprep.text.chapters import chapters
from gristmill.flows.authoring.page_text import is_html, text_per_stored_byte, text_share

SAMPLE_FILES = 3
SAMPLE_ROWS = 200
SAMPLE_BYTES = 4 << 20
COMPRESSED_RATIO = 3.0
"""Bytes of text per stored byte of archives and compressed files: zstd's and gzip's usual ratio on English prose."""
COUNTED_BYTES = 32 << 20
"""Of a compressed file so much is unpacked to count; a larger one is taken to have COMPRESSED_RATIO."""
TEXT_NAMES = ("text", "content", "raw_content", "body", "document", "article", "markdown", "story", "code")
"""Names that a field of texts usually has; elsewhere the longest strings decide."""
ID_NAMES = ("id", "uuid", "doc_id", "document_id", "_id", "url", "uri")
CODE_EXTENSIONS = (
    ".py",
    ".pyi",
    ".c",
    ".h",
    ".cc",
    ".cpp",
    ".hpp",
    ".cu",
    ".rs",
    ".go",
    ".java",
    ".js",
    ".ts",
    ".rb",
    ".sh",
    ".sql",
    ".r",
    ".jl",
    ".lua",
    ".scala",
    ".kt",
    ".swift",
)
PATH_NAMES = ("max_stars_repo_path", "path", "file_path", "filepath", "filename", "file_name")
"""Fields with the path of a file of code: those of The Stack (Kocetkov et al. 2022) and of its like."""
EXTENSION_NAMES = ("ext", "extension")
LANGUAGE_NAMES = ("lang", "language", "programming_language")
CODE_LANGUAGES = frozenset(
    "c c# c++ csharp cuda go haskell java javascript jsx julia kotlin objective-c perl php python r ruby rust scala "
    "shell swift typescript".split()
)
"""Names of programming languages in data sets of code, but those that are codes of natural languages too (`lua`,
`css`)."""
ROW_FORMATS = ("parquet", "arrow", "jsonl", "csv")
EXAMPLE_FIELDS = (
    (("chosen", "rejected"), "preferences", "dpo"),
    (("messages",), "conversations", "sft"),
    (("conversations",), "conversations", "sft"),
    (("instruction", "output"), "instructions", "sft"),
)
"""Fields that rows for fine-tuning have, what such rows are, and the section that reads them."""
SHOWN_FIELDS = 20
BOOK_BYTES = 500_000
"""Beyond this many bytes a file of text is most likely a book, or several documents (100,000 words are the most that
Gopher's rules keep)."""
BOOK_CHAPTERS = 3
"""Chapters in its first SAMPLE_BYTES by which a book is taken to have headings."""
BOOK_PARAGRAPHS = 4000
"""Characters of the documents into which a text without headings is cut: some pages of print."""
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Look:
    """What was found out about one source.

    Attributes:
        path: as it was given.
        format: what the manifest has to say; `auto` where the file names tell.
        text_field, id_field: of rows; None where the format has no fields, or where the default name is right.
        extract: whether the texts are HTML.
        files: number of inputs.
        stored_bytes: their size.
        text_bytes: estimated bytes of text; None where it cannot be known before reading.
        is_code: whether most of the files, or rows, are programs.
        path_field: the field of rows of programs that has their paths; None where the locator is the path.
        split: how long texts are to be cut: `chapters`, or into paragraphs of so many characters; None for not at all.
        remarks: sentences about what may need a second look.
        formats: (format with its compression, number of files, their bytes), the largest first.
        ignored: extension of a folder's files that are not read -> their number.
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
    split: Literal["chapters"] | int | None = None
    remarks: tuple[str, ...] = ()
    formats: tuple[tuple[str, int, int], ...] = ()
    ignored: Mapping[str, int] = field(default_factory=dict)


def look_at(name: str, path: str) -> Look:
    """Look at a file, glob, folder or URL: its listing, and the first rows of a few of its files.

    Raises:
        SourceError: it holds nothing that can be read, or rows without any text.
    """
    if is_python_source(path):
        return Look(path, "auto", 1, 0, None, is_code="stdlib" in path)
    form, listed = _listing(name, path)
    looked = _look_at_files(name, path, form, listed.files)
    kinds = files_by_format(listed.files)
    formats = [(kind, len(files), sum(file.size for file in files)) for kind, files in kinds.items()]
    if len(kinds) > 1:
        looked = replace(
            looked,
            text_bytes=sum(text_bytes_of(path, files) for files in kinds.values()),
            remarks=(*looked.remarks, *_mixed_remark(listed.files)),
        )
    looked = replace(looked, remarks=(*looked.remarks, *answers(listed.ignored)))
    return replace(
        looked, formats=tuple(sorted(formats, key=lambda entry: (-entry[2], entry[0]))), ignored=listed.ignored
    )


def files_by_format(files: Sequence[SourceFile]) -> dict[str, list[SourceFile]]:
    """Format with its compression -> the files that have it."""
    found: dict[str, list[SourceFile]] = {}
    for file in files:
        found.setdefault(" ".join(filter(None, (file.format, file.compression))), []).append(file)
    return found


def text_bytes_of(path: str, files: Sequence[SourceFile]) -> int:
    """Estimated bytes of text of files that have one format; 0 where nothing of them can be read."""
    try:
        return _look_at_files("", path, "auto", files).text_bytes or 0
    except SourceError:
        return 0


def _mixed_remark(files: Sequence[SourceFile]) -> list[str]:
    """What to say of a folder with files of rows beside files of one text each: one source treats all alike."""
    texts = sum(file.format == "text" for file in files)
    if not texts or not any(file.format in ROW_FORMATS for file in files):
        return []
    return [
        f"{texts:,} of {len(files):,} files are one text each beside files of rows: sources of their own "
        "(`gristmill new --source NAME='GLOB'` for each) get weights and rules of their own"
    ]


def _look_at_files(name: str, path: str, form: str, files: Sequence[SourceFile]) -> Look:
    chosen = [files[index] for index in sorted({0, len(files) // 2, len(files) - 1})][:SAMPLE_FILES]
    stored = sum(file.size for file in files)
    kinds = {file.format for file in chosen}
    rows = [rows for file in chosen if (rows := sample_rows(file)) is not None]
    code = sum(PurePosixPath(file.name).suffix in CODE_EXTENSIONS for file in files) * 2 > len(files)
    if not rows:
        books = (
            []
            if code
            else [
                file
                for file in files
                if file.format == "text" and file.size * (COMPRESSED_RATIO if file.compression else 1) > BOOK_BYTES
            ]
        )
        split, said = _cut_of_books(books, len(files)) if books else (None, ())
        per_stored_byte = text_per_stored_byte(files) if kinds <= {"html", "warc"} else _unpacked(chosen)
        plain = int(stored * per_stored_byte)
        return Look(path, form, len(files), stored, plain, is_code=code, split=split, remarks=said)
    together = [row for some in rows for row in some]
    if not together:
        raise SourceError(
            f"source {name!r}: no row of {path} can be read as {chosen[0].format}"
            f"{_damage(chosen)}; give another path, or write the manifest by hand with the right "
            "`format:`"
        )
    named = text_field(together)
    if named is None:
        raise SourceError(
            f"source {name!r}: no field of {path} holds text; its fields are "
            f"{_some_fields(together[0])}; give a path whose rows have one"
        )
    texts = [str(value) for row in together if isinstance(value := _values(row).get(named), str)]
    remarks = (
        []
        if len(texts) == len(together)
        else [
            f"{len(together) - len(texts)} of {len(together)} rows looked at have no {named!r}: they will be quarantined"
        ]
    )
    remarks += _examples_remark(together)
    path_field = code_path_field(together)
    html = sum(map(is_html, texts)) * 2 > len(texts)
    share = sum(len(text.encode()) for text in texts) / max(sum(map(_row_bytes, together)), 1)
    return Look(
        path,
        form,
        len(files),
        stored,
        int(stored * _unpacked(chosen) * share * (text_share(texts) if html else 1)),
        text_field=None if named == "text" else named,
        id_field=id_field(together),
        extract=html,
        is_code=path_field is not None or names_code(together),
        path_field=path_field,
        remarks=tuple(remarks),
    )


def _damage(files: Sequence[SourceFile]) -> str:
    """How the first damaged one of some files is damaged, to be said behind what follows from it."""
    for file in files:
        try:
            read = 0
            for chunk in read_chunks(as_path(file.location), file.compression):
                read += len(chunk)
                if read >= SAMPLE_BYTES:
                    break
        except (CorruptFileError, RecordTooLongError) as error:
            return f": {file.name}: {error}"
    return ""


def _cut_of_books(books: Sequence[SourceFile], files: int) -> tuple[Literal["chapters"] | int, tuple[str, ...]]:
    """How texts as long as books are best cut, by a look at the first, and what to say of it."""
    begin = _beginning(as_path(books[0].location), books[0].compression).decode("utf-8", "replace")
    found = len(chapters(begin))
    many = f"{len(books)} of {files} files are" if files > 1 else "it is"
    long = f"{many} longer than {size(BOOK_BYTES)}, and {'are' if files > 1 else 'is'} cut into"
    if found >= BOOK_CHAPTERS:
        return "chapters", (f"{long} chapters: {books[0].name} has {found:,} in its first {size(len(begin))}",)
    return BOOK_PARAGRAPHS, (f"{long} paragraphs: {books[0].name} has no headings of chapters",)


def split_setting(split: Literal["chapters"] | int | None) -> str | dict[str, int] | None:
    """How a text is to be cut, as a source's `split`."""
    return {"paragraphs": split} if isinstance(split, int) else split


def _some_fields(row: Row) -> str:
    names = sorted(map(str, row))
    more = f" and {len(names) - SHOWN_FIELDS:,} others" if len(names) > SHOWN_FIELDS else ""
    return ", ".join(names[:SHOWN_FIELDS]) + more


def _examples_remark(rows: Sequence[Row]) -> list[str]:
    """What to say of rows that look like examples for fine-tuning: they are no documents."""
    for keys, what, section in EXAMPLE_FIELDS:
        if all(any(key in row for row in rows) for key in keys):
            return [
                f"rows with {' and '.join(keys)} look like {what}: `{section}: {{data: [{{path: ...}}]}}` reads "
                "them, here they would be documents"
            ]
    return []


def _listing(name: str, path: str) -> tuple[str, SourceListing]:
    kind, found = find_at(f"source {name!r}", path)
    markers = {"dataset_dict.json", "state.json"}
    if kind == "folder" and markers & {item.name for item in found}:
        return "hf", find_files(name, {"path": path, "format": "hf"})
    try:
        return "auto", find_files(name, {"path": path})
    except SourceError:
        form = sniff(found) if found else None
        if form is None:
            raise
        return form, find_files(name, {"path": path, "format": form})


def sniff(found: Sequence[Found]) -> str | None:
    """The format of files whose names do not tell, by the first bytes of the first one; None where it is not text."""
    first = min(found, key=lambda item: item.name)
    start = _beginning(as_path(first.location), split_compression(first.name)[1])[:4096]
    if start.startswith(b"PAR1"):
        return "parquet"
    if start.startswith(b"WARC/"):
        return "warc"
    if format_of_content(start):
        return None
    try:
        text = start.decode("utf-8", "strict" if len(start) < 4096 else "ignore")
    except UnicodeDecodeError:
        return None
    if "\0" in text:
        return None
    if is_html(text):
        return "html"
    if is_array(start):
        return "jsonl"
    try:
        return "jsonl" if isinstance(json.loads(text.partition("\n")[0]), dict) else "text"
    except ValueError:
        return "text"


def sample_rows(file: SourceFile) -> list[Row] | None:
    """The first rows of a file as mappings; None for formats without rows. Rows that cannot be read are left out."""
    path = as_path(file.location)
    if file.format not in ROW_FORMATS:
        return None
    if file.format in ("parquet", "arrow"):
        rows = islice(table_rows(path, file.format), SAMPLE_ROWS)
        return [row for _, row in rows if isinstance(row, dict)]
    if file.format == "jsonl":
        return list(islice(_json_rows(path, file.compression), SAMPLE_ROWS))
    lines = _beginning(path, file.compression).decode("utf-8", "replace").splitlines(keepends=True)
    # The last line of a piece of a file is most likely cut.
    lines = lines if len(lines) == 1 or sum(map(len, lines)) < SAMPLE_BYTES else lines[:-1]
    delimiter = "\t" if split_compression(file.name)[0] == ".tsv" else ","
    csv.field_size_limit(SAMPLE_BYTES)
    return list(islice(csv.DictReader(lines, delimiter=delimiter), SAMPLE_ROWS))


def _json_rows(path: Path, compression: str) -> Iterator[Row]:
    """The objects in the first SAMPLE_BYTES of a file; of a damaged one those before the damage."""
    size = 0
    try:
        for line in json_lines(path, compression):
            if isinstance(line, RecordTooLongError):
                return
            size += len(line)
            row = _json_object(line)
            if row is not None:
                yield row
            if size >= SAMPLE_BYTES:
                return
    except CorruptFileError:
        return


def _json_object(line: bytes) -> Row | None:
    try:
        row = json.loads(line.decode("utf-8", "replace"))
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _beginning(path: Path, compression: str) -> bytes:
    """The first SAMPLE_BYTES of a file's content; of a damaged one what comes before the damage."""
    content = b""
    try:
        for chunk in read_chunks(path, compression):
            content += chunk
            if len(content) >= SAMPLE_BYTES:
                break
    except (CorruptFileError, RecordTooLongError):
        return content
    return content[:SAMPLE_BYTES]


def _unpacked(files: Sequence[SourceFile]) -> float:
    """Bytes of content for each stored byte of some files: counted where that is soon done, else guessed."""
    stored = sum(file.size for file in files)
    return sum(_content_bytes(file) for file in files) / stored if stored else 1.0


def _content_bytes(file: SourceFile) -> float:
    path = as_path(file.location)
    if file.format == "parquet":
        with open_table(path) as table:
            rows = [row for _, row in islice(table_rows(path, file.format), SAMPLE_ROWS) if isinstance(row, dict)]
            return fmean(map(_row_bytes, rows)) * table.metadata.num_rows if rows else 0.0
    if file.format == "zip":
        return file.size * COMPRESSED_RATIO
    if not file.compression:
        return file.size
    counted = 0
    try:
        for chunk in read_chunks(path, file.compression):
            counted += len(chunk)
            if counted > COUNTED_BYTES:
                return max(file.size * COMPRESSED_RATIO, counted)
    except (CorruptFileError, RecordTooLongError):
        return max(file.size * COMPRESSED_RATIO, counted)
    return counted


def text_field(rows: Sequence[Row]) -> str | None:
    """The dotted name of the field that holds the texts: a usual name whose strings are long, else the longest."""
    lengths: dict[str, list[int]] = {}
    for row in rows:
        for key, value in _values(row).items():
            if isinstance(value, str):
                lengths.setdefault(key, []).append(len(value))
    means = {key: sum(found) / len(rows) for key, found in lengths.items()}
    if not means or max(means.values()) == 0:
        return None
    longest = max(means, key=lambda key: (means[key], key))
    usual = [key for name in TEXT_NAMES for key in means if key.rpartition(".")[2].lower() == name]
    return next((key for key in usual if means[key] * 2 >= means[longest]), longest)


def code_path_field(rows: Sequence[Row]) -> str | None:
    """The field that has the path of a program in most rows; None where no field has."""
    for name in PATH_NAMES:
        paths = [path for row in rows if isinstance(path := row.get(name), str)]
        programs = sum(PurePosixPath(path).suffix.lower() in CODE_EXTENSIONS for path in paths)
        if programs * 2 > len(rows):
            return name
    return None


def names_code(rows: Sequence[Row]) -> bool:
    """Whether most rows have the extension of a program or the name of a programming language."""
    return any(sum(map(is_named, rows)) * 2 > len(rows) for is_named in (_has_code_extension, _has_code_language))


def _has_code_extension(row: Row) -> bool:
    extensions = [str(row[name]).lower().lstrip(".") for name in EXTENSION_NAMES if row.get(name)]
    return any(f".{extension}" in CODE_EXTENSIONS for extension in extensions)


def _has_code_language(row: Row) -> bool:
    return any(str(row.get(name)).lower() in CODE_LANGUAGES for name in LANGUAGE_NAMES)


def id_field(rows: Sequence[Row]) -> str | None:
    """A field that is called like an identifier and is another one in every row looked at."""
    for name in ID_NAMES:
        found = [str(row[name]) for row in rows if row.get(name) not in (None, "")]
        if len(found) == len(rows) == len(set(found)):
            return name
    return None


def _values(row: Row) -> dict[str, Any]:
    """A row's scalars by name, those of an inner object as `outer.inner`."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": item for inner, item in value.items()}
        else:
            flat[str(key)] = _decoded(value)
    return flat


def _decoded(value: Any) -> Any:
    """A value, as text where it is bytes of UTF-8: a column of bytes may hold pages."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _row_bytes(row: Row) -> int:
    return len(json.dumps(row, ensure_ascii=False, default=str).encode())


def mean_weight(looks: Sequence[Look]) -> float:
    """Mean estimated bytes of the sources whose size is known; 1 where none is."""
    known = [look.text_bytes for look in looks if look.text_bytes]
    return fmean(known) if known else 1.0


def size(count: float) -> str:
    """Bytes for people: `12.3 MB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} bytes" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"
