"""`langid`: finds the language of each document, and drops those that are not wanted."""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.flows.stages.stage import Stage
from gristmill.mixtures.steps.langid import LanguageId


def columns(section: LanguageId) -> Iterable[str]:
    """The language, how sure the model is of it, and what was counted of lines."""
    lines = ["line_languages", "line_language_share", "language_lines_cut", "language_lines_left"]
    return ["language", "language_score", "script", *(lines if section.lines else []), "edits"]


STAGE = Stage(
    "langid", 2, "gristmill.dataprep.judges.langid:run", section=LanguageId, columns=columns,
    report=("gristmill.flows.report.document_sections:languages",))
