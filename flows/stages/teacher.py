"""`teacher`: keeps what a teacher thinks likely at every position that a student is trained on."""

from __future__ import annotations

from gristmill.flows.stages.sections import dump, name_outside_files
from gristmill.flows.stages.stage import Recipe
from gristmill.flows.stages.trainings import training
from gristmill.mixtures.manifest import Manifest


def configure(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    """Which model the teacher is, and what is kept of it."""
    from gristmill.mixtures.posttraining import TeacherKeys

    if manifest.sft is None or manifest.sft.distill is None:
        return None
    dumped = {key: dump(manifest.sft.distill)[key] for key in TeacherKeys.model_fields}
    named = name_outside_files(dumped, TeacherKeys.model_validate(dumped), verify)
    return (
        {**named, "precision": manifest.sft.precision},
        {"teacher": dumped["teacher"], "micro_batch_size": manifest.sft.micro_batch_size},
    )


def needs(manifest: Manifest) -> list[str]:
    """The rows that it is asked about, and the teacher where it is trained here."""
    own = manifest.sft is not None and manifest.sft.distill is not None and manifest.sft.distill.teacher == "pretrain"
    return ["tokenizer", "sft_data", *(["pretrain"] if own else [])]


STAGE = training("teacher", 1, configure, needs, report=("gristmill.flows.report.finetuning:distillation",))
