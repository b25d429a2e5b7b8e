"""The registry of all stages.

A stage of a file in this folder is listed in `ORDER`. Other code asks `STAGES`, or a
plan's nodes, for facts on stages.
"""

from __future__ import annotations

from gristmill.flows.stages import (
    annotate,
    canaries,
    clean,
    cluster,
    decontaminate,
    dedup,
    dedup_lines,
    dedup_semantic,
    dedup_substrings,
    documents,
    dpo,
    dpo_data,
    dpo_prepare,
    edit,
    evaluate,
    examples,
    export,
    filter,
    generate,
    import_tokens,
    ingest,
    judge,
    langid,
    licences,
    merge,
    mix,
    model,
    opt_outs,
    pretrain,
    quality,
    reference,
    reward,
    rl,
    sft,
    sft_data,
    sft_prepare,
    teacher,
    text_index,
    tokenize,
    tokenizer,
)
from gristmill.flows.stages.stage import PrepareStep, Stage
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.schema.prepare import Step, register_step

ORDER = (
    generate,
    ingest,
    clean,
    filter,
    canaries,
    dedup,
    dedup_semantic,
    dedup_lines,
    dedup_substrings,
    langid,
    licences,
    quality,
    decontaminate,
    opt_outs,
    annotate,
    cluster,
    edit,
    judge,
    documents,
    tokenizer,
    tokenize,
    import_tokens,
    mix,
    text_index,
    model,
    examples,
    sft_prepare,
    sft_data,
    dpo_prepare,
    dpo_data,
    pretrain,
    merge,
    teacher,
    sft,
    reward,
    reference,
    dpo,
    rl,
    evaluate,
    export,
)
"""The stages in the order in which they are listed, and in which they run unless their
needs require another: steps of `prepare` run in the manifest's order, and a stage that
needs a later one runs after it.
"""
STAGES: dict[str, Stage] = {module.STAGE.name: module.STAGE for module in ORDER}
"""Name -> stage."""
for _stage in STAGES.values():
    if _stage.step is not None:
        register_step(_stage.name, _stage.step.section)

LAST = export.STAGE.name
"""Name of the last stage."""
TOKENIZER, TOKENIZE, MIX, TEXT_INDEX, PRETRAIN = (
    module.STAGE.name for module in (tokenizer, tokenize, mix, text_index, pretrain)
)
"""Names of stages that have whole pages: the tokenizer, the tokens of all documents,
the packed set, its index, the training on it.
"""


def prepare_step(stage: str) -> PrepareStep:
    """Return the description of a step of `prepare`."""
    step = STAGES[stage].step
    assert step is not None
    return step


def measured_by(step: Step) -> list[str]:
    """Return the columns that a step may write; some may be missing from its output
    (`script`, for a language model whose labels have none).
    """
    return list(dict.fromkeys(prepare_step(step.stage).columns(step.config)))


def instances_of(manifest: Manifest) -> dict[str, Stage]:
    """Return the repeatable stages of a manifest besides `prepare`, by the names of
    their instances.
    """
    stages: dict[str, Stage] = {}
    for stage in STAGES.values():
        if stage.instances is not None:
            stages |= dict.fromkeys(stage.instances(manifest), stage)
    return stages
