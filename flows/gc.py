"""Removing what nothing refers to any more: outputs that no recent run names."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from gristmill.flows.lease import running_owner
from gristmill.flows.store import FINGERPRINT_CHARS, Store, read_runs, remove_tree


def collect(store: Store, keep_runs: int, delete: bool) -> list[tuple[Path, int]]:
    """Find outputs that the last runs of no manifest refer to, and delete them if asked to.

    Outputs that are being written are never touched.

    Args:
        store: where to look.
        keep_runs: for every manifest name, the outputs of so many newest runs stay.
        delete: whether to delete.

    Returns:
        (folder, bytes) of every output found.
    """
    kept = referenced_fingerprints(store, keep_runs)
    garbage = []
    for _, folder in store.outputs():
        fingerprint = folder.path.name.rpartition("--")[2]
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
        for records in by_manifest.values() for record in records[-keep_runs:] for stage in record["stages"].values()
    }
