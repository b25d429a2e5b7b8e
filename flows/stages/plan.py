"""The plan of a manifest: its stages in their order, each with the fingerprint that is known before anything runs.

A fingerprint is the hash of the stage's name and version, of its recipe (the part of the manifest, and the listing of
outside files, that can change its result) and of the fingerprints of its inputs. How the work is done (workers,
ranks, runner, absolute paths) is in no fingerprint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from gristmill.core.files import canonical_json
from gristmill.flows.stages.registry import STAGES
from gristmill.flows.stages.sections import step_recipe
from gristmill.flows.stages.stage import Recipe, Stage
from gristmill.mixtures.base import Judging
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.sources import INGEST


@dataclass(frozen=True)
class Node:
    """One stage of one plan.

    Attributes:
        stage: what kind of work it is.
        fingerprint: names its output.
        recipe: what of the manifest is in the fingerprint.
        config: what its function gets.
        inputs: name of a stage of the plan -> its fingerprint, in the order of the pipeline.
        edits: the stages among the inputs whose edits are applied to texts, in that order.
        called: its name where that is not the stage's: of a step of `prepare` that comes again, or has a name, and of
            a stage with `instances`.
        settings: of a step of `prepare`, as the manifest has them.
        alias: identity of the earlier output whose files equal this one's; empty if this output has its own.
        kept_version: version of the stage that made the output, if a run keeps it over a version change.
    """

    stage: Stage
    fingerprint: str
    recipe: Mapping[str, Any]
    config: Mapping[str, Any]
    inputs: Mapping[str, str] = field(default_factory=dict)
    edits: tuple[str, ...] = ()
    called: str = ""
    settings: Judging | None = None
    alias: str = ""
    kept_version: int | None = None

    @property
    def name(self) -> str:
        """What it is called in the plan, the store and everything that is shown."""
        return self.called or self.stage.name

    @property
    def identity(self) -> str:
        """The fingerprint by which later stages name its output."""
        return self.alias or self.fingerprint

    @property
    def own_fingerprint(self) -> str:
        """The fingerprint of what the present version of the stage makes, whatever output is kept."""
        return fingerprint(self.stage, dict(self.recipe), self.inputs)

    @property
    def uses_workers(self) -> bool:
        """Whether it does its work on as many of `engine.workers` as it gets."""
        return self.stage.judges or (self.stage.parallel and not self.stage.is_short(dict(self.recipe)))


Plan = dict[str, Node]
"""Name -> node, in the order in which the stages run. A run replaces nodes when an output's identity becomes known."""


class UnknownStageError(ValueError):
    """A stage was named that the manifest does not have."""


@dataclass(frozen=True)
class _Placed:
    """A stage as a manifest has it."""

    name: str
    stage: Stage
    needs: Sequence[str]
    configure: Callable[[bool], tuple[Recipe, Recipe] | None]
    settings: Judging | None = None


def make_plan(manifest: Manifest, verify_inputs: bool = False) -> Plan:
    """Compute every stage's fingerprint.

    Args:
        manifest: a validated manifest.
        verify_inputs: hash the content of outside files, instead of trusting size and time.

    Raises:
        gristmill.dataprep.reading.sources.SourceError: a source's path matches nothing.
    """
    plan: Plan = {}
    for placed in _placed(manifest):
        configured = placed.configure(verify_inputs)
        if configured is not None:
            plan[placed.name] = _node(placed, configured, plan, manifest)
    return plan


def add_later_stages(plan: Plan, manifest: Manifest, settle: Callable[[Node], Node]) -> Plan:
    """A plan that ends early with the later stages of its manifest, of which questions can be asked.

    Sources are not looked at; stages whose outside files are gone are left out.

    Args:
        plan: stages of the manifest.
        manifest: the whole.
        settle: see `settle_plan`; called with what is added.
    """
    whole = dict(plan)
    for placed in _placed(manifest):
        if placed.name in whole or placed.name == INGEST or placed.stage.judges:
            continue
        try:
            configured = placed.configure(False)
        except (OSError, ValueError):
            continue
        if configured is not None:
            whole[placed.name] = settle(_node(placed, configured, whole, manifest))
    return whole


def _node(placed: _Placed, configured: tuple[Recipe, Recipe], plan: Plan, manifest: Manifest) -> Node:
    recipe, arguments = configured
    inputs = {name: plan[name].identity for name in placed.needs if name in plan}
    edits = tuple(name for name, step in manifest.steps.items() if step.config.edits_text and name in inputs)
    named = fingerprint(placed.stage, recipe, inputs)
    called = placed.name if placed.name != placed.stage.name else ""
    config = {**recipe, **arguments} if placed.settings is None else arguments  # a step gets all its settings
    return Node(placed.stage, named, recipe, config, inputs, edits, called, placed.settings)


def settle_plan(plan: Plan, settle: Callable[[Node], Node]) -> Plan:
    """Name every input by the identity of its output.

    Args:
        plan: the stages.
        settle: returns a node with the alias, or the kept output, that the store has for it.
    """
    settled: Plan = {}
    for name, node in plan.items():
        inputs = {each: settled[each].identity for each in node.inputs}
        own = replace(node, inputs=inputs, alias="", kept_version=None)
        settled[name] = settle(replace(own, fingerprint=own.own_fingerprint))
    return settled


def present_stages(manifest: Manifest) -> list[str]:
    """The names of a manifest's stages, in the order in which they run, whether or not its data are there yet."""
    found = []
    for placed in _placed(manifest):
        try:
            if placed.configure(False) is not None:
                found.append(placed.name)
        except (OSError, ValueError):  # a file that it wants is missing, which it only is where the stage is present
            found.append(placed.name)
    return found


def fingerprint(stage: Stage, recipe: Recipe, inputs: Mapping[str, str]) -> str:
    """Hash of a stage's name, version, recipe and inputs: 64 hexadecimal digits."""
    return hashlib.sha256(
        canonical_json(
            {"stage": stage.name, "version": stage.version, "recipe": recipe, "inputs": list(inputs.items())}
        )
    ).hexdigest()


def _placed(manifest: Manifest) -> list[_Placed]:
    """All stages, each behind those that it needs; where that leaves a choice, in the order of the registry."""
    waiting = list(_listed(manifest))
    placed: list[_Placed] = []
    while waiting:
        names = {one.name for one in waiting}
        ready = next((one for one in waiting if not names & set(one.needs)), None)
        if ready is None:
            raise ValueError(f"the stages {', '.join(sorted(names))} need each other in a circle")
        waiting.remove(ready)
        placed.append(ready)
    return placed


def _listed(manifest: Manifest) -> Iterator[_Placed]:
    """All stages in the order of the registry, the steps of `prepare` in that of the manifest behind the documents."""
    for stage in STAGES.values():
        if stage.judges:
            continue
        alone = {stage.name: manifest} if stage.instances is None else stage.instances(manifest)
        for name, part in alone.items():
            yield _Placed(name, stage, stage.needs(part), partial(stage.configure, part))
        if stage.name != INGEST:
            continue
        before = [INGEST]
        for name, step in manifest.steps.items():
            of_step = STAGES[step.stage]
            yield _Placed(
                name, of_step, tuple(before), partial(step_recipe, of_step, step.config, manifest), step.config
            )
            before.append(name)
