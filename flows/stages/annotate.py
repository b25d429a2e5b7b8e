"""`annotate`: a model or a user's function measures documents, or decides which of them
are kept.
"""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.flows.stages.stage import (
    MeasuredColumns,
    PrepareStep,
    Problems,
    Stage,
    place_of,
)
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.own_signatures import measured_columns
from gristmill.mixtures.steps.own_steps import Annotate, OwnAnnotate, OwnStep
from gristmill.mixtures.user_code import OwnCodeError
from gristmill.mixtures.yaml_text import unknown_name


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
    from gristmill.dataprep.edits import EDITS
    from gristmill.dataprep.user_code.own_documents import (
        DOCUMENT_COLUMNS,
        check_source,
    )
    from gristmill.dataprep.where_sql import all_names

    place = place_of(manifest, name)
    section = manifest.steps[name].config
    if isinstance(section, Annotate) and section.model is not None:
        from gristmill.dataprep.encoders.document_scores import announce
        from gristmill.dataprep.encoders.model_folders import ModelFolderError
        from gristmill.dataprep.encoders.score_documents import (
            check_bounds,
            check_packages,
        )

        try:
            announced = announce(section.model)
            check_packages(section.model)
            check_bounds(section, announced)
        except ModelFolderError as error:
            yield (*place, "model"), str(error)
        return
    step = section.function if isinstance(section, Annotate) else section
    assert isinstance(step, OwnStep)
    # A function may use the columns of documents, and of earlier steps.
    earlier_columns = {
        earlier: [column for column in measured[earlier] if column != EDITS]
        for earlier in list(manifest.steps)[: place[1]]
    }
    try:
        check_source(step, [*DOCUMENT_COLUMNS, *all_names(earlier_columns)])
    except OwnCodeError as error:
        yield (*place, "use"), str(error)
    if not isinstance(step, OwnAnnotate):
        return
    returned = [*step.measures, *measured_columns(step.use)]
    for side in ("min", "max") if returned else ():
        for column in getattr(step, side):
            if column not in returned:
                yield (
                    (*place, side, column),
                    f"{step.use.place}: {step.use.name} does not return "
                    f"{unknown_name(column, returned, 'it returns')}; correct it, or "
                    "name it in `measures` too",
                )


STAGE = Stage(
    "annotate",
    1,
    "gristmill.dataprep.user_code.annotate:run",
    preflight=preflight,
    step=PrepareStep(Annotate, columns),
    report=(
        "gristmill.flows.report.document_sections:own_code",
        "gristmill.flows.report.document_sections:reader",
    ),
)
