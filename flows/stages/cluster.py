"""`cluster`: numbers and names documents by subject."""

from __future__ import annotations

from gristmill.flows.stages.dedup_semantic import wrong_with_vectors
from gristmill.flows.stages.stage import (
    Display,
    MeasuredColumns,
    PrepareStep,
    Problems,
    Stage,
)
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.steps.dedup_semantic import Cluster


def preflight(manifest: Manifest, name: str, measured: MeasuredColumns) -> Problems:
    """Yield problems with the model's files, and missing packages."""
    yield from wrong_with_vectors(manifest, name)


STAGE = Stage(
    "cluster",
    3,
    "gristmill.dataprep.semantic.cluster:run",
    preflight=preflight,
    step=PrepareStep(Cluster, lambda section: ["domain", "domain_name"]),
    display=Display(
        report=(
            "gristmill.flows.report.document_sections:domains",
            "gristmill.flows.report.document_sections:reader",
        )
    ),
)
