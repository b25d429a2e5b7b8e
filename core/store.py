"""Store of outputs: one content-addressed folder per stage output, committed by one
file that is written last.

    STORE/<stage>/<name>--<fingerprint>/
        stage.json        description of the work, written before any work
        lease/            numbered leases of the owners; the number is the fencing token
        logs/             output of the stage's processes
        work/             state across attempts: records of finished shards, spills,
                          checkpoints
        data/             the final files
        manifest.json     every file with size and checksum, counts, timings, versions
        _SUCCESS          the checksum of manifest.json: the commit point
        kept_output.json  the earlier version's output that is used in place of this one
                          (`output_identities.py`)
    STORE/runs/<run>/run.json

The folders alone determine what is done. This file does not depend on what a stage
computes.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, NotRequired, TypedDict

from gristmill.core.files import (
    DEFAULT_STORE,
    OBJECT_STORES,
    TEMPORARY_MARK,
    as_path,
    create_exclusively,
    find_json,
    is_local,
    json_bytes,
    read_json,
    sha256_file,
    write_bytes,
    write_json,
    write_text,
)
from gristmill.core.object_stores import EXTRAS, asked_for, not_installed
from gristmill.core.processes import Cost
from gristmill.core.secrets import mask_text, remember_secrets

MANIFESTS = "manifests"
"""Folder of a store with the manifests created in Python and not saved elsewhere."""


ANSWER_SECONDS = 10.0
"""Timeout of an object store for the first request of a command."""
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gcs": "GOOGLE_APPLICATION_CREDENTIALS, which `gcloud auth application-default "
    "login` replaces",
    "azure": "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and "
    "AZURE_STORAGE_ACCOUNT_KEY, which `az login` replaces",
}
"""Extra of a store -> variables with its credentials."""
ENDPOINTS = {
    "s3": "AWS_ENDPOINT_URL names the address of a store that is not Amazon's",
    "gcs": "STORAGE_EMULATOR_HOST names the address of an emulator",
    "azure": "AZURE_STORAGE_CONNECTION_STRING names the address of an emulator",
}
"""Extra of a store -> variable with its address."""


class StoreLocationError(ValueError):
    """A location cannot hold a store; the message says what to give instead."""


def store_at(option: str | None) -> Store:
    """Store of an option, else of GRISTMILL_STORE, else the default; it need not exist
    yet.

    Raises:
        StoreLocationError: the location is a file or in this process's memory, no
            installed library opens such URLs, or the bucket does not exist or is not
            open to these credentials.
    """
    location = option or os.environ.get("GRISTMILL_STORE") or DEFAULT_STORE
    remember_secrets(location)
    try:
        store = Store.at(location)
        problem = why_not_open(store.root)
    except (ValueError, ImportError) as error:
        reason = " ".join(str(error).split())
        problem = (
            f"{reason}; give a folder, or a URL of a kind that fsspec opens here, such "
            "as s3://bucket/folder"
        )
    if location.startswith("memory:"):
        problem = (
            "it would be in the memory of this process alone, and stages run in "
            "processes of their own; give a folder, or the URL of an object store"
        )
    if problem is not None:
        raise StoreLocationError(mask_text(f"the store {location}: {problem}"))
    return store


def why_not_open(root: Path) -> str | None:
    """Reason why a folder, or the bucket of an object store, cannot be used, with a
    remedy; None if it can.

    A store that does not answer is given ANSWER_SECONDS, as nothing has started yet.
    """
    if is_local(root):
        if root.exists() and not root.is_dir():
            return "it is a file; name a folder with --store or GRISTMILL_STORE"
        return None
    protocol = root.protocol  # type: ignore[attr-defined]
    extra = EXTRAS.get(protocol, "")
    give = f"give {CREDENTIALS.get(extra)} in the environment"
    try:
        files = root.fs  # type: ignore[attr-defined]
    except ImportError as error:
        return not_installed(protocol, error)
    except ValueError as error:
        return f"there are no credentials ({error}); {give}"
    if protocol not in OBJECT_STORES:
        return None
    try:
        with asked_for(ANSWER_SECONDS):
            files.info(root.drive)
    except FileNotFoundError:
        return (
            f"there is no bucket {root.drive}, or these credentials may not know "
            "of it; make it, or correct the name"
        )
    except Exception as error:  # noqa: BLE001 - object stores' libraries raise errors of their own
        cause = str(error.__cause__ or error).partition("\n")[0]
        status = getattr(error, "status_code", getattr(error, "code", None))
        if (
            isinstance(error, PermissionError)
            or status in (401, 403)
            or cause.startswith("Forbidden")
        ):
            return f"access is denied ({cause}); {give}"
        if "Credential" in f"{type(error).__name__} {cause}":
            return f"there are no credentials ({cause}); {give}"
        return (
            f"it does not answer ({cause}); see that it can be reached from here; "
            f"{ENDPOINTS[extra]}"
        )
    return None


State = Literal["committed", "unfinished", "missing", "corrupt"]
FINGERPRINT_CHARS = 16
KEPT_WORK = ("tensorboard",)
"""Folders below work/ that stay after the commit."""
KEPT_LIST = "kept.json"
"""File with a stage's list of further paths below work/ that stay."""
LAST_WORK = ("result.json", KEPT_LIST)
"""Files of work/ that are removed last and in this order, so that a killed cleanup
resumes with the same list.
"""

