"""`reward`: trains a model that scores answers."""

from __future__ import annotations

from gristmill.flows.stages.stage import (
    Configured,
)
from gristmill.flows.stages.trainings import (
    made_sets,
    model_before,
    torchrun_stage,
    whole,
)
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.schema.rl import Reward


def configure(manifest: Manifest, verify: bool) -> Configured | None:
    """Return the section with its own pairs, or with those of preference optimisation,
    each once.
    """
    section = manifest.reward
    if section is not None and section.data is None and manifest.dpo is not None:
        pairs = tuple(
            preference_set.unweighted() for preference_set in manifest.dpo.data
        )
        manifest = manifest.model_copy(
            update={"reward": section.model_copy(update={"data": pairs})}
        )
    return whole("reward")(manifest, verify)


def needs(manifest: Manifest) -> list[str]:
    """Return the pairs, if they are those of preference optimisation, and the model
    that becomes a reward model.
    """
    has_own_data = manifest.reward is not None and manifest.reward.data is not None
    return [
        *([] if has_own_data else ["dpo_prepare"]),
        *made_sets(manifest.reward if has_own_data else manifest.dpo),
        "tokenizer",
        model_before("dpo", manifest),
    ]


STAGE = torchrun_stage(
    "reward",
    5,
    configure,
    needs,
    training=Reward,
    row_kind="examples",
    report=("gristmill.flows.report.finetuning:reward_model",),
)
