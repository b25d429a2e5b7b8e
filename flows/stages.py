"""The stages: what each one reads of the manifest, which stages it needs, and which function does the work.

`make_plan` turns a manifest into an ordered list of nodes whose fingerprints are known before anything runs. A
fingerprint is the hash of the stage's name and version, of its recipe (the part of the manifest, and the listing of
outside files, that can change its result) and of the fingerprints of its inputs. How the work is done (workers,
ranks, runner, absolute paths) is in no fingerprint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gristmill.dataprep.files import canonical_json
from gristmill.flows import needs
from gristmill.flows.recipes import documents, results, tokens, training
from gristmill.flows.recipes.sections import Recipe
from gristmill.mixtures.manifest import Manifest


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
    edits: tuple[str, ...] = ()
    """The stages among the inputs whose edits are applied to texts, in that order."""

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
        edits = tuple(step.stage for step in manifest.prepare if step.config.edits_text and step.stage in inputs)
        named = fingerprint(stage, recipe, inputs, edits)
        plan[stage.name] = Node(stage, named, recipe, {**recipe, **told}, inputs, edits)
    return plan


def present_stages(manifest: Manifest) -> list[str]:
    """The names of a manifest's stages, in the order in which they run, whether or not its data are there yet."""
    found = []
    for stage in ordered_stages(manifest):
        try:
            if stage.name == "ingest" or stage.configure(manifest, False) is not None:
                found.append(stage.name)
        except (OSError, ValueError):  # a file that it wants is missing, which it only is where the stage is present
            found.append(stage.name)
    return found


def fingerprint(stage: Stage, recipe: Recipe, inputs: Mapping[str, str], edits: Sequence[str] = ()) -> str:
    """64 hexadecimal digits that name a stage's output by what goes into it.

    The edits of two stages and more are named besides: earlier versions applied them in the order of the stages' names,
    so that what they made is another output.
    """
    ordered = {"edits": list(edits)} if len(edits) > 1 else {}
    return hashlib.sha256(canonical_json(
        {"stage": stage.name, "version": stage.version, "recipe": recipe, "inputs": list(inputs.items()), **ordered}
    )).hexdigest()


def ordered_stages(manifest: Manifest) -> list[Stage]:
    """All stages, the preparing ones in the order that the manifest gives them."""
    prepare = [STAGES[step.stage] for step in manifest.prepare]
    after = list(AFTER_PREPARE)
    if "pretrain" in STAGES["sft_data"].needs(manifest):
        after.remove("sft_data")
        after.insert(after.index("pretrain") + 1, "sft_data")
    return [STAGES["ingest"], *prepare, *(STAGES[name] for name in after)]


def _prepares(name: str, version: int, run: str) -> Stage:
    """A step of `prepare`."""
    return Stage(name, version, run, documents.prepare(name), needs.before(name))


def _trains(
    name: str, version: int, configure: Callable[[Manifest, bool], tuple[Recipe, Recipe] | None],
    needed: Callable[[Manifest], list[str]],
) -> Stage:  # fmt: skip
    """A stage that torchrun starts, on every rank."""
    return Stage(name, version, f"gristmill.train.stages.{name}:run", configure, needed, "torchrun")


STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage("ingest", 2, "gristmill.dataprep.reading.ingest:run", documents.ingest, needs.only()),
        _prepares("clean", 2, "gristmill.dataprep.cleaning.clean:run"),
        _prepares("filter", 2, "gristmill.dataprep.filtering.filter:run"),
        _prepares("dedup", 3, "gristmill.dataprep.duplicates.dedup:run"),
        _prepares("dedup_lines", 1, "gristmill.dataprep.passages.dedup_lines:run"),
        _prepares("dedup_substrings", 1, "gristmill.dataprep.passages.dedup_substrings:run"),
        _prepares("langid", 2, "gristmill.dataprep.judges.langid:run"),
        _prepares("quality", 4, "gristmill.dataprep.judges.quality:run"),
        _prepares("decontaminate", 2, "gristmill.dataprep.passages.decontaminate:run"),
        Stage("tokenizer", 3, "gristmill.tokenize.encoding.tokenizer:run", tokens.tokenizer, needs.documents()),
        Stage("tokenize", 2, "gristmill.tokenize.encoding.encode:run", tokens.tokenize, needs.documents("tokenizer")),
        Stage("mix", 8, "gristmill.tokenize.mixing.mix:run", tokens.mix, needs.documents("tokenizer", "tokenize")),
        Stage("sft_prepare", 2, "gristmill.dataprep.examples.prepare:run", training.examples("sft"), needs.only()),
        Stage("sft_data", 3, "gristmill.train.stages.sft_data:run", training.sft_data, needs.before_sft_data),
        Stage("dpo_prepare", 2, "gristmill.dataprep.examples.prepare:run", training.examples("dpo"), needs.only()),
        Stage("dpo_data", 4, "gristmill.train.stages.dpo_data:run", training.dpo_data,
              needs.only("dpo_prepare", "tokenizer", "mix")),
        _trains("pretrain", 2, training.whole("pretrain"), needs.only("tokenizer", "mix")),
        _trains("teacher", 1, training.teacher, needs.before_teacher),
        _trains("sft", 5, training.sft, needs.only("tokenizer", "mix", "sft_data", "pretrain", "teacher")),
        _trains("reward", 3, training.reward, needs.before_reward),
        _trains("reference", 2, training.reference, needs.before_reference),
        _trains("dpo", 6, training.whole("dpo"), needs.before_dpo),
        _trains("rl", 3, training.rl, needs.before_rl),
        Stage("evaluate", 3, "gristmill.train.stages.evaluate:run", results.evaluate,
              needs.only("tokenizer", "mix", "pretrain", "sft", "dpo", "rl")),
        Stage("export", 1, "gristmill.train.stages.export:run", results.export, needs.final_model),
    )
}
AFTER_PREPARE = ("tokenizer", "tokenize", "mix", "sft_prepare", "sft_data", "dpo_prepare", "dpo_data", "pretrain",
                 "teacher", "sft", "reward", "reference", "dpo", "rl", "evaluate", "export")
