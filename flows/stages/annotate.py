"""`annotate`: a model or a user's function measures documents, or decides which of them
are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gristmill.flows.stages.stage import (
    Display,
    Location,
    MeasuredColumns,
    PrepareStep,
    Problems,
    Stage,
)
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.own_signatures import measured_columns
from gristmill.mixtures.steps.own_steps import Annotate, OwnAnnotate, OwnStep
from gristmill.mixtures.user_code import OwnCodeError
from gristmill.mixtures.yaml_text import did_you_mean


def columns(section: Annotate) -> Iterable[str]:
    """Return the function's columns as far as its source shows them, or those that the
    model's folder announces.
    """
    if section.model is None:
        return section.function.measured
    from gristmill.dataprep.encoders.document_scores import announce
    from gristmill.dataprep.encoders.model_folders import ModelFolderError

    try:
        return announce(section.model).columns
    except ModelFolderError:  # `preflight` reports the error
        return [*section.min, *section.max]


def preflight(manifest: Manifest, name: str, measured: MeasuredColumns) -> Problems:
    """Yield problems with a step's model, or with the source of its function, without
    running either.
    """
    step = manifest.steps[name]
    place = ("prepare", list(manifest.steps).index(name), step.stage)
    section = step.config
    if isinstance(section, Annotate) and section.model is not None:
        yield from wrong_with_model(section, place)
        return
    function_step = section.function if isinstance(section, Annotate) else section
    assert isinstance(function_step, OwnStep)
    yield from wrong_with_function(
        function_step, place, known_before(manifest, name, measured)
    )


def wrong_with_model(section: Annotate, place: Location) -> Problems:
    """Yield problems with the files of a model, and missing packages."""
    from gristmill.dataprep.encoders.document_scores import announce
    from gristmill.dataprep.encoders.model_folders import ModelFolderError
    from gristmill.dataprep.encoders.score_documents import check_bounds, check_packages

    assert section.model is not None
    try:
        announced = announce(section.model)
        check_packages(section.model)
        check_bounds(section, announced)
    except ModelFolderError as error:
        yield (*place, "model"), str(error)


def known_before(manifest: Manifest, name: str, measured: MeasuredColumns) -> list[str]:
    """Return the columns that a step's function may use: those of documents, and of
    earlier steps.
    """
    from gristmill.dataprep.edits import EDITS
    from gristmill.dataprep.user_code.own_documents import DOCUMENT_COLUMNS
    from gristmill.dataprep.where_sql import names_of

    names = list(manifest.steps)
    earlier_columns = {}
    for earlier in names[: names.index(name)]:
        earlier_columns[earlier] = [
            column for column in measured[earlier] if column != EDITS
        ]
    known = list(DOCUMENT_COLUMNS)
    for columns in names_of(earlier_columns).values():
        known += columns.values()
    return known


def wrong_with_function(
    step: OwnStep, place: Location, known: Sequence[str]
) -> Problems:
    """Yield problems that the source of a step's function shows."""
    from gristmill.dataprep.user_code.own_documents import check_source

    try:
        check_source(step, known)
    except OwnCodeError as error:
        yield (*place, "use"), str(error)
    if not isinstance(step, OwnAnnotate):
        return
    returned = [*step.measures, *measured_columns(step.use)]
    for side in ("min", "max"):
        for column in getattr(step, side) if returned else ():
            if column not in returned:
                yield (
                    (*place, side, column),
                    (
                        f"{step.use.place}: {step.use.name} does not return "
                        f"{column!r}{did_you_mean(column, returned)}; it "
                        f"returns {', '.join(returned)}; correct it, or name it in "
                        "`measures` too"
                    ),
                )


STAGE = Stage(
    "annotate",
    1,
    "gristmill.dataprep.user_code.annotate:run",
    preflight=preflight,
    step=PrepareStep(Annotate, columns),
    display=Display(
        report=(
            "gristmill.flows.report.document_sections:own_code",
            "gristmill.flows.report.document_sections:reader",
        )
    ),
)
