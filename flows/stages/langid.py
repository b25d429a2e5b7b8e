"""`langid`: identifies the language of each document, and drops other languages than
the kept ones.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import PurePath

from gristmill.flows.stages.stage import (
    Location,
    MeasuredColumns,
    PrepareStep,
    Problems,
    Stage,
    place_of,
)
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.steps.langid import LanguageId


def pinned_files(section: LanguageId) -> Collection[str]:
    """Return the key of lid.176's path, which is one pinned file in any place."""
    from gristmill.dataprep.fasttext.fasttext_models import is_other_model

    return () if is_other_model(section.model) else ("model",)


def preflight(manifest: Manifest, name: str, measured: MeasuredColumns) -> Problems:
    """Yield languages that the model does not know, if the model is available."""
    section = manifest.steps[name].config
    assert isinstance(section, LanguageId)
    yield from unknown_languages(section, place_of(manifest, name)[:2])


def unknown_languages(section: LanguageId, place: Location) -> Problems:
    """Yield languages of a step that its model does not know, if the model is
    available; `place` locates the step.
    """
    from gristmill.dataprep.langid.check_languages import (
        known_labels,
        wanted_languages,
        why_unknown,
    )

    if (labels := known_labels(section)) is None:
        return
    for code in wanted_languages(section):
        if (problem := why_unknown(code, labels, model_name(section))) is not None:
            yield (*place, STAGE.name, "keep"), problem


def model_name(section: LanguageId) -> str:
    """Return the model's name in messages."""
    return "lid.176" if section.model is None else PurePath(section.model).name


STAGE = Stage(
    "langid",
    3,
    "gristmill.dataprep.langid.langid:run",
    preflight=preflight,
    step=PrepareStep(
        LanguageId,
        lambda section: ["language", "language_score", "script"],
        pinned_files,
        rules="gristmill.dataprep.langid.replayed_rules:rules",
        intended_losses=lambda section: [
            ("language", "language"),
            ("domain", "language"),
        ],
    ),
    report=("gristmill.flows.report.document_sections:languages",),
)
