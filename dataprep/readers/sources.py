"""Files of a source, local or in any fsspec store, and the stamps that identify their
content.

A path is a file, a glob (`**` for any depth), a folder, an fsspec URL of one of these,
or a source without files (`python-docs://`; see pythondocs). Wildcards do not match
names that start with a dot. A tar or zip archive is one input; its members
are listed when it is read.
"""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from gristmill.core.files import DEFAULT_STORE, as_path, sha256_file
from gristmill.core.object_stores import not_installed
from gristmill.dataprep.licences.folder_licence import FolderLicences
from gristmill.dataprep.licences.statements import LICENCE
from gristmill.dataprep.readers.binary_formats import (
    answers,
    format_of_extension,
    how_to_read,
)
from gristmill.dataprep.readers.compression import one_line, split_compression
from gristmill.dataprep.readers.own_sources import OwnProcess
from gristmill.dataprep.readers.pythondocs import (
    ListedFile,
    is_python_source,
    python_listing,
    python_parts,
)
from gristmill.mixtures.hub_paths import HUB, is_hub_model
from gristmill.mixtures.schema.sources import DATASETS, DocumentFiles, OwnListing
from gristmill.mixtures.user_code import OwnCodeError

_STAMP_KEYS = (
    "ETag etag blob_id mtime LastModified last_modified updated created".split()
)
"""Keys for the version of a file's content in fsspec's description of it; they differ
by store.
"""

_BLOB = re.compile(r".*/blobs/(?P<hash>[0-9a-f]{40,64})")
"""Target of a link in Hugging Face's cache: the Git or SHA-256 hash of the content."""


class LinkOutsideError(ValueError):
    """A folder has a link to a file outside of it."""


@dataclass(frozen=True)
class StoredFile:
    """A file of a path.

    Attributes:
        name: relative to the path, or to the fixed part of a glob, with `/`.
        location: current path or URL.
        size: bytes as stored.
        stamp: modification time in ns, etag, or another value that changes with the
            content.
    """

    name: str
    location: str
    size: int
    stamp: str


Matches = tuple[str, list[StoredFile]]
"""Kind of a path (`file`, `folder`, `glob`, `missing`), and its files, unordered."""


def find(path: str) -> Matches:
    """Find the files of a path."""
    if is_hub_model(path):
        from gristmill.core.hub import MODEL_FILES

        kind, files = find(str(as_path(path)))
        if kind == "folder":
            files = [file for file in files if file.name.endswith(MODEL_FILES)]
        return kind, files
    if "://" in path:
        location: Any = as_path(path)
        store, inner = location.fs, location.path
        try:
            info = store.info(inner)
        except FileNotFoundError:
            if not glob.has_magic(inner):
                return "missing", []
            root = _split_glob(inner)[0]
            return "glob", _remote_files(store, root, store.glob(inner, detail=True))
        if info["type"] == "file":
            root = inner.rpartition("/")[0]
            return "file", _remote_files(store, root, {inner: info})
        return "folder", _remote_files(store, inner, store.find(inner, detail=True))
    path = os.path.expanduser(path)
    if os.path.isfile(path):
        return "file", [_local_file(*os.path.split(path))]
    if os.path.isdir(path):
        # regular files, also through links; no pipes, devices and outputs of runs
        files = []
        for parent, folders, names in os.walk(path):
            folders[:] = sorted(
                name
                for name in folders
                if not name.startswith(".") and name != DEFAULT_STORE
            )
            files += [
                _file_inside(path, os.path.relpath(os.path.join(parent, name), path))
                for name in sorted(names)
                if not name.startswith(".")
                and os.path.isfile(os.path.join(parent, name))
            ]
        return "folder", files
    if not glob.has_magic(path):
        return "missing", []
    root, pattern = _split_glob(path)
    matches = set(glob.glob(pattern, root_dir=root or None, recursive=True))
    return "glob", [
        _file_inside(root, name)
        for name in sorted(matches)
        if os.path.isfile(os.path.join(root, name))
        and (DEFAULT_STORE in pattern or DEFAULT_STORE not in Path(name).parts)
    ]


