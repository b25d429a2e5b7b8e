"""`rl`: trains a model by rewards for its own answers."""

from __future__ import annotations

from gristmill.flows.stages.stage import Recipe
from gristmill.flows.stages.trainings import made_sets, model_before, training, whole
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.reinforcement import Rl


def configure(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
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


def needs(manifest: Manifest) -> list[str]:
    """The model that begins, and the model of rewards where one is asked."""
    if manifest.rl is None:
        return []
    asked = manifest.rl.start_from
    start = model_before("rl", manifest) if asked == "auto" else asked
    models = ["reward"] if any(one.kind == "model" and one.path is None for one in manifest.rl.rewards) else []
    return [*made_sets(manifest.rl), "mix", "tokenizer", start, *models]


STAGE = training("rl", 3, configure, needs, trained=Rl, rows="prompts", makes_model=True,
                 details="gristmill.flows.report.training:reinforcement_details",
                 report=("gristmill.flows.report.training:reinforcement",))
