"""What a job carries to the workers of a cluster, which need nothing of this machine but its store.

A function of a job travels with the text of `begin_worker.py`, which makes sure of the package there, and then calls
it. Beside it travels what it names of this machine:

    STORE/carried/<digest>/gristmill-<version>-py3-none-any.whl    this package, built from the files that run here
    STORE/carried/files/<SHA-256>/<name>                           local files that the function names
    STORE/carried/kernels/<sources>/<kernel>.<key>                 machine code that the first worker compiled

A folder that it names is taken along, file by file, where it is a model's: one with a config.json. All are named by
their content, or by what it is made of, written once, and fetched by each worker once. The wheel is a
whole one, so that images for workers can be made from it too (`pip install`, with what it requires).
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import io
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

from gristmill.dataprep.files import as_path, atomic_write, carried_files, is_local, sha256_file
from gristmill.dataprep.jobs import begin_worker
from gristmill.dataprep.models.model_folders import CONFIG_FILE
from gristmill.dataprep.text.machine_code import FOLDER as KERNELS
from gristmill.dataprep.text.machine_code import share

FOLDER = "carried"
"""Below a store."""
MOST_FILE_BYTES = 8 << 30
EARLIEST = (1980, 1, 1, 0, 0, 0)
"""The one time that all files of the wheel have: the same content is the same file."""
_store: ContextVar[Path | None] = ContextVar("store", default=None)


@contextmanager
def through(store: Path | None) -> Iterator[None]:
    """Within it what jobs need of this machine is carried to their workers through this store; nothing without one."""
    token = _store.set(store)
    try:
        yield
    finally:
        _store.reset(token)


def carry(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, callable where nothing of this machine is; itself where nothing is to be carried."""
    store = _store.get()
    if store is None:
        return function
    import cloudpickle

    digest, _ = package()
    wheel = _send_package(store)
    named = sorted(set(_local_files(function, store)))
    files = {str(path): _send_file(store, path, _stamp(path)) for path in named if path.is_file()}
    folders = {
        str(path): {
            str(one.relative_to(path)): _send_file(store, one, _stamp(one))
            for one in sorted(path.rglob("*"))
            if one.is_file()
        }
        for path in named
        if path.is_dir()
    }
    job = {
        "store": str(store),
        "package": digest,
        "wheel": wheel,
        "files": files,
        "folders": folders,
        "python": ".".join(map(str, sys.version_info[:2])),
        "options": {} if is_local(store) else dict(store.storage_options),  # type: ignore[attr-defined]
        "function": cloudpickle.dumps(function),
    }
    text, name = _beginning()
    return begin_worker.Carried(text, name, job)


def carry_step(function: Callable[..., Any]) -> Any:
    """The step of Beam's that calls a function on each element and puts out all that it yields."""
    from apache_beam import FlatMap, ParDo

    carried = carry(function)
    return ParDo(carried.step()) if isinstance(carried, begin_worker.Carried) else FlatMap(function)


@cache
def _beginning() -> tuple[str, str]:
    """The text of `begin_worker.py`, and the name of the module that it becomes on a worker."""
    text = Path(begin_worker.__file__).read_text()
    return text, f"gristmill_carried_{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@cache
def _send_package(store: Path) -> str:
    """Put the wheel into a store, once in a process; its name below the store."""
    digest, wheel = package()
    name = f"{FOLDER}/{digest}/gristmill-{_version()}-py3-none-any.whl"
    if not (store / name).exists():
        with atomic_write(store / name) as sink:
            sink.write(wheel)
    return name


def _stamp(path: Path) -> tuple[int, ...]:
    """Says whether a file is still the one that was looked at."""
    found = path.stat()
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