HASHED_AT_ONCE = 4
"""Threads that hash the files of an output."""


IDENTITY: Final = "identity"
"""Key of a manifest for the identity of an equal earlier output; see
`output_identities.py`.
"""


class FileEntry(TypedDict):
    """A file in the manifest of an output."""

    bytes: int
    sha256: str


Files = Mapping[str, FileEntry]
"""Files of an output by their paths in it."""


class StageFingerprint(TypedDict):
    """Fingerprint of an output, with its stage."""

    stage: str
    fingerprint: str


class Attempt(TypedDict):
    """Hosts of an attempt at a training; a new one begins when a host is lost or joins.

    Attributes:
        started: seconds since 1970.
        after_step: last step before the attempt.
        hosts: names.
        lost: hosts of the previous attempt that are not among them.
    """

    started: float
    after_step: int
    hosts: list[str]
    lost: list[str]


class OutputManifest(TypedDict):
    """Manifest of a committed output."""

    stage: str
    version: int
    fingerprint: str
    recipe: dict[str, Any]
    input_fingerprints: list[StageFingerprint]
    edits: list[str]
    """Stages whose edits of texts were applied, in order."""
    how: NotRequired[dict[str, object]]
    """Settings of a training that do not change its result."""
    started: float
    """Seconds since 1970."""
    seconds: float
    lease: int
    cost: NotRequired[Cost]
    attempts: NotRequired[list[Attempt]]
    files: dict[str, FileEntry]
    summary: dict[str, Any]
    """Result of the stage."""
    versions: dict[str, str]
    """Libraries."""
    identity: NotRequired[str]


class CorruptError(RuntimeError):
    """A committed output that differs from its manifest."""


