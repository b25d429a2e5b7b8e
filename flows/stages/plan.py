"""The plan of a manifest: its stages in order, each with the fingerprint that is known
before anything runs.

A fingerprint is the hash of the stage's name and version, of its recipe (the part of
the manifest, and the listing of outside files, that can change its result) and of the
fingerprints of its inputs. Settings of the execution (workers, ranks, runner, absolute
paths) are not in any fingerprint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from gristmill.core.files import json_digest
from gristmill.flows.stages.registry import STAGES
from gristmill.flows.stages.sections import step_recipe
from gristmill.flows.stages.stage import (
    Configured,
    Stage,
)
from gristmill.mixtures.base import Judging, Recipe, dependency_order
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.schema.sources import INGEST


@dataclass(frozen=True)
class Node:
    """One stage of a plan.

    Attributes:
        stage: its description.
        fingerprint: identifier of its output.
        recipe: part of the manifest that is in the fingerprint. Like `config` and
            `settings` it may hold credentials, so none of them is in the `repr`.
        config: argument of its function.
        inputs: name of a stage of the plan -> its fingerprint, in the order of the
            pipeline.
        edits: the inputs whose edits are applied to texts, in that order.
        called: its name if that is not the stage's: for a repeated or named step of
            `prepare`, and for a stage with `instances`.
        settings: settings of a step of `prepare`, as in the manifest.
        alias: identity of the earlier output whose files equal this one's; empty if
            this output has its own.
        kept_version: version of the stage that wrote the output, if a run keeps it
            across a version change.
    """

    stage: Stage
    fingerprint: str
    recipe: Mapping[str, Any] = field(repr=False)
    config: Mapping[str, Any] = field(repr=False)
    inputs: Mapping[str, str] = field(default_factory=dict)
    edits: tuple[str, ...] = ()
    called: str = ""
    settings: Judging | None = field(default=None, repr=False)
    alias: str = ""
    kept_version: int | None = None

    @property
    def name(self) -> str:
        """Its name in the plan, in the store and for users."""
        return self.called or self.stage.name

    @property
    def identity(self) -> str:
        """The fingerprint by which later stages name its output."""
        return self.alias or self.fingerprint

    @property
    def own_fingerprint(self) -> str:
        """The fingerprint of the output of the stage's present version, whatever output
        is kept.
        """
        return fingerprint(self.stage, dict(self.recipe), self.inputs)

    @property
    def uses_workers(self) -> bool:
        """True if its work is divided among `engine.workers`."""
        return self.stage.step is not None or self.stage.is_parallel(dict(self.recipe))


Plan = dict[str, Node]
"""Name -> node, in the order in which the stages run. A run replaces nodes when an
output's identity becomes known.
"""


class UnknownStageError(ValueError):
    """The manifest does not have the named stage."""


@dataclass(frozen=True)
class _Placed:
    """A stage with its place in a manifest."""

    name: str
    stage: Stage
    needs: Sequence[str]
    configure: Callable[[bool], Configured | None]
    settings: Judging | None = None


def make_plan(manifest: Manifest, verify_inputs: bool = False) -> Plan:
    """Compute every stage's fingerprint.

    Args:
        manifest: a validated manifest.
        verify_inputs: hash the content of outside files, instead of trusting size and
            time.

    Raises:
        gristmill.dataprep.readers.sources.SourceError: a source's path matches nothing.
    """
    plan: Plan = {}
    for placed in _placed(manifest):
        configured = placed.configure(verify_inputs)
        if configured is not None:
            plan[placed.name] = _node(placed, configured, plan, manifest)
    return plan


def add_later_stages(
    plan: Plan, manifest: Manifest, settle: Callable[[Node], Node]
) -> Plan:
    """Return a plan that ends early, extended by the later stages of its manifest, for
    questions about them.

    Sources are not read; stages whose outside files are missing are left out.

    Args:
        plan: stages of the manifest.
        manifest: the whole manifest.
        settle: see `settle_plan`; called with each added node.
    """
    extended = dict(plan)
    for placed in _placed(manifest):
        if placed.name in extended or placed.name == INGEST or placed.stage.step:
            continue
        try:
            configured = placed.configure(False)
        except (OSError, ValueError):
            continue
        if configured is not None:
            extended[placed.name] = settle(
                _node(placed, configured, extended, manifest)
            )
    return extended


def _node(
    placed: _Placed, configured: Configured, plan: Plan, manifest: Manifest
) -> Node:
    recipe, arguments = configured
    inputs = {name: plan[name].identity for name in placed.needs if name in plan}
    edits = tuple(
        name
        for name, step in manifest.steps.items()
        if step.config.edits_text and name in inputs
    )
    node_fingerprint = fingerprint(placed.stage, recipe, inputs)
    instance_name = placed.name if placed.name != placed.stage.name else ""
    # a step receives all its settings
    config = {**recipe, **arguments} if placed.settings is None else arguments
    return Node(
        placed.stage,
        node_fingerprint,
        recipe,
        config,
        inputs,
        edits,
        instance_name,
        placed.settings,
    )


def settle_plan(plan: Plan, settle: Callable[[Node], Node]) -> Plan:
    """Name every input by the identity of its output.

    Args:
        plan: the stages.
        settle: returns a node with the alias, or the kept output, that the store has
            for it.
    """
    settled: Plan = {}
    for name, node in plan.items():
        inputs = {
            input_name: settled[input_name].identity for input_name in node.inputs
        }
        resolved = replace(node, inputs=inputs, alias="", kept_version=None)
        settled[name] = settle(replace(resolved, fingerprint=resolved.own_fingerprint))
    return settled


def present_stages(manifest: Manifest) -> list[str]:
    """Return the names of a manifest's stages, in the order in which they run, even if
    their data do not exist yet.
    """
    names = []
    for placed in _placed(manifest):
        try:
            if placed.configure(False) is not None:
                names.append(placed.name)
        except (OSError, ValueError):
            # a file is missing that the stage needs, so the stage is present
            names.append(placed.name)
    return names


def fingerprint(stage: Stage, recipe: Recipe, inputs: Mapping[str, str]) -> str:
    """Hash of a stage's name, version, recipe and inputs: 64 hexadecimal digits."""
    return json_digest(
        {
            "stage": stage.name,
            "version": stage.version,
            "recipe": recipe,
            "inputs": list(inputs.items()),
        }
    )


def _placed(manifest: Manifest) -> list[_Placed]:
    """Return all stages, each after those that it needs, and otherwise in the order of
    the registry, with the steps of `prepare` in the manifest's order after ingest.
    """
    waiting: list[_Placed] = []
    for stage in STAGES.values():
        if stage.step is not None:
            continue
        parts = {stage.name: manifest}
        if stage.instances is not None:
            parts = dict(stage.instances(manifest))
        waiting += [
            _Placed(name, stage, stage.needs(part), partial(stage.configure, part))
            for name, part in parts.items()
        ]
        before = [INGEST]
        for name, step in manifest.steps.items() if stage.name == INGEST else ():
            kind, section = STAGES[step.stage], step.config
            configure = partial(step_recipe, kind, section, manifest)
            waiting.append(_Placed(name, kind, tuple(before), configure, section))
            before.append(name)
    order, circular = dependency_order({entry.name: entry.needs for entry in waiting})
    if circular:
        raise ValueError(
            f"the stages {', '.join(sorted(circular))} need each other in a cycle"
        )
    return sorted(waiting, key=lambda entry: order.index(entry.name))
