"""Sets of preferences read, audited and encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gristmill.dataprep.examples.kept_examples import check_records, usable_sets
from gristmill.dataprep.examples.prepare import view_text
from gristmill.dataprep.passages.contamination import leaks_into
from gristmill.dataprep.reading.examples import Refused
from gristmill.dataprep.reading.preferences import SAME, audit
from gristmill.mixtures.decontaminate import Decontaminate
from gristmill.mixtures.posttraining import PreferencePairs
from gristmill.train.objectives.chat import Chat
from gristmill.train.objectives.conversations import NothingToTrainError
from gristmill.train.objectives.pairs import Answer, Pair, prepare_answers, prepare_pairs


class NoPairsError(ValueError):
    """Labelled answers stand where pairs are needed."""


def read_pairs(
    data: Sequence[PreferencePairs], chat: Chat, length: int, prepared: Path | None = None,
    leaks: Decontaminate | None = None,
) -> tuple[list[list[Pair]], list[dict[str, Any]], list[Sequence[Refused]]]:
    """Read and encode all sets, which are of pairs; see `read_preferences`.

    Raises:
        NoPairsError: a set has an answer that is labelled and no pair.
    """
    found, counts, refused = read_preferences(data, chat, length, prepared, leaks)
    for one, of_set in zip(data, found, strict=True):
        if labelled := sum(isinstance(item, Answer) for item in of_set):
            raise NoPairsError(f"preferences {one.path}: {labelled} of its examples are single answers with a label, "
                               "of which only dpo.loss kto learns; give pairs, or another set")
    return [[item for item in of_set if isinstance(item, Pair)] for of_set in found], counts, refused


def read_preferences(
    data: Sequence[PreferencePairs], chat: Chat, length: int, prepared: Path | None = None,
    leaks: Decontaminate | None = None,
) -> tuple[list[list[Pair | Answer]], list[dict[str, Any]], list[Sequence[Refused]]]:
    """Read and encode all sets of pairs and of labelled answers, or what their preparation left of them.

    Args:
        data: where they are.
        chat: tokenizer and template.
        length: most tokens per conversation.
        prepared: output of the stage that prepared them, if any did.
        leaks: the evaluation sets that they are compared with.

    Returns:
        set by set: the usable pairs and after them the usable answers; counts (see `pairs.prepare_pairs`) with what
        `audit` found of the pairs, and how many answers are `desirable` and `undesirable`; the records that are
        neither.

    Raises:
        gristmill.dataprep.reading.examples.ExamplesError: more records of a set are refused than may be.
        NothingToTrainError: a set has no usable pair or answer.
    """
    sets: list[list[Pair | Answer]] = []
    counts: list[dict[str, Any]] = []
    refused: list[Sequence[Refused]] = []
    for one, read in zip(data, usable_sets(data, "dpo", prepared), strict=True):
        pairs, of_pairs = prepare_pairs([item for item in read.examples if "chosen" in item], chat, length)
        answers, of_answers = prepare_answers([item for item in read.examples if "label" in item], chat, length)
        counted = added(of_pairs, of_answers)
        if not (pairs or answers):
            raise NothingToTrainError(
                f"preferences {one.path}: none of its {counted['examples']} pairs has both answers within {length} "
                f"tokens ({counted['dropped']} too long, {counted['unrenderable']} not to be rendered: "
                f"{counted['unrenderable_reasons']}); raise sequence_length or look at the data")
        sets.append([*pairs, *answers])
        audited = {**audit([item for item in read.examples if "chosen" in item]),
                   "same_answers": sum(item.reason == SAME for item in read.refused),
                   "leaks": None if leaks is None else leaks_into(
                       [view_text("conversation", example) for example in read.examples], leaks)}
        labels = [item.example["label"] for item in answers]
        counts.append({"path": one.path, **read.counts, **counted, "desirable": sum(labels),
                       "undesirable": len(labels) - sum(labels), "audit": audited})
        check_records(f"preferences: {one.path}", counts[-1])
        refused.append(read.refused)
    return sets, counts, refused


def added(of_pairs: Mapping[str, Any], of_answers: Mapping[str, Any]) -> dict[str, Any]:
    """The counts of a set's pairs and answers together."""
    return {name: {reason: count + of_answers[name].get(reason, 0) for reason, count in
                   {**dict.fromkeys(of_answers[name], 0), **value}.items()} if isinstance(value, Mapping) else
            value + of_answers[name] for name, value in of_pairs.items()}
