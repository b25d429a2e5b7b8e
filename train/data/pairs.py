"""Preference pairs for training: reading and encoding, held-out pairs, and the file of
those.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gristmill.core.files import atomic_write
from gristmill.core.seeds import content_key
from gristmill.dataprep.decontamination.contamination import leaks_into
from gristmill.dataprep.examples.conversations import Example, Message
from gristmill.dataprep.examples.kept_examples import (
    UsableSet,
    check_records,
    usable_sets,
)
from gristmill.dataprep.examples.preferences import SAME, Audit, audit
from gristmill.dataprep.examples.prepare_examples import view_text
from gristmill.mixtures.schema.posttraining import PreferencePairs
from gristmill.mixtures.steps.decontaminate import Decontaminate
from gristmill.train.data.conversation_tokens import (
    Chat,
    Conversation,
    Encoded,
    EncodingCounts,
    NothingToTrainError,
    check_content,
    conversation,
    encode_examples,
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
        example: source record.
        chosen, rejected: encoded conversations, prompt included.
    """

    example: Example
    chosen: Conversation
    rejected: Conversation

    @property
    def conversations(self) -> tuple[Conversation, ...]:
        """Conversations that become rows, in order."""
        return (self.chosen, self.rejected)

    @property
    def scored_tokens(self) -> tuple[int, int]:
        """Numbers of scored tokens of the chosen and of the rejected answer."""
        return int(self.chosen.trained.sum()), int(self.rejected.trained.sum())


@dataclass(frozen=True)
class Answer:
    """A prompt with one answer, labelled desirable or undesirable.

    Attributes:
        example: source record.
        conversation: encoded, prompt included; only the answer is scored.
    """

    example: Example
    conversation: Conversation

    @property
    def conversations(self) -> tuple[Conversation, ...]:
        """Conversations that become rows."""
        return (self.conversation,)


def encode_preference(
    example: Example, chat: Chat, length: int
) -> Pair | Answer | None:
    """Encode a preference pair or a labelled answer; None if an answer has no token
    within `length`.
    """
    if "label" in example:
        answer = _encode_answer(example, example["completion"], chat, length)
        return None if answer is None else Answer(example, answer)
    chosen, rejected = (
        _encode_answer(example, messages, chat, length)
        for messages in (example["chosen"], example["rejected"])
    )
    if chosen is None or rejected is None:
        return None
    return Pair(example, chosen, rejected)


def _encode_answer(
    example: Example, answer: Sequence[Message], chat: Chat, length: int
) -> Conversation | None:
    prompt = example["prompt"]
    tokens = chat.encode([*prompt, *answer], tools=example.get("tools", ()))
    earlier_turns = sum(message["role"] == "assistant" for message in prompt)
    return conversation(tokens, earlier_turns + 1, length, example["id"])


def prepare_preferences(
    examples: Sequence[Example], chat: Chat, length: int
) -> Encoded[Pair | Answer]:
    """Encode preference pairs and labelled answers.

    Args:
        examples: of one set.
        chat: tokenizer and template.
        length: most tokens per conversation.
    """
    return encode_examples(
        examples, lambda example: encode_preference(example, chat, length)
    )


def is_held_out(prompt: Sequence[Message], share: float, seed: int) -> bool:
    """True for a prompt whose examples are held out: by a hash of seed and prompt, so
    one prompt is never on both sides.
    """
    texts = [[message["role"], message["content"]] for message in prompt]
    return content_key(seed, texts, HASH_BITS) < share * 2**HASH_BITS


