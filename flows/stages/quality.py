"""`quality`: scores documents with a classifier or by perplexity, and drops the worst."""

from __future__ import annotations

from collections.abc import Iterator

from gristmill.flows.stages.judge import asked_recipe, wrong_question
from gristmill.flows.stages.stage import (
    Library,
    MeasuredColumns,
    PrepareStep,
    Problems,
    Stage,
    place_of,
)
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.steps.quality import Quality
from gristmill.mixtures.yaml_text import unknown_name


def recipe(section: Quality, settings: Recipe) -> Recipe:
    """Return the settings; those of a judge as `asked_recipe` does."""
    if section.judge is not None and section.judge.model is not None:
        settings = {**settings, "judge": asked_recipe(section.judge, settings["judge"])}
    return settings


def preflight(manifest: Manifest, name: str, measured: MeasuredColumns) -> Problems:
    """Yield a judge's column that no earlier step measures, and problems with a judge's
    question.
    """
    from gristmill.dataprep.where_sql import all_names

    section = manifest.steps[name].config
    assert isinstance(section, Quality)
    if section.judge is None:
        return
    place = (*place_of(manifest, name), "judge")
    if section.judge.model is not None:
        yield from wrong_question(section.judge, place)
    known_columns = all_names(
        {step: measured[step] for step in list(manifest.steps)[: place[1]]}
    )
    column = section.judge.column
    if column is not None and column not in known_columns:
        yield (
            (*place, "column"),
            f"no earlier step measures {unknown_name(column, known_columns)}",
        )


def libraries(section: Quality) -> Iterator[Library]:
    """Yield the libraries that train a fastText classifier, and that score with an
    n-gram model.
    """
    if section.distil == "fasttext" or (
        section.classifier is not None and section.classifier.model is None
    ):
        yield Library("fasttext")
    if section.perplexity is not None and section.perplexity.kenlm is not None:
        yield Library("kenlm")


def preload(section: Quality) -> Iterator[str]:
    """Yield the library of a judge's requests."""
    if section.judge is not None and section.judge.model is not None:
        yield "httpx"


STAGE = Stage(
    "quality",
    6,
    "gristmill.dataprep.quality.quality:run",
    preflight=preflight,
    step=PrepareStep(
        Quality,
        columns=lambda section: [*section.scores, "perplexity_bucket"],
        recipe=recipe,
    ),
    libraries=libraries,
    preload=preload,
    report=(
        "gristmill.flows.report.document_sections:quality",
        "gristmill.flows.report.llm_sections:judges",
    ),
)
