"""What a training's skipped steps had read, and the origin, language, quality and cluster of each document.

A report holds what was known when it was written; the rest is read where it lies.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from gristmill.core.files import read_json
from gristmill.core.store import StageFolder
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.row_provenance import known_of


def spike_reports(folder: StageFolder) -> list[dict[str, Any]]:
    """The loss-spike reports of a training, in the order of the steps; see gristmill.train.loop.spike_report."""
    found = [read_json(path) for path in sorted((folder.data / "autopsies").glob("step-*.json"))]
    return sorted(found, key=lambda one: int(one["step"]))


def with_origins(found: list[dict[str, Any]], mix: Path, inputs: Mapping[str, Path]) -> list[dict[str, Any]]:
    """A pre-training's loss-spike reports, the attributed documents described as far as earlier stages know them.

    Args:
        found: as from `spike_reports`.
        mix: the packed set that was read.
        inputs: committed data folders by stage, `ingest` among them.
    """
    suspects = {one for step in found for one in step["suspects"]}
    if not suspects:
        return found
    with closing(PackedSet(mix)) as packed:
        known = known_of(packed, inputs, suspects)
    return [{**step, "documents": [{**one, **known.get(one["id"], {})} for one in step["documents"]]} for step in found]
