"""What a worker of a cluster does first, which may have nothing of the machine that the run was started on.

The text of this file travels with every job (`carried.py`), and runs where this package may be absent: it imports
nothing of it before it has seen that the package here is the one of the run, or has fetched that one from the store.
It is text, and no code that Python has compiled, so that a worker of another Python can say so.

    CACHE/packages/<digest>/gristmill/...    the package, by its content
    CACHE/files/<SHA-256>/<name>             files that the functions of jobs name: models, lists of words
    CACHE/folders/<digest>/...               models' folders that they name: links to their files

CACHE is `$GRISTMILL_CACHE`, else `$XDG_CACHE_HOME/gristmill`, else `~/.cache/gristmill`, of the worker.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import io
import os
import shutil
import socket
import sys
import threading
import uuid
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PACKAGE = "gristmill"
PARTS = ("mixtures", "dataprep", "tokenize", "train", "flows")
"""Its sub-packages, which a checkout has beside it."""
LEFT_OUT = ("__pycache__", ".")
"""What names of files and folders that are no part of it begin with."""
BEGIN = """(lambda modules, made: modules.get(name) or
    (exec(compile(text, name, "exec"), made.__dict__), modules.setdefault(name, made))[1]
)(__import__("sys").modules, __import__("types").ModuleType(name)).Carried(text, name, job)"""
"""Makes a `Carried` of what it was pickled with: this text becomes a module, once in a process."""
ANSWER_SECONDS = 40.0
"""For the store to give the package; less than a cluster has for its first task (`engine.worker_seconds`)."""
REFUSES = "the worker "
"""What the errors of one that cannot begin are known by."""
_lock = threading.Lock()
_begun: set[str] = set()


class Carried:
    """The function of a job, for workers that may have nothing of this package.

    Args:
        text: of this file.
        name: of the module that it becomes.
        job: see `call`.
    """

    def __init__(self, text: str, name: str, job: Mapping[str, Any]) -> None:
        self._told: dict[str, Any] = {"text": text, "name": name, "job": job}

    def __call__(self, *arguments):  # type: ignore[no-untyped-def]
        """Call it."""
        return call(self._told["job"], *arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (BEGIN, dict(self._told))

    def step(self) -> Any:
        """The DoFn that calls it; one of Beam's own making would travel as compiled code."""
        from apache_beam import DoFn

        carried = self

        class Step(DoFn):
            """Calls the function."""

            def process(self, element):  # type: ignore[no-untyped-def]
                """What the function yields."""
                return carried(element)

            def __reduce__(self) -> tuple[Any, ...]:
                return eval, ("carried.step()", {"carried": carried})

        return Step()


def call(job: Mapping[str, Any], *arguments: Any) -> Any:
    """Call the function of a job, with the package and the files that it was started with.

    Args:
        job: `store` (URL or folder), `package` (its digest), `wheel` (below the store), `function` (pickled),
            `python` (its version), `options` (for fsspec), `files` (path there -> SHA-256) and `folders` (path there ->
            path in it -> SHA-256).
        arguments: for the function.

    Raises:
        RuntimeError: this worker has another Python, cannot see the store, or has another package loaded.
    """
    key = f"{job['package']} {job['store']}"
    with _lock:
        if key not in _begun:
            check_python(job["python"])
            have_package(job)
            _begun.add(key)
    carried = importlib.import_module(f"{PACKAGE}.dataprep.jobs.carried")
    return carried.call_here(job, *arguments)


def check_python(version: str) -> None:
    """See that functions which Python has compiled there can run here.

    Raises:
        RuntimeError: they cannot; says what to do.
    """
    here = ".".join(map(str, sys.version_info[:2]))
    if here != version:
        raise RuntimeError(
            f"{REFUSES}{where()} has Python {here}, and the run Python {version}, whose functions no "
            f"other version can run; start workers with Python {version}"
        )


