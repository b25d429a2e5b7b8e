"""Stage `dpo_data`: preference pairs (and labelled answers) made into a packed set with loss masks, a row an answer.

Output: a packed set (`tokenize/packed.py`) whose sources are the sets, with loss masks (`tokenize/loss_masks.py`) and
the pairs' records (`train/data/preference_rows.py`); `refused.jsonl`: the records that are not pairs, and why. Needs no
accelerator, so that data is looked at before one is paid for. No loss, no beta, no weight and no held-out share is
among what it depends on: other ones cost nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gristmill.dataprep.context import Context
from gristmill.dataprep.examples.kept_examples import QUARANTINED, set_names, write_quarantined
from gristmill.dataprep.examples.preferences import warnings_of
from gristmill.mixtures.posttraining import DpoData
from gristmill.tokenize.encoding.tokenizer import load
from gristmill.train.data.conversation_tokens import Chat, left_out_warning
from gristmill.train.data.pairs import Pair, read_preferences
from gristmill.train.data.preference_rows import write_pair_rows
from gristmill.train.stages.stage_inputs import example_length


def run(inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context) -> dict[str, Any]:
    """Read, audit and encode all pairs.

    Raises:
        gristmill.dataprep.examples.read_examples.ExamplesError: more records of a set are quarantined than may be.
        gristmill.train.data.conversation_tokens.NothingToTrainError: a set has no usable pair.
    """
    section = DpoData.model_validate(config)
    chat, tokenizer = Chat(inputs["tokenizer"]), load(inputs["tokenizer"]).described()
    length = example_length(section.sequence_length, inputs)
    names = set_names([one.path for one in section.data])
    found, sets, quarantined = read_preferences(section.data, chat, length, inputs, section.leaks)
    write_quarantined(out / QUARANTINED, zip(names, quarantined, strict=True))
    for name, one in zip(names, sets, strict=True):
        for warning in warnings_of(name, one["audit"]):
            context.warn(warning)
        if left_out := left_out_warning(name, one, length):
            context.warn(left_out)
    written = write_pair_rows(out, dict(zip(names, found, strict=True)), length, tokenizer, chat)
    pairs = sum(isinstance(one, Pair) for of_set in found for one in of_set)
    return {
        "sequence_length": length,
        "pairs": pairs,
        "answers": sum(map(len, found)) - pairs,
        **written,
        "sets": [{"name": name, **counts} for name, counts in zip(names, sets, strict=True)],
    }
