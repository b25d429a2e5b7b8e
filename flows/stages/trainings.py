"""What trainings share: their recipe is their section, with outside files named by what identifies them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gristmill.core.files import as_path
from gristmill.flows.stages import annotate, decontaminate, dedup, filter, judge, langid
from gristmill.flows.stages.sections import dump, name_outside_files, seed_of, step_recipe, without
from gristmill.flows.stages.stage import Configure, Location, Needs, Preflight, Recipe, Stage
from gristmill.mixtures.engine import Trackers
from gristmill.mixtures.manifest import MODELS, TUNINGS, Manifest
from gristmill.mixtures.steps.examples import made_names, output_name
from gristmill.mixtures.steps.filter import Filter
from gristmill.mixtures.steps.judge_pairs import JudgePairs
from gristmill.mixtures.steps.langid import LanguageId
from gristmill.mixtures.training import Training

PACE = "its pace is the device's and the model's: gristmill plan MANIFEST --gpus N --measure 3 tells"


def _compared(section: JudgePairs, named: Recipe) -> Recipe:
    from gristmill.dataprep.llm.judge_pairs import QUESTION

    return judge.asked_recipe(section, named, QUESTION)


COMPARES = Stage("judge_pairs", 1, "gristmill.dataprep.llm.judge_pairs:run", section=JudgePairs, recipe=_compared)
"""The step that examples alone have: it compares the answers of pairs."""
JUDGES = {
    **{module.STAGE.name: module.STAGE for module in (filter, dedup, langid, decontaminate, annotate)},
    COMPARES.name: COMPARES,
}
"""The steps that judge examples too."""
UNNAMED_VERSIONS = {"filter": 2, "dedup": 3, "langid": 2, "decontaminate": 2, "annotate": 1, "judge_pairs": 1}
"""The versions of those steps that recipes of prepared examples do not name, as from before they named any."""


def training(
    name: str, version: int, configure: Configure, needs: Needs, preflight: Preflight | None = None, **shown: Any
) -> Stage:
    """A stage that torchrun starts on every rank, whose function is `run` of the file called like it; see `Stage`."""
    return Stage(
        name,
        version,
        f"gristmill.train.stages.{name}:run",
        configure,
        needs,
        launch="torchrun",
        needs_torch=True,
        needs_libraries=_libraries_of(name),
        preflight=_rows_within_window(name, preflight) if name in TUNINGS else preflight,
        pace=PACE,
        **shown,
    )


def _rows_within_window(stage: str, further: Preflight | None) -> Preflight:
    """Preflight of a tuning: its rows are no longer than the sliding window of the published model behind it."""

    def preflight(
        manifest: Manifest, name: str, measured: Mapping[str, Sequence[str]]
    ) -> Iterator[tuple[Location, str]]:
        problem = _beyond_window(manifest, stage)
        if problem is not None:
            yield (stage, "sequence_length"), problem
        if further is not None:
            yield from further(manifest, name, measured)

    return preflight


def _beyond_window(manifest: Manifest, stage: str) -> str | None:
    started = manifest.pretrain.model.init_from if manifest.pretrain is not None else None
    path = started if manifest.model is None else manifest.model.path
    length = getattr(manifest, stage).sequence_length
    if length is None and stage in ("sft", "dpo") and manifest.mix is not None:
        length = manifest.mix.sequence_length
    if path is None or length is None or not as_path(path).exists():
        return None
    from gristmill.train.models.weights import read_shape

    try:
        shape = read_shape(as_path(path))
    except (OSError, ValueError):
        return None  # the stage that takes the model names the problem
    try:
        replace(shape, sequence_length=max(shape.sequence_length, length))
    except ValueError as error:
        return str(error)
    return None


def _libraries_of(name: str) -> Callable[[Manifest], Iterator[tuple[str, str]]]:
    """What a training computes with in few bits, what draws its answers, and where its numbers go besides."""

    def needed(manifest: Manifest) -> Iterator[tuple[str, str]]:
        section = getattr(manifest, name, None)
        if not isinstance(section, Training):
            return
        lora = getattr(section, "lora", None)
        if section.optimizer.kind == "adamw8bit":
            yield f"{name}.optimizer.kind", "torchao"
        if getattr(section, "float8", "off") != "off":
            yield f"{name}.float8", "torchao"
        if lora is not None and lora.base == "nf4":
            yield f"{name}.lora.base", "bitsandbytes"
        if getattr(section, "rollouts", None) == "vllm":
            yield f"{name}.rollouts", "vllm"
        yield from (
            (f"engine.{client}", client)
            for client in Trackers.model_fields
            if getattr(manifest.engine, client) is not None
        )

    return needed


def model_before(name: str, manifest: Manifest) -> str:
    """The last stage before this one whose model the manifest trains; the first of all where it trains none."""
    before = MODELS[: MODELS.index(name)] if name in MODELS else MODELS
    return next((one for one in reversed(before) if getattr(manifest, one) is not None), MODELS[0])


def first_model(manifest: Manifest) -> str:
    """The stage whose model a run begins with: of checkpoints that are merged, what becomes of them."""
    return model_before("sft", manifest)


def data_needs(manifest: Manifest) -> list[str]:
    """What says how examples are encoded and how long they are: the mixture, or the model where there is none."""
    return ["tokenizer", "mix" if manifest.mix is not None else "model"]


def made_sets(*sections: Any) -> list[str]:
    """What makes the examples that sections read, where the manifest does."""
    paths = [one.path for section in sections if section is not None for one in section.data or ()]
    return list(dict.fromkeys(map(output_name, made_names(paths))))


def whole(name: str) -> Configure:
    """The whole section of this name, with the files of its examples."""

    def configure(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
        section = getattr(manifest, name)
        return None if section is None else recipe_of(name, section, manifest, verify)

    return configure


def recipe_of(name: str, section: Any, manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe]:
    """The recipe of a training's section, and what its function gets besides."""
    # What is prepared of examples, and counted of them, is other stages' business.
    config = {**dump(section, "prepare", "leaks"), "seed": seed_of(section, manifest)}
    if section.schedule.use is None and section.steps:
        # The default warm-up depends on the steps: what it comes to is named.
        config["schedule"]["warmup_steps"] = section.schedule.warmup_of(section.steps)
    # How a training computes is in no fingerprint: its recipe has the defaults, whatever the manifest says.
    recipe = {**_named(name, config, section, verify), **section.how}
    if "data" in config and config["continue_from"] is None:
        # Left out where it is absent, as from before tunings had it.
        del recipe["continue_from"]
    return recipe, {key: value for key, value in config.items() if recipe.get(key) != value}


