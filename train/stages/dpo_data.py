"""Stage `dpo_data`: packs preference pairs and labelled answers with loss masks, one
row per answer.

Output: a packed set (`tokenize/packed.py`) whose sources are the sets, with loss masks
(`tokenize/loss_masks.py`) and the pairs' records (`train/data/preference_rows.py`);
`refused.jsonl`: rejected records with reasons. Needs no accelerator, so data can be
inspected before a training is paid for. The output does not depend on loss, beta,
weights or held-out share, so changing them recomputes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gristmill.core.stage_context import Context
from gristmill.dataprep.examples.kept_examples import (
    QUARANTINED,
    set_names,
    write_quarantined,
)
from gristmill.dataprep.examples.preferences import warnings_of
from gristmill.mixtures.posttraining import DpoData
from gristmill.tokenize.encoding.tokenizer import load
from gristmill.train.data.conversation_tokens import Chat, left_out_warning
from gristmill.train.data.pairs import Pair, read_preferences
from gristmill.train.data.preference_rows import write_pair_rows
from gristmill.train.stages.stage_inputs import example_length


def run(
    inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context
) -> dict[str, Any]:
    """Read, audit and encode all pairs.

    Raises:
        gristmill.dataprep.examples.read_examples.ExamplesError: more records of a set
            are quarantined than may be.
        gristmill.train.data.conversation_tokens.NothingToTrainError: a set has no
            usable pair.
    """
    section = DpoData.model_validate(config)
    chat, tokenizer = Chat(inputs["tokenizer"]), load(inputs["tokenizer"]).described()
    length = example_length(section.sequence_length, inputs)
    names = set_names([dataset.path for dataset in section.data])
    examples, sets, quarantined = read_preferences(
        section.data, chat, length, inputs, section.leaks
    )
    write_quarantined(out / QUARANTINED, zip(names, quarantined, strict=True))
    for name, counts in zip(names, sets, strict=True):
        for warning in warnings_of(name, counts["audit"]):
            context.warn(warning)
        if left_out := left_out_warning(name, counts, length):
            context.warn(left_out)
    written = write_pair_rows(
        out, dict(zip(names, examples, strict=True)), length, tokenizer, chat
    )
    pairs = sum(isinstance(example, Pair) for of_set in examples for example in of_set)
    return {
        "sequence_length": length,
        "pairs": pairs,
        "answers": sum(map(len, examples)) - pairs,
        **written,
        "sets": [
            {"name": name, **counts} for name, counts in zip(names, sets, strict=True)
        ],
    }
