"""`langid`: finds the language of each document, and drops those that are not wanted."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gristmill.flows.stages.stage import Stage
from gristmill.mixtures.steps.langid import LanguageId


def columns(section: LanguageId) -> Iterable[str]:
    """The language, how sure the model is of it, and what was counted of lines."""
    lines = ["line_languages", "line_language_share", "language_lines_cut", "language_lines_left"]
    return ["language", "language_score", "script", *(lines if section.lines else []), "edits"]


def leaves_out(section: LanguageId) -> Collection[str]:
    """The path of lid.176, which is one pinned file wherever it lies."""
    from gristmill.dataprep.judges.fasttext_models import is_other_model

    return () if is_other_model(section.model) else ("model",)


STAGE = Stage(
    "langid", 2, "gristmill.dataprep.judges.langid:run", section=LanguageId, columns=columns, leaves_out=leaves_out,
    rules="gristmill.dataprep.judges.langid:rules",
    report=("gristmill.flows.report.document_sections:languages",))
