"""Preference pairs for training: reading and encoding, held-out pairs, and the file of
those.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gristmill.core.files import atomic_write
from gristmill.core.seeds import content_key
from gristmill.dataprep.examples.kept_examples import check_records, usable_sets
from gristmill.dataprep.examples.preferences import SAME, audit
from gristmill.dataprep.examples.prepare_examples import view_text
from gristmill.dataprep.examples.read_examples import Quarantined
from gristmill.dataprep.passages.contamination import leaks_into
from gristmill.mixtures.posttraining import PreferencePairs
from gristmill.mixtures.steps.decontaminate import Decontaminate
from gristmill.train.data.conversation_tokens import (
    Chat,
    ChatError,
    Conversation,
    NothingToTrainError,
    UnrenderableExamples,
    check_content,
    conversation,
    padded,
    why_left_out,
)

if TYPE_CHECKING:
    from torch import Tensor

HASH_BITS = 64
HOLDOUT = "holdout.jsonl"


@dataclass(frozen=True)
class Pair:
    """A prompt with a preferred and a rejected answer; only the answers are scored.

    Attributes:
        example: source record with ~id, prompt, chosen, rejected.
        chosen, rejected: encoded conversations, prompt included.
    """

    example: Mapping[str, Any]
    chosen: Conversation
    rejected: Conversation

    @property
    def scored_tokens(self) -> tuple[int, int]:
        """Numbers of scored tokens of the chosen and of the rejected answer."""
        return int(self.chosen.trained.sum()), int(self.rejected.trained.sum())


@dataclass(frozen=True)
class Answer:
    """A prompt with one answer, labelled desirable or undesirable.

    Attributes:
        example: source record with ~id, prompt, completion, label.
        conversation: encoded, prompt included; only the answer is scored.
    """

    example: Mapping[str, Any]
    conversation: Conversation


def prepare_answers(
    examples: Sequence[Mapping[str, Any]], chat: Chat, length: int
) -> tuple[list[Answer], dict[str, Any]]:
    """Encode labelled examples; arguments and counts as in `prepare_pairs`."""
    used: list[Answer] = []
    unrenderable = UnrenderableExamples()
    dropped = 0
    for example in examples:
        earlier_turns = sum(
            message["role"] == "assistant" for message in example["prompt"]
        )
        try:
            tokens = chat.encode(
                [*example["prompt"], *example["completion"]],
                tools=example.get("tools", ()),
            )
            row = conversation(tokens, earlier_turns + 1, length, example["id"])
        except ChatError as error:
            unrenderable.add(example["id"], error)
            continue
        if row is None:
            dropped += 1
        else:
            used.append(Answer(example, row))
    return used, {
        "examples": len(examples),
        **unrenderable.counts(),
        "dropped": dropped,
        "used": len(used),
        "truncated": sum(answer.conversation.truncated for answer in used),
    }


def prepare_pairs(
    examples: Sequence[Mapping[str, Any]], chat: Chat, length: int
) -> tuple[list[Pair], dict[str, Any]]:
    """Encode preference examples.

    Args:
        examples: `id`, lists of messages `prompt`, `chosen`, `rejected`, and perhaps
            `tools`.
        chat: tokenizer and template.
        length: most tokens per conversation.

    Returns:
        the pairs whose answers both have a token within `length`, and counts: examples,
        used, truncated, dropped, those of `UnrenderableExamples`.
    """
    used: list[Pair] = []
    unrenderable = UnrenderableExamples()
    dropped = 0
    for example in examples:
        earlier_turns = sum(
            message["role"] == "assistant" for message in example["prompt"]
        )
        try:
            chosen, rejected = (
                conversation(
                    chat.encode(
                        [*example["prompt"], *example[name]],
                        tools=example.get("tools", ()),
                    ),
                    earlier_turns + 1,
                    length,
                    example["id"],
                )
                for name in ("chosen", "rejected")
            )
        except ChatError as error:
            unrenderable.add(example["id"], error)
            continue
        if chosen is None or rejected is None:
            dropped += 1
        else:
            used.append(Pair(example, chosen, rejected))
    truncated = sum(pair.chosen.truncated or pair.rejected.truncated for pair in used)
    return used, {
        "examples": len(examples),
        **unrenderable.counts(),
        "dropped": dropped,
        "used": len(used),
        "truncated": truncated,
    }


def is_held_out(example: Mapping[str, Any], share: float, seed: int) -> bool:
    """True for held-out pairs: by a hash of seed and prompt, so one prompt is never on
    both sides.
    """
    prompt = [[message["role"], message["content"]] for message in example["prompt"]]
    return content_key(seed, prompt, HASH_BITS) < share * 2**HASH_BITS


def are_held_out(
    examples: Iterable[Mapping[str, Any]], share: float, seed: int
) -> np.ndarray:
    """`is_held_out` for n examples: (n,) bool."""
    return np.array(
        [is_held_out(example, share, seed) for example in examples], dtype=bool
    )


def padded_pairs(pairs: Sequence[Pair], pad: int, length: int) -> tuple[Tensor, Tensor]:
    """Ids and targets of n pairs, (2n, t) each: all chosen answers, then all rejected
    ones.
    """
    # making rows needs no torch
    from gristmill.train.objectives.losses import next_tokens

    ids, scored = padded(
        [*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)],
        pad,
        length,
    )
    return ids, next_tokens(ids, scored)


def gained_more(logps: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Mask of pairs whose chosen answer gained more than the rejected one: (n,) bool.

    Args:
        logps, reference: (n, 2), as from `reference.pair_logps`, under the policy and
            under the reference.
    """
    gains = logps - reference
    more: np.ndarray = gains[:, 0] > gains[:, 1]
    return more


