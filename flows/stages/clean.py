"""`clean`: repairs and masks texts, and removes boilerplate lines from them."""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.flows.stages.stage import Display, PrepareStep, Stage
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


STAGE = Stage(
    "clean",
    3,
    "gristmill.dataprep.cleaning.clean:run",
    step=PrepareStep(Clean, columns),
    display=Display(report=("gristmill.flows.report.document_sections:edits",)),
)
