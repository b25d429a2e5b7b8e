"""Atomic files and content hashes: a file is written to a temporary name, flushed to
disk and renamed.

Paths are `pathlib.Path` for local folders and `upath.UPath` for fsspec URLs; both have
the same methods.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from gristmill.mixtures.hub_paths import HUB, is_hub_model

if TYPE_CHECKING:
    import numpy as np
    from _typeshed import DataclassInstance

One = TypeVar("One")
Other = TypeVar("Other")
CHUNK_BYTES = 1 << 20
CONNECTIONS = 32
"""Concurrent requests to a store, for many small files."""
PARTS_AT_ONCE = 2
"""Parts of a large file that are in memory while it is uploaded."""
TEMPORARY_MARK = ".tmp-"
DEFAULT_STORE = "gristmill-store"
"""Folder of a run's outputs, in the current folder; ignored among a source's files."""
OBJECT_STORES = {
    "s3": "s3.S3Files",
    "s3a": "s3.S3Files",
    "gs": "gcs.GCSFiles",
    "gcs": "gcs.GCSFiles",
    "az": "azure_blobs.AzureFiles",
    "abfs": "azure_blobs.AzureFiles",
    "abfss": "azure_blobs.AzureFiles",
}
"""Protocol of an object store -> its file system, whose requests are retried by the
rules of `object_stores.py`.
"""
WITHOUT_FOLDERS = ("hf", *OBJECT_STORES)
"""Protocols without folders to create: a folder exists as soon as it has a file."""

REPAIR = "gristmill verify MANIFEST --repair"
"""Command that finds and withdraws damaged outputs; callers that know the manifest
substitute its path.
"""


CarriedFiles = Mapping[str, Mapping[str, Path]]
carried_files: ContextVar[CarriedFiles] = ContextVar(
    "carried_files", default=MappingProxyType({})
)
"""In a worker of a cluster: path on the submitting machine -> relative path of each of
its files, `.` if it is one -> copy in the store (`dataprep/runners/ship_files.py`), in a
folder named by its SHA-256.
"""


def as_path(location: str | Path) -> Path:
    """Turn a local path or an fsspec URL into a path object; fetches a file that a job
    carries, and a model of the Hugging Face Hub.
    """
    text = str(location)
    if "://" not in text:
        carried = carried_files.get().get(text)
        if carried is None:
            return Path(text)
        return _fetch_once(carried["."]) if "." in carried else _fetch_folder(carried)
    if text.startswith(HUB):
        from gristmill.core import hub

        if is_hub_model(text):
            return hub.snapshot(text)
    from upath import UPath

    protocol = text.partition("://")[0]
    if protocol not in OBJECT_STORES:
        path: Path = UPath(text)
        return path
    _use_store(protocol)
    # The libraries cache listings forever by default: leases and commits of other
    # processes would not be seen.
    return UPath(text, use_listings_cache=False)


@cache
def _use_store(protocol: str) -> None:
    """Register the file system of an object store for its URLs in this process.

    Does nothing without its library: opening such a URL then reports the missing
    package.
    """
    from fsspec import register_implementation

    module, _, name = OBJECT_STORES[protocol].partition(".")
    try:
        files = getattr(import_module(f"gristmill.core.{module}"), name)
    except ImportError:
        return
    register_implementation(protocol, files, clobber=True)


def is_local(path: Path) -> bool:
    """True if the path is on a local file system (so that rename is atomic and mmap
    works).
    """
    return type(path).__module__.startswith("pathlib") or getattr(
        path, "protocol", ""
    ) in ("", "file")


class IncompleteFileError(OSError):
    """A file written by a library cannot be read back whole."""


@contextmanager
def atomic_write(path: Path, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a file that appears under its final name complete, or not at all.

    On a local disk the bytes go to a temporary file beside it, which is flushed to disk
    and renamed. For an object store they go to a temporary file of this machine, which
    is uploaded; uploads are atomic.

    Args:
        durable: wait for the disk. If False, the file is still atomic for every
            process, but may be empty or truncated if the machine crashes within
            seconds.
    """
    with _temporary_file(path) as temporary, open(temporary, "wb") as sink:
        yield sink
        sink.flush()
        if durable and is_local(path):
            os.fsync(sink.fileno())


