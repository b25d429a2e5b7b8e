"""The stages: what each one reads of the manifest, which stages it needs, and which function does the work.

`make_plan` turns a manifest into an ordered list of nodes whose fingerprints are known before anything runs. A
fingerprint is the hash of the stage's name and version, of its recipe (the part of the manifest, and the listing of
outside files, that can change its result) and of the fingerprints of its inputs. How the work is done (workers,
ranks, runner, absolute paths) is in no fingerprint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

from gristmill.dataprep.files import as_path, canonical_json, sha256_file
from gristmill.mixtures.decontaminate import Decontaminate
from gristmill.mixtures.language import LanguageId
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.mix_problems import uses_own_weights
from gristmill.mixtures.section import Judging, Section, outside_paths

MIXTURE_KEYS = ("weight", "max_epochs", "min_tokens", "max_tokens", "where", "epochs")
"""Keys of a source that only the mixture reads; all others belong to its reading."""
NOTE_KEYS = ("licence",)
"""Keys of a source that change nothing."""
Recipe = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """A kind of work.

    Attributes:
        name: what users call it.
        version: raised whenever the same recipe gives an output with another meaning or other bytes.
        run: `module:function`, imported in the stage's own process only.
        configure: (manifest, verify_inputs) -> (recipe, what else the function is told), or None where the manifest
            switches the stage off.
        needs: names of the stages whose outputs it reads; those that are switched off are left out.
        launch: a plain process, or torchrun.
    """

    name: str
    version: int
    run: str
    configure: Callable[[Manifest, bool], tuple[Recipe, Recipe] | None]
    needs: Callable[[Manifest], list[str]]
    launch: Literal["process", "torchrun"] = "process"


@dataclass(frozen=True)
class Node:
    """One stage of one plan."""

    stage: Stage
    fingerprint: str
    recipe: Mapping[str, Any]
    config: Mapping[str, Any]
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Stage name -> fingerprint, in the order of the pipeline."""

    @property
    def name(self) -> str:
        """The stage's name."""
        return self.stage.name


Plan = dict[str, Node]
"""Stage name -> node, in the order in which the stages run."""


class UnknownStageError(ValueError):
    """A stage was named that the manifest does not have."""


def make_plan(manifest: Manifest, verify_inputs: bool = False) -> Plan:
    """Compute every stage's fingerprint.

    Args:
        manifest: a validated manifest.
        verify_inputs: hash the content of outside files, instead of trusting size and time.

    Raises:
        gristmill.dataprep.reading.sources.SourceError: a source's path matches nothing.
    """
    plan: Plan = {}
    for stage in ordered_stages(manifest):
        configured = stage.configure(manifest, verify_inputs)
        if configured is None:
            continue
        recipe, told = configured
        inputs = {name: plan[name].fingerprint for name in stage.needs(manifest) if name in plan}
        plan[stage.name] = Node(stage, fingerprint(stage, recipe, inputs), recipe, {**recipe, **told}, inputs)
    return plan


def fingerprint(stage: Stage, recipe: Recipe, inputs: Mapping[str, str]) -> str:
    """64 hexadecimal digits that name a stage's output by what goes into it."""
    return hashlib.sha256(canonical_json(
        {"stage": stage.name, "version": stage.version, "recipe": recipe, "inputs": list(inputs.items())}
    )).hexdigest()


def ordered_stages(manifest: Manifest) -> list[Stage]:
    """All stages, the preparing ones in the order that the manifest gives them."""
    prepare = [STAGES[step.stage] for step in manifest.prepare]
    return [STAGES["ingest"], *prepare, *(STAGES[name] for name in AFTER_PREPARE)]


def _dump(section: Section, *leave_out: str) -> Recipe:
    return section.model_dump(mode="json", exclude=set(leave_out))


def _seed(section: Any, manifest: Manifest) -> int:
    return manifest.seed if section.seed is None else section.seed