def _file_inside(root: str, name: str) -> StoredFile:
    """File of a folder or glob.

    Raises:
        LinkOutsideError: the file is a link to a file outside of the folder.
    """
    location = os.path.realpath(os.path.join(root, name))
    base = os.path.realpath(root or ".")
    allowed = [base]
    # Hugging Face cache: a snapshot's files link to the blobs of its repository, which
    # may link to those that several repositories share.
    repository, in_snapshot, _ = base.partition("/snapshots/")
    if in_snapshot:
        allowed += [f"{repository}/blobs", f"{os.path.dirname(repository)}/blobs"]
    if not any(Path(location).is_relative_to(folder) for folder in allowed):
        raise LinkOutsideError(
            f"{os.path.join(root, name)} links to {location}, "
            f"which lies outside of {base}"
        )
    return _local_file(root, name)


def _split_glob(path: str) -> tuple[str, str]:
    """Split a pattern before its first part with a wildcard: `a/b/**/*.py` is (`a/b`,
    `**/*.py`).
    """
    parts = path.split("/")
    first = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    root = "/".join(parts[:first])
    return root or ("/" if path.startswith("/") else ""), "/".join(parts[first:])


def _local_file(root: str, name: str) -> StoredFile:
    location = os.path.join(root, name)
    status = os.stat(location)
    link = os.readlink(location) if os.path.islink(location) else ""
    blob = _BLOB.fullmatch(link)
    return StoredFile(
        Path(name).as_posix(),
        os.path.abspath(location),
        status.st_size,
        blob["hash"] if blob else str(status.st_mtime_ns),
    )


def _remote_files(
    store: Any, root: str, infos: Mapping[str, Mapping[str, Any]]
) -> list[StoredFile]:
    files = []
    for location, info in infos.items():
        name = location[len(root) :].lstrip("/")
        if "://" in location:
            # the query is not part of the name, and may be a signature
            name = unquote(name.partition("?")[0])
        if info["type"] != "file" or any(
            part.startswith(".") for part in name.split("/")
        ):
            continue
        stamp = next(
            (str(info[key]) for key in _STAMP_KEYS if info.get(key) is not None), ""
        )
        files.append(
            StoredFile(name, store.unstrip_protocol(location), int(info["size"]), stamp)
        )
    return files


FORMATS = {
    "docling": (".json",),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet",),
    "arrow": (".arrow", ".feather"),
    "csv": (".csv", ".tsv"),
    "html": (".html", ".htm", ".xhtml"),
    "warc": (".warc", ".wet", ".arc"),
    "pdf": (".pdf",),
    "docx": (".docx",),
    "epub": (".epub",),
    "tar": (".tar",),
    "zip": (".zip",),
    "text": tuple(
        ".txt .text .md .rst .tex .org .adoc .py .pyi .c .h .cc .cpp .hpp .cu .rs .go "
        ".java .js .ts .rb .sh .sql .r .jl .lua .scala .kt .swift .yaml .yml .toml "
        ".cfg .ini".split()
    ),
}
"""Extensions per format, which may be followed by a compression (.gz, .zst, .bz2,
.xz), except for Parquet, Arrow and zip; of two formats with one extension, the last is
`auto`.
"""
DOCUMENT_FORMATS = ("pdf", "docx", "epub", "docling")
"""Formats of files whose text the extracting process reads."""
LIBRARIES = {
    "pdf": ("pypdfium2", "documents"),
    "docx": ("mammoth", "documents"),
}
"""Format -> library that reads it, and the extra that brings it."""
ARCHIVES = ("tar", "zip")
_ROW_FORMATS = ("parquet", "arrow", "jsonl", "csv")
_WITHOUT_COMPRESSION = ("parquet", "arrow", "zip")
FORMAT_OF = {
    extension: name for name, extensions in FORMATS.items() for extension in extensions
}
OWN = "own"
"""Format of files for a user's reader."""
HASHED_BYTES = 64 << 20
"""Outside files below this size are identified by their content."""


class SourceError(ValueError):
    """A source has nothing that can be read."""


