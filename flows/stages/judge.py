"""`judge`: a language model scores documents, and thresholds decide."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gristmill.flows.stages.stage import Location, Recipe, Stage
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.steps.asked_model import HOW
from gristmill.mixtures.steps.judge import Judge, Question
from gristmill.mixtures.steps.judge_pairs import JudgePairs


def asked_recipe(section: Question | JudgePairs, named: Recipe, shipped_as: str = "") -> Recipe:
    """The settings without how the judges are reached, and the text of a question that comes with gristmill."""
    from gristmill.dataprep.llm.prompt_templates import shipped

    models = {
        key: {name: value for name, value in named[key].items() if name not in HOW}
        for key in ("model", "second")
        if named.get(key) is not None
    }
    question = (
        {}
        if section.template is not None
        else {"question": shipped(f"judge-{section.rubric}" if isinstance(section, Question) else shipped_as).sha256}
    )
    return {**named, **models, **question}


def wrong_question(section: Question, place: Location) -> Iterator[tuple[Location, str]]:
    """A schema or a template that is none, or a template that asks for what it is not given."""
    from gristmill.dataprep.llm.judge import GIVEN
    from gristmill.dataprep.llm.prompt_templates import TemplateProblemError, read_template
    from gristmill.dataprep.llm.prompting import json_schema_problem

    if (problem := json_schema_problem(section.answer)) is not None:
        yield (*place, "answer"), problem
    try:
        read_template(section.template, f"judge-{section.rubric}").check(GIVEN)
    except TemplateProblemError as error:
        yield (*place, "template"), str(error)


def preflight(manifest: Manifest, name: str, measured: Mapping[str, Sequence[str]]) -> Iterator[tuple[Location, str]]:
    """What is wrong with the question."""
    step = manifest.steps[name]
    assert isinstance(step.config, Judge)
    yield from wrong_question(step.config, ("prepare", list(manifest.steps).index(name), step.stage))


STAGE = Stage(
    "judge",
    1,
    "gristmill.dataprep.llm.judge:run",
    section=Judge,
    imports=lambda settings: ["httpx"],
    columns=lambda section: section.measured,
    recipe=asked_recipe,
    preflight=preflight,
    pace="a model's answers take as long as its server is busy",
    report=("gristmill.flows.report.asked_sections:judges",),
)
