"""`dedup`: keeps one document of each cluster of equal and near-equal ones."""

from __future__ import annotations

from gristmill.flows.stages.stage import (
    MeasuredColumns,
    PrepareStep,
    Problems,
    Stage,
    place_of,
)
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.steps.dedup import Dedup
from gristmill.mixtures.steps.dedup_semantic import DedupSemantic


def preflight(manifest: Manifest, name: str, measured: MeasuredColumns) -> Problems:
    """Yield a malformed `keep`, or one with a column that no earlier step measures; and
    an unusable model of `meaning`.
    """
    from gristmill.dataprep.dedup.clusters import (
        check_names,
        parse_keep,
        qualified,
    )

    place = place_of(manifest, name)
    section = manifest.steps[name].config
    assert isinstance(section, Dedup | DedupSemantic)
    before = {step: measured[step] for step in list(measured)[: place[1]]}
    try:
        check_names(parse_keep(section.keep), qualified(before))
    except ValueError as error:
        yield (*place, "keep"), str(error).removeprefix("keep: ")
    if isinstance(section, Dedup) and section.meaning is not None:
        from gristmill.dataprep.encoders.embeddings import check_embedder
        from gristmill.dataprep.encoders.model_folders import ModelFolderError

        try:
            check_embedder(section.meaning)
        except ModelFolderError as error:
            yield (*place, "meaning"), str(error)


STAGE = Stage(
    "dedup",
    3,
    "gristmill.dataprep.dedup.dedup:run",
    preflight=preflight,
    step=PrepareStep(
        Dedup,
        columns=lambda section: [
            "cluster",
            "cluster_size",
            "duplicate_of",
            "jaccard",
            "against_index",
            "against_locator",
        ],
    ),
    report=("gristmill.flows.report.document_sections:duplicates",),
)
