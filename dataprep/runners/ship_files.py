"""Transfer of a job's code and local files to cluster workers, which share only the
store with this machine.

A function of a job travels with the source of `worker_bootstrap.py`, which installs the
package on the worker and calls the function. The store has everything else that it
needs:

    STORE/carried/
        <digest>/gristmill-<version>-py3-none-any.whl    this package, built from the
                                                         files that run here
        files/<SHA-256>/<name>                           local files in the function's
                                                         arguments
        kernels/<sources>/<kernel>.<key>                 machine code that the first
                                                         worker compiled

A folder in the arguments is transferred file by file if it is a model's, with a
config.json. Paths depend on contents, or on sources, so each is written once, and each
worker fetches it once. The wheel is complete, so that images for workers can be built
from it (`pip install`).
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
from contextvars import Context, ContextVar, copy_context
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from gristmill.core.files import (
    as_path,
    carried_files,
    copy_file,
    is_local,
    sha256_file,
    write_bytes,
)
from gristmill.dataprep.encoders.model_folders import CONFIG_FILE
from gristmill.dataprep.runners import worker_bootstrap
from gristmill.dataprep.text.jit_cache import FOLDER as KERNELS
from gristmill.dataprep.text.jit_cache import share

Function = Callable[..., Any]
FOLDER = "carried"
"""Folder below a store."""
MOST_FILE_BYTES = 8 << 30
EARLIEST = (1980, 1, 1, 0, 0, 0)
"""Modification time of all files in the wheel, so that equal contents make equal
wheels.
"""
_store: ContextVar[Path | None] = ContextVar("store", default=None)


@contextmanager
def through(store: Path | None) -> Iterator[None]:
    """Context in which jobs carry local code and files to their workers through a
    store; no effect without one.
    """
    token = _store.set(store)
    try:
        yield
    finally:
        _store.reset(token)


def carry(function: Function) -> Function:
    """Wrap a function so that workers without this machine's files can call it;
    unchanged without a store.
    """
    store = _store.get()
    if store is None:
        return function
    import cloudpickle

    wheel = _send_package(store)
    local_paths = sorted(set(_local_files(function, store)))
    files = {
        str(path): {
            str(file.relative_to(path)): _send_file(store, file)
            for file in (path, *sorted(path.rglob("*")))
            if file.is_file()
        }
        for path in local_paths
    }
    job: worker_bootstrap.Job = {
        "store": str(store),
        "package": package_digest(),
        "wheel": wheel,
        "files": files,
        "python": ".".join(map(str, sys.version_info[:2])),
        "options": {} if is_local(store) else dict(store.storage_options),  # type: ignore[attr-defined]
        "function": cloudpickle.dumps(function),
    }
    return worker_bootstrap.Carried(*_bootstrap_source(), job)


def carry_step(function: Function) -> Any:
    """Make the Beam step that calls a function on each element and outputs all that it
    yields.
    """
    from apache_beam import FlatMap, ParDo

    carried = carry(function)
    return (
        ParDo(carried.step())
        if isinstance(carried, worker_bootstrap.Carried)
        else FlatMap(function)
    )


@cache
def _bootstrap_source() -> tuple[str, str]:
    """Source of `worker_bootstrap.py`, and the name of its module on a worker.

    Read once per process, like the package, so that the two stay of one version.
    """
    text = Path(worker_bootstrap.__file__).read_text()
    return text, f"gristmill_carried_{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@cache
def _send_package(store: Path) -> str:
    """Write the wheel to a store, unless it is there; returns its name below the
    store.
    """
    name = f"{FOLDER}/{package_digest()}/gristmill-{_version()}-py3-none-any.whl"
    if not (store / name).exists():
        write_bytes(store / name, package_wheel())
    return name


def _send_file(store: Path, path: Path) -> str:
    """Write a file to a store, once per process unless it changes; returns its SHA-256.

    Raises:
        ValueError: the file is too large.
    """
    stat = path.stat()
    if stat.st_size > MOST_FILE_BYTES:
        raise ValueError(
            f"{path} has more than {MOST_FILE_BYTES >> 30} GiB: put it where all "
            "workers see it, and name it by its URL"
        )
    stamp = stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino
    return _send_version(store, path, stamp)


@cache
def _send_version(store: Path, path: Path, stamp: tuple[int, ...]) -> str:
    sha256 = sha256_file(path)
    target = store / FOLDER / "files" / sha256 / path.name
    if not target.exists():
        copy_file(path, target)
    return sha256


def call_here(job: worker_bootstrap.Job, *arguments: Any) -> Any:
    """Call the function of a job in a worker with the package, with local paths mapped
    to files of the store.
    """
    store = as_path(job["store"])
    share(store / FOLDER / KERNELS)

    files = {
        path: {
            name: store / FOLDER / "files" / sha256 / Path(path, name).name
            for name, sha256 in files_of_path.items()
        }
        for path, files_of_path in job["files"].items()
    }
    # a generator runs in the job's context, and its consumer does not
    context = copy_context()
    context.run(carried_files.set, files)
    result = context.run(_loaded(job["function"]), *arguments)
    return _results(context, result) if isinstance(result, Iterator) else result


def _results(context: Context, generator: Iterator[Any]) -> Iterator[Any]:
    while (result := context.run(next, generator, _END)) is not _END:
        yield result


_END = object()


@lru_cache(maxsize=8)
def _loaded(function: bytes) -> Function:
    import cloudpickle

    loaded: Function = cloudpickle.loads(function)
    return loaded


def arguments_of(value: Any) -> Iterator[Any]:
    """Arguments of a function, with sections and all that they and containers hold."""
    if isinstance(value, partial):
        yield from arguments_of([value.args, value.keywords])
    elif isinstance(value, Mapping):
        yield from arguments_of(list(value.values()))
    elif isinstance(value, BaseModel):
        yield value
        yield from arguments_of(dict(value))
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from arguments_of(item)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from arguments_of([getattr(value, item.name) for item in fields(value)])
    else:
        yield value


def _local_files(function: Function, store: Path) -> Iterator[Path]:
    """Local files and models' folders outside the store that are arguments of a
    function.
    """
    for value in arguments_of(function):
        if not isinstance(value, str | Path) or not str(value).startswith("/"):
            continue
        path = Path(str(value))
        if (
            is_local(as_path(value))
            and not path.is_relative_to(str(store))
            and (path.is_file() or (path / CONFIG_FILE).is_file())
        ):
            yield path


def package_files() -> list[tuple[str, Path]]:
    """Files of this package as installed here, with their names in a wheel."""
    return list(
        worker_bootstrap.files_of(list(sys.modules[worker_bootstrap.PACKAGE].__path__))
    )


@cache
def package_digest() -> str:
    """Digest of this package as installed here."""
    return worker_bootstrap.digest_of(iter(package_files()))


def package_wheel() -> bytes:
    """Wheel of this package as installed here."""
    contents = {name: path.read_bytes() for name, path in package_files()}
    about = f"gristmill-{_version()}.dist-info"
    try:
        metadata = importlib.metadata.distribution("gristmill").read_text("METADATA")
    except importlib.metadata.PackageNotFoundError:
        metadata = None
    contents[f"{about}/METADATA"] = (
        metadata or f"Metadata-Version: 2.1\nName: gristmill\nVersion: {_version()}\n"
    ).encode()
    contents[f"{about}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: gristmill\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    record = []
    for name, content in contents.items():
        digest_of_file = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
        checksum = digest_of_file.rstrip(b"=").decode()
        record.append(f"{name},sha256={checksum},{len(content)}")
    contents[f"{about}/RECORD"] = "\n".join([*record, f"{about}/RECORD,,", ""]).encode()
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(
                zipfile.ZipInfo(name, EARLIEST), content, zipfile.ZIP_DEFLATED
            )
    return sink.getvalue()


def _version() -> str:
    return str(sys.modules[worker_bootstrap.PACKAGE].__version__)
