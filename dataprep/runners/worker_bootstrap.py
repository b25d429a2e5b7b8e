"""Bootstrap of cluster workers, which may share nothing with the machine that started
the run.

The source of this file travels with every job (`ship_files.py`) and runs on workers
without this package. It imports the package only after it has verified that the
installed one is that of the run, or has fetched that one from the store. It travels as
source, not as compiled code, so that a worker with another Python version can report
the mismatch.

Spark's executors start it as the daemon of their Python workers, which imports the
package before it forks them, if the installed one is that of the run.

    CACHE/packages/<digest>/gristmill/...    the package, by its content
    CACHE/files/<SHA-256>/<name>             files in the arguments of jobs' functions:
                                             models, word lists
    CACHE/folders/<digest>/...               models' folders in the arguments: links to
                                             their files

CACHE is `$GRISTMILL_CACHE`, else `$XDG_CACHE_HOME/gristmill`, else
`~/.cache/gristmill`, of the worker.
"""

from __future__ import annotations

import gc
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
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

PACKAGE = "gristmill"
SUBPACKAGES = ("mixtures", "core", "dataprep", "tokenize", "train", "flows")
"""Sub-packages from the lowest layer to the highest; in a checkout they are folders
beside the package. pyproject.toml maps the same ones.
"""
LEFT_OUT = ("__pycache__", ".")
"""Prefixes of names of files and folders that do not belong to the package."""
BEGIN = """(lambda modules, made: modules.get(name) or
    (exec(compile(text, name, "exec"), made.__dict__), modules.setdefault(name, made))[1]
)(__import__("sys").modules, __import__("types").ModuleType(name)).Carried(text, name, job)"""
"""Expression that rebuilds a pickled `Carried`: it turns the source into a module, once
per process.
"""
ANSWER_SECONDS = 40.0
"""Timeout of the store; less than that of a cluster's first task
(`engine.worker_seconds`).
"""
REFUSES = "the worker "
"""Prefix of errors from a worker that cannot start."""
DIGEST_VARIABLE = "GRISTMILL_PACKAGE"
"""Environment variable of a daemon with the digest of the package of the run."""
PRELOADED = (
    "gristmill.dataprep.readers.ingest",
    "gristmill.dataprep.runners.shuffle",
    "gristmill.dataprep.text.preload",
)
"""Modules that most jobs need. Importing these starts no thread, which a fork would
lose.
"""
_lock = threading.Lock()
_begun: set[str] = set()


class Job(TypedDict):
    """A job for workers that may share nothing with the machine that started it.

    Attributes:
        store: URL or folder.
        package: digest of the package.
        wheel: file of the package, below the store.
        function: pickled by cloudpickle.
        python: version, as `3.12`.
        options: arguments of fsspec that open the store.
        files: path on the machine of the run -> relative path of each of its files, `.`
            if it is one -> SHA-256.
    """

    store: str
    package: str
    wheel: str
    function: bytes
    python: str
    options: Mapping[str, Any]
    files: dict[str, dict[str, str]]


class Carried:
    """Function of a job, callable on workers without this package.

    Args:
        text: source of this file.
        name: name of the module for it.
        job: see `call`.
    """

    def __init__(self, text: str, name: str, job: Job) -> None:
        self._text = text
        self._name = name
        self._job = job

    def __call__(self, *arguments):  # type: ignore[no-untyped-def]
        """Call the function."""
        return call(self._job, *arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        variables = {"text": self._text, "name": self._name, "job": self._job}
        return eval, (BEGIN, variables)

    def step(self) -> Any:
        """Make the DoFn that calls the function; Beam's own wrapper would travel as
        compiled code.
        """
        from apache_beam import DoFn

        carried = self

        class Step(DoFn):
            """Step that calls the function."""

            def process(self, element):  # type: ignore[no-untyped-def]
                """Return what the function yields."""
                return carried(element)

            def __reduce__(self) -> tuple[Any, ...]:
                return eval, ("carried.step()", {"carried": carried})

        return Step()


def call(job: Job, *arguments: Any) -> Any:
    """Call the function of a job, with the package and the files of the run.

    Raises:
        RuntimeError: this worker has another Python, cannot see the store, or has
            another package loaded.
    """
    key = f"{job['package']} {job['store']}"
    with _lock:
        if key not in _begun:
            here = ".".join(map(str, sys.version_info[:2]))
            if here != job["python"]:
                raise RuntimeError(
                    f"{REFUSES}{where()} has Python {here}, and the run Python "
                    f"{job['python']}, whose functions no other version can run; start "
                    f"workers with Python {job['python']}"
                )
            # before libraries are loaded: engines start a worker for each processor
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            have_package(job)
            _begun.add(key)
    carried = importlib.import_module(f"{PACKAGE}.dataprep.runners.ship_files")
    return carried.call_here(job, *arguments)


def have_package(job: Job) -> None:
    """Make `import gristmill` import the package of the run."""
    content = read_store(job, job["wheel"])
    if has_package(job["package"]):
        return
    if PACKAGE in sys.modules:
        raise RuntimeError(
            f"{REFUSES}{where()} has loaded another {PACKAGE} than "
            "the run has; start it anew"
        )
    folder = cache_folder() / "packages" / job["package"]
    if not folder.exists():
        unpack(content, folder)
    if digest_of(files_of([str(folder / PACKAGE)])) != job["package"]:
        raise RuntimeError(
            f"{folder} on {where()} is not the package of the run; remove it"
        )
    sys.path.insert(0, str(folder))
    # Child processes of this worker (readers of files that may crash) need the package
    # too.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(folder), os.environ.get("PYTHONPATH")))
    )
    importlib.invalidate_caches()


