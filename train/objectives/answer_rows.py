"""Single answers of the packed set of preferences: both of every pair, and those that came with a label of their own.

A prompt with an answer to another prompt, of which an estimate of KL(policy || reference) is made, is put together from
two rows when it is read.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gristmill.dataprep.documents import read_table
from gristmill.dataprep.files import canonical_json, read_json
from gristmill.tokenize.loss_masks import LossMasks
from gristmill.tokenize.packed import PackedSet
from gristmill.train.objectives.conversations import PAD_MULTIPLE
from gristmill.train.objectives.losses import next_tokens
from gristmill.train.objectives.pair_rows import EXAMPLES, MADE_OF, ROWS_OF_PAIR


class AnswerRows:
    """The answers of a packed set, by number, in the order of its rows.

    Args:
        packed: the rows, with what lies beside them.

    Attributes:
        records: of the examples: id, prompt, and chosen and rejected, or completion and label.
        examples: int64 of shape (A,), the number of each answer's record.
        ids: of the example of each of the A answers.
        sets: int64 of shape (A,), the number of each one's set.
        desirable: bool of shape (A,); of a pair the chosen answer is.
        num_tokens, scored_tokens: int64 of shape (A,), of the conversation and of its answer.
        partners: int64 of shape (A,), for each the answer to another prompt that is put behind its own.
        made_of: what the rows depend on, by name.
        fingerprint: 32 hexadecimal digits of what the rows hold.
    """

    def __init__(self, packed: PackedSet) -> None:
        self.packed, self._masks = packed, LossMasks(packed)
        table = read_table(packed.folder / EXAMPLES, ["id", "set", "rows", "label", "record"])
        counts, labels = table["rows"].to_numpy(), table["label"].to_pylist()
        self.records: list[dict[str, Any]] = [json.loads(one) for one in table["record"].to_pylist()]
        self.examples = np.repeat(np.arange(len(counts)), counts)
        names = table["id"].to_pylist()
        self.ids: list[str] = [names[example] for example in self.examples]
        self.sets = table["set"].to_numpy().astype(np.int64)[self.examples]
        self.desirable = np.array([kind for rows, label in zip(counts, labels, strict=True)
                                   for kind in ((True, False) if rows == ROWS_OF_PAIR else (label,))], dtype=bool)
        self.num_tokens = packed.boundaries(np.arange(packed.rows, dtype=np.int64)).filled().astype(np.int64)
        self.scored_tokens = self._masks.trained_per_row
        self.partners = partners_of(self.examples, [canonical_json(one["prompt"]) for one in self.records])
        self.made_of: dict[str, Any] = read_json(packed.folder / MADE_OF)
        self.fingerprint = self._masks.fingerprint

    def __len__(self) -> int:
        return len(self.examples)

    def read(self, answers: np.ndarray) -> tuple[Tensor, Tensor]:
        """Ids and targets of n answers, (n, t) each; t is no longer than it needs to be."""
        t = self._padded(int(self.num_tokens[answers].max()))
        ids = torch.from_numpy(self.packed.read(answers)[:, :t].copy())
        return ids, next_tokens(ids, torch.from_numpy(self._masks.read(answers)[:, :t].copy()))

    def read_mismatched(self, answers: np.ndarray) -> tuple[Tensor, Tensor]:
        """Ids and targets, (n, t), of the prompts of n answers, each with its partner's answer; cut like the rows."""
        rows, others = ((self.packed.read(which), self._masks.read(which)) for which in (
            answers, self.partners[answers]))
        length = self.packed.sequence_length
        found = []
        for number, partner in enumerate(self.partners[answers]):
            own, other = (int(np.flatnonzero(trained[number])[0]) for _, trained in (rows, others))
            end = int(self.num_tokens[partner])
            found.append([np.concatenate([rows[part][number, :own], others[part][number, other:end]])[:length]
                          for part in (0, 1)])
            found[-1][1][:own] = False
        t = self._padded(max(len(ids) for ids, _ in found))
        ids = np.full((len(found), t), self.packed.manifest["tokenizer"]["pad"], dtype=np.int64)
        trained = np.zeros((len(found), t), dtype=bool)
        for number, (tokens, mask) in enumerate(found):
            ids[number, : len(tokens)], trained[number, : len(mask)] = tokens, mask
        made = torch.from_numpy(ids)
        return made, next_tokens(made, torch.from_numpy(trained))

    def _padded(self, longest: int) -> int:
        return min(self.packed.sequence_length, -(-longest // PAD_MULTIPLE) * PAD_MULTIPLE)


def partners_of(examples: np.ndarray, prompts: list[bytes]) -> np.ndarray:
    """For each answer the number of one to another prompt: of the next example that has one, around the end.

    The examples of a set are in the order of the hashes of their contents, so that the next one is any one; every
    answer of an example has another partner where that example has as many. Where there is one prompt only, an answer
    is its own partner.

    Args:
        examples: (A,) int64 ascending, the number of each answer's example.
        prompts: of the examples.
    """
    firsts = np.searchsorted(examples, np.arange(len(prompts) + 1))
    counts, found = np.diff(firsts), np.empty(len(examples), dtype=np.int64)
    following = _next_with_another_prompt(prompts)
    for answer, example in enumerate(examples.tolist()):
        other = following[example]
        found[answer] = answer if other == example else (
            firsts[other] + (answer - firsts[example]) % counts[other])
    return found


def _next_with_another_prompt(prompts: list[bytes]) -> list[int]:
    """The next example, around the end, whose prompt is another one; itself where there is none."""
    number = len(prompts)
    if len(set(prompts)) < 2:
        return list(range(number))
    found = [0] * number
    # Backwards twice around, so that each looks at what the one behind it has found.
    for place in range(2 * number - 1, -1, -1):
        example, after = place % number, (place + 1) % number
        found[example] = after if prompts[after] != prompts[example] else found[after]
    return found