@dataclass(frozen=True)
class SourceFile(StoredFile):
    """One input of a source.

    Attributes:
        format: a key of FORMATS, `python`, or OWN.
        compression: one of compression.DECODERS, or empty.
        members: format of an archive's members: the source's format, or `auto`.
        metadata: of the documents of a text file: the licence of its folder.
    """

    format: str
    compression: str
    members: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SourceListing:
    """All inputs of a source in order, and the ignored files of its folder."""

    files: Sequence[SourceFile]
    ignored: Mapping[str, int] = field(default_factory=dict)
    """Number of ignored files of a folder, by extension."""
    by: str = ""
    """User's function that listed them."""


def listing(name: str, source: DocumentFiles, verify: bool = False) -> list[ListedFile]:
    """List the fingerprint of a source, sorted by path; a user's listing keeps its
    order.

    Args:
        name: of the source, for messages.
        source: its section of the manifest; only settings that select files are used.
        verify: use SHA-256 of the contents as stamps instead of modification times or
            etags.

    Raises:
        SourceError: as in `find_files`.
    """
    if is_python_source(source.path):
        return python_listing(source.path)
    return [_listed_file(file, verify) for file in find_files(name, source).files]


def _listed_file(file: StoredFile | SourceFile, hashed: bool) -> ListedFile:
    stamp = f"sha256:{sha256_file(as_path(file.location))}" if hashed else file.stamp
    listed: ListedFile = {"path": file.name, "size": file.size, "stamp": stamp}
    if isinstance(file, SourceFile) and file.metadata:
        listed["licence"] = file.metadata[LICENCE]
    return listed


def outside_listing(key: str, path: str, verify: bool = False) -> list[ListedFile]:
    """List the fingerprint of a setting's outside files (word lists, models, evaluation
    sets), sorted by name.

    Small files are identified by the SHA-256 of their content, so that copying them
    changes nothing; files of HASHED_BYTES and more by size and modification time or
    etag, unless `verify` is set.

    Args:
        key: the setting, for messages.
        path: a file, a glob, a folder or an fsspec URL of one of these.

    Raises:
        SourceError: the path matches nothing.
    """
    return [
        _listed_file(file, verify or file.size < HASHED_BYTES)
        for file in _outside(key, path)
    ]


def _outside(key: str, path: str) -> list[StoredFile]:
    """Files of a setting, sorted by name."""
    kind, files = find_at(key, path)
    if not files:
        raise SourceError(f"{key}: {_nothing(kind, path, 'any', {})}")
    return sorted(files, key=lambda file: file.name)


@contextmanager
def _about(key: str) -> Iterator[None]:
    """Begin the message of a SourceError with a key."""
    try:
        yield
    except SourceError as error:
        raise SourceError(f"{key}: {error}") from error


def find_at(key: str, path: str) -> Matches:
    """`find` with the errors of an object store's library as one sentence.

    Raises:
        SourceError: the URL's protocol is unknown, or the store does not answer or
            refuses access.
    """
    with _about(key):
        return _find(path)


def _find(path: str) -> Matches:
    try:
        return find(path)
    except LinkOutsideError as error:
        raise SourceError(
            f"{error}; name that file by its own path, or copy it"
        ) from error
    except Exception as error:  # each of these libraries has its own errors
        protocol, separator, _ = path.partition("://")
        if not separator:
            raise
        if isinstance(error, ImportError):
            raise SourceError(f"{path}: {not_installed(protocol, error)}") from error
        raise SourceError(
            f"{path} cannot be listed: {one_line(error)}; correct the "
            "URL, or the access to it"
        ) from error


def outside_files(key: str, path: str) -> list[tuple[str, str]]:
    """Outside files of a setting: (name relative to the path's fixed part, location),
    sorted by name.

    Raises:
        SourceError: the path matches nothing.
    """
    return [(file.name, file.location) for file in _outside(key, path)]