def has_package(digest: str) -> bool:
    """Test if the loaded package, or else the installed one, is that of the run."""
    loaded = sys.modules.get(PACKAGE)
    if loaded is not None:
        places = list(loaded.__path__)
    else:
        spec = importlib.util.find_spec(PACKAGE)
        places = list(spec.submodule_search_locations or ()) if spec else []
    return bool(places) and digest_of(files_of(places)) == digest


def serve_spark() -> None:
    """Fork Spark's Python workers, which share what is imported here."""
    from pyspark import daemon

    if has_package(os.environ[DIGEST_VARIABLE]):
        # without a library the first job fails, with a message
        with suppress(ImportError):
            importlib.import_module(f"{PACKAGE}.core.arrays").avoid_pandas()
            for name in PRELOADED:
                importlib.import_module(name)
    # a garbage collection in a worker would copy the memory of what is imported
    gc.freeze()
    daemon.manager()


def read_store(job: Job, name: str) -> bytes:
    """Read a file of the store.

    Raises:
        RuntimeError: the store cannot be reached from this worker; the message has the
            remedy.
    """
    path = f"{job['store'].rstrip('/')}/{name}"
    answer: Future[bytes] = Future()

    def read() -> None:
        try:
            import fsspec

            with fsspec.open(path, "rb", **job["options"]) as stream:
                answer.set_result(stream.read())
        except Exception as error:  # noqa: BLE001 - the waiting thread raises it
            answer.set_exception(error)

    # Libraries wait minutes for an unreachable address, each with its own setting.
    threading.Thread(target=read, daemon=True).start()
    try:
        return answer.result(ANSWER_SECONDS)
    except Exception as error:
        reason = str(error) or f"no answer in {ANSWER_SECONDS:g} s"
        why = " ".join(f"{type(error).__name__}: {reason}".split())
        raise RuntimeError(
            f"{REFUSES}{where()} cannot see the store {job['store']} ({why}); give a "
            "store that all workers reach under the same name, with what opens it and "
            "its credentials in their environment, or a folder that all of them share"
        ) from error


def unpack(wheel: bytes, folder: Path) -> None:
    """Unpack a wheel into a folder atomically; other processes may do the same
    concurrently.
    """
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
    """Files of the package with their names in a wheel, sorted by name.

    Args:
        places: `__path__` of the package; for a checkout, the folder of the package
            suffices.
    """
    first = Path(places[0])
    root = first if (first / SUBPACKAGES[-1]).is_dir() else first.parent
    folders = {"": first, **{part: root / part for part in SUBPACKAGES}}
    path_by_name = {}
    for part, folder in folders.items():
        for path in folder.rglob("*") if part else folder.glob("*"):
            parts = path.relative_to(folder).parts
            if path.is_file() and not any(name.startswith(LEFT_OUT) for name in parts):
                path_by_name["/".join(filter(None, (PACKAGE, part, *parts)))] = path
    yield from sorted(path_by_name.items())


def digest_of(files: Iterator[tuple[str, Path]]) -> str:
    """Digest of the contents of a package."""
    digest = hashlib.sha256()
    for name, path in files:
        digest.update(
            f"{name}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode()
        )
    return digest.hexdigest()[:32]


def cache_folder() -> Path:
    """Cache folder of this worker."""
    if configured := os.environ.get("GRISTMILL_CACHE"):
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / PACKAGE


def where() -> str:
    """Describe this process for messages."""
    return f"{socket.gethostname()} (process {os.getpid()})"


if __name__ == "__main__":
    serve_spark()
