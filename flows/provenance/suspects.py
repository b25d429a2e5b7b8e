"""What a training's skipped steps had read, with what is known of each suspect: address, language, quality, cluster.

An autopsy names documents by id and source, since training sees no more of them; the rest is read where it lies.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from gristmill.dataprep.files import read_json
from gristmill.flows.provenance.documents import describe_documents
from gristmill.flows.store import StageFolder
from gristmill.tokenize.packed import PackedSet

KNOWN = ("url", "locator", "language", "quality", "cluster", "cluster_size")
"""What of a document's description stands beside a suspect."""


def autopsies(folder: StageFolder) -> list[dict[str, Any]]:
    """The autopsies of a training, in the order of the steps; see gristmill.train.loop.autopsy."""
    found = [read_json(path) for path in sorted((folder.data / "autopsies").glob("step-*.json"))]
    return sorted(found, key=lambda one: int(one["step"]))


def with_origins(found: list[dict[str, Any]], mix: Path, inputs: Mapping[str, Path]) -> list[dict[str, Any]]:
    """A pre-training's autopsies, their suspects described as far as the stages before it know them.

    Args:
        found: as from `autopsies`.
        mix: the packed set that was read.
        inputs: committed data folders by stage, `ingest` among them.
    """
    suspects = {bytes.fromhex(one) for step in found for one in step["suspects"]}
    if not suspects:
        return found
    with closing(PackedSet(mix)) as packed:
        described = {key.hex(): {name: value[name] for name in KNOWN if name in value}
                     for key, value in describe_documents(packed, inputs, suspects).items()}
    return [{**step, "documents": [{**one, **described.get(one["id"], {})} for one in step["documents"]]}
            for step in found]


def describe_origin(one: Mapping[str, Any]) -> str:
    """One line: where a document is from and how it was judged."""
    parts = [str(one.get("url") or one.get("locator") or ""), str(one.get("language") or "")]
    parts += [f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
              for name, value in one.get("quality", {}).items()]
    if one.get("cluster_size", 1) > 1:
        parts.append(f"cluster {one['cluster'][:8]} of {one['cluster_size']}")
    return " · ".join(part for part in parts if part)
