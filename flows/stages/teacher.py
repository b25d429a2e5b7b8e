"""`teacher`: stores a teacher's distributions at every position on which a student is
trained.
"""

from __future__ import annotations

from gristmill.flows.stages.sections import dump, name_outside_files
from gristmill.flows.stages.stage import (
    Configured,
)
from gristmill.flows.stages.trainings import torchrun_stage
from gristmill.mixtures.manifest import Manifest


def configure(manifest: Manifest, verify: bool) -> Configured | None:
    """Return the settings that determine the teacher, and how much of its distributions
    is stored.
    """
    from gristmill.mixtures.schema.posttraining import TeacherKeys

    if manifest.sft is None or manifest.sft.distill is None:
        return None
    dumped = {key: dump(manifest.sft.distill)[key] for key in TeacherKeys.model_fields}
    recipe = name_outside_files(dumped, TeacherKeys.model_validate(dumped), verify)
    return (
        {**recipe, "precision": manifest.sft.precision},
        {
            "teacher": dumped["teacher"],
            "micro_batch_size": manifest.sft.micro_batch_size,
        },
    )


def needs(manifest: Manifest) -> list[str]:
    """Return the rows to score, and the teacher if it is trained here."""
    is_trained_here = (
        manifest.sft is not None
        and manifest.sft.distill is not None
        and manifest.sft.distill.teacher == "pretrain"
    )
    return ["tokenizer", "sft_data", *(["pretrain"] if is_trained_here else [])]


STAGE = torchrun_stage(
    "teacher",
    1,
    configure,
    needs,
    report=("gristmill.flows.report.finetuning:distillation",),
)
