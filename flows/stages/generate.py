"""`generate`: a language model writes documents from those of other sources, before all
sources are read.
"""

from __future__ import annotations

from gristmill.flows.stages import (
    annotate,
    decontaminate,
    dedup,
    filter,
    judge,
    langid,
    quality,
)
from gristmill.flows.stages.ingest import read_sources
from gristmill.flows.stages.sections import (
    dump,
    name_outside_files,
    step_recipe,
    without,
)
from gristmill.flows.stages.stage import (
    Configured,
    MeasuredColumns,
    Problems,
    Stage,
    always,
)
from gristmill.mixtures.base import dependency_order
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.steps.asked_model import HOW
from gristmill.mixtures.steps.judge import Question
from gristmill.mixtures.steps.quality import Quality

CHOOSING = {
    module.STAGE.name: module.STAGE
    for module in (filter, dedup, langid, quality, decontaminate, annotate, judge)
}
"""The steps that select parents."""


def configure(manifest: Manifest, verify: bool) -> Configured | None:
    """Return the settings of each generated source, and the sources of their parents as
    they are read.
    """
    sources = manifest.generated_sources
    if not sources:
        return None
    parents = {
        parent for source in sources.values() for parent in source.generate.parents
    }
    recipe, arguments = read_sources(
        manifest,
        verify,
        [name for name in manifest.document_sources if name in parents],
    )
    from gristmill.dataprep.llm.prompt_templates import shipped

    order, _ = dependency_order(
        {name: source.generate.parents for name, source in sources.items()}
    )
    generated = []
    for name in order:
        section = sources[name].generate
        settings = name_outside_files(dump(section), section, verify)
        # access to the model, which does not affect its answers, is left out
        model = without(settings["model"], *HOW)
        steps = []
        for step in section.prepare:
            stage = CHOOSING[step.stage]
            step_settings, _ = step_recipe(stage, step.config, manifest, verify)
            steps.append({step.stage: step_settings, "version": stage.version})
        entry = {"name": name, **settings, "model": model, "prepare": steps}
        if section.template is None:
            entry["prompt"] = shipped(f"generate-{section.style}").sha256
        generated.append(entry)
    sections = {name: dump(sources[name].generate) for name in order}
    return (
        {**recipe, "generated": generated, "seed": manifest.seed},
        {
            **arguments,
            "generate": sections,
            "order": order,
            "ingest": dump(manifest.ingest),
        },
    )


def preflight(manifest: Manifest, name: str, measured: MeasuredColumns) -> Problems:
    """Yield an invalid template or one with unknown variables, here and in the judges
    of parents.
    """
    from gristmill.dataprep.llm.generated_documents import GIVEN
    from gristmill.dataprep.llm.prompt_templates import (
        TemplateProblemError,
        read_template,
    )

    for source, section in manifest.generated_sources.items():
        try:
            read_template(
                section.generate.template, f"generate-{section.generate.style}"
            ).check(GIVEN)
        except TemplateProblemError as error:
            yield ("sources", source, "generate", "template"), str(error)
        for number, step in enumerate(section.generate.prepare):
            place = ("sources", source, "generate", "prepare", number, step.stage)
            if isinstance(step.config, Question):
                yield from judge.wrong_question(step.config, place)
            elif (
                isinstance(step.config, Quality)
                and step.config.judge is not None
                and step.config.judge.model
            ):
                yield from judge.wrong_question(step.config.judge, (*place, "judge"))


STAGE = Stage(
    "generate",
    1,
    "gristmill.dataprep.llm.generated_documents:run",
    configure,
    preflight=preflight,
    no_estimate_reason="the speed of a model's answers depends on its server",
    preload=lambda settings: ["httpx"],
    is_parallel=always,
    language_models=lambda manifest: manifest.generated_sources,
    report=("gristmill.flows.report.llm_sections:generated",),
)
