"""`sft_data`: encodes conversations and packs them into rows, optionally mixed with
rows of pre-training.
"""

from __future__ import annotations

from gristmill.flows.stages.sections import reads_of
from gristmill.flows.stages.sft import part_of_section
from gristmill.flows.stages.stage import (
    Configured,
    Stage,
)
from gristmill.flows.stages.trainings import data_needs, made_sets
from gristmill.mixtures.manifest import Manifest


def configure(manifest: Manifest, verify: bool) -> Configured | None:
    """Return the settings that determine the packed examples."""
    configured = part_of_section(manifest, verify, of_data=True)
    if configured is None or manifest.sft is None or not manifest.sft.replay:
        return configured
    recipe, arguments = configured
    return {**recipe, **reads_of(manifest)}, arguments


def needs(manifest: Manifest) -> list[str]:
    """Return the examples, and pre-training if its rows are replayed and only it knows
    which of them it has read.
    """
    sft, pretrain = manifest.sft, manifest.pretrain
    may_end_early = pretrain is not None and pretrain.early_stopping is not None
    replays = ["pretrain"] if sft is not None and sft.replay and may_end_early else []
    return ["sft_prepare", *made_sets(sft), *data_needs(manifest), *replays]


STAGE = Stage(
    "sft_data",
    6,
    "gristmill.train.stages.sft_data:run",
    configure,
    needs,
    report=("gristmill.flows.report.finetuning:masks",),
)
