"""Which files a source names, here or in any store that fsspec knows, and what identifies their content.

A path is a file, a glob (`**` for any depth), a folder, an fsspec URL of one of these, or one of two sources that
need no files: `python-docs://` and `python-stdlib://`. Names that begin with a dot are not matched by wildcards. A
tar or zip archive is one input; its members are looked at when it is read.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from gristmill.dataprep.files import DEFAULT_STORE, as_path, sha256_file
from gristmill.dataprep.object_stores import not_installed
from gristmill.dataprep.reading.binary_formats import answers, format_of_extension, how_to_read
from gristmill.dataprep.reading.compression import split_compression
from gristmill.dataprep.reading.huggingface import DEFAULT_SPLIT, NoSplitError, split_files
from gristmill.dataprep.reading.own_sources import OwnProcess
from gristmill.dataprep.reading.pythondocs import is_python_source, python_listing, python_parts
from gristmill.mixtures.own_code import OwnCodeError
from gristmill.mixtures.sources import OwnListing

_STAMP_KEYS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")


class LinkOutsideError(ValueError):
    """A folder holds a link to a file outside of it."""


@dataclass(frozen=True)
class Found:
    """A file: name relative to what was looked for, location, size in bytes, and what changes with its content."""

    name: str
    location: str
    size: int
    stamp: str


def find(path: str) -> tuple[str, list[Found]]:
    """What a path is (`file`, `folder`, `glob`, `missing`), and the files that it names, in no certain order."""
    return _find_remote(path) if "://" in path else _find_local(path)


def _find_local(path: str) -> tuple[str, list[Found]]:
    path = os.path.expanduser(path)
    if os.path.isfile(path):
        return "file", [_found_local(os.path.dirname(path), os.path.basename(path))]
    if os.path.isdir(path):
        return "folder", [_found_inside(path, name) for name in _walk(path)]
    if not glob.has_magic(path):
        return "missing", []
    root, pattern = _split_glob(path)
    names = (
        name
        for name in glob.glob(pattern, root_dir=root or None, recursive=True)
        if DEFAULT_STORE in pattern or DEFAULT_STORE not in Path(name).parts
    )
    return "glob", [
        _found_inside(root, name) for name in sorted(set(names)) if os.path.isfile(os.path.join(root, name))
    ]


def _found_inside(root: str, name: str) -> Found:
    """A file of a folder or glob.

    Raises:
        LinkOutsideError: it is a link to a file outside of the folder.
    """
    location, base = os.path.realpath(os.path.join(root, name)), os.path.realpath(root or ".")
    allowed = [base]
    if os.path.basename(os.path.dirname(base)) == "snapshots":  # the hub's cache: a snapshot's files link to its blobs
        allowed.append(os.path.join(os.path.dirname(os.path.dirname(base)), "blobs"))
    if not any(os.path.commonpath([location, folder]) == folder for folder in allowed):
        raise LinkOutsideError(f"{os.path.join(root, name)} links to {location}, which lies outside of {base}")
    return _found_local(root, name)


def _walk(folder: str) -> Iterator[str]:
    """The regular files below a folder, also behind links; pipes, sockets and devices are none, nor what a run that was
    started there has written."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != DEFAULT_STORE)
        for name in sorted(names):
            if not name.startswith(".") and os.path.isfile(os.path.join(parent, name)):
                yield os.path.relpath(os.path.join(parent, name), folder)


def _split_glob(path: str) -> tuple[str, str]:
    """Split a pattern before its first part with a wildcard: `a/b/**/*.py` is (`a/b`, `**/*.py`)."""
    parts = path.split("/")
    first = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    root = "/".join(parts[:first])
    return root or ("/" if path.startswith("/") else ""), "/".join(parts[first:])


def _found_local(root: str, name: str) -> Found:
    location = os.path.join(root, name)
    status = os.stat(location)
    return Found(Path(name).as_posix(), os.path.abspath(location), status.st_size, str(status.st_mtime_ns))


