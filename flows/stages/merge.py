"""`merge`: averages checkpoints of the pre-training."""

from __future__ import annotations

from gristmill.flows.stages.stage import (
    Configured,
    MeasuredColumns,
    Problems,
    Stage,
    only,
)
from gristmill.mixtures.manifest import Manifest


def configure(manifest: Manifest, verify: bool) -> Configured | None:
    """Return the merged steps and their weights."""
    section = manifest.merge
    pretrain = manifest.pretrain
    if section is None or pretrain is None:
        return None
    weights = section.weights or [1.0] * len(section.steps)
    return {
        "steps": list(section.steps),
        "of": pretrain.steps,
        "shares": [weight / sum(weights) for weight in weights],
    }, {}


def preflight(manifest: Manifest, name: str, measured: MeasuredColumns) -> Problems:
    """Yield an error for each checkpoint that would not be kept."""
    assert manifest.merge is not None
    assert manifest.pretrain is not None
    saved_every = manifest.engine.checkpoint_every
    kept_every = manifest.engine.permanent_every
    for step in manifest.merge.steps:
        is_kept = kept_every is not None and step % kept_every == 0
        if step != manifest.pretrain.steps and (step % saved_every or not is_kept):
            yield (
                (STAGE.name, "steps"),
                f"the checkpoint of step {step} must be saved and kept: set "
                f"engine.checkpoint_every (now {saved_every}) and "
                f"engine.permanent_every (now {kept_every or 'absent'}) to {step}, "
                "or to divisors of it",
            )


STAGE = Stage(
    "merge",
    2,
    "gristmill.train.stages.merge:run",
    configure,
    only("pretrain"),
    preflight=preflight,
    output="model",
    torch=True,
)