def find_files(name: str, source: DocumentFiles) -> SourceListing:
    """Find the inputs of a source, sorted by name; a user's listing keeps its order.

    A folder is searched recursively for files of the source's format (`auto`: all known
    extensions; `text`: all files; `hf`: the files of a split). A glob or a file path
    selects files by name.

    Raises:
        SourceError: the path matches nothing, `auto` does not know a file's format, or
            an `hf` folder lacks the split.
    """
    with _about(f"source {name!r}"):
        path = source.path
        source_format = OWN if source.read else source.format
        if source.list is not None:
            with _about("list"):
                files = [
                    _source_file(item, source_format)
                    for item in _listed(source.list, path)
                ]
            return SourceListing(files, by=source.list.use.reference)
        if is_python_source(path):
            return SourceListing(
                [
                    SourceFile(part, path, 0, "", "python", "")
                    for part in python_parts(path)
                ]
            )
        if "://" in path and "::" in path:
            raise SourceError(
                f"{path} is a chain of URLs; name the archive itself, its members are read"
            )
        kind, matches = _find(path)
        if source_format in DATASETS:
            if kind != "folder":
                raise SourceError(
                    f"{path} must be a folder, since its format is {source_format}"
                )
            file_by_name = {item.name: item for item in matches}
            layout = import_module(
                f"gristmill.dataprep.readers.dataset_{source_format}"
            )
            split = None if source.split is None else str(source.split)
            try:
                names = layout.data_files(DatasetFolder(path, file_by_name), split)
            except DatasetError as error:
                raise SourceError(f"the dataset {path} {error}") from error
            return SourceListing(
                [_source_file(file_by_name[name], "auto") for name in names]
            )
        selected = [
            item
            for item in matches
            if kind != "folder"
            or source_format in ("text", OWN)
            or split_compression(item.name)[0]
            in (FORMAT_OF if source_format == "auto" else FORMATS[source_format])
        ]
        ignored = Counter(
            PurePosixPath(item.name).suffix or "(none)"
            for item in set(matches).difference(selected)
        )
        ignored_by_extension = dict(sorted(ignored.items()))
        if not selected:
            raise SourceError(_nothing(kind, path, source_format, ignored_by_extension))
        explicit = (
            split_compression(PurePosixPath(path).name)[0] if kind == "glob" else ""
        )
        files = [
            _source_file(item, source_format, explicit)
            for item in sorted(selected, key=lambda item: item.name)
        ]
        return SourceListing(_with_licences(files), ignored_by_extension)


def _with_licences(files: Sequence[SourceFile]) -> list[SourceFile]:
    """Text files with the licence of their folder, or of the nearest one above it
    within the source.
    """
    folders: dict[str, FolderLicences] = {}
    licensed = []
    for file in files:
        # a web server does not list its folders
        if file.format == "text" and not file.location.startswith("http"):
            root = file.location.removesuffix(f"/{file.name}")
            licences = folders.setdefault(root, FolderLicences(root))
            statement = licences.of(file.location.rpartition("/")[0])
            if statement is not None:
                file = replace(file, metadata=statement.metadata())
        licensed.append(file)
    return licensed


def check_libraries(listings: Mapping[str, SourceListing]) -> None:
    """Raise SourceError if the library of a source's format is not installed."""
    for name, source_listing in listings.items():
        for form in sorted({file.format for file in source_listing.files}):
            library, extra = LIBRARIES.get(form, ("", ""))
            if library and find_spec(library) is None:
                raise SourceError(
                    f"source {name!r}: {library} is not installed (needed by format "
                    f"{form}); install it with: pip install 'gristmill[{extra}]', or "
                    "name the files to read by a glob, such as folder/**/*.txt"
                )


