"""`rl`: trains a model with rewards for its own answers."""

from __future__ import annotations

from gristmill.flows.stages.sections import without
from gristmill.flows.stages.stage import (
    Configured,
    MeasuredColumns,
    Problems,
)
from gristmill.flows.stages.trainings import (
    made_sets,
    model_before,
    torchrun_stage,
    whole,
)
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.objectives.rl_tools import PythonTool
from gristmill.mixtures.schema.rl import Rl
from gristmill.mixtures.steps.asked_model import HOW


def configure(manifest: Manifest, verify: bool) -> Configured | None:
    """Return the section, with the listings of reward models at other paths."""
    from gristmill.dataprep.readers.sources import outside_listing

    configured = whole("rl")(manifest, verify)
    if configured is None:
        return None
    recipe, arguments = configured
    # The starting model is among the inputs.
    del recipe["start_from"]
    named_recipe = dict(recipe)
    named_arguments = dict(arguments)
    if "teacher" in recipe:
        named_arguments["teacher"] = recipe["teacher"]
        named_recipe["teacher"] = outside_listing(
            "rl.teacher", recipe["teacher"], verify
        )
    if "teacher_endpoint" in recipe:
        named_arguments["teacher_endpoint"] = recipe["teacher_endpoint"]
        named_recipe["teacher_endpoint"] = without(recipe["teacher_endpoint"], *HOW)
    named_arguments["rewards"] = recipe["rewards"]
    named_recipe["rewards"] = [
        {
            **entry,
            "path": outside_listing(f"rl.rewards.{number}.path", entry["path"], verify),
        }
        if entry.get("path")
        else entry
        for number, entry in enumerate(recipe["rewards"])
    ]
    return named_recipe, named_arguments


def needs(manifest: Manifest) -> list[str]:
    """Return the starting model, and a reward model of this manifest if used."""
    if manifest.rl is None:
        return []
    start_from = manifest.rl.start_from
    start = model_before("rl", manifest) if start_from == "auto" else start_from
    models = (
        ["reward"]
        if any(
            entry.kind == "model" and entry.path is None
            for entry in manifest.rl.rewards
        )
        else []
    )
    return [*made_sets(manifest.rl), "mix", "tokenizer", start, *models]


def preflight(manifest: Manifest, name: str, measured: MeasuredColumns) -> Problems:
    """Yield an error for a sandbox that this machine does not support."""
    from gristmill.train.rl.tools.sandbox import SandboxError, check_sandbox

    for number, tool in enumerate(manifest.rl.tools if manifest.rl is not None else ()):
        if not isinstance(tool, PythonTool):
            continue
        try:
            check_sandbox()
        except SandboxError as error:
            yield (STAGE.name, "tools", number), str(error)


STAGE = torchrun_stage(
    "rl",
    6,
    configure,
    needs,
    preflight=preflight,
    training=Rl,
    row_kind="prompts",
    output="model",
    report=("gristmill.flows.report.training:reinforcement",),
)
