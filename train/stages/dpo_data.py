"""Stage `dpo_data`: packs preference pairs with loss masks, one row per answer.

Output: a packed set (`tokenize/packed.py`) whose sources are the sets, with loss masks
(`tokenize/loss_masks.py`) and the pairs' records (`train/data/preference_rows.py`);
`refused.jsonl`: rejected records with reasons. Needs no accelerator, so data can be
inspected before a training is paid for. The output does not depend on loss, beta,
weights or held-out share, so changing them recomputes nothing.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from gristmill.core.stage_context import Context
from gristmill.dataprep.examples.kept_examples import (
    QUARANTINED,
    set_names,
    write_quarantined,
)
from gristmill.dataprep.examples.preferences import warnings_of
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.schema.posttraining import DpoData
from gristmill.tokenize.encoding.tokenizer import load
from gristmill.train.data.conversation_tokens import (
    Chat,
    TemplateMismatchError,
    left_out_warning,
)
from gristmill.train.data.pairs import read_pairs
from gristmill.train.data.preference_rows import write_pair_rows
from gristmill.train.loop.objective import JsonObject
from gristmill.train.stages.stage_inputs import Inputs, example_length


def run(
    inputs: Inputs,
    config: Recipe,
    out: Path,
    context: Context,
) -> JsonObject:
    """Read, audit and encode all pairs.

    Raises:
        gristmill.dataprep.examples.read_examples.ExamplesError: more records of a set
            are quarantined than may be.
        gristmill.train.data.conversation_tokens.NothingToTrainError: a set has no
            usable pair.
        TemplateMismatchError: the template does not write the end of an answer.
    """
    section = DpoData.model_validate(config)
    chat = Chat(inputs["tokenizer"])
    tokenizer = load(inputs["tokenizer"]).described()
    length = example_length(section.sequence_length, inputs)
    names = set_names([dataset.path for dataset in section.data])
    sets = read_pairs(section.data, chat, length, inputs, section.leaks)
    named_sets = dict(zip(names, sets, strict=True))
    write_quarantined(
        out / QUARANTINED,
        (
            (name, preference_set.records.quarantined)
            for name, preference_set in named_sets.items()
        ),
    )
    for name, preference_set in named_sets.items():
        for warning in warnings_of(name, preference_set.audit):
            context.warn(warning)
        for pair in preference_set.pairs:
            if any(item.ended + item.cut < item.answers for item in pair.conversations):
                example = pair.example["id"]
                raise TemplateMismatchError(
                    f"dpo: {preference_set.records.places.get(example, example)}: the "
                    "chat template writes no special token after the answer, so that "
                    "the model would not learn to stop; let it write one"
                )
        if left_out := left_out_warning(name, preference_set.encoding, length):
            context.warn(left_out)
    pairs = {name: preference_set.pairs for name, preference_set in named_sets.items()}
    written = write_pair_rows(out, pairs, length, tokenizer, chat)
    return {
        "sequence_length": length,
        "pairs": sum(map(len, pairs.values())),
        **asdict(written),
        "sets": [
            {"name": name, **preference_set.summary()}
            for name, preference_set in named_sets.items()
        ],
    }