def _find_remote(path: str) -> tuple[str, list[Found]]:
    import fsspec

    store, inner = fsspec.core.url_to_fs(path)
    if glob.has_magic(inner) and not store.exists(inner):
        root = _split_glob(inner)[0]
        return "glob", _found_remote(store, root, store.glob(inner, detail=True))
    if store.isfile(inner):
        return "file", _found_remote(store, inner.rpartition("/")[0], {inner: store.info(inner)})
    if not store.isdir(inner):
        return "missing", []
    return "folder", _found_remote(store, inner, store.find(inner, detail=True))


def _found_remote(store: Any, root: str, infos: Mapping[str, Mapping[str, Any]]) -> list[Found]:
    found = []
    for location, info in infos.items():
        name = location[len(root) :].lstrip("/")
        if "://" in location:
            name = unquote(name.partition("?")[0])  # what follows is not a name, and a signature at times
        if info["type"] != "file" or any(part.startswith(".") for part in name.split("/")):
            continue
        stamp = next((str(info[key]) for key in _STAMP_KEYS if info.get(key) is not None), "")
        found.append(Found(name, store.unstrip_protocol(location), int(info["size"]), stamp))
    return found


FORMATS = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet",),
    "arrow": (".arrow", ".feather"),
    "csv": (".csv", ".tsv"),
    "html": (".html", ".htm", ".xhtml"),
    "warc": (".warc", ".wet", ".arc"),
    "tar": (".tar",),
    "zip": (".zip",),
    "text": (
        ".txt",
        ".text",
        ".md",
        ".rst",
        ".tex",
        ".org",
        ".adoc",
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
        ".yaml",
        ".yml",
        ".toml",
        ".cfg",
        ".ini",
    ),
}
"""Extensions per format; each may be followed by a compression (.gz, .zst, .bz2, .xz, .lz4), except Parquet, Arrow,
zip."""
ARCHIVES = ("tar", "zip")
_DATASET_FORMATS = ("parquet", "arrow", "jsonl", "csv")
_WITHOUT_COMPRESSION = ("parquet", "arrow", "zip")
_FORMAT_OF = {extension: name for name, extensions in FORMATS.items() for extension in extensions}
OWN = "own"
"""The format of files that a function of the user's reads."""
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
        format: a key of FORMATS, `python`, or OWN.
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
    by: str = ""
    """The function of the user's that listed them."""


def listing(name: str, source: Mapping[str, Any], verify: bool = False) -> list[dict[str, Any]]:
    """List what fingerprints a source: `path` (relative), `size` (bytes), `stamp`, sorted by path.

    A listing of the user's has its own order.

    Args:
        name: the source's name, for messages.
        source: its section of the manifest; only what says which files it has is looked at.
        verify: take SHA-256 of the contents as stamps, instead of modification times or etags.

    Raises:
        SourceError: as in `find_files`.
    """
    path = source["path"]
    if is_python_source(path):
        return python_listing(path, verify)
    return [
        {
            "path": file.name,
            "size": file.size,
            "stamp": f"sha256:{sha256_file(as_path(file.location))}" if verify else file.stamp,
        }
        for file in find_files(name, source).files
    ]


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
        {
            "path": item.name,
            "size": item.size,
            "stamp": f"sha256:{sha256_file(as_path(item.location))}"
            if verify or item.size < HASHED_BYTES
            else item.stamp,
        }
        for item in sorted(found, key=lambda item: item.name)
    ]


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
        protocol, separator, _ = path.partition("://")
        if not separator:
            raise
        if isinstance(error, ImportError):
            raise SourceError(f"{key}: {path}: {not_installed(protocol, error)}") from error
        raise SourceError(
            f"{key}: {path} cannot be listed: {' '.join(str(error).split())}; correct the URL, or the access to it"
        ) from error


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
    """Raise SourceError where a source matches nothing, or the format of a file is unknown."""
    find_files(name, source)


