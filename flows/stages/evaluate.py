"""`evaluate`: measures every model of a manifest on held-out text, tasks and
prompts.
"""

from __future__ import annotations

from collections.abc import Iterator

from gristmill.flows.stages.sections import (
    dump,
    name_outside_files,
    reads_of,
    seed_of,
    without,
)
from gristmill.flows.stages.stage import (
    Configured,
    Display,
    Library,
    MeasuredColumns,
    Problems,
    Requirements,
    Stage,
    only,
)
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.manifest import MODELS, Manifest
from gristmill.mixtures.sections.evaluation import GIVEN, QUESTION, ModelToxicity
from gristmill.mixtures.steps.asked_model import HOW


def configure(manifest: Manifest, verify: bool) -> Configured | None:
    """Return the section, with the factor that converts preferences to rewards."""
    section = manifest.evaluate
    if section is None:
        return None
    beta = {} if manifest.dpo is None else {"beta": manifest.dpo.beta}
    reads = (
        reads_of(manifest)
        if section.memorisation is not None or section.contamination is not None
        else {}
    )
    recipe = {**dump(section), "seed": seed_of(section, manifest), **beta, **reads}
    named_recipe = name_outside_files(recipe, section, verify)
    arguments: Recipe = {
        name: recipe[name] for name in ("tasks", "suites") if name in recipe
    }
    if section.red_team is None:
        return named_recipe, arguments
    red_team = dict(named_recipe["red_team"])
    judge = section.red_team.judge
    if judge is not None:
        # without access to the judge, and with the checksum of our own question
        model = without(red_team["judge"]["model"], *HOW)
        red_team["judge"] = {**red_team["judge"], "model": model}
        if judge.template is None:
            from gristmill.dataprep.llm.prompt_templates import shipped

            red_team["judge"]["question"] = shipped(QUESTION).sha256
    return (
        {**named_recipe, "red_team": red_team},
        {**arguments, "red_team": recipe["red_team"]},
    )


def preflight(manifest: Manifest, name: str, measured: MeasuredColumns) -> Problems:
    """Yield problems with the judges of answers to a red team."""
    from gristmill.dataprep.encoders.document_scores import announce
    from gristmill.dataprep.encoders.model_folders import ModelFolderError
    from gristmill.dataprep.encoders.score_documents import check_packages
    from gristmill.dataprep.llm.prompt_templates import (
        TemplateProblemError,
        read_template,
    )

    section = None if manifest.evaluate is None else manifest.evaluate.red_team
    if section is None:
        return
    place = ("evaluate", "red_team")
    if section.judge is not None:
        try:
            read_template(section.judge.template, QUESTION).check(GIVEN)
        except TemplateProblemError as error:
            yield (*place, "judge", "template"), str(error)
    if isinstance(section.toxicity, ModelToxicity):
        try:
            check_packages(section.toxicity.model)
            section.toxicity.chosen(list(announce(section.toxicity.model).numbers))
        except ModelFolderError as error:
            yield (*place, "toxicity", "model"), str(error)
        except ValueError as error:
            yield (*place, "toxicity", "column"), str(error)


def libraries(manifest: Manifest) -> Iterator[Library]:
    """Yield the libraries that compare generated texts with references."""
    for task in () if manifest.evaluate is None else manifest.evaluate.tasks:
        for library in task.libraries:
            yield Library(library, f"evaluate.tasks.{task.name}.metrics")


STAGE = Stage(
    "evaluate",
    3,
    "gristmill.train.stages.evaluate:run",
    configure,
    only("tokenizer", "mix", *MODELS),
    preflight=preflight,
    requirements=Requirements(torch=True, libraries=libraries),
    display=Display(
        topics={"evaluation": "evaluation.json"},
        report=(
            "gristmill.flows.report.evaluation:held_out",
            "gristmill.flows.report.evaluation:tasks",
            "gristmill.flows.report.evaluation:suites",
            "gristmill.flows.report.evaluation:memorisation",
            "gristmill.flows.report.evaluation:leaks",
            "gristmill.flows.report.safety:red_team",
            "gristmill.flows.report.evaluation:samples",
        ),
    ),
)
