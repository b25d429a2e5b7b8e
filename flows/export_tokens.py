"""Export of a manifest's packed set in the token formats of other trainers (`gristmill
export-tokens`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gristmill.flows.questions.find_documents import committed_inputs
from gristmill.flows.running.session import Session
from gristmill.flows.stages.registry import MIX, PRETRAIN

if TYPE_CHECKING:
    from gristmill.tokenize.exporting.exported_files import Export


class NothingToExportError(LookupError):
    """A manifest without a packed set, or an unusable destination."""


def export_from(
    session: Session, form: str, out: str, order: str, split: str, shard_tokens: int
) -> Export:
    """Export the tokens of a manifest's mixture.

    Args:
        session: the opened manifest.
        form: one of `exported_files.FORMATS`.
        out: folder or URL.
        order: `trained` (one epoch in the order of pre-training, seeded by the manifest
            if it has no section `pretrain`; held-out rows are always in stored order),
            or `stored`.
        split: `train` or `validation`.
        shard_tokens: maximum tokens per file.

    Raises:
        NothingToExportError: the manifest has no mixture, it is not packed yet, or
            `out` cannot be opened.
    """
    from gristmill.core.files import as_path
    from gristmill.tokenize.exporting.exported_files import export_tokens
    from gristmill.tokenize.packed import PackedSet

    if session.manifest.mix is None:
        raise NothingToExportError(
            f"{session.manifest_file} has no `mix:` section, so it has no packed tokens"
        )
    inputs = committed_inputs(session)
    if MIX not in inputs:
        raise NothingToExportError(
            "the mixture is not packed yet; run: "
            f"{session.command('run', '--until', MIX)}"
        )
    try:
        folder: Path = as_path(out)
    except (ValueError, ImportError) as error:
        raise NothingToExportError(
            f"{out}: {error}; give a folder, or a URL that the installed fsspec can "
            "open, such as s3://bucket/folder"
        ) from error
    seed: int | None = session.manifest.seed
    if order == "stored" or split == "validation":
        seed = None
    elif PRETRAIN in session.plan:
        seed = int(session.plan[PRETRAIN].config["seed"])
    return export_tokens(
        PackedSet(inputs[MIX]), folder, form, split, seed, shard_tokens
    )
