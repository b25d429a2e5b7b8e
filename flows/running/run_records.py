"""Records of runs (manifest, outputs of stages, end state), and garbage collection of
outputs without a record.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Required, TypedDict

from gristmill.core.files import TEMPORARY_MARK, find_json, is_local, write_json
from gristmill.core.lease import (
    FORGOTTEN_SECONDS,
    ProcessIdentity,
    identity,
    is_gone,
    running_owner,
)
from gristmill.core.secrets import mask_secrets
from gristmill.core.store import (
    FINGERPRINT_CHARS,
    Attempt,
    Store,
    new_run_folder,
    read_runs,
    remove_tree,
)
from gristmill.flows.running.events import (
    RunEvent,
    StageFailed,
    StageFinished,
    StageStarted,
    StageWaits,
    StageWarning,
)
from gristmill.flows.running.output_identities import alias_of, kept_output
from gristmill.flows.stages.plan import Node, Plan
from gristmill.mixtures.manifest import Manifest

ROWS = ("read", "kept", "quarantined")
"""Document counts in the record of a stage."""
RECORDED = (StageStarted, StageWaits, StageFinished, StageFailed)
"""Events that change the record of a run."""
log = logging.getLogger("gristmill.runs")


class KeptVersion(TypedDict):
    """Version of a stage whose output is kept, and its current version."""

    version: int
    instead_of: int


class StageEntry(TypedDict, total=False):
    """A stage in `run.json`: its output, and its outcome in this run so far.

    `identity` and `kept` are there if they differ from the fingerprint's; `started` of
    a stage that runs, `error` of one that failed, the others of one with a committed
    output. `rows` has document counts; `attempts` the changing hosts of a training;
    `warnings` those of this run.
    """

    fingerprint: Required[str]
    identity: str
    kept: KeptVersion
    started: float
    error: str
    how: str
    seconds: float
    folder: str
    note: str
    rows: dict[str, int]
    attempts: list[Attempt]
    warnings: list[str]


class RunContent(TypedDict, total=False):
    """Content of `run.json`; `message` and `finished` are there when the run has ended.
    Times are seconds since 1970.
    """

    run: Required[str]
    name: Required[str]
    manifest_file: Required[str]
    manifest: Required[dict[str, object]]
    overrides: Required[list[str]]
    settings: Required[dict[str, object]]
    state: Required[str]
    started: Required[float]
    owner: Required[ProcessIdentity]
    stages: Required[dict[str, StageEntry]]
    message: str
    finished: float


@dataclass
class RunRecord:
    """`run.json` of one run, rewritten at every change; a subscriber to its events."""

    folder: Path
    content: RunContent
    plan: Plan = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    _warnings: dict[str, list[str]] = field(
        default_factory=lambda: defaultdict(list), repr=False
    )

    @classmethod
    def start(
        cls,
        store: Store,
        manifest: Manifest,
        file: str,
        overrides: list[str],
        plan: Plan,
    ) -> RunRecord:
        """Create a new run's folder and first record; remove half-written files of
        killed runs.
        """
        remove_half_written(store)
        folder = new_run_folder(store, manifest.name)
        content: RunContent = {
            "run": folder.name,
            "name": manifest.name,
            "manifest_file": str(Path(file).resolve()),
            "manifest": manifest.model_dump(mode="json", exclude_none=True),
            "overrides": overrides,
            "settings": manifest.model_dump(mode="json", exclude_unset=True),
            "state": "running",
            "started": time.time(),
            "owner": identity(os.getpid()),
            "stages": {name: _names_of(node) for name, node in plan.items()},
        }
        record = cls(folder, content, plan)
        record.save()
        return record

    def note(self, event: RunEvent) -> None:
        """Record an event of a stage; progress is recorded beside the stage's lease.

        A store that rejects the record of a start or a failure does not end the stage.
        """
        if isinstance(event, StageWarning):
            self._warnings[event.node.name].append(event.message)
        if not isinstance(event, RECORDED):
            return  # a stage that prints must not wait for a slow store
        with self._lock:
            match event:
                case StageFinished(outcome=outcome):
                    # Later stages may have new identities.
                    state_keys = {"how", "started", "error"}
                    stages = self.content["stages"]
                    for name, later in self.plan.items():
                        if state_keys.isdisjoint(stages[name]):
                            stages[name] = _names_of(later)
                    entry = _names_of(self.plan[outcome.stage])
                    entry |= {
                        "how": outcome.how,
                        "seconds": round(outcome.seconds, 3),
                        "folder": str(outcome.folder.path),
                        "note": outcome.note,
                    }
                    manifest = outcome.folder.manifest()
                    if "attempts" in manifest:
                        entry["attempts"] = manifest["attempts"]
                    counts = manifest["summary"].get("counts") or {}
                    rows = {kind: counts[kind] for kind in ROWS if kind in counts}
                    if rows:
                        entry["rows"] = rows
                    if outcome.stage in self._warnings:
                        entry["warnings"] = self._warnings[outcome.stage]
                    stages[outcome.stage] = entry
                    self.save()
                case StageStarted() | StageWaits():
                    self._note(
                        event.node, {**_names_of(event.node), "started": time.time()}
                    )
                case StageFailed():
                    self._note(
                        event.node, {**_names_of(event.node), "error": event.message}
                    )

    def _note(self, node: Node, entry: StageEntry) -> None:
        self.content["stages"][node.name] = entry
        try:
            self.save()
        except Exception as error:  # noqa: BLE001 - object stores' libraries raise errors of their own
            log.warning("the record of the run could not be written: %s", error)

    @contextmanager
    def until_end(self) -> Iterator[None]:
        """Record the end of the block: completed, failed or interrupted."""
        try:
            yield
        except BaseException as error:
            self.finish(
                "failed" if isinstance(error, Exception) else "interrupted", str(error)
            )
            raise
        self.finish("completed")

    def finish(self, state: str, message: str = "") -> None:
        """Record the end of the run: completed, failed or interrupted."""
        with self._lock:
            self.content["state"] = state
            self.content["message"] = message
            self.content["finished"] = time.time()
            self.save()

    def save(self) -> None:
        """Write the record, without credentials in addresses or settings."""
        write_json(self.folder / "run.json", mask_secrets(self.content))


def remove_half_written(store: Store) -> None:
    """Remove temporary files from the folders of runs that have ended or were
    killed.
    """
    if not is_local(store.runs) or not store.runs.exists():
        return
    for leftover in store.runs.glob(f"*/*{TEMPORARY_MARK}*"):
        owner = find_json(leftover.with_name("run.json"), {}).get("owner")
        with suppress(FileNotFoundError):  # it was just renamed
            is_old = time.time() - leftover.stat().st_mtime > FORGOTTEN_SECONDS
            if is_old or (owner is not None and is_gone(owner)):
                leftover.unlink()


def _names_of(node: Node) -> StageEntry:
    """Entry for a stage's output: its fingerprint, its identity if different, and its
    version if it is kept.
    """
    names: StageEntry = {"fingerprint": node.fingerprint}
    if node.alias:
        names["identity"] = node.alias
    if node.kept_version is not None:
        names["kept"] = {"version": node.kept_version, "instead_of": node.stage.version}
    return names


def collect(store: Store, keep_runs: int, delete: bool) -> list[tuple[Path, int]]:
    """Find outputs that no recent run refers to, and delete them if `delete`.

    Outputs in progress are never touched. An output whose identity a referenced one has
    taken over stays, as later outputs refer to its folder.

    Args:
        store: the store.
        keep_runs: see `referenced_fingerprints`.
        delete: True to delete.

    Returns:
        (folder, bytes) of every unreferenced output.
    """
    referenced = referenced_fingerprints(store, keep_runs)
    folders = [
        (folder.path.name.rpartition("--")[2], folder) for _, folder in store.outputs()
    ]
    referenced |= {
        alias_of(folder)[:FINGERPRINT_CHARS]
        for fingerprint, folder in folders
        if fingerprint in referenced
    }
    garbage = []
    for fingerprint, folder in folders:
        pointer = kept_output(folder)
        if (
            pointer is not None
            and pointer.fingerprint[:FINGERPRINT_CHARS] in referenced
        ):
            continue
        if (
            fingerprint not in referenced
            and running_owner(folder.path / "lease") is None
        ):
            garbage.append(folder.path)
    if store.trash.exists():
        garbage += sorted(store.trash.iterdir())
    sizes = []
    for path in garbage:
        num_bytes = sum(
            file.stat().st_size for file in path.rglob("*") if file.is_file()
        )
        sizes.append((path, num_bytes))
    if delete:
        for path in garbage:
            # Removing the marker first prevents a half-deleted output from counting as
            # complete.
            (path / "_SUCCESS").unlink(missing_ok=True)
            remove_tree(path)
    return sizes


def referenced_fingerprints(store: Store, keep_runs: int) -> set[str]:
    """Shortened fingerprints in the newest runs of every manifest: `keep_runs` of each
    of its stages, so that runs which end earlier do not give up a trained model.
    """
    by_stage = defaultdict(list)
    for _, record in read_runs(store):
        for stage in record["stages"]:
            by_stage[record["name"], stage].append(record)
    return {
        entry["fingerprint"][:FINGERPRINT_CHARS]
        for records in by_stage.values()
        for record in records[-keep_runs:]
        for entry in record["stages"].values()
    }