@contextmanager
def foreign_file(
    path: Path, check: Callable[[Path], object], scratch: Path | None = None
) -> Iterator[Path]:
    """Yield a local path for a library that writes files itself; the file is renamed
    once it reads back whole.

    C and C++ libraries may ignore a failed write and leave a truncated file on a full
    disk.

    Args:
        path: final name.
        check: reads the file as its users will; raises if it is incomplete.
        scratch: local folder for the library's output if `path` is not local; the
            system's temporary folder if None.

    Raises:
        IncompleteFileError: `check` raised, or the library raised an OSError without
            errno.
    """
    with _temporary_file(path, scratch) as temporary:
        try:
            yield temporary
        except OSError as error:
            if error.errno is not None:
                raise
            # NumPy compares the bytes written, and gives no errno
            raise _incomplete_error(temporary, path.name, error) from error
        try:
            with temporary.open("rb") as stream:
                os.fsync(stream.fileno())
            check(temporary)
        except Exception as error:
            raise _incomplete_error(temporary, path.name, error) from error


def _incomplete_error(file: Path, name: str, error: Exception) -> IncompleteFileError:
    free = shutil.disk_usage(file.parent).free
    return IncompleteFileError(
        f"{name} was not written whole: {str(error) or type(error).__name__}; its "
        f"disk has {free:,} bytes free"
    )


@contextmanager
def _temporary_file(path: Path, scratch: Path | None = None) -> Iterator[Path]:
    """Yield a local path, and move or upload its file to a path unless there is an
    error.
    """
    _make_folder(path.parent)
    if not is_local(path):
        with tempfile.TemporaryDirectory(prefix="gristmill-", dir=scratch) as folder:
            temporary = Path(folder) / path.name
            yield temporary
            copy_file(temporary, path)
        return
    temporary = _temporary_name(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _temporary_name(path: Path) -> Path:
    return (
        path.parent / f"{path.name}{TEMPORARY_MARK}{os.getpid()}-{uuid.uuid4().hex[:8]}"
    )


def _make_folder(folder: Path) -> None:
    if getattr(folder, "protocol", "") not in WITHOUT_FOLDERS:
        folder.mkdir(parents=True, exist_ok=True)


def json_object(record: DataclassInstance) -> dict[str, Any]:
    """JSON object of a dataclass, without the fields that are None by default."""
    defaults = {field.name: field.default for field in fields(record)}
    return {
        name: value
        for name, value in asdict(record).items()
        if value is not None or defaults[name] is not None
    }


def write_bytes(path: Path, content: bytes, durable: bool = True) -> None:
    """Write a file atomically (`durable`: see `atomic_write`)."""
    if is_local(path):
        with atomic_write(path, durable) as sink:
            sink.write(content)
    else:
        _make_folder(path.parent)
        path.fs.pipe_file(path.path, content)  # type: ignore[attr-defined]


def write_json(path: Path, value: Any, durable: bool = True) -> None:
    """Write a value as JSON, atomically (`durable`: see `atomic_write`).

    Files that need not last are for programs alone, and have no indents, which Python
    adds ten times as slowly.
    """
    write_bytes(path, json_bytes(value, 1 if durable else None), durable)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file atomically."""
    write_bytes(path, text.encode())


def write_json_lines(path: Path, records: Iterable[Mapping[str, object]]) -> None:
    """Write records as JSON lines with sorted keys."""
    with atomic_write(path) as sink:
        for record in records:
            line = json.dumps(record, ensure_ascii=False, sort_keys=True)
            sink.write(line.encode() + b"\n")


def copy_file(source: Path, target: Path) -> None:
    """Copy a file atomically."""
    if is_local(target) or not is_local(source):
        with source.open("rb") as stream, atomic_write(target) as sink:
            shutil.copyfileobj(stream, sink, CHUNK_BYTES)
        return
    _make_folder(target.parent)
    store: Any = target
    options = {}
    if store.protocol in OBJECT_STORES:
        options["max_concurrency"] = PARTS_AT_ONCE
    store.fs.put_file(str(source), store.path, **options)


def json_bytes(value: Any, indent: int | None = 1) -> bytes:
    """JSON of a value with sorted keys, as bytes."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, sort_keys=True)
    return text.encode() + b"\n"


def array_bytes(array: np.ndarray) -> bytes:
    """Content of a `.npy` file of an array.

    `np.save` into an open file ignores a failure to write the last bytes
    (`ndarray.tofile` does not check `fclose`).
    """
    import numpy as np

    content = io.BytesIO()
    np.save(content, array, allow_pickle=False)
    return content.getvalue()


def reserve(path: Path) -> None:
    """Allocate the disk space of a file that is filled through a memory map.

    Without it, a full disk ends the process with SIGBUS.

    Raises:
        OSError: the disk does not have enough space.
    """
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, max(path.stat().st_size, 1))


