"""The recipes of everything that is trained, and of the examples that it is trained on."""

from __future__ import annotations

from collections.abc import Callable

from gristmill.flows.recipes.sections import Recipe, dump, name_outside_files, reads_of, seed_of, step_recipe, without
from gristmill.mixtures.decontaminate import Decontaminate
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.training import Training


def whole(name: str) -> Callable[[Manifest, bool], tuple[Recipe, Recipe] | None]:
    """The whole section of this name, with the files of its examples."""

    def configure(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
        section = getattr(manifest, name)
        if section is None:
            return None
        # What is prepared of examples, and counted of them, is other stages' business.
        config = {**dump(section, "prepare", "leaks"), "seed": seed_of(section, manifest)}
        # The default warm-up depends on the steps: what it comes to is named.
        config["schedule"]["warmup_steps"] = section.schedule.warmup_of(section.steps)
        # How a training computes is in no fingerprint: its recipe has the defaults, whatever the manifest says.
        recipe = {**_named(name, config, section, verify), **section.how}
        if name == "pretrain" and config["model"]["init_from"] is not None:
            # A model that was trained on longer rows keeps its context; it once got the length of these.
            files = recipe["model"]["init_from"]
            recipe["model"] = {**recipe["model"], "init_from": {"files": files, "context": "kept"}}
        if name != "pretrain" and config["continue_from"] is None:
            # Left out where it is absent, as from before tunings had it.
            del recipe["continue_from"]
        return recipe, {key: value for key, value in config.items() if recipe.get(key) != value}

    return configure


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


def examples(name: str) -> Callable[[Manifest, bool], tuple[Recipe, Recipe] | None]:
    """The preparation of a section's examples, where it asks for one."""

    def configure(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
        section = getattr(manifest, name)
        found = whole(name)(manifest, verify)
        if found is None or not section.prepare:
            return None
        recipe, told = ([without(item, "weight", "train_on") for item in part["data"]] for part in found)
        steps = [(step.stage, step.judged, *step_recipe(step.config, manifest, verify)) for step in section.prepare]
        return ({"kind": name, "data": recipe,
                 "prepare": [{stage: named, "judge": judged} for stage, judged, named, _ in steps]},
                {"data": told, "prepare": [{stage: {**named, **config}, "judge": judged}
                                           for stage, judged, named, config in steps]})

    return configure


def sft_data(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    """What the packed examples depend on."""
    found = _part_of_sft(manifest, verify, lambda key, of_data: of_data or key == "seed")
    if found is None or manifest.sft is None or not manifest.sft.replay:
        return found
    return {**found[0], **reads_of(manifest)}, found[1]


def sft(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    """What the training on packed examples depends on besides them."""
    found = _part_of_sft(manifest, verify, lambda key, of_data: not of_data or key == "seed")
    if found is None:
        return None
    recipe, told = found
    if recipe["ewc"] is not None:
        recipe |= reads_of(manifest)
    distill = recipe.pop("distill")
    if distill is None:
        return recipe, told
    # The teacher is what the stage of that name made of it.
    mixed = {key: distill[key] for key in ("kind", "beta", "weight")}
    return {**recipe, "distill": mixed}, {**told, "distill": distill}


def teacher(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    """Which model the teacher is, and what is kept of it."""
    from gristmill.mixtures.posttraining import TeacherKeys

    if manifest.sft is None or manifest.sft.distill is None:
        return None
    dumped = {key: dump(manifest.sft.distill)[key] for key in TeacherKeys.model_fields}
    named = name_outside_files(dumped, TeacherKeys.model_validate(dumped), verify)
    return ({**named, "precision": manifest.sft.precision},
            {"teacher": dumped["teacher"], "micro_batch_size": manifest.sft.micro_batch_size})


def _part_of_sft(
    manifest: Manifest, verify: bool, is_wanted: Callable[[str, bool], bool]
) -> tuple[Recipe, Recipe] | None:
    """The keys of the section `sft` that its data, or its training, depends on."""
    from gristmill.mixtures.posttraining import SftData

    found = whole("sft")(manifest, verify)
    if found is None:
        return None
    recipe, told = ({key: value for key, value in part.items() if is_wanted(key, key in SftData.model_fields)}
                    for part in found)
    return recipe, told


def reward(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    """Its own pairs, or those of preference optimisation, each once."""
    section = manifest.reward
    if section is not None and section.data is None and manifest.dpo is not None:
        pairs = tuple(one.unweighted() for one in manifest.dpo.data)
        manifest = manifest.model_copy(update={"reward": section.model_copy(update={"data": pairs})})
    return whole("reward")(manifest, verify)


def dpo_data(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    """What the encoded pairs, and their audit, depend on."""
    from gristmill.mixtures.posttraining import DpoData

    dpo = whole("dpo")(manifest, verify)
    if dpo is None:
        return None
    recipe, told = ({key: part[key] for key in DpoData.model_fields if key in part} for part in dpo)
    leaks = _leaks(manifest)
    named, config = (None, None) if leaks is None else step_recipe(leaks, manifest, verify)
    # How often a set is read is none of this stage's.
    return ({**recipe, "data": [without(item, "weight") for item in recipe["data"]], "leaks": named},
            {**told, "data": [without(item, "weight") for item in told["data"]], "leaks": config})


def _leaks(manifest: Manifest) -> Decontaminate | None:
    """The evaluation sets that preferences are compared with: their own, or those of the documents."""
    if manifest.dpo is not None and manifest.dpo.leaks is not None:
        return manifest.dpo.leaks
    return next((step.decontaminate for step in manifest.prepare if step.decontaminate is not None), None)


def reference(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    """What the starting model's log-probabilities depend on besides it and the answers."""
    section = manifest.dpo
    if section is None:
        return None
    # The size of a forward pass is how the work is done. What a loss makes of the numbers is none of this stage's.
    # Single answers are another work than pairs; no other loss is told apart.
    told: Recipe = {"answers": True} if section.loss == "kto" else {}
    if section.lora is not None and section.lora.base is not None:
        told["rounded"] = {"base": section.lora.base, "targets": section.lora.targets}
    return {"precision": section.precision, **told}, {"micro_batch_size": section.micro_batch_size}


def rl(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    """The section, with what identifies the reward models of other paths."""
    from gristmill.dataprep.reading.sources import outside_listing

    found = whole("rl")(manifest, verify)
    if found is None:
        return None
    recipe, told = found
    # Which model begins is among the inputs.
    del recipe["start_from"]
    rewards = [{**one, "path": outside_listing(f"rl.rewards.{number}.path", one["path"], verify)} if one.get("path")
               else one for number, one in enumerate(recipe["rewards"])]
    return {**recipe, "rewards": rewards}, {**told, "rewards": recipe["rewards"]}
