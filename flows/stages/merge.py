"""`merge`: averages checkpoints of the pre-training."""

from __future__ import annotations

from gristmill.flows.stages.sections import seed_of
from gristmill.flows.stages.stage import (
    Configured,
    Display,
    MeasuredColumns,
    Problems,
    Requirements,
    Stage,
    only,
)
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.scaling.merging import merge_problems, merged_steps
from gristmill.mixtures.schema.evaluation import Evaluate


def configure(manifest: Manifest, verify: bool) -> Configured | None:
    """Return the merged steps, their weights, and the settings of the model's
    measurement.
    """
    section = manifest.merge
    pretrain = manifest.pretrain
    if section is None or pretrain is None:
        return None
    measured = manifest.evaluate or Evaluate()
    return {
        "steps": merged_steps(section, pretrain),
        "of": pretrain.steps,
        "shares": section.shares,
        "seed": seed_of(measured, manifest),
        "bootstrap_samples": measured.bootstrap_samples,
    }, {}


def preflight(manifest: Manifest, name: str, measured: MeasuredColumns) -> Problems:
    """Yield an error if the checkpoints would be deleted before."""
    assert manifest.merge is not None
    problem = merge_problems(
        manifest.engine.checkpoint_every,
        manifest.engine.permanent_every,
        manifest.merge.every,
    )
    if problem is not None:
        yield (STAGE.name, "every"), problem


STAGE = Stage(
    "merge",
    1,
    "gristmill.train.stages.merge:run",
    configure,
    only("tokenizer", "mix", "pretrain"),
    preflight=preflight,
    output="model",
    requirements=Requirements(torch=True),
    display=Display(
        topics={"merged": "merged.json"},
        report=("gristmill.flows.report.evaluation:merged",),
    ),
)
