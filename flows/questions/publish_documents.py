"""`gristmill export-documents`: write a manifest's documents to a folder, an object
store, or the Hugging Face Hub.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gristmill.core.files import TEMPORARY_MARK, as_path, find_json, is_local
from gristmill.core.secrets import mask_text, remember_secrets
from gristmill.core.stage_context import Context
from gristmill.core.store import StageFolder, remove_tree
from gristmill.dataprep.conservation import ConservationError
from gristmill.dataprep.corpus import Corpus
from gristmill.dataprep.exporting.export_documents import (
    LIST,
    NAMES,
    ExportError,
    export_documents,
)
from gristmill.flows.questions.find_documents import committed_corpus
from gristmill.flows.running.events import StageStarted, Subscriber, parse_event
from gristmill.flows.running.session import Session
from gristmill.flows.stages.documents import STAGE, problems_of, recipe_of
from gristmill.flows.stages.plan import Node, fingerprint
from gristmill.mixtures.hub_paths import HUB
from gristmill.mixtures.schema.evaluation import Documents

EXPORTS = "exports"
"""Folder of the store for the state of unfinished exports."""
OWN_FILES = (LIST, "README.md", "croissant.json")


def publish(
    session: Session, section: Documents, out: str, emit: Subscriber
) -> dict[str, Any]:
    """Write the documents of a manifest's committed steps.

    The same call resumes an interrupted export, and does nothing if everything is
    written.

    Args:
        session: the opened manifest.
        section: selection and format of the documents.
        out: a folder, or a URL: of an object store, or hf://datasets/USER/NAME.
        emit: receives progress.

    Returns:
        the content of `_documents.json`, and `is_new`: True if this call wrote
        anything.

    Raises:
        gristmill.flows.questions.find_documents.NothingIngestedError: no documents are
            committed yet.
        ExportError: a column or the condition is invalid, or the target holds other
            files.
    """
    remember_secrets(out)
    corpus, recipe = committed_corpus(session), recipe_of(session.manifest, section)
    for key, message in problems_of(
        section,
        {
            step: [
                column for owner, column in corpus.measured.values() if owner == step
            ]
            for step in corpus.steps
        },
    ):
        raise ExportError(f"--{key}: {message}")
    identity = fingerprint(
        STAGE, recipe, {name: session.plan[name].identity for name in corpus.inputs}
    )
    folder = _open_target(out)
    work = (
        session.store.root
        / EXPORTS
        / f"{identity[:16]}-{hashlib.sha256(out.encode()).hexdigest()[:8]}"
    )
    summary: dict[str, Any] | None = find_json(folder / LIST)
    foreign = None
    if summary is not None:
        if summary.get("identity") == identity:
            return {**summary, "is_new": False}
        foreign = "another export"
    elif work.exists():
        own = (f"{NAMES[section.format][0]}-*", *OWN_FILES)
        for pattern in own if is_local(folder) else ():
            for leftover in folder.glob(f"{pattern}{TEMPORARY_MARK}*"):
                leftover.unlink()
    else:
        prefix, ending = NAMES[section.format]
        inner = folder / prefix.rpartition("/")[0] if "/" in prefix else folder
        existing = (
            [path.name for path in inner.glob(f"*{ending}")] if inner.exists() else []
        )
        # the hub makes a README.md itself
        if not out.startswith(HUB) and section.format == "hf":
            existing += [name for name in OWN_FILES if (folder / name).exists()]
        foreign = min(existing, default=None)
    if foreign is not None:
        raise ExportError(
            mask_text(
                f"{out} already holds {foreign}; choose another folder, or remove it"
            )
        )
    node = Node(STAGE, identity, recipe, recipe)
    emit(StageStarted(node, StageFolder(work), work.exists()))

    def emit_report(content: dict[str, Any]) -> None:
        event = parse_event(node, content)
        if event is not None:
            emit(event)

    engine = session.manifest.engine
    work.mkdir(parents=True, exist_ok=True)
    # The hub takes one commit at a time.
    workers = 1 if out.startswith(HUB) else engine.workers
    exported = export_documents(
        corpus,
        section,
        recipe["about"],
        folder,
        Context(
            work=work,
            stage=node.name,
            beam=engine.model_copy(update={"nodes": 1, "workers": workers}),
            emit=emit_report,
        ),
        identity,
    )
    summary = asdict(exported)
    if section.where is None:
        _check_counts(session, corpus, section, summary)
    remove_tree(work)
    if is_local(work) and not any(work.parent.iterdir()):
        work.parent.rmdir()
    return {**summary, "is_new": True}


def _open_target(out: str) -> Path:
    """Open the target folder; on the hub, create the data set as private if it does not
    exist.
    """
    if out.startswith(HUB):
        from huggingface_hub import HfApi, parse_hf_uri

        name = parse_hf_uri(out)
        if name.type != "dataset":
            raise ExportError(
                mask_text(
                    f"{out}: a data set of the hub is written hf://datasets/USER/NAME"
                )
            )
        HfApi().create_repo(name.id, repo_type=name.type, private=True, exist_ok=True)
    try:
        folder = as_path(out)
    except (ValueError, ImportError) as error:
        raise ExportError(
            mask_text(
                f"{out}: {error}; give a folder, or a URL of a kind that fsspec opens "
                "here, such as s3://bucket/folder or hf://datasets/USER/NAME"
            )
        ) from error
    if is_local(folder) and folder.exists() and not folder.is_dir():
        raise ExportError(f"{out} is a file; name a folder")
    return folder.resolve() if is_local(folder) else folder


def _check_counts(
    session: Session, corpus: Corpus, section: Documents, summary: Mapping[str, Any]
) -> None:
    """Raise ConservationError unless the numbers written equal those that the last step
    counted as kept.
    """
    counts = [
        session.folder(name).manifest()["summary"].get("counts", {})
        for name in corpus.inputs
    ]
    first, last = counts[0], counts[-1]
    if not {"kept", "bytes_kept"} <= last.keys() or "kept" not in first:
        return
    expected = {"documents": last["kept"], "text_bytes": last["bytes_kept"]}
    if section.dropped:
        expected = {"documents": first["kept"] - last["kept"]}
    for name, number in expected.items():
        if summary[name] != number:
            raise ConservationError(
                f"{summary[name]:,} {name.replace('_', ' ')} were written, but the "
                "steps counted "
                f"{number:,}; find out why with: {session.command('verify')}"
            )
