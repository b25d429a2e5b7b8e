"""A training whose folder lies in an object store: it works in a folder of this machine, which the store follows.

A training appends to files, maps them into memory and renames them; objects allow none of it. So what earlier attempts
left (of their checkpoints the one to resume from), and all inputs but the packed set (which is streamed), is fetched
before it begins, and what has changed is sent after each checkpoint and at the end:

    CACHE/training/<hash of the URL>/stage.json, work/, data/, inputs/<stage>/

The store holds a state to resume from at every moment: a checkpoint's marker is sent after everything else, and removed
before what it stands for. The folder here is rebuilt by every attempt, and removed by those that end by themselves.

Of a training on several hosts each works in such a folder of its own (`<hash>-<host>`). It sends its ranks' parts of
checkpoints; the first one sends all else, and alone removes what is outdated.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from gristmill.dataprep.context import read_inputs
from gristmill.dataprep.files import TEMPORARY_MARK, as_path, is_local, read_json, write_json
from gristmill.dataprep.object_stores import Patience
from gristmill.dataprep.secrets import restore_secrets
from gristmill.mixtures.engine import Stream
from gristmill.tokenize.streaming.file_cache import default_folder
from gristmill.train.parallel.hosts import hosts_of

VARIABLE = "GRISTMILL_STAGE_FOLDER"
"""Holds, for the ranks of a training that works here, the URL of the folder that is to follow."""
OUTDATED = "outdated"
"""Under this name `stage.json` here has files in the store that go with the next checkpoint."""
STREAMED = "mix"
"""The input that is read row by row from wherever it lies."""
SAYING_SECONDS = 10.0
"""So long a store is asked to take the reason why a training ends; its parent process has heard it besides."""
Sent = dict[str, tuple[int, int]]
"""Files below the folder, by relative name: bytes and time of change (ns) as they were sent or fetched."""


def work_on(folder: Path, leads: bool = True) -> Path:
    """Where a training works that a folder describes: there, or in a folder of this machine, which that one follows.

    Args:
        folder: of the stage.
        leads: whether this host does, or is the only one.

    Raises:
        OSError: there is too little room for it here.
    """
    if is_local(folder):
        return folder
    here = work_here(folder, leads)
    os.environ[VARIABLE] = str(folder)
    return here


def followed(folder: Path) -> Path:
    """The folder in a store that follows the one which this process trains in; that itself where none does."""
    return as_path(os.environ.get(VARIABLE, str(folder)))


def work_here(folder: Path, leads: bool = True) -> Path:
    """Make the folder of this machine for a training that a folder in a store describes; returns it.

    Args:
        folder: in the store.
        leads: whether this host does: another one fetches no checkpoint before it knows which.

    Raises:
        OSError: there is too little room for it.
    """
    description = read_json(folder / "stage.json")
    engine = description["engine"]
    here = folder_here(folder, engine, hosts_of(engine) > 1)
    for apart in (False, True):  # what an earlier attempt has left, on as many hosts or not
        shutil.rmtree(folder_here(folder, engine, apart), ignore_errors=True)
    work = sizes_below(folder / "work")
    inputs = {
        name: location
        for name, location in read_inputs(restore_secrets(deepcopy(description))).items()
        if name != STREAMED and not is_local(location)
    }
    steps = sorted({step for name in work if (step := _checkpoint_of(name))}, reverse=True)
    newest = sum(size for name, size in work.items() if steps and _checkpoint_of(name) == steps[0])
    check_room(
        here,
        newest + sum(size for location in inputs.values() for size in sizes_below(location).values()),
        newest * engine["keep_checkpoints"],
    )
    fetch_tree(folder / "work", here / "work", lambda name: _checkpoint_of(name) is None)
    (here / "data").mkdir(parents=True, exist_ok=True)
    for name, location in inputs.items():
        fetch_tree(location, here / "inputs" / name)
    goes_back = description["config"].get("spikes", {}).get("rollback_after") is not None
    left = fetch_checkpoints(
        folder / "work", here / "work", steps if leads else [], engine, len(steps) if goes_back else 1
    )
    write_json(
        here / "stage.json",
        {
            **description,
            "fetched": {name: str(here / "inputs" / name) for name in inputs},
            OUTDATED: [f"work/{name}" for name in work if _checkpoint_of(name) in left],
        },
    )
    return here


def fetch_checkpoints(
    work: Path, here: Path, steps: Sequence[str], engine: Mapping[str, Any], at_least: int = 1
) -> set[str]:
    """Fetch what a training resumes from: its newest checkpoint whose contents are sound, and those it finds damaged.

    Where more than two are kept, those that stay beside the next one are fetched too, so that they go in their turn.

    Args:
        work, here: a training's working files, in the store and on this machine.
        steps: the names of all checkpoints in the store, the newest first, whole or not.
        engine: of its description.
        at_least: so many sound ones; a training that may go back needs them all.

    Returns:
        names of those that are not here and are to go with the next checkpoint; permanent ones stay.
    """
    # It imports torch, which the ranks must not before they are set up.
    from gristmill.train.loop.checkpoints import CHECKPOINTS, PREFIX, damaged_files, is_complete

    wanted, sound, fetched = max(engine["keep_checkpoints"] - 1, at_least), 0, 0
    for step in steps:
        if sound >= wanted:
            break
        fetched += 1
        fetch_tree(work / CHECKPOINTS / step, here / CHECKPOINTS / step)
        sound += is_complete(here / CHECKPOINTS / step) and not damaged_files(here / CHECKPOINTS / step)
    every = engine.get("permanent_every")
    return {step for step in steps[fetched:] if not every or int(step.removeprefix(PREFIX)) % every}


def _checkpoint_of(name: str) -> str | None:
    """The checkpoint that a file below work/ is part of."""
    parts = name.split("/")
    return parts[1] if len(parts) > 2 and parts[0] == "checkpoints" else None


def check_room(here: Path, fetched_bytes: int, written_bytes: int) -> None:
    """Raise OSError unless there is room for a training's folder.

    Args:
        here: the folder.
        fetched_bytes: of what it reads from the store.
        written_bytes: of its next checkpoints.
    """
    disk = next(folder for folder in here.parents if folder.exists())
    free, needed = shutil.disk_usage(disk).free, fetched_bytes + written_bytes
    if needed > free:
        raise OSError(
            f"the training works in {here}, which needs {needed / 1e9:,.3f} GB ({fetched_bytes / 1e9:,.3f} that it "
            f"fetches from the store, {written_bytes / 1e9:,.3f} for its next checkpoints), and {free / 1e9:,.3f} GB "
            "are free there; free some, or name a folder of a larger disk as engine.stream.cache_folder"
        )


def folder_here(folder: Path, engine: Mapping[str, Any], apart: bool) -> Path:
    """Where on this machine a training works whose folder lies in a store: one place for each URL, and for each of
    several hosts (`apart`), which may share their users' home folders."""
    named = Stream.model_validate(engine.get("stream", {})).cache_folder
    cache = Path(named) if named else default_folder()
    host = f"-{socket.gethostname()}" if apart else ""
    return (cache / "training" / f"{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}{host}").absolute()