def _named(name: str, config: Recipe, section: Training, verify: bool) -> Recipe:
    """A training's settings with outside files by what identifies them, and its examples by a listing of theirs."""
    if "data" not in config:
        return name_outside_files(config, section, verify)
    from gristmill.dataprep.examples.read_examples import examples_listing
    from gristmill.dataprep.reading.sources import outside_listing

    checkpoint = config["continue_from"]
    return {
        **config,
        "continue_from": checkpoint and outside_listing(f"{name}.continue_from", checkpoint, verify),
        "data": [{**without(item, "path"), "listing": examples_listing(item["path"])} for item in config["data"]],
    }


def prepares_examples(name: str, version: int, section: str, **shown: Any) -> Stage:
    """The stage that prepares a section's examples, where it asks for that; see `Stage`."""
    return Stage(
        name,
        version,
        "gristmill.dataprep.examples.prepare_examples:run",
        _examples(section),
        lambda manifest: made_sets(getattr(manifest, section)),
        of_examples=True,
        preflight=_wrong_steps(section),
        parallel=True,
        asks=lambda manifest: getattr(getattr(manifest, section), "prepare", ()),
        report=("gristmill.flows.report.finetuning:preparation",),
        **shown,
    )


def _examples(name: str) -> Callable[[Manifest, bool], tuple[Recipe, Recipe] | None]:
    def configure(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
        section = getattr(manifest, name)
        found = whole(name)(manifest, verify)
        if found is None or not section.prepare:
            return None
        recipe, told = ([without(item, "weight", "train_on") for item in part["data"]] for part in found)
        steps = [
            (step.stage, step.judged, *step_recipe(JUDGES[step.stage], step.config, manifest, verify))
            for step in section.prepare
        ]
        return (
            {
                "kind": name,
                "data": recipe,
                "prepare": [{stage: named, "judge": judged, **_raised(stage)} for stage, judged, named, _ in steps],
            },
            {"data": told, "prepare": [{stage: config, "judge": judged} for stage, judged, _, config in steps]},
        )

    return configure


def _raised(stage: str) -> Recipe:
    version = JUDGES[stage].version
    return {} if version == UNNAMED_VERSIONS[stage] else {"version": version}


def _wrong_steps(name: str) -> Preflight:
    """What finds languages in the steps of a section that no example can have (see `langid` and `filter`), and
    questions about pairs that cannot be asked."""

    def preflight(
        manifest: Manifest, stage: str, measured: Mapping[str, Sequence[str]]
    ) -> Iterator[tuple[Location, str]]:
        from gristmill.dataprep.llm.judge_pairs import read_question
        from gristmill.dataprep.llm.prompt_templates import TemplateProblemError

        steps = [step.config for step in getattr(manifest, name).prepare]
        for number, step in enumerate(steps):
            place = (name, "prepare", number)
            if isinstance(step, LanguageId):
                yield from langid.unknown_languages(step, place)
            if isinstance(step, JudgePairs):
                try:
                    read_question(step)
                except TemplateProblemError as error:
                    yield (*place, COMPARES.name, "template"), str(error)
            if isinstance(step, Filter):
                yield from filter.unknown_languages(steps[: number + 1], place)

    return preflight
