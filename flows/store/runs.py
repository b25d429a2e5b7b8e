"""The record of a run: which manifest, which stage outputs, how it ended; and removing outputs that no record names."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gristmill.dataprep.files import TEMPORARY_MARK, is_local, read_json, write_json
from gristmill.dataprep.secrets import mask_secrets
from gristmill.flows.running.run import Outcome
from gristmill.flows.stages.plan import Node, Plan
from gristmill.flows.store.identities import alias_of, kept_output
from gristmill.flows.store.lease import FORGOTTEN_SECONDS, identity, is_gone, running_owner
from gristmill.flows.store.store import (
    FINGERPRINT_CHARS,
    StageFolder,
    Store,
    new_run_folder,
    read_runs,
    remove_tree,
)
from gristmill.mixtures.manifest import Manifest

ROWS = ("read", "kept", "quarantined")
"""Counts of documents that a record has of a stage."""
log = logging.getLogger("gristmill.runs")


@dataclass
class RunRecord:
    """`run.json` of one run, rewritten whenever something happened: an observer of its stages."""

    folder: Path
    content: dict[str, Any] = field(default_factory=dict)
    plan: Plan = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    @classmethod
    def start(cls, store: Store, manifest: Manifest, file: str, overrides: list[str], plan: Plan) -> RunRecord:
        """Make a new run's folder and first record; remove what killed runs have left half-written."""
        remove_half_written(store)
        record = cls(new_run_folder(store, manifest.name), plan=plan)
        record.content = {
            "run": record.folder.name,
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
        record.save()
        return record

    def stage_started(self, node: Node, resuming: bool, folder: StageFolder) -> None:
        """See Observer."""
        self._note(node, started=time.time())

    def stage_waits(self, node: Node, owner: Mapping[str, Any]) -> None:
        """See Observer."""
        self._note(node, started=time.time())

    def stage_event(self, node: Node, event: Mapping[str, Any]) -> None:
        """See Observer; how far a stage is stands beside its lease."""

    def stage_finished(self, node: Node, outcome: Outcome) -> None:
        """Note how a stage came to its output, and what later stages are called now."""
        with self._lock:
            for name, later in self.plan.items():
                if not self.content["stages"][name].keys() & {"how", "started", "error"}:
                    self.content["stages"][name] = _names_of(later)
            counts = outcome.folder.manifest()["summary"].get("counts") or {}
            rows = {kind: counts[kind] for kind in ROWS if kind in counts}
            self.content["stages"][outcome.stage] = {
                **_names_of(self.plan[outcome.stage]),
                "how": outcome.how,
                "seconds": round(outcome.seconds, 3),
                "folder": str(outcome.folder.path),
                "note": outcome.note,
                **({"rows": rows} if rows else {}),
            }
            self.save()

    def stage_failed(self, node: Node, message: str) -> None:
        """See Observer."""
        self._note(node, error=message)

    def _note(self, node: Node, **values: Any) -> None:
        """Add to a stage's entry; a store that does not take it ends no stage for that."""
        with self._lock:
            self.content["stages"][node.name] = {**_names_of(node), **values}
            try:
                self.save()
            except Exception as error:  # noqa: BLE001 - object stores' libraries raise errors of their own
                log.warning("the record of the run could not be written: %s", error)

    @contextmanager
    def until_end(self) -> Iterator[None]:
        """Note how what is done inside ends: completed, failed or interrupted."""
        try:
            yield
        except BaseException as error:
            self.finish("failed" if isinstance(error, Exception) else "interrupted", str(error))
            raise
        self.finish("completed")

    def finish(self, state: str, message: str = "") -> None:
        """Note how the run ended: completed, failed or interrupted."""
        with self._lock:
            self.content.update(state=state, message=message, finished=time.time())
            self.save()

    def save(self) -> None:
        """Write the record, without credentials that addresses or settings carry."""
        write_json(self.folder / "run.json", mask_secrets(self.content))


def remove_half_written(store: Store) -> None:
    """Remove temporary files from the folders of runs that have ended, or were killed."""
    if not is_local(store.runs) or not store.runs.exists():
        return
    for leftover in store.runs.glob(f"*/*{TEMPORARY_MARK}*"):
        file = leftover.with_name("run.json")
        owner = read_json(file).get("owner") if file.exists() else None
        with suppress(FileNotFoundError):  # it was just renamed
            is_old = time.time() - leftover.stat().st_mtime > FORGOTTEN_SECONDS
            if is_old or (owner is not None and is_gone(owner)):
                leftover.unlink()


def _names_of(node: Node) -> dict[str, Any]:
    """Names of a stage's output: its fingerprint, the one that it equals, and the version that made it if it is kept."""
    names: dict[str, Any] = {"fingerprint": node.fingerprint}
    if node.alias:
        names["identity"] = node.alias
    if node.kept_version is not None:
        names["kept"] = {"version": node.kept_version, "instead_of": node.stage.version}
    return names


def collect(store: Store, keep_runs: int, delete: bool) -> list[tuple[Path, int]]:
    """Find outputs that the last runs of no manifest refer to, and delete them if asked to.

    Outputs that are being written are never touched. An output whose identity a kept one has taken over stays: what
    was made behind it names its folder.

    Args:
        store: where to look.
        keep_runs: for every manifest name, the outputs of so many newest runs stay.
        delete: whether to delete.

    Returns:
        (folder, bytes) of every output found.
    """
    kept = referenced_fingerprints(store, keep_runs)
    folders = [(folder.path.name.rpartition("--")[2], folder) for _, folder in store.outputs()]
    kept |= {alias_of(folder)[:FINGERPRINT_CHARS] for fingerprint, folder in folders if fingerprint in kept}
    garbage = []
    for fingerprint, folder in folders:
        former = kept_output(folder)
        if former is not None and former["fingerprint"][:FINGERPRINT_CHARS] in kept:
            continue
        if fingerprint not in kept and running_owner(folder.path / "lease") is None:
            garbage.append(folder.path)
    if store.trash.exists():
        garbage += sorted(store.trash.iterdir())
    sizes = [(path, sum(file.stat().st_size for file in path.rglob("*") if file.is_file())) for path in garbage]
    if delete:
        for path in garbage:
            # Without its marker the output does not count, so that a half-deleted one cannot be mistaken for a whole.
            (path / "_SUCCESS").unlink(missing_ok=True)
            remove_tree(path)
    return sizes


def referenced_fingerprints(store: Store, keep_runs: int) -> set[str]:
    """The shortened fingerprints that the newest runs of every manifest name."""
    by_manifest = defaultdict(list)
    for _, record in read_runs(store):
        by_manifest[record["name"]].append(record)
    return {
        stage["fingerprint"][:FINGERPRINT_CHARS]
        for records in by_manifest.values()
        for record in records[-keep_runs:]
        for stage in record["stages"].values()
    }
