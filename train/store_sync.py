"""Local working folder of a training whose stage folder is in an object store, and its
synchronisation with the store.

A training appends to files, maps them into memory and renames them, which object stores
do not support. The files of earlier attempts (only the checkpoint to resume from) and
all inputs except the packed set (which is streamed) are fetched before the training
starts; changes are sent after each checkpoint and at the end:

    CACHE/training/<hash of the URL>/stage.json, work/, data/, inputs/<stage>/

The store always holds a state to resume from: the marker of a checkpoint is sent last,
and removed first. Every attempt rebuilds the local folder, and removes it on a normal
exit.

If a training has several hosts, each works in a separate folder (`<hash>-<host>`) and
sends its shards of checkpoints. The first host sends all other files, and only it
removes outdated ones.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

from gristmill.core.files import (
    TEMPORARY_MARK,
    as_path,
    is_local,
    read_json,
    write_json,
)
from gristmill.core.object_stores import Patience, Warn
from gristmill.core.secrets import restore_secrets
from gristmill.core.stage_context import StageDescription, read_inputs
from gristmill.mixtures.schema.engine import Engine, Stream, TrainingEngine
from gristmill.tokenize.streaming.file_cache import default_folder
from gristmill.train.distributed.rendezvous import hosts_of

VARIABLE = "GRISTMILL_STAGE_FOLDER"
"""Environment variable of the ranks of such a training: URL of the stage folder in the
store.
"""
STREAMED = "mix"
"""Input that is streamed row by row from its location."""
SAYING_SECONDS = 10.0
"""Time limit for storing the reason why a training failed; the parent process receives
it too.
"""
Sent = dict[str, tuple[int, int]]
"""Relative file name -> (bytes, modification time in ns) when the file was last sent or
fetched.
"""
Request = Literal["written", "read", "removed"]
"""Participle of a request to the store."""


def work_on(folder: Path, leads: bool = True) -> Path:
    """Folder in which a training works: its stage folder if that is local, else a local
    folder that the store follows.

    Args:
        folder: of the stage.
        leads: true on the leading or only host.

    Raises:
        OSError: too little disk space.
    """
    if is_local(folder):
        return folder
    os.environ[VARIABLE] = str(folder)
    return work_here(folder, leads)


def followed(folder: Path) -> Path:
    """Folder in the store that follows the working folder of this process; `folder`
    itself without a store.
    """
    return as_path(os.environ.get(VARIABLE, str(folder)))


def work_here(folder: Path, leads: bool = True) -> Path:
    """Create the local folder of a training whose stage folder is in a store; returns
    it.

    Args:
        folder: in the store.
        leads: true on the leading host; the others fetch no checkpoint until the leader
            has chosen one.

    Raises:
        OSError: too little disk space.
    """
    description: StageDescription = read_json(folder / "stage.json")
    engine = Engine.model_validate(description["engine"])
    local_folder = folder_here(folder, engine.stream, hosts_of(engine) > 1)
    # folders of earlier attempts with one host or several
    for per_host in (False, True):
        shutil.rmtree(folder_here(folder, engine.stream, per_host), ignore_errors=True)
    work = sizes_below(folder / "work")
    inputs = {
        name: location
        for name, location in read_inputs(
            restore_secrets(deepcopy(description))
        ).items()
        if name != STREAMED and not is_local(location)
    }
    steps = sorted(
        {step for name in work if (step := _checkpoint_of(name))}, reverse=True
    )
    newest = sum(
        size
        for name, size in work.items()
        if steps and _checkpoint_of(name) == steps[0]
    )
    fetched_bytes = newest + sum(
        size for location in inputs.values() for size in sizes_below(location).values()
    )
    written_bytes = newest * engine.keep_checkpoints
    disk = next(folder for folder in local_folder.parents if folder.exists())
    free = shutil.disk_usage(disk).free
    needed = fetched_bytes + written_bytes
    if needed > free:
        raise OSError(
            f"the training works in {local_folder}, which needs {needed / 1e9:,.3f} GB "
            f"({fetched_bytes / 1e9:,.3f} that it fetches from the store, "
            f"{written_bytes / 1e9:,.3f} for its next checkpoints), and "
            f"{free / 1e9:,.3f} GB are free there; free some, or name a folder of a "
            "larger disk as engine.stream.cache_folder"
        )
    fetch_tree(
        folder / "work",
        local_folder / "work",
        lambda name: _checkpoint_of(name) is None,
    )
    (local_folder / "data").mkdir(parents=True, exist_ok=True)
    for name, location in inputs.items():
        fetch_tree(location, local_folder / "inputs" / name)
    outdated_checkpoints = fetch_checkpoints(
        folder / "work", local_folder / "work", steps if leads else [], engine
    )
    description["fetched"] = {
        name: str(local_folder / "inputs" / name) for name in inputs
    }
    description["outdated"] = [
        f"work/{name}" for name in work if _checkpoint_of(name) in outdated_checkpoints
    ]
    write_json(local_folder / "stage.json", description)
    return local_folder


def fetch_checkpoints(
    work: Path, here: Path, steps: Sequence[str], engine: TrainingEngine
) -> set[str]:
    """Fetch the newest intact checkpoint to resume from, and damaged newer ones.

    If more than two are kept, also fetch those that stay beside the next one, so that
    their retention ends on time.

    Args:
        work, here: working folder of a training, in the store and local.
        steps: names of all checkpoints in the store, newest first, complete or not.
        engine: retention of checkpoints.

    Returns:
        names of checkpoints that were not fetched and are deleted with the next
        checkpoint; permanent ones stay.
    """
    # Imports torch, which must happen after the ranks are set up.
    from gristmill.train.checkpoint import (
        CHECKPOINTS,
        PREFIX,
        damaged_files,
        is_complete,
    )

    target_count = max(engine.keep_checkpoints - 1, 1)
    sound = 0
    fetched = 0
    for step in steps:
        if sound >= target_count:
            break
        fetched += 1
        fetch_tree(work / CHECKPOINTS / step, here / CHECKPOINTS / step)
        sound += is_complete(here / CHECKPOINTS / step) and not damaged_files(
            here / CHECKPOINTS / step
        )
    every = engine.permanent_every
    return {
        step
        for step in steps[fetched:]
        if not every or int(step.removeprefix(PREFIX)) % every
    }


def _checkpoint_of(name: str) -> str | None:
    """Checkpoint of a file below work/, or None."""
    parts = name.split("/")
    return parts[1] if len(parts) > 2 and parts[0] == "checkpoints" else None


def folder_here(folder: Path, stream: Stream, per_host: bool) -> Path:
    """Local folder of a training in a store: one per URL, and per host if it has
    several, as hosts may share home folders.
    """
    cache = Path(stream.cache_folder) if stream.cache_folder else default_folder()
    host = f"-{socket.gethostname()}" if per_host else ""
    return (
        cache
        / "training"
        / f"{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}{host}"
    ).absolute()


def fetch_tree(
    source: Path, target: Path, wanted: Callable[[str], bool] = lambda name: True
) -> None:
    """Copy the files below a folder of a store to a local folder; a missing source is
    empty.

    Args:
        wanted: predicate of relative file names.
    """
    target.mkdir(parents=True, exist_ok=True)
    for name in sizes_below(source):
        if wanted(name):
            file = target / name
            file.parent.mkdir(parents=True, exist_ok=True)
            source.fs.get_file((source / name).path, str(file))  # type: ignore[attr-defined]


def sizes_below(folder: Path) -> dict[str, int]:
    """Relative name -> bytes of all files below a folder of a store."""
    root = folder.path.rstrip("/")  # type: ignore[attr-defined]
    files = folder.fs.find(root, detail=True)  # type: ignore[attr-defined]
    # Names with a final / are empty objects that represent folders.
    return {
        name[name.index(root) + len(root) :].lstrip("/"): entry["size"]
        for name, entry in files.items()
        if not name.endswith("/")
    }


class Mirror:
    """Synchronisation of a folder of a store with a local folder.

    Args:
        here: local folder, created by `work_here`.
        folder: in the store.
        stream: retry policy for failures of the store.
        warn: receives warnings of failures, at most one per minute.
    """

    def __init__(self, here: Path, folder: Path, stream: Stream, warn: Warn) -> None:
        self._here = here
        self._folder = folder
        self._patience = Patience(
            stream.retry_seconds,
            warn,
            "check the store, or raise engine.stream.retry_seconds "
            f"({stream.retry_seconds:g})",
        )
        self._lock = threading.Lock()
        self._sent: Sent = {
            **self._files("work"),
            **dict.fromkeys(read_json(here / "stage.json").get("outdated", ()), (0, 0)),
        }
        self._elsewhere = set[str]()

    def send(self, *parts: str) -> None:
        """Send changes of some subfolders, and delete removed files in the store."""
        with self._lock:
            for part in parts:
                files = self._files(part)
                changed = [
                    name
                    for name, state in files.items()
                    if self._sent.get(name) != state
                ]
                for name in _markers_last(changed):
                    # it may be removed locally, and soon in the store
                    with suppress(FileNotFoundError):
                        self._ask(name, "written")
                        self._sent[name] = files[name]
                removed = [
                    name
                    for name in self._sent
                    if name.startswith(f"{part}/")
                    and name not in files
                    and not (
                        name in self._elsewhere and (self._here / name).parent.exists()
                    )
                ]
                for name in reversed(_markers_last(removed)):
                    with suppress(FileNotFoundError):
                        self._ask(name, "removed")
                    del self._sent[name]

    def add(self, folder: Path) -> None:
        """Send all files below a local folder; other files in the store stay."""
        with self._lock:
            for name, state in self._files(self._name(folder)).items():
                self._ask(name, "written")
                self._sent[name] = state

    def saved(self, checkpoint: Path, names: Iterable[str]) -> None:
        """Send changes of `work/`, after other hosts have sent their files of a
        checkpoint.

        Args:
            checkpoint: complete; its marker is sent now.
            names: files of the checkpoint on other hosts; they are deleted together
                with the local ones.
        """
        self._elsewhere |= {self._name(checkpoint / name) for name in names}
        self._sent.update(dict.fromkeys(self._elsewhere - self._sent.keys(), (0, 0)))
        self.send("work")

    def fetch(self, checkpoint: Path) -> None:
        """Fetch the missing files of a complete checkpoint.

        Raises:
            OSError: the fetched files do not match the marker's checksums.
        """
        # Imports torch, which must happen after the ranks are set up.
        from gristmill.train.checkpoint import MARKER, damaged_files

        remote = self._folder / self._name(checkpoint)
        marker = checkpoint / MARKER
        if not marker.exists():
            write_json(
                marker,
                self._patience.ask(
                    str(remote / MARKER), lambda: read_json(remote / MARKER)
                ),
            )
        missing = [
            name
            for name in read_json(marker)["files"]
            if not (checkpoint / name).exists()
        ]
        for name in missing:
            self._ask(self._name(checkpoint / name), "read")
        if missing and (damaged := damaged_files(checkpoint)):
            raise OSError(
                f"{remote}: {', '.join(damaged)} did not come here as saved; run the "
                "same command again"
            )
        with self._lock:
            self._sent.update(self._files(self._name(checkpoint)))

    def _name(self, path: Path) -> str:
        return path.relative_to(self._here).as_posix()

    def _ask(self, name: str, done: Request) -> None:
        """Send a file to the store, fetch it or remove it there."""
        remote: Any = self._folder / name
        local = str(self._here / name)

        def request() -> None:
            match done:
                case "written":
                    remote.fs.put_file(local, remote.path)
                case "read":
                    remote.fs.get_file(remote.path, local)
                case "removed":
                    remote.fs.rm_file(remote.path)

        self._patience.ask(str(remote), request, done)

    def _files(self, part: str) -> Sent:
        files = {}
        for path in (self._here / part).rglob("*"):
            if TEMPORARY_MARK not in path.name and path.is_file():
                status = path.stat()
                files[self._name(path)] = (status.st_size, status.st_mtime_ns)
        return files


def mirror_of(here: Path, stream: Stream, warn: Warn) -> Mirror | None:
    """Mirror of this training's folder; None if the stage folder is local, and on all
    ranks but the first of each host.
    """
    if VARIABLE not in os.environ or os.environ["LOCAL_RANK"] != "0":
        return None
    return Mirror(here, followed(here), stream, warn)


def _markers_last(names: Iterable[str]) -> list[str]:
    # Imports torch, which must happen after the ranks are set up.
    from gristmill.train.checkpoint import MARKER

    return sorted(names, key=lambda name: (name.endswith(f"/{MARKER}"), name))