def fetch_tree(source: Path, target: Path, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Copy the files below a folder of a store to a folder of this machine; none where there is none.

    Args:
        wanted: which, by their names below it.
    """
    target.mkdir(parents=True, exist_ok=True)
    for name in sizes_below(source):
        if wanted(name):
            file = target / name
            file.parent.mkdir(parents=True, exist_ok=True)
            source.fs.get_file((source / name).path, str(file))  # type: ignore[attr-defined]


def sizes_below(folder: Path) -> dict[str, int]:
    """Name -> bytes of all files below a folder of a store, by their names below it."""
    store, root = folder.fs, folder.path.rstrip("/")  # type: ignore[attr-defined]
    return {
        name[name.index(root) + len(root) :].lstrip("/"): entry["size"]
        for name, entry in store.find(root, detail=True).items()
        if not name.endswith("/")
    }  # an empty object that stands for a folder


class Mirror:
    """Keeps a folder of a store the same as a folder of this machine.

    Args:
        here: the folder of this machine, as `work_here` has made it.
        folder: the one in the store.
        stream: how long to try where the store fails.
        warn: called when the store fails, at most once a minute.
    """

    def __init__(self, here: Path, folder: Path, stream: Stream, warn: Callable[[str], None]) -> None:
        self._here, self._folder = here, folder
        self._patience = Patience(
            stream.retry_seconds,
            warn,
            f"check the store, or raise engine.stream.retry_seconds ({stream.retry_seconds:g})",
        )
        self._lock = threading.Lock()
        outdated = read_json(here / "stage.json").get(OUTDATED, ())
        self._sent: Sent = {**self._files("work"), **dict.fromkeys(outdated, (0, 0))}
        self._elsewhere = set[str]()

    def send(self, *parts: str) -> None:
        """Send what has changed in some folders below, and remove what is gone."""
        with self._lock:
            for part in parts:
                self._send(part)

    def add(self, folder: Path) -> None:
        """Send all files below a folder of this machine; what is in the store besides stays."""
        with self._lock:
            for name, state in self._files(self._name(folder)).items():
                self._patience.ask(str(self._folder / name), partial(self._put, name), "written")
                self._sent[name] = state

    def saved(self, checkpoint: Path, names: Iterable[str]) -> None:
        """Send what has changed in `work/`, once the hosts that have written some files of a checkpoint have sent them.

        Args:
            checkpoint: complete; its marker is sent now.
            names: of its files that are not here. They go with what is here.
        """
        self._elsewhere |= {self._name(checkpoint / name) for name in names}
        self._sent.update(dict.fromkeys(self._elsewhere - self._sent.keys(), (0, 0)))
        self.send("work")

    def fetch(self, checkpoint: Path) -> None:
        """Fetch the files of a complete checkpoint that are not here.

        Raises:
            OSError: what has come is not what its marker names.
        """
        # It imports torch, which the ranks must not before they are set up.
        from gristmill.train.loop.checkpoints import MARKER, damaged_files

        there = self._folder / self._name(checkpoint)
        marker = checkpoint / MARKER
        if not marker.exists():
            write_json(marker, self._patience.ask(str(there / MARKER), lambda: read_json(there / MARKER)))
        missing = [name for name in read_json(marker)["files"] if not (checkpoint / name).exists()]
        for name in missing:
            self._patience.ask(str(there / name), partial(self._get, self._name(checkpoint / name)))
        if missing and (damaged := damaged_files(checkpoint)):
            raise OSError(f"{there}: {', '.join(damaged)} did not come here as saved; run the same command again")
        with self._lock:
            self._sent.update(self._files(self._name(checkpoint)))

    def _name(self, path: Path) -> str:
        return path.relative_to(self._here).as_posix()

    def _get(self, name: str) -> None:
        source = self._folder / name
        source.fs.get_file(source.path, str(self._here / name))  # type: ignore[attr-defined]

    def _send(self, part: str) -> None:
        files = self._files(part)
        changed = {name for name, state in files.items() if self._sent.get(name) != state}
        for name in _markers_last(changed):
            with suppress(FileNotFoundError):  # removed here meanwhile: so it soon will be in the store
                self._patience.ask(str(self._folder / name), partial(self._put, name), "written")
                self._sent[name] = files[name]
        gone = {
            name
            for name in self._sent
            if name.startswith(f"{part}/")
            and name not in files
            and not (name in self._elsewhere and (self._here / name).parent.exists())
        }
        for name in reversed(_markers_last(gone)):
            with suppress(FileNotFoundError):
                self._patience.ask(str(self._folder / name), partial(self._remove, name), "removed")
            del self._sent[name]

    def _put(self, name: str) -> None:
        target = self._folder / name
        target.fs.put_file(str(self._here / name), target.path)  # type: ignore[attr-defined]

    def _remove(self, name: str) -> None:
        target = self._folder / name
        target.fs.rm_file(target.path)  # type: ignore[attr-defined]

    def _files(self, part: str) -> Sent:
        found: Sent = {}
        for folder, _, names in os.walk(self._here / part):
            for name in names:
                path = Path(folder, name)
                if TEMPORARY_MARK not in name and path.exists():
                    status = path.stat()
                    found[path.relative_to(self._here).as_posix()] = (status.st_size, status.st_mtime_ns)
        return found


def mirror_of(here: Path, engine: dict[str, Any], warn: Callable[[str], None]) -> Mirror | None:
    """What sends this training's files to the store that its folder lies in; None where that is this machine's, and
    on all ranks but the first of each host."""
    if VARIABLE not in os.environ or os.environ["LOCAL_RANK"] != "0":
        return None
    return Mirror(here, followed(here), Stream.model_validate(engine.get("stream", {})), warn)


def works_apart() -> bool:
    """Whether each host of this training works in a folder of its own."""
    return VARIABLE in os.environ and int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1


def _markers_last(names: Iterable[str]) -> list[str]:
    # It imports torch, which the ranks must not before they are set up.
    from gristmill.train.loop.checkpoints import MARKER

    return sorted(names, key=lambda name: (name.endswith(f"/{MARKER}"), name))