@dataclass(frozen=True)
class StageFolder:
    """Folder of a stage output, finished or not."""

    path: Path

    @property
    def data(self) -> Path:
        """Folder of the final files."""
        return self.path / "data"

    @property
    def work(self) -> Path:
        """Folder of state across attempts."""
        return self.path / "work"

    @property
    def logs(self) -> Path:
        """Folder of the output of attempts."""
        return self.path / "logs"

    def state(self) -> State:
        """State of the folder; compares sizes, not contents (see `verify`)."""
        if not self.path.exists():
            return "missing"
        if not (self.path / "_SUCCESS").exists():
            return "unfinished"
        return "corrupt" if next(self.damage(), None) else "committed"

    def manifest(self) -> OutputManifest:
        """Committed manifest.

        Raises:
            CorruptError: the manifest is missing, or differs from the committed one.
        """
        content = (self.path / "manifest.json").read_bytes()
        if (
            hashlib.sha256(content).hexdigest()
            != (self.path / "_SUCCESS").read_text().strip()
        ):
            raise CorruptError(
                f"{self.path / 'manifest.json'} is not the manifest that was committed"
            )
        manifest: OutputManifest = json.loads(content)
        return manifest

    def committed_manifest(self) -> OutputManifest | None:
        """Manifest of a readable commit, or None; the files may be damaged."""
        try:
            return self.manifest()
        except (OSError, ValueError, CorruptError):
            return None

    def damage(self, deep: bool = False) -> Iterator[str]:
        """Yield a sentence for every committed file that is missing, or has another
        size or (deep) another checksum.
        """
        try:
            files = self.manifest()["files"]
        except (OSError, ValueError, CorruptError) as error:
            yield str(error)
            return
        for name, entry in files.items():
            file = self.data / name
            size = file.stat().st_size if file.exists() else None
            if size is None:
                yield f"{file} is gone"
            elif size != entry["bytes"]:
                yield f"{file} has {size} bytes, committed were {entry['bytes']}"
            elif deep and sha256_file(file) != entry["sha256"]:
                yield f"{file} has the committed size but not the committed checksum"

    def begin(self, description: Mapping[str, object], shared: bool = False) -> None:
        """Write the description of the work, and set a damaged commit aside so that the
        work continues.

        Removes half-written files of an interrupted attempt.

        Args:
            shared: True if other hosts may work here (`engine.nodes`): half-written
                files of the output may be theirs, and stay until the commit.
        """
        for folder in (self.data, self.work, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        write_json(self.path / "stage.json", description)
        success = self.path / "_SUCCESS"
        if success.exists():
            number = len(list(self.path.glob("_CORRUPT.*")))
            write_text(
                self.path / f"_CORRUPT.{number}", "\n".join(self.damage()) + "\n"
            )
            success.unlink()
        self._remove_half_written(self.path.glob)
        if not shared:
            self._remove_half_written(self.data.rglob)

    def commit(
        self,
        header: Mapping[str, object],
        summary: Mapping[str, object],
        decide: Callable[[bytes], None] = lambda content: None,
        find_alias: Callable[[Files], str] = lambda files: "",
    ) -> None:
        """Commit the output: write the manifest, then `_SUCCESS`, then remove files
        that only attempts need.

        Another host that repeats a task, as its first host seemed dead, may still be
        writing: its temporary files are ignored.

        Args:
            header, summary: further entries of the manifest.
            decide: called with the manifest's content before the commit; raises to
                prevent it.
            find_alias: function from the files to the identity of an equal earlier
                output; empty if there is none.
        """
        paths = [
            file
            for file in sorted(self.data.rglob("*"))
            if TEMPORARY_MARK not in file.name and file.is_file()
        ]
        with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
            checksums = list(pool.map(sha256_file, paths))
        files: Files = {
            file.relative_to(self.data).as_posix(): {
                "bytes": file.stat().st_size,
                "sha256": checksum,
            }
            for file, checksum in zip(paths, checksums, strict=True)
        }
        manifest = {
            **header,
            "files": files,
            "summary": dict(summary),
            "versions": library_versions(),
        }
        if alias := find_alias(files):
            manifest[IDENTITY] = alias
        content = json_bytes(manifest)
        decide(content)
        self.publish(content)
        self._remove_half_written(self.data.rglob)
        self.clean_work()

    def publish(self, content: bytes) -> bool:
        """Write a manifest whose commit is decided, and `_SUCCESS`; False if a commit
        exists.

        Raises:
            CorruptError: another process has committed another manifest.
        """
        success, checksum = self.path / "_SUCCESS", hashlib.sha256(content).hexdigest()
        if success.exists():
            return False
        write_bytes(self.path / "manifest.json", content)
        if (
            not create_exclusively(success, checksum.encode())
            and success.read_text().strip() != checksum
        ):
            raise CorruptError(f"{self.path} was committed by somebody else meanwhile")
        return True

    def clean_work(self) -> None:
        """Remove files that only attempts need; the files that mark a pending cleanup
        go last.
        """
        if not self.work.exists():
            return
        marks = [self.work / name for name in LAST_WORK]
        names = [*KEPT_WORK, *find_json(self.work / KEPT_LIST, ())]
        _remove_but(self.work, [*(self.work / name for name in names), *marks])
        for mark in marks:
            mark.unlink(missing_ok=True)

    def is_tidy(self) -> bool:
        """True if the cleanup of a committed output is complete; a process may be
        killed during it.
        """
        return not (
            any((self.work / name).exists() for name in LAST_WORK)
            or any(self.path.glob(f"*{TEMPORARY_MARK}*"))
        )

    def tidy(self) -> None:
        """Remove leftovers of an attempt that was killed after its commit."""
        self.clean_work()
        self._remove_half_written(self.path.glob)

    def _remove_half_written(self, find: Callable[[str], Iterable[Path]]) -> None:
        for leftover in list(find(f"*{TEMPORARY_MARK}*")):
            leftover.unlink(missing_ok=True)


@dataclass(frozen=True)
class Store:
    """A folder, or any fsspec URL, with all stage outputs and the records of all
    runs.
    """

    root: Path

    @classmethod
    def at(cls, location: str | Path) -> Store:
        """Store at a local path or an fsspec URL."""
        root = as_path(location)
        return cls(root.resolve() if is_local(root) else root)

    def folder(self, stage: str, name: str, fingerprint: str) -> StageFolder:
        """Folder of a stage output; only the fingerprint counts, `name` is for
        people.
        """
        suffix = f"--{fingerprint[:FINGERPRINT_CHARS]}"
        for folder in self.outputs_of(stage):
            if folder.path.name.endswith(suffix):
                return folder
        return StageFolder(self.root / stage / f"{name}{suffix}")

    def outputs(self) -> Iterator[tuple[str, StageFolder]]:
        """Yield every stage output in the store, with its stage's name."""
        if not self.root.exists():
            return
        for stage in sorted(self.root.iterdir()):
            if stage.is_dir() and stage.name not in ("runs", "trash", MANIFESTS):
                for folder in self.outputs_of(stage.name):
                    yield stage.name, folder

    def outputs_of(self, stage: str) -> Iterator[StageFolder]:
        """Yield every output of one stage."""
        if not (self.root / stage).exists():
            return
        for folder in sorted((self.root / stage).iterdir()):
            if "--" in folder.name:
                yield StageFolder(folder)

    @property
    def runs(self) -> Path:
        """Folder of the records of runs."""
        return self.root / "runs"

    @property
    def trash(self) -> Path:
        """Folder of outputs replaced by a forced rerun."""
        return self.root / "trash"


def _remove_but(folder: Path, kept: list[Path]) -> None:
    """Remove a folder's content except some paths and their parent folders.

    Other hosts may write there until they have seen the commit, so a folder is renamed
    first, to an unknown name. In an object store, which has no folders, it is not
    renamed.
    """
    for item in folder.iterdir():
        if item in kept:
            continue
        if any(item in path.parents for path in kept):
            _remove_but(item, kept)
        elif item.is_dir():
            unknown_name = f"{item.name}{TEMPORARY_MARK}{uuid.uuid4().hex[:8]}"
            remove_tree(
                item.rename(item.with_name(unknown_name)) if is_local(item) else item
            )
        else:
            item.unlink(missing_ok=True)


def remove_tree(path: Path) -> None:
    """Remove a folder and its content."""
    if is_local(path):
        shutil.rmtree(path)
    else:
        path.rmdir(recursive=True)  # type: ignore[call-arg]


@cache
def library_versions() -> dict[str, str]:
    """Versions of installed libraries that affect results."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": platform.python_version()}
    for package in (
        "gristmill apache-beam pyarrow numpy numba datasketch fasttext tokenizers torch"
    ).split():
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def new_run_folder(store: Store, name: str) -> Path:
    """Create the folder of a new run, named by the time; two runs in one second get two
    folders.
    """
    base = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    folder = store.runs / base
    number = 1
    while not create_exclusively(folder / "started", uuid.uuid4().hex.encode()):
        number += 1
        folder = store.runs / f"{base}-{number}"
    return folder


def read_runs(store: Store) -> list[tuple[Path, dict[str, Any]]]:
    """All runs with their records, oldest first."""
    if not store.runs.exists():
        return []
    return [
        (folder, read_json(folder / "run.json"))
        for folder in sorted(store.runs.iterdir())
        if (folder / "run.json").exists()
    ]
