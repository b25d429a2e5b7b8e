"""All stages there are: the one place that collects them.

A stage of a file in this folder is listed in `ORDER`; one from elsewhere is added with `register`. Whoever must know
something of stages asks `STAGES`, or a plan's nodes.
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
from gristmill.flows.stages.stage import Stage
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.prepare import Step, register_step, unregister_step
from gristmill.mixtures.sources import INGEST

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
"""The stages in the order in which they are listed, and run where nothing asks for another: steps of `prepare` run in
the manifest's, and a stage that needs a later one comes behind that."""
STAGES: dict[str, Stage] = {}
"""Name -> stage."""


LAST = export.STAGE.name
"""The last stage of all."""
TOKENIZER, TOKENIZE, MIX, TEXT_INDEX, PRETRAIN = (
    module.STAGE.name for module in (tokenizer, tokenize, mix, text_index, pretrain)
)
"""Those that whole pages are about: the tokenizer, the tokens of all documents, the packed set, its index, the training
on it."""


class StageNameError(ValueError):
    """A stage was registered under a name that is taken, or added behind none."""


def register(stage: Stage, behind: str = INGEST) -> None:
    """Add a stage, which then may stand in a manifest, run, and be asked about like those of gristmill.

    Args:
        stage: a step of `prepare`, or one with a `configure` of its own.
        behind: the stage behind which it is listed.

    Raises:
        StageNameError: there is a stage of this name, or none to stand behind.
    """
    if stage.name in STAGES or behind not in STAGES:
        raise StageNameError(
            f"there is a stage {stage.name!r} already"
            if stage.name in STAGES
            else f"there is no stage {behind!r} to stand behind; there are {', '.join(STAGES)}"
        )
    listed = list(STAGES.items())
    place = list(STAGES).index(behind) + 1
    STAGES.clear()
    STAGES.update([*listed[:place], (stage.name, stage), *listed[place:]])
    _let_stand(stage)


def unregister(name: str) -> None:
    """Take a stage away again."""
    if STAGES.pop(name).section is not None:
        unregister_step(name)


def measured_by(step: Step) -> list[str]:
    """The columns that a step may write: all that it writes, and perhaps some that its inputs leave out (`script`,
    for a language model whose labels name none).
    """
    return list(dict.fromkeys(STAGES[step.stage].columns(step.config)))


def instances_of(manifest: Manifest) -> dict[str, Stage]:
    """What a manifest asks for several times beside `prepare`, by the names that it has there."""
    return {
        name: stage for stage in STAGES.values() if stage.instances is not None for name in stage.instances(manifest)
    }


def _let_stand(stage: Stage) -> None:
    if stage.section is not None:
        register_step(stage.name, stage.section)


for _module in ORDER:
    STAGES[_module.STAGE.name] = _module.STAGE
    _let_stand(_module.STAGE)
