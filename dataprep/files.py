"""How a file gets its final name: written aside, flushed to disk, renamed; and how its content is named.

Paths are `pathlib.Path` for local folders and `upath.UPath` for any fsspec URL; both have the same methods.
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
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

if TYPE_CHECKING:
    import numpy as np

One = TypeVar("One")
Other = TypeVar("Other")
CHUNK_BYTES = 1 << 20
CONNECTIONS = 32
"""Requests to a store at a time, for many small files."""
TEMPORARY_MARK = ".tmp-"
S3_PROTOCOLS = ("s3", "s3a")
DEFAULT_STORE = "gristmill-store"
"""Name of the folder with a run's outputs, in the current folder; where it lies among a source's files, it is none of
them."""
OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl")
"""Protocols whose libraries keep listings of folders for good by default. What another process wrote
(a lease, a commit) would not be seen."""
WITHOUT_FOLDERS = ("hf", *OBJECT_STORES)
"""Protocols under which no folder need be made: one is there as soon as a file is in it."""

REPAIR = "gristmill verify MANIFEST --repair"
"""What finds damaged outputs and withdraws them; whoever knows the manifest puts its own command in this place."""


carried_files: ContextVar[Mapping[str, Path | Mapping[str, Path]]] = ContextVar(
    "carried_files", default=MappingProxyType({})
)
"""In a worker of a cluster: where in the store lie the files of another machine that a job names
(`dataprep/jobs/carried.py`): by their paths there, each in a folder that is named by its SHA-256; of a folder all of
its files, by their paths in it."""


def as_path(location: str | Path) -> Path:
    """Turn a local path or an fsspec URL into a path object; a file that a job carries is fetched for that."""
    text = str(location)
    if "://" not in text:
        carried = carried_files.get().get(text)
        if carried is None:
            return Path(text)
        return _fetch_folder(carried) if isinstance(carried, Mapping) else _fetch_once(carried)
    from upath import UPath

    protocol = text.partition("://")[0]
    if protocol in S3_PROTOCOLS:
        _use_s3()
    options = {"use_listings_cache": False} if protocol in OBJECT_STORES else {}
    path: Path = UPath(text, **options)
    return path


@cache
def _use_s3() -> None:
    """Let fsspec open S3 URLs in this process so that requests are repeated by the rules of `object_stores.py`.

    Without s3fs nothing happens: who opens such a URL is told what is missing.
    """
    from fsspec import register_implementation

    try:
        from gristmill.dataprep.s3_files import S3Files
    except ImportError:
        return
    for protocol in S3_PROTOCOLS:
        register_implementation(protocol, S3Files, clobber=True)


def is_local(path: Path) -> bool:
    """Whether the path lies on a file system of this machine (so that rename is atomic and mmap works)."""
    return type(path).__module__.startswith("pathlib") or getattr(path, "protocol", "") in ("", "file")


class IncompleteFileError(OSError):
    """A library has written a file that cannot be read back whole."""


@contextmanager
def atomic_write(path: Path, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a file that appears under its final name whole, or not at all.

    On a local disk the bytes go to a temporary name beside it, are flushed to the disk and renamed. On an object
    store the write itself is a single put, which is atomic there; after an error nothing is put.

    Args:
        durable: whether to wait for the disk. Without, the file is as whole to every process, whatever is killed, but
            where the whole machine crashes within seconds it may be found empty or cut.
    """
    _make_folder(path.parent)
    if not is_local(path):
        with _remote_write(path) as sink:
            yield sink
        return
    with _renamed(path) as temporary, open(temporary, "wb") as sink:
        yield sink
        sink.flush()
        if durable:
            os.fsync(sink.fileno())


@contextmanager
def foreign_file(path: Path, check: Callable[[Path], object], scratch: Path | None = None) -> Iterator[Path]:
    """A local path for a library that writes files by itself; the file gets its final name once it reads back whole.

    Libraries in C and C++ may ignore that a write failed, and leave a file that is cut off where the disk was full.

    Args:
        path: final name.
        check: reads the file as its users will; raises where it is not whole.
        scratch: local folder that the library writes to if `path` is not local; the system's temporary one if None.

    Raises:
        IncompleteFileError: `check` has raised, or the library an OSError without a reason.
    """
    _make_folder(path.parent)
    if is_local(path):
        with _renamed(path) as temporary, _written_whole(temporary, path.name, check):
            yield temporary
        return
    with tempfile.TemporaryDirectory(prefix="gristmill-", dir=scratch) as folder:
        temporary = Path(folder) / path.name
        with _written_whole(temporary, path.name, check):
            yield temporary
        with temporary.open("rb") as source, atomic_write(path) as sink:
            shutil.copyfileobj(source, sink, CHUNK_BYTES)