def read_bytes(path: Path) -> bytes:
    """Read a file, which another process may replace meanwhile, in one request."""
    # s3fs opens a file by another request, and refuses to read a later version.
    return path.read_bytes() if is_local(path) else path.fs.cat_file(path.path)  # type: ignore[attr-defined]


def read_json(path: Path) -> Any:
    """Read a JSON file, which another process may replace meanwhile."""
    return json.loads(read_bytes(path))


def find_json(path: Path, default: Any = None) -> Any:
    """Read a JSON file; `default` if it does not exist."""
    try:
        return read_json(path)
    except FileNotFoundError:
        return default


def read_json_lines(path: Path) -> list[Any]:
    """Read the records of a file of JSON lines, which only LF ends."""
    with path.open("rb") as lines:
        return list(map(json.loads, lines))


def create_exclusively(path: Path, content: bytes) -> bool:
    """Create a file only if it does not exist; return True if this call created it.

    The content is complete as soon as the name exists: it is written to a temporary
    file and linked. On an object store the content should be unique to the caller: a
    request whose response was lost is sent again, and the existing object is then
    recognised by its content.
    """
    _make_folder(path.parent)
    if not is_local(path):
        try:
            path.fs.pipe_file(path.path, content, mode="create")  # type: ignore[attr-defined]
        except FileExistsError:
            return bool(content) and path.read_bytes() == content
        return True
    temporary = _temporary_name(path)
    try:
        # an empty file has nothing that a crash could lose
        write_bytes(temporary, content, durable=bool(content))
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def file_names(folder: Path) -> set[str]:
    """Names of all entries of a folder, in one request; empty if the folder does not
    exist.
    """
    if not is_local(folder):
        return set(file_sizes(folder))
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()


def file_sizes(folder: Path) -> dict[str, int]:
    """Name -> bytes of all files in a folder, in one request; empty if the folder does
    not exist.
    """
    try:
        if is_local(folder):
            with os.scandir(folder) as entries:
                return {
                    entry.name: entry.stat().st_size
                    for entry in entries
                    if entry.is_file()
                }
        listed = folder.fs.ls(folder.path, detail=True)  # type: ignore[attr-defined]
    except FileNotFoundError:
        return {}
    return {
        entry["name"].rstrip("/").rpartition("/")[2]: entry["size"]
        for entry in listed
        if entry["type"] == "file"
    }


def at_once(
    function: Callable[[One], Other], values: Iterable[One], here: bool
) -> Iterator[Other]:
    """Call a function that waits for a store on many values, CONNECTIONS at a time;
    yields results in order.

    Args:
        here: the files are local, so one thread is faster.
    """
    if here:
        yield from map(function, values)
        return
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        yield from pool.map(function, values)


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """`$GRISTMILL_CACHE`, else `$XDG_CACHE_HOME/gristmill`, else
    `~/.cache/gristmill`.
    """
    if configured := environment.get("GRISTMILL_CACHE"):
        return Path(configured)
    return (
        Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gristmill"
    )


def _fetch_once(source: Path) -> Path:
    sha256 = source.parent.name
    target = cache_folder() / "files" / sha256 / source.name
    if not target.exists():
        content = read_bytes(source)
        if hashlib.sha256(content).hexdigest() != sha256:
            raise OSError(
                f"{source} does not hold what its folder's name says; "
                "remove it, and start the run again"
            )
        write_bytes(target, content)
    return target


def _fetch_folder(sources: Mapping[str, Path]) -> Path:
    """Local folder with a carried folder's files, as symlinks, so that shared files are
    stored once.
    """
    digest = json_digest({name: file.parent.name for name, file in sources.items()})
    target = cache_folder() / "folders" / digest
    if not target.exists():
        temporary = target.with_name(f"{digest}{TEMPORARY_MARK}{uuid.uuid4().hex}")
        for name, source in sources.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).symlink_to(_fetch_once(source))
        try:
            temporary.rename(target)
        except OSError:  # another process created it first
            shutil.rmtree(temporary)
            if not target.exists():
                raise
    return target


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]


def json_digest(value: Any) -> str:
    """SHA-256 of a value's canonical JSON, in hexadecimal."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def canonical_json(value: Any) -> bytes:
    """Canonical JSON of a value, for fingerprints: sorted keys, no spaces, no NaN.

    Raises:
        TypeError: the value has no exact form in JSON.
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode()
