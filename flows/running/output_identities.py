"""Identities of outputs: the fingerprints by which later stages refer to them.

The identity of an output is its fingerprint, unless its files equal those of an earlier
output of the same stage: then it takes that output's identity, so that no later
fingerprint changes ("early cutoff", Mokhov et al. 2018, "Build Systems a la Carte",
section 2.3). The manifest records it (`identity`), so it is committed with the files.

The output of an earlier version of a stage can be kept: `kept_output.json`, in the
folder of the current version's output, points to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace

from gristmill.core.files import find_json, json_digest, write_json
from gristmill.core.store import IDENTITY, Files, StageFolder, Store
from gristmill.flows.stages.plan import Node, Plan, settle_plan

KEPT_OUTPUT = "kept_output.json"


class NothingToKeepError(LookupError):
    """The store has no output of an earlier version of a stage."""


def content_digest(files: Files, timed: Collection[str]) -> str:
    """Digest of an output's files, by name, size and checksum.

    Args:
        files: files of the manifest.
        timed: names of files that record timings, which are left out.
    """
    entries = [
        [name, entry["bytes"], entry["sha256"]]
        for name, entry in sorted(files.items())
        if name not in timed
    ]
    return json_digest(entries)


def find_alias(store: Store, node: Node, files: Files) -> str:
    """Identity of the newest other output of a stage with the same files; empty if it
    is the node's own fingerprint.

    If another output with other files has taken the node's fingerprint as its identity
    (a forced rerun gave other bytes), the output gets a new identity.
    """
    digest = content_digest(files, node.stage.timed_files)
    identities: list[tuple[float, str]] = []
    is_taken = False
    for folder in store.outputs_of(node.name):
        manifest = folder.committed_manifest()
        if manifest is None or manifest["fingerprint"] == node.fingerprint:
            continue
        identity = str(manifest.get(IDENTITY, manifest["fingerprint"]))
        if content_digest(manifest["files"], node.stage.timed_files) == digest:
            identities.append((manifest["started"], identity))
        elif identity == node.fingerprint:
            is_taken = True
    if identities:
        identity = max(identities)[1]
        return "" if identity == node.fingerprint else identity
    if is_taken:
        return hashlib.sha256(f"{node.fingerprint} {digest}".encode()).hexdigest()
    return ""


def alias_of(folder: StageFolder) -> str:
    """Identity that a committed output took over; empty if it has its own."""
    manifest = folder.committed_manifest()
    return "" if manifest is None else str(manifest.get(IDENTITY, ""))


def settle_from_store(plan: Plan, store: Store, name: str) -> Plan:
    """Plan with the identities of committed outputs, and with kept outputs.

    Args:
        plan: the stages.
        store: store of their outputs.
        name: name of the manifest.
    """
    return settle_plan(plan, lambda node: settle_node(node, store, name))


def settle_node(node: Node, store: Store, name: str) -> Node:
    """Node with the alias of its output, or with the kept output."""
    folder = store.folder(node.name, name, node.fingerprint)
    manifest = folder.committed_manifest()
    if manifest is not None:
        return replace(node, alias=str(manifest.get(IDENTITY, "")))
    pointer = kept_output(folder)
    if pointer is None:
        return node
    kept_folder = store.folder(node.name, name, pointer.fingerprint)
    if kept_folder.state() != "committed":
        return node
    return replace(
        node,
        fingerprint=pointer.fingerprint,
        alias=alias_of(kept_folder),
        kept_version=pointer.version,
    )


@dataclass(frozen=True)
class KeptOutput:
    """Fingerprint and version of the kept output that replaces a folder's own."""

    fingerprint: str
    version: int


def kept_output(folder: StageFolder) -> KeptOutput | None:
    """The kept output to which a folder points, if there is one."""
    pointer = find_json(folder.path / KEPT_OUTPUT)
    return None if pointer is None else KeptOutput(**pointer)


def keep_output(node: Node, store: Store, name: str) -> None:
    """Keep the newest output of an earlier version of a stage with the same recipe and
    inputs.

    Raises:
        NothingToKeepError: the store has no such output.
    """
    for version in range(node.stage.version - 1, 0, -1):
        former = replace(
            node, stage=replace(node.stage, version=version)
        ).own_fingerprint
        if store.folder(node.name, name, former).state() == "committed":
            pointer = store.folder(node.name, name, node.fingerprint).path / KEPT_OUTPUT
            write_json(pointer, asdict(KeptOutput(former, version)))
            return
    raise NothingToKeepError(
        f"{node.name}: the store has no committed output that an earlier version of "
        "this stage made of the same "
        f"settings and inputs; its version is {node.stage.version}"
    )


def forget_kept(nodes: Iterable[Node], store: Store, name: str) -> None:
    """Stop keeping outputs of earlier versions of some stages."""
    for node in nodes:
        if node.kept_version is not None:
            (
                store.folder(node.name, name, node.own_fingerprint).path / KEPT_OUTPUT
            ).unlink(missing_ok=True)
