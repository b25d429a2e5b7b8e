"""`gristmill export-tokens`: the packed set of a manifest, in the formats that other trainers read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gristmill.flows.questions.find_documents import committed_inputs
from gristmill.flows.running.session import Session
from gristmill.flows.stages.registry import MIX, PRETRAIN


class NothingToExportError(LookupError):
    """The manifest has no packed set."""


def export_from(session: Session, form: str, out: str, order: str, split: str, shard_tokens: int) -> dict[str, Any]:
    """Export the tokens of a manifest's mixture.

    Args:
        session: the opened manifest.
        form: see `exporting.export.FORMATS`.
        out: folder or URL.
        order: `trained` (one epoch in the order of pre-training, which without a section `pretrain` has the manifest's
            seed; held-out rows have no such order), or `stored`.
        split: `train` or `validation`.
        shard_tokens: most tokens per file.

    Raises:
        NothingToExportError: the mixture is not packed yet.
    """
    from gristmill.core.files import as_path
    from gristmill.tokenize.exporting.exported_files import export_tokens
    from gristmill.tokenize.packed import PackedSet

    inputs = committed_inputs(session, session.plan)
    if MIX not in inputs:
        raise NothingToExportError(f"the mixture is not packed yet; run: {session.command('run', '--until', MIX)}")
    try:
        folder: Path = as_path(out)
    except (ValueError, ImportError) as error:
        raise NothingToExportError(
            f"{out}: {error}; give a folder, or a URL of a kind that fsspec opens here, such as s3://bucket/folder"
        ) from error
    return export_tokens(PackedSet(inputs[MIX]), folder, form, split, _seed(session, order, split), shard_tokens)


def _seed(session: Session, order: str, split: str) -> int | None:
    if order == "stored" or split == "validation":
        return None
    if PRETRAIN in session.plan:
        return int(session.plan[PRETRAIN].config["seed"])
    return session.manifest.seed
