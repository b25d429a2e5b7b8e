"""Sets of preferences read, audited and encoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gristmill.dataprep.reading.examples import Refused, read_set
from gristmill.dataprep.reading.preference_audit import SAME, audit
from gristmill.mixtures.posttraining import PreferencePairs
from gristmill.train.objectives.chat import Chat
from gristmill.train.objectives.conversations import NothingToTrainError
from gristmill.train.objectives.pairs import Pair, prepare_pairs


def read_pairs(
    data: Sequence[PreferencePairs], chat: Chat, length: int
) -> tuple[list[list[Pair]], list[dict[str, Any]], list[Sequence[Refused]]]:
    """Read and encode all sets of pairs.

    Args:
        data: where they are.
        chat: tokenizer and template.
        length: most tokens per conversation.

    Returns:
        set by set: the usable pairs; counts (see `pairs.prepare_pairs`), with what `audit` found; the records that
        are no pairs.

    Raises:
        gristmill.dataprep.reading.examples.ExamplesError: more records of a set are refused than may be.
        NothingToTrainError: a set has no usable pair.
    """
    sets: list[list[Pair]] = []
    counts: list[dict[str, Any]] = []
    refused: list[Sequence[Refused]] = []
    for one in data:
        read = read_set(one.path, "dpo", one.format, one.limit, one.max_refused)
        found, counted = prepare_pairs(read.examples, chat, length)
        if not found:
            raise NothingToTrainError(
                f"preferences {one.path}: none of its {counted['examples']} pairs has both answers within {length} "
                f"tokens ({counted['dropped']} too long, {counted['unrenderable']} not to be rendered: "
                f"{counted['unrenderable_reasons']}); raise sequence_length or look at the data")
        sets.append(found)
        audited = {**audit(read.examples), "same_answers": sum(item.reason == SAME for item in read.refused)}
        counts.append({"path": one.path, **read.counts(), **counted, "audit": audited})
        refused.append(read.refused)
    return sets, counts, refused
