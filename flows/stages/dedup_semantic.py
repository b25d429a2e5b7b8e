"""`dedup_semantic`: keeps one of several documents with the same meaning."""

from __future__ import annotations

from gristmill.flows.stages import dedup
from gristmill.flows.stages.stage import (
    MeasuredColumns,
    PrepareStep,
    Problems,
    Stage,
    place_of,
)
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.steps.dedup_semantic import Cluster, DedupSemantic


def preflight(manifest: Manifest, name: str, measured: MeasuredColumns) -> Problems:
    """Yield problems with `keep`, as `dedup` does, and with the model's files, and
    missing packages.
    """
    yield from dedup.preflight(manifest, name, measured)
    yield from wrong_with_vectors(manifest, name, measured)


def wrong_with_vectors(
    manifest: Manifest, name: str, measured: MeasuredColumns
) -> Problems:
    """Yield problems with the files of a step's model, and missing packages."""
    from gristmill.dataprep.encoders.embeddings import check_embedder
    from gristmill.dataprep.encoders.model_folders import (
        ModelFolderError,
        check_installed,
    )

    section = manifest.steps[name].config
    assert isinstance(section, DedupSemantic | Cluster)
    try:
        check_embedder(section.model)
        check_installed("sklearn")
    except ModelFolderError as error:
        yield (*place_of(manifest, name), "model"), str(error)


STAGE = Stage(
    "dedup_semantic",
    1,
    "gristmill.dataprep.dedup.semantic:run",
    preflight=preflight,
    step=PrepareStep(
        DedupSemantic,
        columns=lambda section: [
            "cluster",
            "cluster_size",
            "duplicate_of",
            "cosine",
            "centroid",
        ],
    ),
    report=(
        "gristmill.flows.report.document_sections:duplicates",
        "gristmill.flows.report.document_sections:reader",
    ),
)