def reward_accuracy(logps: np.ndarray, reference: np.ndarray) -> float | None:
    """Share of pairs for which `gained_more` holds; ties do not count (TRL). None
    without pairs.
    """
    return float(gained_more(logps, reference).mean()) if len(logps) else None


def more_likely(logps: np.ndarray) -> float | None:
    """Share of pairs whose chosen answer is the likelier one, without a reference."""
    return float((logps[:, 0] > logps[:, 1]).mean()) if len(logps) else None


class NoPairsError(ValueError):
    """Labelled answers in a set that needs pairs."""


def read_pairs(
    data: Sequence[PreferencePairs],
    chat: Chat,
    length: int,
    inputs: Mapping[str, Path],
    leaks: Decontaminate | None = None,
) -> tuple[list[list[Pair]], list[dict[str, Any]], list[Sequence[Quarantined]]]:
    """Read and encode all sets, which may hold only pairs; see `read_preferences`.

    Raises:
        NoPairsError: a set has single labelled answers.
    """
    examples, counts, quarantined = read_preferences(data, chat, length, inputs, leaks)
    for dataset, of_set in zip(data, examples, strict=True):
        if labelled := sum(isinstance(item, Answer) for item in of_set):
            raise NoPairsError(
                f"preferences {dataset.path}: {labelled} of its examples are single "
                "answers with a label, "
                "of which only dpo.loss kto learns; give pairs, or another set"
            )
    return (
        [[item for item in of_set if isinstance(item, Pair)] for of_set in examples],
        counts,
        quarantined,
    )


def read_preferences(
    data: Sequence[PreferencePairs],
    chat: Chat,
    length: int,
    inputs: Mapping[str, Path],
    leaks: Decontaminate | None = None,
) -> tuple[
    list[list[Pair | Answer]], list[dict[str, Any]], list[Sequence[Quarantined]]
]:
    """Read and encode all sets of pairs and of labelled answers, or their prepared
    versions.

    Args:
        data: the sets.
        chat: tokenizer and template.
        length: most tokens per conversation.
        inputs: of the stage, including the prepared sets and the sets made by the run,
            if any.
        leaks: evaluation sets to compare them with.

    Returns:
        set by set: the usable pairs, followed by the usable answers; counts (see
        `pairs.prepare_pairs`) with the `audit` of the pairs, and the numbers of
        `desirable` and `undesirable` answers; the rejected records.

    Raises:
        gristmill.dataprep.examples.read_examples.ExamplesError: more records of a set
            are quarantined than may be.
        NothingToTrainError: a set has no usable pair or answer.
    """
    sets: list[list[Pair | Answer]] = []
    counts: list[dict[str, Any]] = []
    quarantined: list[Sequence[Quarantined]] = []
    for dataset, records in zip(data, usable_sets(data, "dpo", inputs), strict=True):
        pairs, of_pairs = prepare_pairs(
            [item for item in records.examples if "chosen" in item], chat, length
        )
        answers, of_answers = prepare_answers(
            [item for item in records.examples if "label" in item], chat, length
        )
        left_out = {**of_pairs.pop("left_out"), **of_answers.pop("left_out")}
        check_content(
            f"preferences {dataset.path}",
            left_out,
            records.places,
            records.counts["records"],
            dataset.max_quarantined,
        )
        counted = added(of_pairs, of_answers)
        if not (pairs or answers):
            raise NothingToTrainError(
                f"preferences {dataset.path}: none of its {counted['examples']} pairs "
                f"has both answers within {length} tokens ({why_left_out(counted)}); "
                "raise sequence_length or look at the data"
            )
        sets.append([*pairs, *answers])
        audited = {
            **audit([item for item in records.examples if "chosen" in item]),
            "same_answers": sum(item.reason == SAME for item in records.quarantined),
            "leaks": None
            if leaks is None
            else leaks_into(
                [view_text("conversation", example) for example in records.examples],
                leaks,
            ),
        }
        labels = [item.example["label"] for item in answers]
        counts.append(
            {
                "path": dataset.path,
                **records.counts,
                **counted,
                "desirable": sum(labels),
                "undesirable": len(labels) - sum(labels),
                "audit": audited,
            }
        )
        check_records(f"preferences: {dataset.path}", counts[-1])
        quarantined.append(records.quarantined)
    return sets, counts, quarantined


def added(of_pairs: Mapping[str, Any], of_answers: Mapping[str, Any]) -> dict[str, Any]:
    """Sum of the counts of a set's pairs and of its answers."""
    return {
        name: {
            reason: count + of_answers[name].get(reason, 0)
            for reason, count in {**dict.fromkeys(of_answers[name], 0), **value}.items()
        }
        if isinstance(value, Mapping)
        else value + of_answers[name]
        for name, value in of_pairs.items()
    }


def write_holdout(
    path: Path,
    records: Sequence[Mapping[str, Any]],
    name: str,
    values: np.ndarray,
    **also: int,
) -> None:
    """Write n held-out pairs as JSON lines, each with the values of its two answers.

    Args:
        path: output file.
        records: the pairs.
        name: of the values: a line has `NAME_chosen` and `NAME_rejected`.
        values: (n, 2), chosen first.
        also: further entries of every line.
    """
    with atomic_write(path) as sink:
        for pair, (chosen, rejected) in zip(records, values.tolist(), strict=True):
            line = {
                **pair,
                f"{name}_chosen": chosen,
                f"{name}_rejected": rejected,
                **also,
            }
            sink.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