def find_files(name: str, source: Mapping[str, Any]) -> SourceListing:
    """Find the inputs of a source, sorted by name; those of a listing of the user's in its order.

    A folder is searched at any depth for files of the source's format (`auto`: for all known extensions; `text`:
    for all files; `hf`: for the files of a split). A glob and a file name what they match.

    Raises:
        SourceError: the path matches nothing, `auto` cannot tell a file's format, or an `hf` folder has no such split.
    """
    path, asked = source["path"], OWN if source.get("read") else source.get("format", "auto")
    if source.get("list"):
        own = OwnListing.model_validate(source["list"])
        files = [_source_file(name, item, asked, "") for item in _listed(name, own, path)]
        return SourceListing(files, by=own.use.reference)
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


def _listed(name: str, own: OwnListing, base: str) -> list[Found]:
    """The files that a function of the user's lists; paths are relative to `base`.

    Raises:
        SourceError: it cannot be called or gives no paths, one that is not there, or one twice.
    """
    try:
        with OwnProcess(own) as process:
            found = [_entry(name, entry, base) for entry in process.files(base)]
    except OwnCodeError as error:
        raise SourceError(f"source {name!r}: list: {error}") from error
    if not found:
        raise SourceError(f"source {name!r}: list: {own.use.reference} lists no files")
    names = Counter(item.name for item in found)
    if twice := next((file for file, number in names.items() if number > 1), None):
        raise SourceError(
            f"source {name!r}: list: {own.use.reference} lists {twice} twice; list it once, or give "
            "each a `name` of its own"
        )
    return found


def _entry(name: str, entry: Mapping[str, Any], base: str) -> Found:
    """A listed file; one with a URL and a size is not looked at."""
    path = entry["path"]
    location = path if "://" in path or os.path.isabs(path) else f"{base.rstrip('/')}/{path}"
    called = entry.get("name") or _name_below(location, base)
    if "://" in location and "size" in entry:
        return Found(called, location, entry["size"], "")
    kind, found = find_at(f"source {name!r}: list", location)
    if kind != "file":
        raise SourceError(
            f"source {name!r}: list: {location} is "
            + ("not there" if kind == "missing" else f"a {kind}; list its files")
        )
    return Found(called, found[0].location, found[0].size, found[0].stamp)


def _name_below(location: str, base: str) -> str:
    """What a listed file is called: its path below `base`, or all of it; without a URL's scheme and query."""
    below = location.removeprefix(base.rstrip("/") + "/").rpartition("://")[2].lstrip("/")
    return unquote(below.partition("?")[0]) if "://" in location else below


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
    advice = "; ".join(answers(ignored)) or advice
    return f"the folder {path} holds nothing of format {asked} (it holds {seen}); {advice}"


def _is_wanted(name: str, asked: str) -> bool:
    known = _FORMAT_OF.get(split_compression(name)[0])
    return asked in ("text", OWN) or (known is not None if asked == "auto" else known == asked)


def _source_file(name: str, item: Found, asked: str, explicit: str) -> SourceFile:
    # A listing may call a file otherwise, and what follows a URL's path is a query.
    extension, compression = split_compression(
        item.location.partition("?")[0] if "://" in item.location else item.location
    )
    known = _FORMAT_OF.get(extension)
    if asked == "auto" and known is None and (binary := format_of_extension(extension)):
        raise SourceError(f"source {name!r}: {item.name}: {how_to_read(binary)}")
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
    if known in ARCHIVES and asked != OWN:
        if asked in ("parquet", "arrow"):
            raise SourceError(f"source {name!r}: {item.name}: {asked} files are not read out of archives; unpack it")
        chosen, members = known, asked
    compression = "" if chosen in _WITHOUT_COMPRESSION else compression
    return SourceFile(item.name, item.location, item.size, item.stamp, chosen, compression, members)
