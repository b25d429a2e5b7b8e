"""Building blocks of trainings: their recipe is their section, with listings in place
of outside files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from gristmill.core.files import as_path
from gristmill.flows.stages import annotate, decontaminate, dedup, filter, judge, langid
from gristmill.flows.stages.sections import (
    dump,
    name_outside_files,
    seed_of,
    step_recipe,
    with_listings,
    without,
)
from gristmill.flows.stages.stage import (
    Configure,
    Configured,
    Library,
    MeasuredColumns,
    Needs,
    Preflight,
    PrepareStep,
    Problems,
    RowKind,
    Stage,
    always,
)
from gristmill.mixtures.manifest import MODELS, TUNINGS, Manifest
from gristmill.mixtures.schema.engine import Trackers
from gristmill.mixtures.schema.model import Implementation
from gristmill.mixtures.schema.optimizer import OPTIMIZERS
from gristmill.mixtures.schema.pretrain import Training
from gristmill.mixtures.steps.examples import made_names, output_name
from gristmill.mixtures.steps.filter import Filter
from gristmill.mixtures.steps.judge_pairs import JudgePairs
from gristmill.mixtures.steps.langid import LanguageId

COMPARES = Stage(
    "judge_pairs",
    1,
    "gristmill.dataprep.llm.judge_pairs:run",
    step=PrepareStep(JudgePairs, recipe=judge.asked_recipe),
)
"""The step that only examples have: it compares the answers of pairs."""
JUDGES = {
    **{
        module.STAGE.name: module.STAGE
        for module in (filter, dedup, langid, decontaminate, annotate)
    },
    COMPARES.name: COMPARES,
}
"""Steps that can judge examples."""


def torchrun_stage(
    name: str,
    version: int,
    configure: Configure,
    needs: Needs,
    preflight: Preflight | None = None,
    training: type[Training] | None = None,
    row_kind: RowKind | None = None,
    output: Literal["model"] | None = None,
    report: tuple[str, ...] = (),
) -> Stage:
    """Return a stage that torchrun starts on every rank, with the function `run` of the
    file of its name; see `Stage`.
    """

    def preflight_of_tuning(
        manifest: Manifest, stage: str, measured: MeasuredColumns
    ) -> Problems:
        problem = _beyond_window(manifest, name)
        if problem is not None:
            yield (name, "sequence_length"), problem
        if preflight is not None:
            yield from preflight(manifest, stage, measured)

    def libraries(manifest: Manifest) -> Iterator[Library]:
        section = getattr(manifest, name, None)
        if not isinstance(section, Training):
            return
        lora = getattr(section, "lora", None)
        library = OPTIMIZERS[section.optimizer.kind].library
        if library is not None:
            yield Library(library, f"{name}.optimizer.kind")
        if getattr(section, "tasks", ()):
            yield Library("lm_eval", f"{name}.tasks")
        if getattr(section, "float8", "off") != "off":
            yield Library("torchao", f"{name}.float8")
        if getattr(section, "kind", "decoder") != "decoder":
            yield Library("transformers", name)
        if lora is not None and lora.base == "nf4":
            yield Library("bitsandbytes", f"{name}.lora.base")
        for client in Trackers.model_fields:
            if getattr(manifest.engine, client) is not None:
                yield Library(client, f"engine.{client}")

    return Stage(
        name,
        version,
        f"gristmill.train.stages.{name}:run",
        configure,
        needs,
        preflight=preflight_of_tuning if name in TUNINGS else preflight,
        training=training,
        row_kind=row_kind,
        output=output,
        no_estimate_reason="the speed depends on the device and the model: for GPUs "
        "gristmill plan MANIFEST --gpus N estimates it",
        torch=True,
        torchrun=True,
        libraries=libraries,
        language_models=lambda manifest: getattr(
            getattr(manifest, name, None), "teacher_endpoint", None
        ),
        report=report,
    )


def _beyond_window(manifest: Manifest, stage: str) -> str | None:
    """Return the reason why rows are longer than the published model allows, or
    None.
    """
    path: str | None = None
    implementation: Implementation = "auto"
    if manifest.model is not None:
        path, implementation = manifest.model.path, manifest.model.implementation
    elif manifest.pretrain is not None:
        model = manifest.pretrain.model
        path, implementation = model.init_from, model.implementation
    length = getattr(manifest, stage).sequence_length
    if length is None and stage in ("sft", "dpo") and manifest.mix is not None:
        length = manifest.mix.sequence_length
    if path is None or length is None or not as_path(path).exists():
        return None
    from gristmill.train.models.weights import read_shape

    try:
        shape = read_shape(as_path(path), implementation)
    except (OSError, ValueError):
        return None  # the stage of the model reports the problem
    try:
        replace(shape, sequence_length=max(shape.sequence_length, length))
    except ValueError as error:
        return str(error)
    return None


def model_before(name: str, manifest: Manifest) -> str:
    """Return the last stage before this one whose model the manifest trains; the first
    of `MODELS` if there is none.
    """
    before = MODELS[: MODELS.index(name)] if name in MODELS else MODELS
    return next(
        (stage for stage in reversed(before) if getattr(manifest, stage) is not None),
        MODELS[0],
    )


def data_needs(manifest: Manifest) -> list[str]:
    """Return the stages that determine the encoding and length of examples: the
    mixture, or the model without one.
    """
    return ["tokenizer", "mix" if manifest.mix is not None else "model"]


def made_sets(*sections: Any) -> list[str]:
    """Return the stages that write the examples of these sections, if the manifest
    defines them.
    """
    paths = [
        entry.path
        for section in sections
        if section is not None
        for entry in section.data or ()
    ]
    return list(dict.fromkeys(map(output_name, made_names(paths))))


def whole(name: str) -> Configure:
    """Return a `Configure` of the whole section of this name, with the files of its
    examples.
    """

    def configure(manifest: Manifest, verify: bool) -> Configured | None:
        section = getattr(manifest, name)
        if section is None:
            return None
        # Other stages prepare and count examples.
        config = dump(section, "prepare", "leaks") | {
            "seed": seed_of(section, manifest)
        }
        if section.schedule.use is None and section.steps:
            # The default warm-up depends on the steps, so the recipe has the result.
            config["schedule"]["warmup_steps"] = section.schedule.warmup_of(
                section.steps
            )
        if "data" in config:
            from gristmill.dataprep.readers.sources import outside_listing

            checkpoint = config["continue_from"]
            recipe = {
                **config,
                "continue_from": checkpoint
                and outside_listing(f"{name}.continue_from", checkpoint, verify),
                "data": with_listings(config["data"]),
            }
        else:
            recipe = name_outside_files(config, section, verify)
        # Settings of the computation are not in fingerprints: the recipe has their
        # defaults, whatever the manifest sets.
        recipe |= section.how
        return recipe, {
            key: value for key, value in config.items() if recipe.get(key) != value
        }

    return configure


def prepares_examples(name: str, version: int, section: str) -> Stage:
    """Return the stage that prepares a section's examples, if the section has steps;
    see `Stage`.
    """

    def configure(manifest: Manifest, verify: bool) -> Configured | None:
        configured = whole(section)(manifest, verify)
        if configured is None or not getattr(manifest, section).prepare:
            return None
        recipe, arguments = (
            [without(item, "weight", "train_on") for item in part["data"]]
            for part in configured
        )
        step_recipes = []
        step_arguments = []
        for step in getattr(manifest, section).prepare:
            stage = JUDGES[step.stage]
            settings, config = step_recipe(stage, step.config, manifest, verify)
            judged = {"judge": step.judged, "version": stage.version}
            step_recipes.append({step.stage: settings, **judged})
            step_arguments.append({step.stage: config, "judge": step.judged})
        return (
            {"kind": section, "data": recipe, "prepare": step_recipes},
            {"data": arguments, "prepare": step_arguments},
        )

    def preflight(
        manifest: Manifest, stage: str, measured: MeasuredColumns
    ) -> Problems:
        """Yield languages that no example can have (see `langid` and `filter`), and
        invalid questions about pairs.
        """
        from gristmill.dataprep.llm.judge_pairs import read_question
        from gristmill.dataprep.llm.prompt_templates import TemplateProblemError

        steps = [step.config for step in getattr(manifest, section).prepare]
        for number, step in enumerate(steps):
            place = (section, "prepare", number)
            if isinstance(step, LanguageId):
                yield from langid.unknown_languages(step, place)
            if isinstance(step, JudgePairs):
                try:
                    read_question(step)
                except TemplateProblemError as error:
                    yield (*place, COMPARES.name, "template"), str(error)
            if isinstance(step, Filter):
                yield from filter.unknown_languages(steps[: number + 1], place)

    return Stage(
        name,
        version,
        "gristmill.dataprep.examples.prepare_examples:run",
        configure,
        lambda manifest: made_sets(getattr(manifest, section)),
        preflight=preflight,
        output="examples",
        is_parallel=always,
        language_models=lambda manifest: getattr(
            getattr(manifest, section), "prepare", ()
        ),
        report=("gristmill.flows.report.finetuning:preparation",),
    )
