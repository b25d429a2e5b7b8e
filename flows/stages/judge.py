"""`judge`: a language model scores documents, with thresholds on the scores."""

from __future__ import annotations

from gristmill.flows.stages.sections import without
from gristmill.flows.stages.stage import (
    Location,
    MeasuredColumns,
    PrepareStep,
    Problems,
    Stage,
    place_of,
)
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.steps.asked_model import HOW
from gristmill.mixtures.steps.judge import Judge, Question
from gristmill.mixtures.steps.judge_pairs import JudgePairs


def asked_recipe(section: Question | JudgePairs, settings: Recipe) -> Recipe:
    """Return the settings without access to the judge, with the checksum of a question
    that comes with gristmill.
    """
    from gristmill.dataprep.llm.prompt_templates import shipped

    settings = {**settings, "model": without(settings["model"], *HOW)}
    if section.template is not None or settings.get("prompt") is not None:
        return settings
    if isinstance(section, Question):
        name = f"judge-{section.rubric}"
    else:
        from gristmill.dataprep.llm.judge_pairs import QUESTION

        name = QUESTION
    return {**settings, "question": shipped(name).sha256}


def wrong_question(section: Question, place: Location) -> Problems:
    """Yield an invalid schema or template, or a template with unknown variables."""
    from gristmill.dataprep.llm.judge import GIVEN
    from gristmill.dataprep.llm.prompt_templates import (
        TemplateProblemError,
        question_template,
    )
    from gristmill.dataprep.llm.prompting import json_schema_problem, pattern_problem

    if (problem := json_schema_problem(section.answer)) is not None:
        yield (*place, "answer"), problem
    if section.pattern is not None:
        problem = pattern_problem(section.pattern, section.answer)
        if problem is not None:
            yield (*place, "pattern"), problem
    try:
        question_template(section).check(GIVEN)
    except TemplateProblemError as error:
        yield (*place, "template"), str(error)


def preflight(manifest: Manifest, name: str, measured: MeasuredColumns) -> Problems:
    """Yield problems with the question."""
    section = manifest.steps[name].config
    assert isinstance(section, Judge)
    yield from wrong_question(section, place_of(manifest, name))


STAGE = Stage(
    "judge",
    1,
    "gristmill.dataprep.llm.judge:run",
    preflight=preflight,
    step=PrepareStep(
        Judge, columns=lambda section: section.measured, recipe=asked_recipe
    ),
    no_estimate_reason="the speed of a model's answers depends on its server",
    preload=lambda settings: ["httpx"],
    report=("gristmill.flows.report.llm_sections:judges",),
)
