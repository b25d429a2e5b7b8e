"""`gristmill export-documents`: a manifest's documents as files in a folder, in an object store, or on the hub."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gristmill.core.files import TEMPORARY_MARK, as_path, is_local, read_json
from gristmill.core.secrets import mask_text, remember_secrets
from gristmill.core.stage_context import Context
from gristmill.core.store import StageFolder, remove_tree
from gristmill.dataprep.conservation import ConservationError
from gristmill.dataprep.corpus import Corpus
from gristmill.dataprep.exporting.export_documents import LIST, NAMES, ExportError, export_documents
from gristmill.flows.questions.find_documents import committed_corpus
from gristmill.flows.running.run import Observer
from gristmill.flows.running.session import Session
from gristmill.flows.stages.documents import STAGE, problems_of, recipe_of
from gristmill.flows.stages.plan import Node, fingerprint
from gristmill.mixtures.evaluation import Documents

HUB = "hf://"
HUB_FOLDER = re.compile(r"^hf://datasets/(?P<name>[\w.-]+/[\w.-]+)(?P<inner>/.*)?$")
EXPORTS = "exports"
"""Folder of the store in which unfinished exports keep what they know."""
OWN_FILES = (LIST, "README.md", "croissant.json")


def publish(session: Session, section: Documents, out: str, observer: Observer) -> dict[str, Any]:
    """Write the documents of a manifest's committed steps.

    The same call resumes one that was interrupted, and does nothing where everything is written.

    Args:
        session: the opened manifest.
        section: which documents, and how.
        out: a folder, or a URL: of an object store, or hf://datasets/USER/NAME.
        observer: shown the progress.

    Returns:
        what `_documents.json` says, and `is_new`: whether this call wrote anything.

    Raises:
        gristmill.flows.questions.find_documents.NothingIngestedError: there are no documents yet.
        ExportError: a column or the condition is wrong, or something is in the way.
    """
    remember_secrets(out)
    corpus, recipe = committed_corpus(session), recipe_of(session.manifest, section)
    for key, message in problems_of(
        section,
        {step: [column for owner, column in corpus.measured.values() if owner == step] for step in corpus.steps},
    ):
        raise ExportError(f"--{key}: {message}")
    identity = fingerprint(STAGE, recipe, {name: session.plan[name].identity for name in corpus.inputs})
    folder = _open(out)
    work = session.store.root / EXPORTS / f"{identity[:16]}-{hashlib.sha256(out.encode()).hexdigest()[:8]}"
    if (folder / LIST).exists():
        found: dict[str, Any] = read_json(folder / LIST)
        if found.get("identity") != identity:
            raise ExportError(mask_text(f"{out} already holds another export; choose another folder, or remove it"))
        return {**found, "is_new": False}
    if work.exists():
        _remove_leftovers(folder, section)
    else:
        _refuse_others(folder, section, out)
    node = Node(STAGE, identity, recipe, recipe)
    observer.stage_started(node, work.exists(), StageFolder(work))
    found = export_documents(
        corpus, section, recipe["about"], folder, _context(session, work, node, observer, out), identity
    )
    if section.where is None:
        _check_ledger(session, corpus, section, found)
    remove_tree(work)
    if is_local(work) and not any(work.parent.iterdir()):
        work.parent.rmdir()
    return {**found, "is_new": True}


def _context(session: Session, work: Path, node: Node, observer: Observer, out: str) -> Context:
    engine = session.manifest.engine
    work.mkdir(parents=True, exist_ok=True)
    # The hub takes one commit at a time.
    workers = 1 if out.startswith(HUB) else engine.workers
    return Context(
        work=work,
        stage=node.name,
        workers=workers,
        runner=engine.runner,
        mode=engine.mode,
        address=engine.address,
        options=engine.options,
        shuffle=engine.shuffle,
        emit=lambda event: observer.stage_event(node, event),
    )


def _open(out: str) -> Path:
    """The folder, on the hub that of a data set which is there, and private if this call has made it."""
    if out.startswith(HUB):
        found = HUB_FOLDER.match(out)
        if found is None:
            raise ExportError(mask_text(f"{out}: a data set of the hub is written hf://datasets/USER/NAME"))
        from huggingface_hub import HfApi

        HfApi().create_repo(found["name"], repo_type="dataset", private=True, exist_ok=True)
    try:
        folder = as_path(out)
    except (ValueError, ImportError) as error:
        raise ExportError(
            mask_text(
                f"{out}: {error}; give a folder, or a URL of a kind that fsspec opens here, such "
                "as s3://bucket/folder or hf://datasets/USER/NAME"
            )
        ) from error
    if is_local(folder) and folder.exists() and not folder.is_dir():
        raise ExportError(f"{out} is a file; name a folder")
    return folder.resolve() if is_local(folder) else folder


def _refuse_others(folder: Path, section: Documents, out: str) -> None:
    """Raise ExportError where files lie that a reader would take for ours, or that would be written over."""
    prefix, ending = NAMES[section.format]
    inner = folder / prefix.rpartition("/")[0] if "/" in prefix else folder
    found = [path.name for path in inner.glob(f"*{ending}")] if inner.exists() else []
    if not out.startswith(HUB) and section.format == "hf":  # the hub makes a README.md itself
        found += [name for name in OWN_FILES if (folder / name).exists()]
    if found:
        raise ExportError(mask_text(f"{out} already holds {min(found)}; choose another folder, or remove it"))


def _remove_leftovers(folder: Path, section: Documents) -> None:
    """Remove what an attempt that was killed had not given its final name."""
    for name in (f"{NAMES[section.format][0]}-*", *OWN_FILES):
        for leftover in folder.glob(f"{name}{TEMPORARY_MARK}*") if is_local(folder) else ():
            leftover.unlink()


def _check_ledger(session: Session, corpus: Corpus, section: Documents, found: Mapping[str, Any]) -> None:
    """Raise ConservationError unless what is written is what the last step has counted as kept."""
    summaries = [session.folder(name).manifest()["summary"] for name in corpus.inputs]
    first, last = (summaries[place].get("counts", {}) for place in (0, -1))
    if not {"kept", "bytes_kept"} <= last.keys() or "kept" not in first:
        return
    counted = (
        {"documents": first["kept"] - last["kept"]}
        if section.dropped
        else {"documents": last["kept"], "text_bytes": last["bytes_kept"]}
    )
    differing = {name: number for name, number in counted.items() if found[name] != number}
    for name, number in differing.items():
        raise ConservationError(
            f"{found[name]:,} {name.replace('_', ' ')} were written, but the steps counted "
            f"{number:,}; find out why with: {session.command('verify')}"
        )
