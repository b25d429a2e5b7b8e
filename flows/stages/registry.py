"""The registry of all stages.

A stage of a file in this folder is listed in `ORDER`; one from elsewhere is added with
`register`. Other code asks `STAGES`, or a plan's nodes, for facts on stages.
"""

from __future__ import annotations

from gristmill.flows.stages import (
    annotate,
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
    merge,
    mix,
    model,
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
from gristmill.mixtures.sections.prepare import Step, register_step, unregister_step
from gristmill.mixtures.sections.sources import INGEST

ORDER = (
    generate,
    ingest,
    clean,
    filter,
    dedup,
    dedup_semantic,
    dedup_lines,
    dedup_substrings,
    langid,
    quality,
    decontaminate,
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
STAGES: dict[str, Stage] = {}
"""Name -> stage."""


LAST = export.STAGE.name
"""Name of the last stage."""
TOKENIZER, TOKENIZE, MIX, TEXT_INDEX, PRETRAIN = (
    module.STAGE.name for module in (tokenizer, tokenize, mix, text_index, pretrain)
)
"""Names of stages that have whole pages: the tokenizer, the tokens of all documents,
the packed set, its index, the training on it.
"""


class StageNameError(ValueError):
    """A stage was registered under an existing name, or after a stage that does not
    exist.
    """


def register(stage: Stage, behind: str = INGEST) -> None:
    """Add a stage, which can then be used in a manifest, run, and queried like those of
    gristmill.

    Args:
        stage: a step of `prepare`, or a stage with its own `configure`.
        behind: name of the stage after which it is listed.

    Raises:
        StageNameError: the name is taken, or the stage `behind` does not exist.
    """
    if stage.name in STAGES:
        raise StageNameError(f"there is already a stage {stage.name!r}")
    if behind not in STAGES:
        raise StageNameError(
            f"there is no stage {behind!r}; there are {', '.join(STAGES)}"
        )
    items = list(STAGES.items())
    place = list(STAGES).index(behind) + 1
    STAGES.clear()
    STAGES.update([*items[:place], (stage.name, stage), *items[place:]])
    _let_stand(stage)


def unregister(name: str) -> None:
    """Remove a registered stage."""
    if STAGES.pop(name).step is not None:
        unregister_step(name)


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


def _let_stand(stage: Stage) -> None:
    if stage.step is not None:
        register_step(stage.name, stage.step.section)


for _module in ORDER:
    STAGES[_module.STAGE.name] = _module.STAGE
    _let_stand(_module.STAGE)
