"""`clean`: repairs and masks texts, and removes boilerplate lines from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gristmill.flows.stages.stage import (
    Library,
    MeasuredColumns,
    PrepareStep,
    Problems,
    Stage,
    place_of,
)
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.steps.clean import Clean


def columns(section: Clean) -> Iterable[str]:
    """Return the columns for the remaining text, and for the number of changes by each
    rule.
    """
    from gristmill.dataprep.cleaning.clean import (
        REMOVED_RATIO,
        RULE_PREFIX,
        WORDS_LEFT,
        steps,
    )
    from gristmill.dataprep.edits import EDITS

    return [
        EDITS,
        WORDS_LEFT,
        REMOVED_RATIO,
        *(RULE_PREFIX + rule for step in steps(section) for rule in step.rules),
    ]


def preflight(manifest: Manifest, name: str, measured: MeasuredColumns) -> Problems:
    """Yield labels that the pipeline of `mask.entities` does not have."""
    section = manifest.steps[name].config
    assert isinstance(section, Clean)
    if section.mask is None or section.mask.entities is None:
        return
    from gristmill.dataprep.cleaning.entities import NoPipelineError, check_labels

    try:
        check_labels(section.mask.entities)
    except NoPipelineError as error:
        yield (*place_of(manifest, name), "mask", "entities"), str(error)


def libraries(section: Clean) -> Iterator[Library]:
    """Yield the library that recognises entities."""
    if section.mask is not None and section.mask.entities is not None:
        yield Library("spacy", "mask.entities")


STAGE = Stage(
    "clean",
    4,
    "gristmill.dataprep.cleaning.clean:run",
    preflight=preflight,
    step=PrepareStep(Clean, columns),
    libraries=libraries,
    report=(
        "gristmill.flows.report.document_sections:edits",
        "gristmill.flows.report.document_sections:personal_data",
    ),
)