def have_package(job: Mapping[str, Any]) -> None:
    """See that what `import gristmill` gives here is the package of the run."""
    loaded = sys.modules.get(PACKAGE)
    found = None if loaded is not None else importlib.util.find_spec(PACKAGE)
    places = loaded.__path__ if loaded is not None else (found.submodule_search_locations or ()) if found else ()
    content = read_store(job, job["wheel"])
    if places and digest_of(files_of(list(places))) == job["package"]:
        return
    if loaded is not None:
        raise RuntimeError(f"{REFUSES}{where()} has loaded another {PACKAGE} than the run has; start it anew")
    folder = cache_folder() / "packages" / job["package"]
    if not folder.exists():
        unpack(content, folder)
    if digest_of(files_of([str(folder / PACKAGE)])) != job["package"]:
        raise RuntimeError(f"{folder} on {where()} is not the package of the run; remove it")
    sys.path.insert(0, str(folder))
    # The processes that it starts (readers of files that may crash) need it too.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    importlib.invalidate_caches()


def read_store(job: Mapping[str, Any], name: str) -> bytes:
    """A file of the store.

    Raises:
        RuntimeError: it cannot be seen from here; says what to do.
    """
    found: list[Any] = []
    path = f"{job['store'].rstrip('/')}/{name}"
    # An address at which nobody is keeps a library waiting for minutes, each in its own way.
    reading = threading.Thread(target=_read, args=(path, job["options"], found), daemon=True)
    reading.start()
    reading.join(ANSWER_SECONDS)
    content = found[0] if found else TimeoutError(f"no answer in {ANSWER_SECONDS:g} s")
    if isinstance(content, bytes):
        return content
    why = " ".join(f"{type(content).__name__}: {content}".split())
    raise RuntimeError(
        f"{REFUSES}{where()} cannot see the store {job['store']} ({why}); give a store that all workers reach under "
        "the same name, with what opens it and its credentials in their environment, or a folder that all of them share"
    ) from content


def _read(path: str, options: Mapping[str, Any], found: list[Any]) -> None:
    try:
        if "://" not in path:
            found.append(Path(path).read_bytes())
            return
        import fsspec

        with fsspec.open(path, "rb", **options) as stream:
            found.append(stream.read())
    except Exception as error:  # noqa: BLE001 - it is told by whoever waits
        found.append(error)


def unpack(wheel: bytes, folder: Path) -> None:
    """Unpack a wheel so that the folder appears whole; somebody else may do the same at the same time."""
    aside = folder.with_name(f"{folder.name}.tmp-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        archive.extractall(aside)
    try:
        aside.rename(folder)
    except OSError:
        shutil.rmtree(aside)
        if not folder.exists():
            raise


def files_of(places: list[str]) -> Iterator[tuple[str, Path]]:
    """The files of a package by their names in a wheel, in order.

    Args:
        places: its `__path__`; of a checkout, the folder of the package alone will do.
    """
    first = Path(places[0])
    root = first if (first / PARTS[-1]).is_dir() else first.parent
    folders = {"": first, **{part: root / part for part in PARTS}}
    found = {}
    for part, folder in folders.items():
        for path in folder.rglob("*") if part else folder.glob("*"):
            inside = path.relative_to(folder).parts
            if path.is_file() and not any(name.startswith(LEFT_OUT) for name in inside):
                found["/".join((PACKAGE, *([part] if part else []), *inside))] = path
    yield from sorted(found.items())


def digest_of(files: Iterator[tuple[str, Path]]) -> str:
    """Names the content of a package."""
    digest = hashlib.sha256()
    for name, path in files:
        digest.update(f"{name}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:32]


def cache_folder() -> Path:
    """Where this worker keeps what it fetched."""
    if own := os.environ.get("GRISTMILL_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / PACKAGE


def where() -> str:
    """This process, for messages."""
    return f"{socket.gethostname()} (process {os.getpid()})"
