"""`evaluate`: measures every model of a manifest on held-out text, tasks and
prompts.
"""

from __future__ import annotations

from collections.abc import Iterator

from gristmill.flows.stages.sections import (
    dump,
    name_outside_files,
    reads_of,
    seed_of,
)
from gristmill.flows.stages.stage import (
    Configured,
    Library,
    MeasuredColumns,
    Problems,
    Stage,
    only,
)
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.manifest import MODELS, Manifest
from gristmill.mixtures.steps.canaries import Canaries


def configure(manifest: Manifest, verify: bool) -> Configured | None:
    """Return the section, with the rows that pre-training reads if tasks or canaries
    are searched for in them.
    """
    section = manifest.evaluate
    if section is None:
        return None
    searches = section.contamination is not None or section.canaries is not None
    recipe = {
        **dump(section),
        "seed": seed_of(section, manifest),
        **(reads_of(manifest) if searches else {}),
        **(inserted_by(manifest) if section.canaries is not None else {}),
    }
    named_recipe = name_outside_files(recipe, section, verify)
    arguments: Recipe = {
        name: recipe[name] for name in ("tasks", "suites") if name in recipe
    }
    return named_recipe, arguments


def inserted_by(manifest: Manifest) -> Recipe:
    """Return the settings of the step `canaries`."""
    for step in manifest.steps.values():
        if isinstance(step.config, Canaries):
            seed = seed_of(step.config, manifest)
            return {"inserted": {**dump(step.config), "seed": seed}}
    return {}


def preflight(manifest: Manifest, name: str, measured: MeasuredColumns) -> Problems:
    """Yield the problem of canaries that nothing inserts."""
    section = manifest.evaluate
    if section is None or section.canaries is None:
        return
    if not inserted_by(manifest):
        yield (
            ("evaluate", "canaries"),
            "measures secrets that nothing inserts; add the step `canaries` to "
            "`prepare`, or remove it",
        )


def libraries(manifest: Manifest) -> Iterator[Library]:
    """Yield the library that runs tasks."""
    if manifest.evaluate is not None and manifest.evaluate.tasks:
        yield Library("lm_eval", "evaluate.tasks")


STAGE = Stage(
    "evaluate",
    8,
    "gristmill.train.stages.evaluate:run",
    configure,
    only("tokenizer", "mix", *MODELS),
    preflight=preflight,
    torch=True,
    libraries=libraries,
    topics={"evaluation": "evaluation.json"},
    report=(
        "gristmill.flows.report.evaluation:held_out",
        "gristmill.flows.report.evaluation:tasks",
        "gristmill.flows.report.evaluation:suites",
        "gristmill.flows.report.evaluation:leaks",
        "gristmill.flows.report.evaluation:canaries",
        "gristmill.flows.report.evaluation:samples",
    ),
)