def _ingest(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe]:
    from gristmill.dataprep.reading.sources import listing

    dumped = {name: _dump(source, *MIXTURE_KEYS, *NOTE_KEYS) for name, source in manifest.sources.items()}
    read = {name: {key: value for key, value in source.items() if key != "path"} for name, source in dumped.items()}
    listings = {name: listing(name, source, verify=verify) for name, source in dumped.items()}
    recipe = {
        "ingest": _dump(manifest.ingest),
        "sources": {name: {**read[name], "listing": listings[name]} for name in dumped},
    }
    # The stage compares the listing with what it finds: files that changed meanwhile are an error.
    return recipe, {"sources": {name: {**source, "listing": listings[name]} for name, source in dumped.items()}}


def _prepare(name: str) -> Callable[[Manifest, bool], tuple[Recipe, Recipe] | None]:
    def configure(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
        for step in manifest.prepare:
            if step.stage == name:
                return _step(step.config, manifest, verify)
        return None

    return configure


def _step(section: Judging, manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe]:
    """The recipe of a step, of documents' preparation or of examples', and what its function is told."""
    from gristmill.dataprep.judges.models import is_other_model

    if isinstance(section, LanguageId) and not is_other_model(section.model):
        # lid.176 is one pinned file wherever it lies, so its path is no part of the recipe.
        return _dump(section, "model"), {"model": section.model}
    seed = {"seed": _seed(section, manifest)} if "seed" in type(section).model_fields else {}
    config = {**_dump(section), **seed}
    return name_outside_files(config, section, verify), config


def name_outside_files(recipe: Recipe, section: Section, verify: bool) -> Recipe:
    """The recipe with every outside path replaced by what identifies the files that it names."""
    from gristmill.dataprep.reading.sources import outside_listing

    named: Recipe = deepcopy(recipe)
    for location, path in outside_paths(section):
        *parents, last = location
        at: Any = named
        for part in parents:
            at = at[part]
        at[last] = outside_listing(".".join(map(str, location)), path, verify)
    return named


def _tokenizer(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    section = manifest.tokenizer
    if section is None:
        return None
    if section.path is not None:
        chat = _dump_only(section, verify, "special_tokens", "chat_template", "chat_template_path")
        return ({"external": {"sha256": sha256_file(as_path(section.path))}, **chat},
                {"tokenizer": _dump(section), "sources": list(manifest.sources), "seed": 0})
    dumped = _dump(section, "seed", "path")
    return {"tokenizer": name_outside_files(dumped, section, verify), "sources": list(manifest.sources),
            "seed": _seed(section, manifest)}, {"tokenizer": dumped}


def _dump_only(section: Section, verify: bool, *keys: str) -> Recipe:
    """Some settings of a section, outside files by what identifies them."""
    named = name_outside_files(_dump(section), section, verify)
    return {key: named[key] for key in keys}


def _tokenize(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    return None if manifest.tokenizer is None else ({}, {})


def _mix(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    if manifest.mix is None:
        return None
    sources = {name: source.model_dump(mode="json", include=set(MIXTURE_KEYS))
               for name, source in manifest.sources.items()}
    dumped = _dump(manifest.mix, "seed")
    mix = name_outside_files(dumped, manifest.mix, verify)
    told = {} if mix == dumped else {"mix": dumped}
    recipe = {"mix": mix, "sources": sources, "seed": _seed(manifest.mix, manifest)}
    if uses_own_weights(recipe["mix"]):
        return recipe, told
    weighed = {name: {key: value for key, value in source.items() if key != "weight"}
               for name, source in sources.items()}
    return {**recipe, "sources": weighed}, {**told, "sources": sources}


def _training(name: str) -> Callable[[Manifest, bool], tuple[Recipe, Recipe] | None]:
    def configure(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
        section = getattr(manifest, name)
        if section is None:
            return None
        # What is prepared of examples, and counted of them, is other stages' business.
        recipe = {**_dump(section, "prepare", "leaks"), "seed": _seed(section, manifest)}
        if name == "pretrain":
            named = name_outside_files(recipe, section, verify)
            return named, {key: value for key, value in recipe.items() if named[key] != value}
        from gristmill.dataprep.reading.examples import examples_listing

        data = recipe.pop("data")
        recipe["data"] = [{**{key: value for key, value in item.items() if key != "path"},
                           "listing": examples_listing(item["path"])} for item in data]
        return recipe, {"data": data}

    return configure


def _examples(name: str) -> Callable[[Manifest, bool], tuple[Recipe, Recipe] | None]:
    """The preparation of a section's examples, where it asks for one."""

    def configure(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
        section = getattr(manifest, name)
        whole = _training(name)(manifest, verify)
        if whole is None or not section.prepare:
            return None
        recipe, told = ([_without(item, "weight", "train_on") for item in part["data"]] for part in whole)
        steps = [(step.stage, step.judged, *_step(step.config, manifest, verify)) for step in section.prepare]
        return ({"kind": name, "data": recipe,
                 "prepare": [{stage: named, "judge": judged} for stage, judged, named, _ in steps]},
                {"data": told, "prepare": [{stage: {**named, **config}, "judge": judged}
                                           for stage, judged, named, config in steps]})

    return configure


def _sft_data(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    return _part_of_sft(manifest, verify, lambda key, of_data: of_data or key == "seed")


def _sft(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    found = _part_of_sft(manifest, verify, lambda key, of_data: not of_data or key == "seed")
    if found is None:
        return None
    recipe, told = found
    distill = recipe.pop("distill")
    if distill is None:
        return recipe, told
    # The teacher is what the stage of that name made of it.
    mixed = {key: distill[key] for key in ("kind", "beta", "weight")}
    return {**recipe, "distill": mixed}, {**told, "distill": distill}


def _teacher(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    from gristmill.mixtures.distillation import TeacherKeys

    if manifest.sft is None or manifest.sft.distill is None:
        return None
    dumped = {key: _dump(manifest.sft.distill)[key] for key in TeacherKeys.model_fields}
    named = name_outside_files(dumped, TeacherKeys.model_validate(dumped), verify)
    return ({**named, "precision": manifest.sft.precision},
            {"teacher": dumped["teacher"], "micro_batch_size": manifest.sft.micro_batch_size})


def _part_of_sft(
    manifest: Manifest, verify: bool, is_wanted: Callable[[str, bool], bool]
) -> tuple[Recipe, Recipe] | None:
    """The keys of the section `sft` that its data, or its training, depends on."""
    from gristmill.mixtures.posttraining import SftData

    whole = _training("sft")(manifest, verify)
    if whole is None:
        return None
    recipe, told = ({key: value for key, value in part.items() if is_wanted(key, key in SftData.model_fields)}
                    for part in whole)
    return recipe, told


def _reward(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    """Its own pairs, or those of preference optimisation, each once."""
    section = manifest.reward
    if section is not None and section.data is None and manifest.dpo is not None:
        pairs = tuple(one.unweighted() for one in manifest.dpo.data)
        manifest = manifest.model_copy(update={"reward": section.model_copy(update={"data": pairs})})
    return _training("reward")(manifest, verify)


def _dpo_data(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    from gristmill.mixtures.posttraining import DpoData

    dpo = _training("dpo")(manifest, verify)
    if dpo is None:
        return None
    recipe, told = ({key: part[key] for key in DpoData.model_fields if key in part} for part in dpo)
    leaks = _leaks(manifest)
    named, config = (None, None) if leaks is None else _step(leaks, manifest, verify)
    # How often a set is read is none of this stage's.
    return ({**recipe, "data": [_without(item, "weight") for item in recipe["data"]], "leaks": named},
            {**told, "data": [_without(item, "weight") for item in told["data"]], "leaks": config})


def _leaks(manifest: Manifest) -> Decontaminate | None:
    """The evaluation sets that preferences are compared with: their own, or those of the documents."""
    if manifest.dpo is not None and manifest.dpo.leaks is not None:
        return manifest.dpo.leaks
    return next((step.decontaminate for step in manifest.prepare if step.decontaminate is not None), None)


def _reference(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    section = manifest.dpo
    if section is None:
        return None
    # The size of a forward pass is how the work is done. What a loss makes of the numbers is none of this stage's.
    # Single answers are another work than pairs; no other loss is told apart.
    answers = {"answers": True} if section.loss == "kto" else {}
    return {"precision": section.precision, **answers}, {"micro_batch_size": section.micro_batch_size}


def _without(item: Recipe, *keys: str) -> Recipe:
    return {key: value for key, value in item.items() if key not in keys}


def _rl(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    from gristmill.dataprep.reading.sources import outside_listing

    found = _training("rl")(manifest, verify)
    if found is None:
        return None
    recipe, told = found
    # Which model begins is among the inputs.
    del recipe["start_from"]
    rewards = [{**one, "path": outside_listing(f"rl.rewards.{number}.path", one["path"], verify)} if one.get("path")
               else one for number, one in enumerate(recipe["rewards"])]
    return {**recipe, "rewards": rewards}, {**told, "rewards": recipe["rewards"]}


def _evaluate(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    section = manifest.evaluate
    if section is None:
        return None
    beta = {} if manifest.dpo is None else {"beta": manifest.dpo.beta}
    recipe = {**_dump(section), "seed": _seed(section, manifest), **beta}
    return name_outside_files(recipe, section, verify), {"tasks": recipe["tasks"]}


def _export(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    if manifest.export is None:
        return None
    return {**_dump(manifest.export), "lineage": _lineage(manifest)}, {}


def _lineage(manifest: Manifest) -> Recipe:
    """What the model card says of the data: the sources with their licences, and the weights that counted."""
    mix = {} if manifest.mix is None else _dump(manifest.mix)
    own = uses_own_weights(mix)
    sources = {name: {**({"weight": source.weight} if own else {}), "licence": source.licence}
               for name, source in manifest.sources.items()}
    asked = {key: mix[key] for key in ("weights", "stages") if mix.get(key)}
    return {"name": manifest.name, "sources": sources, **({"mix": asked} if asked else {})}


def _annotators(manifest: Manifest) -> list[str]:
    return [step.stage for step in manifest.prepare]


def _before(name: str) -> Callable[[Manifest], list[str]]:
    def needs(manifest: Manifest) -> list[str]:
        annotators = _annotators(manifest)
        return ["ingest", *annotators[: annotators.index(name)]]

    return needs


def _documents(*others: str) -> Callable[[Manifest], list[str]]:
    return lambda manifest: ["ingest", *_annotators(manifest), *others]


def _only(*names: str) -> Callable[[Manifest], list[str]]:
    return lambda manifest: list(names)


def _start(manifest: Manifest) -> str:
    """The stage whose model preferences are learned from."""
    return "sft" if manifest.sft is not None else "pretrain"


def _before_reward(manifest: Manifest) -> list[str]:
    own = manifest.reward is not None and manifest.reward.data is not None
    return [*([] if own else ["dpo_prepare"]), "tokenizer", _start(manifest)]


def _before_teacher(manifest: Manifest) -> list[str]:
    own = manifest.sft is not None and manifest.sft.distill is not None and manifest.sft.distill.teacher == "pretrain"
    return ["tokenizer", "sft_data", *(["pretrain"] if own else [])]


def _before_reference(manifest: Manifest) -> list[str]:
    return ["dpo_data", _start(manifest)]


def _before_dpo(manifest: Manifest) -> list[str]:
    return ["tokenizer", "mix", *_before_reference(manifest), "reference"]


def _before_rl(manifest: Manifest) -> list[str]:
    if manifest.rl is None:
        return []
    last = next(name for name in ("dpo", "sft", "pretrain") if getattr(manifest, name) is not None)
    start = last if manifest.rl.start_from == "auto" else manifest.rl.start_from
    models = ["reward"] if any(one.kind == "model" and one.path is None for one in manifest.rl.rewards) else []
    return ["mix", "tokenizer", start, *models]


def _final_model(manifest: Manifest) -> list[str]:
    final = next(name for name in ("rl", "dpo", "sft", "pretrain") if getattr(manifest, name) is not None)
    measured = ["mix"] if manifest.export is not None and manifest.export.int8 else []
    return ["tokenizer", *measured, final]


STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage("ingest", 1, "gristmill.dataprep.reading.ingest:run", _ingest, _only()),
        Stage("clean", 1, "gristmill.dataprep.cleaning.clean:run", _prepare("clean"), _before("clean")),
        Stage("filter", 1, "gristmill.dataprep.filtering.filter:run", _prepare("filter"), _before("filter")),
        Stage("dedup", 2, "gristmill.dataprep.duplicates.dedup:run", _prepare("dedup"), _before("dedup")),
        Stage("dedup_lines", 1, "gristmill.dataprep.passages.dedup_lines:run", _prepare("dedup_lines"),
              _before("dedup_lines")),
        Stage("dedup_substrings", 1, "gristmill.dataprep.passages.dedup_substrings:run", _prepare("dedup_substrings"),
              _before("dedup_substrings")),
        Stage("langid", 2, "gristmill.dataprep.judges.langid:run", _prepare("langid"), _before("langid")),
        Stage("quality", 3, "gristmill.dataprep.judges.quality:run", _prepare("quality"), _before("quality")),
        Stage("decontaminate", 1, "gristmill.dataprep.passages.decontaminate:run", _prepare("decontaminate"),
              _before("decontaminate")),
        Stage("tokenizer", 3, "gristmill.tokenize.encoding.tokenizer:run", _tokenizer, _documents()),
        Stage("tokenize", 2, "gristmill.tokenize.encoding.encode:run", _tokenize, _documents("tokenizer")),
        Stage("mix", 8, "gristmill.tokenize.mixing.mix:run", _mix, _documents("tokenizer", "tokenize")),
        Stage("sft_prepare", 1, "gristmill.dataprep.examples.prepare:run", _examples("sft"), _only()),
        Stage("sft_data", 1, "gristmill.train.sft_data:run", _sft_data, _only("sft_prepare", "tokenizer", "mix")),
        Stage("dpo_prepare", 1, "gristmill.dataprep.examples.prepare:run", _examples("dpo"), _only()),
        Stage("dpo_data", 3, "gristmill.train.dpo_data:run", _dpo_data, _only("dpo_prepare", "tokenizer", "mix")),
        Stage("pretrain", 2, "gristmill.train.pretrain:run", _training("pretrain"), _only("tokenizer", "mix"),
              "torchrun"),
        Stage("teacher", 1, "gristmill.train.teacher:run", _teacher, _before_teacher, "torchrun"),
        Stage("sft", 4, "gristmill.train.sft:run", _sft, _only("tokenizer", "mix", "sft_data", "pretrain", "teacher"),
              "torchrun"),
        Stage("reward", 2, "gristmill.train.reward:run", _reward, _before_reward, "torchrun"),
        Stage("reference", 2, "gristmill.train.reference:run", _reference, _before_reference, "torchrun"),
        Stage("dpo", 4, "gristmill.train.dpo:run", _training("dpo"), _before_dpo, "torchrun"),
        Stage("rl", 1, "gristmill.train.rl:run", _rl, _before_rl, "torchrun"),
        Stage("evaluate", 2, "gristmill.train.evaluate:run", _evaluate,
              _only("tokenizer", "mix", "pretrain", "sft", "dpo", "rl")),
        Stage("export", 1, "gristmill.train.export:run", _export, _final_model),
    )
}
AFTER_PREPARE = ("tokenizer", "tokenize", "mix", "sft_prepare", "sft_data", "dpo_prepare", "dpo_data", "pretrain",
                 "teacher", "sft", "reward", "reference", "dpo", "rl", "evaluate", "export")
