"""`rl`: trains a model by rewards for its own answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gristmill.flows.stages.stage import Recipe
from gristmill.flows.stages.trainings import made_sets, model_before, training, whole
from gristmill.mixtures.manifest import Location, Manifest
from gristmill.mixtures.objectives.rl_tools import PythonTool, SearchTool
from gristmill.mixtures.reinforcement import Rl
from gristmill.mixtures.sources import INGEST


def configure(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    """The section, with what identifies the reward models of other paths."""
    from gristmill.dataprep.reading.sources import outside_listing

    found = whole("rl")(manifest, verify)
    if found is None:
        return None
    recipe, told = found
    # Which model begins is among the inputs.
    del recipe["start_from"]
    rewards = [
        {**one, "path": outside_listing(f"rl.rewards.{number}.path", one["path"], verify)} if one.get("path") else one
        for number, one in enumerate(recipe["rewards"])
    ]
    named, given = {**recipe, "rewards": rewards}, {**told, "rewards": recipe["rewards"]}
    if "tools" in recipe:
        named["tools"] = [
            {**one, "path": outside_listing(f"rl.tools.{number}.path", one["path"], verify)} if one.get("path") else one
            for number, one in enumerate(recipe["tools"])
        ]
        given["tools"] = recipe["tools"]
    return named, given


def needs(manifest: Manifest) -> list[str]:
    """The model that begins, the model of rewards where one is asked, and the documents that a tool looks through."""
    if manifest.rl is None:
        return []
    asked = manifest.rl.start_from
    start = model_before("rl", manifest) if asked == "auto" else asked
    models = ["reward"] if any(one.kind == "model" and one.path is None for one in manifest.rl.rewards) else []
    searched = (
        [INGEST, *manifest.steps]
        if any(isinstance(one, SearchTool) and one.path is None for one in manifest.rl.tools)
        else []
    )
    return [*made_sets(manifest.rl), *searched, "mix", "tokenizer", start, *models]


def preflight(manifest: Manifest, name: str, measured: Mapping[str, Sequence[str]]) -> Iterator[tuple[Location, str]]:
    """A sandbox that this machine lacks."""
    from gristmill.train.reinforcement.tools.sandbox import SandboxError, check_sandbox

    for number, tool in enumerate(manifest.rl.tools if manifest.rl is not None else ()):
        if not isinstance(tool, PythonTool):
            continue
        try:
            check_sandbox()
        except SandboxError as error:
            yield (STAGE.name, "tools", number), str(error)


STAGE = training(
    "rl",
    4,
    configure,
    needs,
    trained=Rl,
    preflight=preflight,
    rows="prompts",
    makes_model=True,
    details="gristmill.flows.report.training:reinforcement_details",
    report=("gristmill.flows.report.training:reinforcement",),
)