@contextmanager
def _written_whole(file: Path, name: str, check: Callable[[Path], object]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            raise
        raise _incomplete(file, name, error) from error  # NumPy counts what was written, and gives no reason
    try:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
        check(file)
    except Exception as error:
        raise _incomplete(file, name, error) from error


def _incomplete(file: Path, name: str, error: Exception) -> IncompleteFileError:
    free = shutil.disk_usage(file.parent).free
    return IncompleteFileError(
        f"{name} was not written whole: {str(error) or type(error).__name__}; its disk has {free:,} bytes free"
    )


@contextmanager
def _renamed(path: Path) -> Iterator[Path]:
    """A temporary name beside a path, which is renamed to it unless there is an error."""
    temporary = _temporary_name(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _temporary_name(path: Path) -> Path:
    return path.parent / f"{path.name}{TEMPORARY_MARK}{os.getpid()}-{uuid.uuid4().hex[:8]}"


@contextmanager
def _remote_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file of a store. fsspec completes an upload whenever its file is closed, so after an error it is not."""
    sink: Any = path.open("wb")
    try:
        yield sink
    except BaseException:
        if hasattr(sink, "discard"):
            sink.discard()
        sink.closed = True
        raise
    sink.close()


def _make_folder(folder: Path) -> None:
    if getattr(folder, "protocol", "") not in WITHOUT_FOLDERS:
        folder.mkdir(parents=True, exist_ok=True)


def write_json(path: Path, value: Any, durable: bool = True) -> None:
    """Write a value as readable JSON, atomically (`durable`: see `atomic_write`)."""
    with atomic_write(path, durable) as sink:
        sink.write(json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """A value as readable JSON."""
    return json.dumps(value, indent=1, ensure_ascii=False, sort_keys=True).encode() + b"\n"


def array_bytes(array: np.ndarray) -> bytes:
    """An array as the content of a `.npy` file.

    `np.save` into an open file ignores that the last bytes could not be written (`ndarray.tofile` does not look at
    what `fclose` returns).
    """
    import numpy as np

    content = io.BytesIO()
    np.save(content, array, allow_pickle=False)
    return content.getvalue()


def reserve(path: Path) -> None:
    """Take the disk space of a file that is about to be filled through memory.

    Without it, a full disk ends the process by SIGBUS.

    Raises:
        OSError: the disk has not so much space.
    """
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, max(path.stat().st_size, 1))


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    return json.loads(path.read_bytes())


def create_exclusively(path: Path, content: bytes) -> bool:
    """Create a file if and only if nobody has; return whether this call did.

    The content is complete the moment the name exists: it is written aside and linked. On an object store it should be
    the caller's own: a request whose answer was lost is sent again, and what is found then is known by its content.
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
        with open(temporary, "wb") as aside:
            aside.write(content)
            aside.flush()
            os.fsync(aside.fileno())
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def file_names(folder: Path) -> set[str]:
    """The names of all that is in a folder, asked for once; none where there is no such folder."""
    if is_local(folder):
        try:
            return set(os.listdir(folder))
        except FileNotFoundError:
            return set()
    return set(file_sizes(folder))


def file_sizes(folder: Path) -> dict[str, int]:
    """Name -> bytes of all files in a folder, asked for once; none where there is no such folder."""
    try:
        if is_local(folder):
            with os.scandir(folder) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        listed = folder.fs.ls(folder.path, detail=True)  # type: ignore[attr-defined]
    except FileNotFoundError:
        return {}
    return {one["name"].rstrip("/").rpartition("/")[2]: one["size"] for one in listed if one["type"] == "file"}


def at_once(function: Callable[[One], Other], values: Iterable[One], here: bool) -> Iterator[Other]:
    """Call a function that waits for a store on many values, CONNECTIONS at a time; in their order.

    Args:
        here: whether the files are local, which one thread reads faster.
    """
    if here:
        yield from map(function, values)
        return
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        yield from pool.map(function, values)


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """`$GRISTMILL_CACHE`, else `$XDG_CACHE_HOME/gristmill`, else `~/.cache/gristmill`."""
    if own := environment.get("GRISTMILL_CACHE"):
        return Path(own)
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gristmill"


def _fetch_once(source: Path) -> Path:
    sha256 = source.parent.name
    target = cache_folder() / "files" / sha256 / source.name
    if not target.exists():
        content = source.read_bytes()
        if hashlib.sha256(content).hexdigest() != sha256:
            raise OSError(f"{source} does not hold what its folder's name says; remove it, and start the run again")
        with atomic_write(target) as sink:
            sink.write(content)
    return target


def _fetch_folder(sources: Mapping[str, Path]) -> Path:
    """A folder of this machine with the files of another machine's: links, so that what two have lies here once."""
    digest = hashlib.sha256(canonical_json({name: source.parent.name for name, source in sources.items()})).hexdigest()
    target = cache_folder() / "folders" / digest
    if not target.exists():
        made = target.with_name(f"{digest}{TEMPORARY_MARK}{uuid.uuid4().hex}")
        for name, source in sources.items():
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            (made / name).symlink_to(_fetch_once(source))
        try:
            made.rename(target)
        except OSError:  # another process was first
            shutil.rmtree(made)
            if not target.exists():
                raise
    return target


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)  # type: ignore[arg-type]
    return digest.hexdigest()


def canonical_json(value: Any) -> bytes:
    """One byte string per value: sorted keys, no spaces, no NaN; what fingerprints are made of.

    Raises:
        TypeError: the value holds something that JSON has no exact form for.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()