def are_held_out(examples: Iterable[Example], share: float, seed: int) -> np.ndarray:
    """`is_held_out` for the prompts of n examples: (n,) bool."""
    return np.array(
        [is_held_out(example["prompt"], share, seed) for example in examples],
        bool,
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
        logps, reference: (n, 2), as from `reference_logps.pair_logps`, under the policy
            and under the reference.
    """
    gains = logps - reference
    return gains[:, 0] > gains[:, 1]


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


@dataclass(frozen=True)
class PreferenceSet:
    """An encoded set of preferences.

    Attributes:
        path: of the set.
        examples: the usable pairs, followed by the usable answers.
        records: the examples and quarantined records that were read.
        encoding: numbers of examples that are not usable.
        audit: defects of its pairs.
    """

    path: str
    examples: Sequence[Pair | Answer]
    records: UsableSet
    encoding: EncodingCounts
    audit: Audit

    @property
    def pairs(self) -> list[Pair]:
        """The usable pairs."""
        return [example for example in self.examples if isinstance(example, Pair)]

    def summary(self) -> dict[str, object]:
        """Counts for the summary of a stage."""
        truncated = sum(
            any(conversation.truncated for conversation in example.conversations)
            for example in self.examples
        )
        labels = [
            example.example["label"]
            for example in self.examples
            if isinstance(example, Answer)
        ]
        return {
            "path": self.path,
            **vars(self.records.counts),
            **vars(self.encoding),
            "used": len(self.examples),
            "truncated": truncated,
            "desirable": sum(labels),
            "undesirable": len(labels) - sum(labels),
            "audit": asdict(self.audit),
        }


def read_pairs(
    data: Sequence[PreferencePairs],
    chat: Chat,
    length: int,
    inputs: Mapping[str, Path],
) -> list[PreferenceSet]:
    """Read and encode all sets, which may hold only pairs; see `read_preferences`.

    Raises:
        NoPairsError: a set has single labelled answers.
    """
    sets = read_preferences(data, chat, length, inputs)
    for preference_set in sets:
        if labelled := len(preference_set.examples) - len(preference_set.pairs):
            raise NoPairsError(
                f"preferences {preference_set.path}: {labelled} of its examples are "
                "single answers with a label, of which only dpo.loss kto learns; give "
                "pairs, or another set"
            )
    return sets


def read_preferences(
    data: Sequence[PreferencePairs],
    chat: Chat,
    length: int,
    inputs: Mapping[str, Path],
    leaks: Decontaminate | None = None,
) -> list[PreferenceSet]:
    """Read and encode all sets of pairs and of labelled answers, or their prepared
    versions.

    Args:
        data: the sets.
        chat: tokenizer and template.
        length: most tokens per conversation.
        inputs: of the stage, including the prepared sets and the sets made by the run,
            if any.
        leaks: evaluation sets to compare them with.

    Raises:
        gristmill.dataprep.examples.read_examples.ExamplesError: more records of a set
            are quarantined than may be.
        NothingToTrainError: a set has no usable pair or answer.
    """
    sets: list[PreferenceSet] = []
    for dataset, records in zip(data, usable_sets(data, "dpo", inputs), strict=True):
        where = f"preferences {dataset.path}"
        encoded = prepare_preferences(records.examples, chat, length)
        check_content(
            where,
            encoded.left_out,
            records.places,
            records.counts.records,
            dataset.max_quarantined,
        )
        counts = encoded.counts
        if not encoded.used:
            raise NothingToTrainError(
                f"{where}: none of its {counts.examples} pairs has both answers within "
                f"{length} tokens ({why_left_out(counts)}); raise sequence_length or "
                "look at the data"
            )
        check_records(
            where,
            records.counts,
            counts.unrenderable,
            counts.dropped,
            len(encoded.used),
        )
        audited = audit(
            [example for example in records.examples if "chosen" in example],
            sum(record.reason == SAME for record in records.quarantined),
            None
            if leaks is None
            else leaks_into(
                [view_text("conversation", example) for example in records.examples],
                leaks,
            ),
        )
        pairs_first = sorted(encoded.used, key=lambda item: isinstance(item, Answer))
        sets.append(PreferenceSet(dataset.path, pairs_first, records, counts, audited))
    return sets


def write_holdout(
    path: Path,
    records: Sequence[Example],
    name: str,
    values: np.ndarray,
    sequence_length: int | None = None,
) -> None:
    """Write n held-out pairs as JSON lines, each with the values of its two answers.

    Args:
        path: output file.
        records: the pairs.
        name: of the values: a line has `NAME_chosen` and `NAME_rejected`.
        values: (n, 2), chosen first.
        sequence_length: most tokens of a conversation; in every line if given.
    """
    length = {} if sequence_length is None else {"sequence_length": sequence_length}
    with atomic_write(path) as sink:
        for pair, (chosen, rejected) in zip(records, values.tolist(), strict=True):
            line = {
                **pair,
                f"{name}_chosen": chosen,
                f"{name}_rejected": rejected,
                **length,
            }
            sink.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
