"""Preference pairs made ready for training: two conversations that share a prompt, and who of them is held out."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gristmill.dataprep.files import canonical_json
from gristmill.train.objectives.chat import Chat, ChatError
from gristmill.train.objectives.conversations import SHOWN_REASONS, Conversation, conversation, padded

if TYPE_CHECKING:
    from torch import Tensor

HASH_BITS = 64


@dataclass(frozen=True)
class Pair:
    """A prompt with a preferred and a rejected answer, of which only the answers are scored.

    Attributes:
        example: what it was made from: id, prompt, chosen, rejected.
        chosen, rejected: the encoded conversations, prompt included.
    """

    example: Mapping[str, Any]
    chosen: Conversation
    rejected: Conversation

    @property
    def scored_tokens(self) -> tuple[int, int]:
        """How many tokens of the chosen and of the rejected answer are scored."""
        return int(self.chosen.trained.sum()), int(self.rejected.trained.sum())


@dataclass(frozen=True)
class Answer:
    """A prompt with one answer that is desirable or not.

    Attributes:
        example: what it was made from: id, prompt, completion, label.
        conversation: encoded, prompt included; only the answer is scored.
    """

    example: Mapping[str, Any]
    conversation: Conversation


def prepare_answers(
    examples: Sequence[Mapping[str, Any]], chat: Chat, length: int
) -> tuple[list[Answer], dict[str, Any]]:
    """Encode labelled examples; arguments and counts as of `prepare_pairs`."""
    used: list[Answer] = []
    refused: list[str] = []
    for example in examples:
        earlier_turns = sum(message["role"] == "assistant" for message in example["prompt"])
        try:
            tokens = chat.encode([*example["prompt"], *example["completion"]], tools=example.get("tools", ()))
        except ChatError as error:
            refused.append(str(error))
            continue
        if (found := conversation(tokens, earlier_turns + 1, length, example["id"])) is not None:
            used.append(Answer(example, found))
    return used, {"examples": len(examples), "unrenderable": len(refused),
                  "unrenderable_reasons": dict(Counter(refused).most_common(SHOWN_REASONS)),
                  "dropped": len(examples) - len(used) - len(refused), "used": len(used),
                  "truncated": sum(one.conversation.truncated for one in used)}


def prepare_pairs(
    examples: Sequence[Mapping[str, Any]], chat: Chat, length: int
) -> tuple[list[Pair], dict[str, Any]]:
    """Encode preference examples.

    Args:
        examples: `id`, lists of messages `prompt`, `chosen`, `rejected`, and perhaps `tools`.
        chat: tokenizer and template.
        length: most tokens per conversation.

    Returns:
        the pairs of which both answers have a token within `length`, and counts: examples, used, truncated, dropped,
        unrenderable (with the reasons).
    """
    used: list[Pair] = []
    refused: list[str] = []
    dropped = 0
    for example in examples:
        earlier_turns = sum(message["role"] == "assistant" for message in example["prompt"])
        try:
            chosen, rejected = (
                conversation(chat.encode([*example["prompt"], *example[name]], tools=example.get("tools", ())),
                             earlier_turns + 1, length, example["id"])
                for name in ("chosen", "rejected"))
        except ChatError as error:
            refused.append(str(error))
            continue
        if chosen is None or rejected is None:
            dropped += 1
        else:
            used.append(Pair(example, chosen, rejected))
    truncated = sum(pair.chosen.truncated or pair.rejected.truncated for pair in used)
    return used, {"examples": len(examples), "unrenderable": len(refused),
                  "unrenderable_reasons": dict(Counter(refused).most_common(SHOWN_REASONS)),
                  "dropped": dropped, "used": len(used), "truncated": truncated}


def is_held_out(example: Mapping[str, Any], share: float, seed: int) -> bool:
    """Whether a pair only measures: by a hash of seed and prompt, so that one prompt is never on both sides."""
    prompt = [[message["role"], message["content"]] for message in example["prompt"]]
    digest = hashlib.blake2b(canonical_json([seed, prompt]), digest_size=HASH_BITS // 8).digest()
    return int.from_bytes(digest, "little") < share * 2**HASH_BITS


def padded_pairs(pairs: Sequence[Pair], pad: int, length: int) -> tuple[Tensor, Tensor]:
    """Ids and targets of n pairs, (2n, t) each: all chosen answers, then all rejected ones."""
    from gristmill.train.objectives.losses import next_tokens  # here: who only makes the rows needs no torch

    ids, scored = padded([*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)], pad, length)
    return ids, next_tokens(ids, scored)


def gained_more(logps: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Whether the chosen answer of each of n pairs gained more than the rejected one: (n,) bool.

    Args:
        logps, reference: (n, 2), as from `reference.pair_logps`, under the policy and under the reference.
    """
    gained = logps - reference
    more: np.ndarray = gained[:, 0] > gained[:, 1]
    return more


def reward_accuracy(logps: np.ndarray, reference: np.ndarray) -> float | None:
    """Share of pairs for which `gained_more` holds; ties do not count (TRL). None where there are no pairs."""
    return float(gained_more(logps, reference).mean()) if len(logps) else None


def more_likely(logps: np.ndarray) -> float | None:
    """Share of pairs whose chosen answer is the likelier one, without any reference."""
    return float((logps[:, 0] > logps[:, 1]).mean()) if len(logps) else None
