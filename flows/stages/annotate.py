"""`annotate`: a user's function measures documents, or decides which of them are kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gristmill.flows.stages.stage import Location, Stage
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.own_code import OwnCodeError
from gristmill.mixtures.own_signatures import measured_columns
from gristmill.mixtures.steps.own_steps import Annotate
from gristmill.mixtures.yaml_text import did_you_mean


def preflight(
    manifest: Manifest, name: str, measured: Mapping[str, Sequence[str]]
) -> Iterator[tuple[Location, str]]:  # fmt: skip
    """What the source of a step's function shows to be wrong, without running it."""
    from gristmill.dataprep.edits import EDITS
    from gristmill.dataprep.expressions import names_of
    from gristmill.dataprep.own.own_documents import DOCUMENT_COLUMNS, check_source

    names = list(manifest.steps)
    step = manifest.steps[name]
    place = ("prepare", names.index(name), step.stage)
    before = names_of({other: [column for column in measured[other] if column != EDITS]
                       for other in names[:names.index(name)]})
    known = [*DOCUMENT_COLUMNS, *(column for columns in before.values() for column in columns.values())]
    try:
        check_source(step.config, known)  # type: ignore[arg-type]
    except OwnCodeError as error:
        yield (*place, "use"), str(error)
    if not isinstance(step.config, Annotate):
        return
    returned = [*step.config.measures, *measured_columns(step.config.use)]
    for side in ("min", "max"):
        for column in getattr(step.config, side) if returned else ():
            if column not in returned:
                yield (*place, side, column), (
                    f"{step.config.use.place}: {step.config.use.name} does not return {column!r}"
                    f"{did_you_mean(column, returned)}; it returns {', '.join(returned)}; correct it, or name it in "
                    "`measures` too")


STAGE = Stage("annotate", 1, "gristmill.dataprep.own.annotate:run", section=Annotate,
              columns=lambda section: section.measured, preflight=preflight,
              report=("gristmill.flows.report.document_sections:own_code",))
