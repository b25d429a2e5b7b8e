"""Which files a source names, and what identifies their content.

A path is a file, a glob (`**` for any depth), a folder, an fsspec URL of one of these, or one of two sources that
need no files: `python-docs://` and `python-stdlib://`. Names that begin with a dot are not matched by wildcards. A
tar or zip archive is one input; its members are looked at when it is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from gristmill.dataprep.files import as_path, sha256_file
from gristmill.dataprep.reading.compression import split_compression
from gristmill.dataprep.reading.huggingface import DEFAULT_SPLIT, NoSplitError, split_files
from gristmill.dataprep.reading.locations import Found, LinkOutsideError, find
from gristmill.dataprep.reading.pythondocs import is_python_source, python_listing, python_parts

FORMATS = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet",),
    "arrow": (".arrow", ".feather"),
    "csv": (".csv", ".tsv"),
    "html": (".html", ".htm", ".xhtml"),
    "warc": (".warc", ".wet", ".arc"),
    "tar": (".tar",),
    "zip": (".zip",),
    "text": (".txt", ".text", ".md", ".rst", ".tex", ".org", ".adoc", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp",
             ".cu", ".rs", ".go", ".java", ".js", ".ts", ".rb", ".sh", ".sql", ".r", ".jl", ".lua", ".scala", ".kt",
             ".swift", ".yaml", ".yml", ".toml", ".cfg", ".ini"),
}  # fmt: skip
"""Extensions per format; each may be followed by a compression (.gz, .zst, .bz2, .xz, .lz4), except Parquet, Arrow,
zip."""
ARCHIVES = ("tar", "zip")
_DATASET_FORMATS = ("parquet", "arrow", "jsonl", "csv")
_WITHOUT_COMPRESSION = ("parquet", "arrow", "zip")
_FORMAT_OF = {extension: name for name, extensions in FORMATS.items() for extension in extensions}
HASHED_BYTES = 64 << 20
"""Outside files below this size are named by their content."""


class SourceError(ValueError):
    """A source names nothing that can be read."""


@dataclass(frozen=True)
class SourceFile:
    """One input of a source.

    Attributes:
        name: path relative to the glob's fixed part, with `/`; never absolute.
        location: where it lies now (a local path or URL).
        size: bytes as stored.
        stamp: modification time in ns, etag, or what else changes with the content.
        format: a key of FORMATS, or `python`.
        compression: one of compression.COMPRESSIONS, or empty.
        members: of an archive: the format that the source asks for, or `auto`.
    """

    name: str
    location: str
    size: int
    stamp: str
    format: str
    compression: str
    members: str = ""


@dataclass(frozen=True)
class SourceListing:
    """All inputs of a source in their order, and what its folder holds besides."""

    files: Sequence[SourceFile]
    ignored: Mapping[str, int] = field(default_factory=dict)
    """Number of files of a folder that are not read, by extension."""


def listing(name: str, source: Mapping[str, Any], verify: bool = False) -> list[dict[str, Any]]:
    """List what fingerprints a source: `path` (relative), `size` (bytes), `stamp`, sorted by path.

    Args:
        name: the source's name, for messages.
        source: its section of the manifest; only `path`, `format` and `split` are looked at.
        verify: take SHA-256 of the contents as stamps, instead of modification times or etags.

    Raises:
        SourceError: as in `find_files`.
    """
    path = source["path"]
    if is_python_source(path):
        return python_listing(path, verify)
    return [
        {"path": file.name, "size": file.size,
         "stamp": f"sha256:{sha256_file(as_path(file.location))}" if verify else file.stamp}
        for file in find_files(name, source).files
    ]  # fmt: skip


def outside_listing(key: str, path: str, verify: bool = False) -> list[dict[str, Any]]:
    """List what fingerprints the outside files of a setting (word lists, models, evaluation sets), sorted by name.

    Small files are named by the SHA-256 of their content, so that copying them changes nothing; from HASHED_BYTES on
    by size and modification time or etag, unless `verify` asks for the content.

    Args:
        key: the setting, for messages.
        path: a file, a glob, a folder or an fsspec URL of one of these.

    Raises:
        SourceError: the path matches nothing.
    """
    kind, found = find_at(key, path)
    if not found:
        raise SourceError(f"{key}: {_nothing(kind, path, 'any', {})}")
    return [
        {"path": item.name, "size": item.size,
         "stamp": f"sha256:{sha256_file(as_path(item.location))}" if verify or item.size < HASHED_BYTES else item.stamp}
        for item in sorted(found, key=lambda item: item.name)
    ]  # fmt: skip


def find_at(key: str, path: str) -> tuple[str, list[Found]]:
    """`locations.find`; whatever the library of an object store raises becomes one sentence.

    Raises:
        SourceError: the URL names no kind of store that there is, or the store does not answer, or refuses.
    """
    try:
        return find(path)
    except LinkOutsideError as error:
        raise SourceError(f"{key}: {error}; name that file by its own path, or copy it") from error
    except Exception as error:  # each of these libraries has errors of its own
        if "://" not in path:
            raise
        raise SourceError(f"{key}: {path} cannot be listed: {' '.join(str(error).split())}; correct the URL, or the "
                          "access to it") from error


def outside_files(key: str, path: str) -> list[tuple[str, str]]:
    """The outside files of a setting: (name relative to the path's fixed part, location), sorted by name.

    Raises:
        SourceError: the path matches nothing.
    """
    kind, found = find_at(key, path)
    if not found:
        raise SourceError(f"{key}: {_nothing(kind, path, 'any', {})}")
    return sorted((item.name, item.location) for item in found)


def check(name: str, source: Mapping[str, Any]) -> None:
    """Raise SourceError where a source matches nothing, or a file whose format nobody knows."""
    find_files(name, source)


def find_files(name: str, source: Mapping[str, Any]) -> SourceListing:
    """Find the inputs of a source, sorted by name.

    A folder is searched at any depth for files of the source's format (`auto`: for all known extensions; `text`:
    for all files; `hf`: for the files of a split). A glob and a file name what they match.

    Raises:
        SourceError: the path matches nothing, `auto` cannot tell a file's format, or an `hf` folder has no such split.
    """
    path, asked = source["path"], source.get("format", "auto")
    if is_python_source(path):
        return SourceListing([SourceFile(part, path, 0, "", "python", "") for part in python_parts(path)])
    if "://" in path and "::" in path:
        raise SourceError(f"source {name!r}: {path} is a chain of URLs; name the archive itself, its members are read")
    kind, found = find_at(f"source {name!r}", path)
    if asked == "hf":
        return _dataset(name, path, kind, found, source.get("split") or DEFAULT_SPLIT)
    wanted, ignored = found, Counter[str]()
    if kind == "folder":
        wanted = [item for item in found if _is_wanted(item.name, asked)]
        kept = {item.name for item in wanted}
        ignored.update(PurePosixPath(item.name).suffix or "(none)" for item in found if item.name not in kept)
    if not wanted:
        raise SourceError(f"source {name!r}: {_nothing(kind, path, asked, ignored)}")
    explicit = split_compression(PurePosixPath(path).name)[0] if kind == "glob" else ""
    files = [_source_file(name, item, asked, explicit) for item in sorted(wanted, key=lambda item: item.name)]
    return SourceListing(files, dict(sorted(ignored.items())))


def _dataset(name: str, path: str, kind: str, found: Sequence[Found], split: str) -> SourceListing:
    if kind != "folder":
        raise SourceError(f"source {name!r}: {path} must be a folder, since its format is hf")
    items = {item.name: item for item in found}

    def is_data(file: str) -> bool:
        return format_of(split_compression(file)[0]) in _DATASET_FORMATS

    try:
        files = split_files(sorted(items), lambda file: as_path(items[file].location).read_bytes(), split, is_data)
    except NoSplitError as error:
        raise SourceError(f"source {name!r}: the dataset {path} {error}") from error
    return SourceListing([_source_file(name, items[file], "auto", "") for file in files])


def format_of(extension: str) -> str | None:
    """The format of files with an extension (`.csv`), or None."""
    return _FORMAT_OF.get(extension)


def member_format(extension: str, asked: str) -> str | None:
    """As what a member of an archive is read, or None where it is not: the rules of a folder.

    A member without an extension is taken for what the source asks for.
    """
    known = format_of(extension)
    if asked == "auto":
        return known
    return asked if asked == "text" or known == asked or not extension else None


def _nothing(kind: str, path: str, asked: str, ignored: Mapping[str, int]) -> str:
    if kind == "missing":
        return f"{path} does not exist; correct its path"
    if kind == "glob":
        return f"no file matches {path}; correct the pattern (** matches any depth)"
    seen = ", ".join(f"{count} {extension}" for extension, count in ignored.items()) or "no files at all"
    advice = "name the format, or a glob such as folder/**/*.ext" if asked == "auto" else "correct path or format"
    return f"the folder {path} holds nothing of format {asked} (it holds {seen}); {advice}"


def _is_wanted(name: str, asked: str) -> bool:
    known = _FORMAT_OF.get(split_compression(name)[0])
    return asked == "text" or (known is not None if asked == "auto" else known == asked)


def _source_file(name: str, item: Found, asked: str, explicit: str) -> SourceFile:
    extension, compression = split_compression(item.name)
    known = _FORMAT_OF.get(extension)
    if asked == "auto" and known is None and extension and extension == explicit:
        known = "text"  # a glob that spells the extension out means these files
    chosen = known if asked == "auto" else asked
    if chosen is None:
        known_ones = " ".join(extension for extensions in FORMATS.values() for extension in extensions)
        raise SourceError(
            f"source {name!r}: cannot tell the format of {item.name} by its extension {extension or '(none)'}; "
            f"set `format:` to text, jsonl, csv, parquet, arrow, html or warc (known extensions: {known_ones})"
        )
    members = ""
    if known in ARCHIVES:
        if asked in ("parquet", "arrow"):
            raise SourceError(f"source {name!r}: {item.name}: {asked} files are not read out of archives; unpack it")
        chosen, members = known, asked
    compression = "" if chosen in _WITHOUT_COMPRESSION else compression
    return SourceFile(item.name, item.location, item.size, item.stamp, chosen, compression, members)
