"""`cluster`: numbers and names documents by subject."""

from __future__ import annotations

from gristmill.flows.stages.dedup_semantic import wrong_with_vectors
from gristmill.flows.stages.stage import (
    PrepareStep,
    Stage,
)
from gristmill.mixtures.steps.dedup_semantic import Cluster

STAGE = Stage(
    "cluster",
    3,
    "gristmill.dataprep.semantic.cluster:run",
    preflight=wrong_with_vectors,
    step=PrepareStep(Cluster, lambda section: ["domain", "domain_name"]),
    report=(
        "gristmill.flows.report.document_sections:domains",
        "gristmill.flows.report.document_sections:reader",
    ),
)