@cache
def _send_file(store: Path, path: Path, stamp: tuple[int, ...]) -> str:
    """Put a file into a store, once in a process unless it changes; its SHA-256.

    Raises:
        ValueError: it is too large.
    """
    if path.stat().st_size > MOST_FILE_BYTES:
        raise ValueError(
            f"{path} has more than {MOST_FILE_BYTES >> 30} GiB: put it where all workers see it, and name it by its URL"
        )
    sha256 = sha256_file(path)
    target = store / FOLDER / "files" / sha256 / path.name
    if not target.exists():
        with atomic_write(target) as sink, path.open("rb") as source:
            while chunk := source.read(1 << 20):
                sink.write(chunk)
    return sha256


def call_here(job: Mapping[str, Any], *arguments: Any) -> Any:
    """Call the function of a job in a worker that has the package; local files that it names are those of the run."""
    store = as_path(job["store"])
    share(store / FOLDER / KERNELS)
    function = _loaded(job["function"])

    def in_store(files: Mapping[str, str]) -> dict[str, Path]:
        return {path: store / FOLDER / "files" / sha256 / Path(path).name for path, sha256 in files.items()}

    files: dict[str, Path | Mapping[str, Path]] = {
        **in_store(job["files"]),
        **{path: in_store(inside) for path, inside in job["folders"].items()},
    }
    token = carried_files.set(files)
    try:
        result = function(*arguments)
    finally:
        carried_files.reset(token)
    return _one_by_one(result, files) if isinstance(result, Iterator) else result


def _one_by_one(results: Iterator[Any], files: Mapping[str, Path | Mapping[str, Path]]) -> Iterator[Any]:
    """What a generator yields: between two of them whoever asks has files of its own."""
    while True:
        token = carried_files.set(files)
        try:
            one = next(results)
        except StopIteration:
            return
        finally:
            carried_files.reset(token)
        yield one


@lru_cache(maxsize=8)
def _loaded(function: bytes) -> Callable[..., Any]:
    import cloudpickle

    found: Callable[..., Any] = cloudpickle.loads(function)
    return found


def _local_files(value: Any, store: Path) -> Iterator[Path]:
    """Files, and models' folders, of this machine outside the store that a function names among its arguments."""
    if isinstance(value, partial):
        yield from _local_files([value.args, value.keywords], store)
    elif isinstance(value, Mapping):
        yield from _local_files(list(value.values()), store)
    elif isinstance(value, list | tuple | set | frozenset):
        for one in value:
            yield from _local_files(one, store)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _local_files([getattr(value, one.name) for one in fields(value)], store)
    elif isinstance(value, str | Path) and str(value).startswith("/"):
        path = Path(str(value))
        if (
            is_local(as_path(value))
            and not path.is_relative_to(str(store))
            and (path.is_file() or (path / CONFIG_FILE).is_file())
        ):
            yield path


@cache
def package() -> tuple[str, bytes]:
    """The digest of this package, as it lies here, and a wheel of it."""
    files = list(begin_worker.files_of(list(sys.modules[begin_worker.PACKAGE].__path__)))
    digest = begin_worker.digest_of(iter(files))
    contents = {name: path.read_bytes() for name, path in files}
    about = f"gristmill-{_version()}.dist-info"
    try:
        metadata = importlib.metadata.distribution("gristmill").read_text("METADATA")
    except importlib.metadata.PackageNotFoundError:
        metadata = None
    contents[f"{about}/METADATA"] = (
        metadata or f"Metadata-Version: 2.1\nName: gristmill\nVersion: {_version()}\n"
    ).encode()
    contents[f"{about}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: gristmill\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = [f"{name},sha256={_urlsafe(content)},{len(content)}" for name, content in contents.items()]
    contents[f"{about}/RECORD"] = "\n".join([*record, f"{about}/RECORD,,", ""]).encode()
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(zipfile.ZipInfo(name, EARLIEST), content, zipfile.ZIP_DEFLATED)
    return digest, sink.getvalue()


def _urlsafe(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def _version() -> str:
    return str(sys.modules[begin_worker.PACKAGE].__version__)