def _listed(own_listing: OwnListing, base: str) -> list[StoredFile]:
    """Files of a user's listing; paths are relative to `base`.

    Raises:
        SourceError: the function fails, or its paths are missing, do not exist or
            repeat.
    """
    try:
        with OwnProcess(own_listing) as process:
            entries = process.files(base)
    except OwnCodeError as error:
        raise SourceError(str(error)) from error
    base = base.rstrip("/")
    files = []
    for entry in entries:
        path = entry["path"]
        location = path if "://" in path or os.path.isabs(path) else f"{base}/{path}"
        # its path below `base`, or the full path; without a URL's scheme and query
        name = location.removeprefix(f"{base}/").rpartition("://")[2].lstrip("/")
        if "://" in location:
            name = unquote(name.partition("?")[0])
        name = entry.get("name") or name
        if "://" in location and "size" in entry:  # not looked up
            files.append(StoredFile(name, location, entry["size"], ""))
            continue
        kind, matches = _find(location)
        if kind != "file":
            raise SourceError(
                f"{location} is "
                + ("not there" if kind == "missing" else f"a {kind}; list its files")
            )
        files.append(replace(matches[0], name=name))
    function = own_listing.use.reference
    if not files:
        raise SourceError(f"{function} lists no files")
    name, number = Counter(item.name for item in files).most_common(1)[0]
    if number > 1:
        raise SourceError(
            f"{function} lists {name} twice; list it once, or give each a `name` of "
            "its own"
        )
    return files


class DatasetError(ValueError):
    """A folder is not a dataset of its format, is damaged, or lacks a requested part."""


@dataclass(frozen=True)
class DatasetFolder:
    """A folder whose own files say which of them hold data. `data_files(folder, split)`
    of the module of its format, `dataset_<format>.py`, returns their names in order, or
    raises DatasetError.

    Attributes:
        path: of the folder.
        files: all its files, by their names relative to it.
    """

    path: str
    files: Mapping[str, StoredFile]

    def read(self, name: str) -> bytes:
        """Read a file.

        Raises:
            FileNotFoundError: the folder has no such file.
        """
        if name not in self.files:
            raise FileNotFoundError(name)
        return as_path(self.files[name].location).read_bytes()

    @staticmethod
    def is_data(name: str) -> bool:
        """True for a file of rows of a known format."""
        return FORMAT_OF.get(split_compression(name)[0]) in _ROW_FORMATS


def _nothing(
    kind: str, path: str, source_format: str, ignored: Mapping[str, int]
) -> str:
    if kind == "missing":
        access = ", or set HF_TOKEN if it is private" * path.startswith(HUB)
        return f"{path} does not exist; correct its path{access}"
    if kind == "glob":
        return f"no file matches {path}; correct the pattern (** matches any depth)"
    if not ignored:
        return f"the folder {path} has no files; correct its path"
    known, advice = f"of format {source_format}", "correct path or format"
    if source_format == "auto":
        known = "whose format is known by its name"
        advice = "name the format, or a glob such as folder/**/*.ext"
    advice = "; ".join(answers(ignored)) or advice
    ignored_text = ", ".join(f"{count} {kind}" for kind, count in ignored.items())
    return f"the folder {path} has no file {known}, but {ignored_text}; {advice}"


def _source_file(
    item: StoredFile, source_format: str, explicit: str = ""
) -> SourceFile:
    # A listing may rename a file, so its location has the extension; a URL may have a
    # query.
    extension, compression = split_compression(
        item.location.partition("?")[0] if "://" in item.location else item.location
    )
    known_format = FORMAT_OF.get(extension)
    chosen = source_format
    if source_format == "auto":
        if known_format is None and (binary := format_of_extension(extension)):
            raise SourceError(f"{item.name}: {how_to_read(binary)}")
        if known_format is None and extension and extension == explicit:
            # a glob with an explicit extension selects these files
            known_format = "text"
        if known_format is None:
            raise SourceError(
                f"cannot tell the format of {item.name} by its extension "
                f"{extension or '(none)'}; set `format:`, such as text or jsonl (known "
                f"extensions: {' '.join(FORMAT_OF)})"
            )
        chosen = known_format
    members = ""
    if known_format in ARCHIVES and source_format != OWN:
        if source_format in ("parquet", "arrow"):
            raise SourceError(
                f"{item.name}: {source_format} files are not read out of archives; "
                "unpack it"
            )
        chosen = known_format
        members = source_format
    compression = "" if chosen in _WITHOUT_COMPRESSION else compression
    return SourceFile(
        **vars(item), format=chosen, compression=compression, members=members
    )
