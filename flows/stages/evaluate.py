"""`evaluate`: measures every model of a manifest on held-out text, tasks and prompts."""

from __future__ import annotations

from gristmill.flows.stages.sections import dump, name_outside_files, reads_of, seed_of
from gristmill.flows.stages.stage import Recipe, Stage, only
from gristmill.mixtures.manifest import MODELS, Manifest


def configure(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    """The section, and what turns preferences into rewards."""
    section = manifest.evaluate
    if section is None:
        return None
    beta = {} if manifest.dpo is None else {"beta": manifest.dpo.beta}
    reads = reads_of(manifest) if section.memorisation is not None or section.contamination is not None else {}
    recipe = {**dump(section), "seed": seed_of(section, manifest), **beta, **reads}
    return name_outside_files(recipe, section, verify), {"tasks": recipe["tasks"]}


STAGE = Stage("evaluate", 3, "gristmill.train.stages.evaluate:run", configure, only("tokenizer", "mix", *MODELS),
              topics={"evaluation": "evaluation.json"},
              report=("gristmill.flows.report.evaluation:held_out", "gristmill.flows.report.evaluation:tasks",
                      "gristmill.flows.report.evaluation:memorisation", "gristmill.flows.report.evaluation:leaks",
                      "gristmill.flows.report.evaluation:samples"))
