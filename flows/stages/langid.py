"""`langid`: identifies the language of each document, and drops other languages than
the kept ones.
"""

from __future__ import annotations

from collections.abc import Collection

from gristmill.flows.stages.stage import Display, PrepareStep, Stage
from gristmill.mixtures.steps.langid import LanguageId


def pinned_files(section: LanguageId) -> Collection[str]:
    """Return the key of lid.176's path, which is one pinned file in any place."""
    from gristmill.dataprep.fasttext.fasttext_models import is_other_model

    return () if is_other_model(section.model) else ("model",)


STAGE = Stage(
    "langid",
    3,
    "gristmill.dataprep.langid.langid:run",
    step=PrepareStep(
        LanguageId,
        lambda section: ["language", "language_score", "script"],
        pinned_files,
        rules="gristmill.dataprep.langid.langid:rules",
    ),
    display=Display(report=("gristmill.flows.report.document_sections:languages",)),
)
