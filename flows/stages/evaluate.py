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
    Display,
    Library,
    Requirements,
    Stage,
    only,
)
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.manifest import MODELS, Manifest


def configure(manifest: Manifest, verify: bool) -> Configured | None:
    """Return the section, with the rows that pre-training reads if tasks are searched
    for in them.
    """
    section = manifest.evaluate
    if section is None:
        return None
    reads = reads_of(manifest) if section.contamination is not None else {}
    recipe = {**dump(section), "seed": seed_of(section, manifest), **reads}
    named_recipe = name_outside_files(recipe, section, verify)
    arguments: Recipe = {
        name: recipe[name] for name in ("tasks", "suites") if name in recipe
    }
    return named_recipe, arguments


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
    requirements=Requirements(torch=True, libraries=libraries),
    display=Display(
        topics={"evaluation": "evaluation.json"},
        report=(
            "gristmill.flows.report.evaluation:held_out",
            "gristmill.flows.report.evaluation:tasks",
            "gristmill.flows.report.evaluation:suites",
            "gristmill.flows.report.evaluation:leaks",
            "gristmill.flows.report.evaluation:samples",
        ),
    ),
)
