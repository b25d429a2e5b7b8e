"""Preference pairs for training: reading and encoding, held-out pairs, and the file of
those.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from gristmill.core.files import atomic_write
from gristmill.core.seeds import content_key
from gristmill.dataprep.decontamination.contamination import leaks_into
from gristmill.dataprep.documents import Inputs
from gristmill.dataprep.examples.conversations import Example, Message
from gristmill.dataprep.examples.kept_examples import (
    UsableSet,
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
    SetErrors,
    TemplateMismatchError,
    check_encoded,
    conversation,
    encode_examples,
)
from gristmill.train.loop.objective import JsonObject

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


def encode_pairs(examples: Sequence[Example], chat: Chat, length: int) -> Encoded[Pair]:
    """Encode preference pairs; those with an answer that has no token within `length`
    are left out.

    Args:
        examples: of one set.
        chat: tokenizer and template.
        length: most tokens per conversation.
    """

    def encode(example: Example) -> Sequence[Pair]:
        prompt = example["prompt"]
        encoded = []
        for answer in (example["chosen"], example["rejected"]):
            messages = [*prompt, *answer]
            turns = [
                sum(message["role"] == "assistant" for message in part)
                for part in (prompt, messages)
            ]
            learned = range(turns[0] + 1, turns[1] + 1)
            tokens = chat.encode(messages, tools=example.get("tools", ()))
            if not set(learned) <= set(tokens.turns.tolist()):
                raise TemplateMismatchError(
                    "the template changes turns of the answer when others follow, so "
                    "that no text holds the whole answer; give answers of one turn"
                )
            encoded.append(
                conversation(tokens, learned, length, example["id"], chat.stops)
            )
        chosen, rejected = encoded
        if chosen is None or rejected is None:
            return []
        return [Pair(example, chosen, rejected)]

    return encode_examples(examples, encode)


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


def gained_more(logps: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Mask of pairs whose chosen answer gained more than the rejected one, (n,) bool;
    ties do not count (TRL).

    Args:
        logps, reference: (n, 2), as from `reference_logps.pair_logps`, under the policy
            and under the reference.
    """
    gains = logps - reference
    return gains[:, 0] > gains[:, 1]


def more_likely(logps: np.ndarray) -> float | None:
    """Share of pairs whose chosen answer is the likelier one, without a reference."""
    return float((logps[:, 0] > logps[:, 1]).mean()) if len(logps) else None


@dataclass(frozen=True)
class PreferenceSet:
    """An encoded set of preferences.

    Attributes:
        path: of the set.
        pairs: the usable pairs.
        records: the examples and quarantined records that were read.
        encoding: numbers of examples that are not usable.
        audit: defects of its pairs.
    """

    path: str
    pairs: Sequence[Pair]
    records: UsableSet
    encoding: EncodingCounts
    audit: Audit

    def summary(self) -> JsonObject:
        """Counts for the summary of a stage."""
        truncated = sum(
            any(conversation.truncated for conversation in pair.conversations)
            for pair in self.pairs
        )
        return {
            "path": self.path,
            **vars(self.records.counts),
            **vars(self.encoding),
            "used": len(self.pairs),
            "truncated": truncated,
            "audit": asdict(self.audit),
        }


def read_pairs(
    data: Sequence[PreferencePairs],
    chat: Chat,
    length: int,
    inputs: Inputs,
    leaks: Decontaminate | None = None,
) -> list[PreferenceSet]:
    """Read and encode all sets of pairs, or their prepared versions.

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
        gristmill.train.data.conversation_tokens.NothingToTrainError: a set has no
            usable pair.
        gristmill.train.data.conversation_tokens.TemplateMismatchError: the template
            does not fit a set.

    The last two name all such sets.
    """
    sets: list[PreferenceSet] = []
    errors = SetErrors()
    for dataset, records in zip(data, usable_sets(data, "dpo", inputs), strict=True):
        where = f"preferences {dataset.path}"
        encoded = encode_pairs(records.examples, chat, length)
        with errors.noted():
            check_encoded(
                where,
                encoded,
                records,
                dataset.max_quarantined,
                f"pairs has both answers within {length} tokens",
                "raise sequence_length",
            )
        audited = audit(
            records.examples,
            sum(record.reason == SAME for record in records.quarantined),
            None
            if leaks is None
            else leaks_into(
                [view_text("conversation", example) for example in records.examples],
                leaks,
            ),
        )
        sets.append(
            PreferenceSet(dataset.path, encoded.used, records, encoded.counts, audited)
        )
    errors.raise_all()
    return sets


def write_holdout(
    path: Path,
    records: Sequence[Example],
    name: str,
    values: np.ndarray,
) -> None:
    """Write n held-out pairs as JSON lines, each with the values of its two answers.

    Args:
        path: output file.
        records: the pairs.
        name: of the values: a line has `NAME_chosen` and `NAME_rejected`.
        values: (n, 2), chosen first.
    """
    with atomic_write(path) as sink:
        for pair, (chosen, rejected) in zip(records, values.tolist(), strict=True):
            line = {
                **pair,
                f"{name}_chosen": chosen,
                f"{name}_rejected": rejected,
            }
            sink.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
