"""Preferences as rows of a packed set: row 2i holds the chosen answer of pair i, row 2i
+ 1 the rejected one.

An answer labelled desirable or undesirable, without a pair, is one row, after the pairs
of its set. Each row is one conversation, prompt included, with a loss mask over its
answer; the sets follow one another. Beside the rows are

    examples.parquet    one row per example: id, set (its number in packed.json), row
                        (its first), rows (2 for a pair, 1 for an answer), label (of an
                        answer: true if desirable), and the source record as JSON
    made-of.json        inputs that the rows depend on, by name

so held-out shares and weights of sets are decided without reading tokens.

A prompt with another prompt's answer, which estimates KL(policy || reference), is
joined from two rows when read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.files import canonical_json, read_json, write_json
from gristmill.dataprep.documents import read_table, write_table
from gristmill.dataprep.examples.conversations import Example
from gristmill.mixtures.schema.posttraining import Dpo
from gristmill.tokenize.loss_masks import LossMasks
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_files import TokenizerEntry
from gristmill.tokenize.shuffle import Order
from gristmill.train.data.conversation_tokens import (
    Chat,
    NothingToTrainError,
    padded_length,
    write_example_ids,
)
from gristmill.train.data.example_rows import (
    WrittenRows,
    copies,
    merged_order,
    piece_of,
    quotas,
    write_ordered_rows,
)
from gristmill.train.data.pairs import Answer, Pair, are_held_out
from gristmill.train.loop.objective import ReadDocument, mean_of_trained

if TYPE_CHECKING:
    from torch import Tensor

EXAMPLES, MADE_OF = "examples.parquet", "made-of.json"
ROWS_OF_PAIR = 2
EXAMPLES_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("set", pa.int32()),
        ("row", pa.int64()),
        ("rows", pa.int32()),
        ("label", pa.bool_()),
        ("record", pa.large_string()),
    ]
)


def write_pair_rows(
    folder: Path,
    sets: Mapping[str, Sequence[Pair | Answer]],
    length: int,
    tokenizer: TokenizerEntry,
    chat: Chat,
) -> WrittenRows:
    """Write the pairs and labelled answers of all sets as one packed set.

    Args:
        folder: output folder.
        sets: name -> its pairs, at least one.
        length: tokens per row.
        tokenizer: vocab_size, eos, pad, sha256.
        chat: tokenizer and template of the pairs.
    """
    items = [(number, item) for number, of in enumerate(sets.values()) for item in of]
    examples = [item.example for _, item in items]
    sizes = np.array([len(item.conversations) for _, item in items], np.int64)
    numbers = np.array([number for number, _ in items], np.int64)
    table = {
        "id": [example["id"] for example in examples],
        "set": numbers,
        "row": np.cumsum(sizes) - sizes,
        "rows": sizes,
        "label": [example.get("label") for example in examples],
        "record": [json.dumps(example, ensure_ascii=False) for example in examples],
    }
    write_table(folder / EXAMPLES, pa.table(table).cast(EXAMPLES_SCHEMA))
    texts = [
        [
            example[name]
            for name in ("prompt", "chosen", "rejected", "completion", "label", "tools")
            if name in example
        ]
        for example in examples
    ]
    write_json(
        folder / MADE_OF,
        {
            "chat template and tokenizer": chat.digest,
            "sequence_length": length,
            "pairs": hashlib.sha256(canonical_json(texts)).hexdigest(),
        },
    )
    counts = np.bincount(numbers, sizes, minlength=len(sets)).astype(int)
    return write_ordered_rows(
        folder,
        list(sets),
        [[piece_of(encoded)] for _, item in items for encoded in item.conversations],
        # One phase per set keeps the two rows of a pair adjacent.
        np.diag(counts).tolist(),
        length,
        tokenizer,
        chat.pad,
    )


class LabelledError(ValueError):
    """Single answers in the data of a loss over pairs."""


def check_pairs(packed: PackedSet) -> None:
    """Reject a set with examples other than pairs.

    Raises:
        LabelledError: the set has single answers.
    """
    counts = read_table(packed.folder / EXAMPLES, ["rows"])["rows"]
    if single := len(counts) - pc.sum(pc.equal(counts, ROWS_OF_PAIR)).as_py():
        raise LabelledError(
            f"dpo.data: {single} of {len(counts)} examples are single answers with a "
            "label, but dpo.loss is one of pairs; set it to kto, or leave those sets "
            "out"
        )


class PreferenceRows:
    """Pairs or answers of a packed set, by number.

    Args:
        packed: the rows, with their files of examples.

    Attributes:
        ids: of the example of each.
        sets: int64 of shape (n,), the number of each one's set.
        num_tokens: int64 of shape (n,), tokens of its conversations.
        scored_tokens: int64, tokens of its answers.
        made_of: inputs that the rows depend on, by name.
        fingerprint: 32 hexadecimal digits, a hash of the rows.
    """

    ids: list[str]
    sets: np.ndarray
    num_tokens: np.ndarray
    scored_tokens: np.ndarray

    def __init__(self, packed: PackedSet) -> None:
        self.packed = packed
        self._masks = LossMasks(packed)
        rows = np.arange(packed.rows, dtype=np.int64)
        self._filled = packed.boundaries(rows).filled()
        self.made_of: dict[str, str | int] = read_json(packed.folder / MADE_OF)
        self.fingerprint = self._masks.fingerprint

    def __len__(self) -> int:
        return len(self.ids)

    def _read_rows(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Ids and targets, (n, t) each; t is as small as the rows allow."""
        longest = int(self._filled[rows].max())
        t = padded_length(longest, self.packed.sequence_length)
        return ids_and_targets(
            self.packed.read(rows)[:, :t], self._masks.read(rows)[:, :t]
        )


class PairRows(PreferenceRows):
    """The pairs of a packed set, by number.

    Attributes:
        first: int64 of shape (P,), the row of each one's chosen answer; the rejected
            one's is the next.
        scored_tokens: int64 of shape (P, 2), tokens of the chosen and of the rejected
            answer.
    """

    def __init__(self, packed: PackedSet) -> None:
        super().__init__(packed)
        table = read_table(packed.folder / EXAMPLES, ["id", "set", "row", "rows"])
        table = table.filter(pc.equal(table["rows"], ROWS_OF_PAIR))
        self.ids = table["id"].to_pylist()
        self.sets = table["set"].to_numpy().astype(np.int64)
        self.first = table["row"].to_numpy()
        both = np.stack([self.first, self.first + 1], axis=1)
        self.num_tokens = self._filled[both].sum(axis=1)
        self.scored_tokens = self._masks.trained_per_row[both]

    def records(self) -> list[Example]:
        """Source records of the pairs."""
        table = read_table(self.packed.folder / EXAMPLES, ["rows", "record"])
        pairs = table.filter(pc.equal(table["rows"], ROWS_OF_PAIR))
        return list(map(json.loads, pairs["record"].to_pylist()))

    def read(self, pairs: np.ndarray) -> tuple[Tensor, Tensor]:
        """Ids and targets of n pairs, (2n, t) each, all chosen answers first; t is as
        small as the rows allow.
        """
        return self._read_rows(
            np.concatenate([self.first[pairs], self.first[pairs] + 1])
        )


class AnswerRows(PreferenceRows):
    """The answers of a packed set, by number, in the order of its rows.

    Attributes:
        records: of the examples.
        examples: int64 of shape (A,), the number of each answer's record.
        desirable: bool of shape (A,); the chosen answer of a pair is desirable.
        partners: int64 of shape (A,), for each answer the number of an answer to
            another prompt.
    """

    def __init__(self, packed: PackedSet) -> None:
        super().__init__(packed)
        table = read_table(
            packed.folder / EXAMPLES, ["id", "set", "rows", "label", "record"]
        )
        counts = table["rows"].to_numpy()
        labels = table["label"].to_pylist()
        self.records: list[Example] = list(map(json.loads, table["record"].to_pylist()))
        self.examples = np.repeat(np.arange(len(counts)), counts)
        names = table["id"].to_pylist()
        self.ids = [names[example] for example in self.examples]
        self.sets = table["set"].to_numpy().astype(np.int64)[self.examples]
        self.desirable = np.array(
            [
                kind
                for rows, label in zip(counts, labels, strict=True)
                for kind in ((True, False) if rows == ROWS_OF_PAIR else (label,))
            ],
            bool,
        )
        self.num_tokens = self._filled
        self.scored_tokens = self._masks.trained_per_row
        self.partners = partners_of(
            self.examples, [canonical_json(record["prompt"]) for record in self.records]
        )

    def read(self, answers: np.ndarray) -> tuple[Tensor, Tensor]:
        """Ids and targets of n answers, (n, t) each; t is as small as the rows
        allow.
        """
        return self._read_rows(answers)

    def read_mismatched(self, answers: np.ndarray) -> tuple[Tensor, Tensor]:
        """Ids and targets, (n, t), of the prompts of n answers, each followed by its
        partner's answer; truncated like rows.
        """
        partners = self.partners[answers]
        prompt_masks = self._masks.read(answers)
        answer_ids = self.packed.read(partners)
        answer_masks = self._masks.read(partners)
        length = self.packed.sequence_length
        ids = self.packed.read(answers)
        trained = np.zeros(ids.shape, bool)
        longest = 0
        for number, partner in enumerate(partners):
            # An answer is all of its row's trained tokens, and ends the row.
            begin = int(prompt_masks[number].argmax())
            first = int(answer_masks[number].argmax())
            size = min(int(self.num_tokens[partner]) - first, length - begin)
            answer = slice(first, first + size)
            end = begin + size
            ids[number, begin:end] = answer_ids[number, answer]
            ids[number, end:] = self.packed.manifest["tokenizer"]["pad"]
            trained[number, begin:end] = answer_masks[number, answer]
            longest = max(longest, end)
        t = padded_length(longest, length)
        return ids_and_targets(ids[:, :t], trained[:, :t])


def ids_and_targets(ids: np.ndarray, trained: np.ndarray) -> tuple[Tensor, Tensor]:
    """Rows of ids, (n, t), as tensors with the next tokens as targets, `IGNORED` where
    these are not trained.
    """
    import torch  # writing rows needs no torch

    from gristmill.train.objectives.losses import next_tokens

    tokens = torch.from_numpy(ids.copy())
    return tokens, next_tokens(tokens, torch.from_numpy(trained.copy()))


def partners_of(examples: np.ndarray, prompts: list[bytes]) -> np.ndarray:
    """Number of an answer to another prompt for each answer: from the next example,
    cyclically, with another prompt.

    The examples of a set are sorted by hashes of their contents, so the next one is
    arbitrary; the answers of an example have distinct partners if the next example has
    enough. With a single prompt, each answer is its own partner.

    Args:
        examples: (A,) int64 ascending, the number of each answer's example.
        prompts: of the examples.
    """
    number = len(prompts)
    if len(set(prompts)) < 2:
        return np.arange(len(examples))
    following = [0] * number
    # Two backward passes, so that each example sees the result of its successor.
    for place in range(2 * number - 1, -1, -1):
        example, after = place % number, (place + 1) % number
        following[example] = (
            after if prompts[after] != prompts[example] else following[after]
        )
    firsts = np.searchsorted(examples, np.arange(number + 1))
    counts = np.diff(firsts)
    partner_examples = np.array(following)[examples]
    places = np.arange(len(examples)) - firsts[examples]
    return firsts[partner_examples] + places % counts[partner_examples]


def held_out_mask(records: Sequence[Example], section: Dpo, seed: int) -> np.ndarray:
    """Mask of held-out pairs or labelled answers, (n,) bool: by prompt.

    Raises:
        NothingToTrainError: all are held out.
    """
    held_out = are_held_out(records, section.holdout, seed)
    if held_out.all():
        raise NothingToTrainError(
            f"dpo: all {len(records)} examples are held out; lower dpo.holdout "
            f"({section.holdout}) or add examples with other prompts"
        )
    return held_out


def draw_pairs(
    rows: PreferenceRows, held_out: np.ndarray, section: Dpo, seed: int
) -> list[np.ndarray]:
    """Pairs to train on, set by set (int64 numbers of pairs, repetitions adjacent).

    Without weights every pair occurs once. With weights a set has its share of the
    pairs, and a hash of seed and id chooses its repeated pairs, as in fine-tuning.

    Args:
        rows: all pairs.
        held_out: (P,) bool, the held-out pairs.
        section: with the weights of the sets, in the order of the rows' sets.
        seed: of the hash.

    Raises:
        NothingToTrainError: all pairs of a weighted set are held out.
    """
    sets = [
        np.flatnonzero((rows.sets == number) & ~held_out)
        for number in range(len(section.data))
    ]
    if section.data[0].weight is None:
        return sets
    for dataset, of_set in zip(section.data, sets, strict=True):
        if not len(of_set):
            raise NothingToTrainError(
                f"dpo data {dataset.path}: all of its pairs are held out, but its "
                f"weight is {dataset.weight}; lower dpo.holdout ({section.holdout}) or "
                "remove the set"
            )
    weights = [dataset.weight or 0.0 for dataset in section.data]
    drawn = []
    for of_set, quota in zip(sets, quotas(list(map(len, sets)), weights), strict=True):
        ids = [rows.ids[pair] for pair in of_set]
        numbers = copies(np.ones(len(of_set), np.int64), ids, quota, seed)
        drawn.append(np.repeat(of_set, numbers))
    return drawn


class Drawn:
    """Pairs or answers drawn for training, in reading order.

    Args:
        rows: all of them.
        draws: as from `draw_pairs`; repeated numbers are read repeatedly in an epoch.
        seed: of the order.

    Attributes:
        order: of the draws' sets, each merged with the others by their sizes.
        numbers: int64, number of the pair or answer of each row of the order.
        fingerprint: 32 hexadecimal digits, a hash of the rows and of the draws.
    """

    def __init__(
        self, rows: PreferenceRows, draws: Sequence[np.ndarray], seed: int
    ) -> None:
        self._rows = rows
        self.order = Order([len(drawn) for drawn in draws], seed)
        # The order merges the sets by their numbers of pairs: row r is the next one of
        # the set at place r.
        self.numbers = merged(draws)
        self.fingerprint = hashlib.blake2b(
            rows.fingerprint.encode() + self.numbers.astype("<i8").tobytes(),
            digest_size=16,
        ).hexdigest()

    def num_tokens(self, rows: np.ndarray) -> int:
        """Tokens of the conversations of some rows, without padding."""
        return int(self._rows.num_tokens[self.numbers[rows]].sum())

    def describe(self, rows: np.ndarray) -> dict[str, list[str]]:
        """The ids of the examples of some rows."""
        return {"examples": [self._rows.ids[number] for number in self.numbers[rows]]}

    def blame(self, rows: np.ndarray, row_losses: np.ndarray) -> list[ReadDocument]:
        """Ids, losses and token counts of some rows."""
        return [
            {
                "id": self._rows.ids[number],
                "loss": mean_of_trained(losses),
                "tokens": int(self._rows.num_tokens[number]),
            }
            for number, losses in zip(self.numbers[rows], row_losses, strict=True)
        ]


def merged(draws: Sequence[np.ndarray]) -> np.ndarray:
    """Draws of all sets in their merged order (see tokenize/shuffle.py)."""
    set_of = merged_order([len(drawn) for drawn in draws])
    pairs = np.empty(len(set_of), np.int64)
    for number, drawn in enumerate(draws):
        pairs[set_of == number] = drawn
    return pairs


def write_drawn_ids(
    folder: Path, rows: PreferenceRows, draws: Sequence[np.ndarray]
) -> None:
    """Write the example of each row of a training (see `write_example_ids`)."""
    write_example_ids(
        folder,
        [rows.ids[number] for number in merged(draws)],
        [len(drawn) for drawn in draws],
    )


@dataclass(frozen=True)
class DrawnSet:
    """Use of a set in training.

    Attributes:
        name: of the set.
        pairs: its pairs, or answers.
        held_out: number of these that are held out.
        drawn: number of these drawn for an epoch, with repetitions.
        drawn_share: of all drawn ones.
    """

    name: str
    pairs: int
    held_out: int
    drawn: int
    drawn_share: float


def describe_draws(
    rows: PreferenceRows,
    names: Sequence[str],
    draws: Sequence[np.ndarray],
    held_out: np.ndarray,
) -> list[DrawnSet]:
    """Use of each set in training."""
    total = sum(map(len, draws))
    return [
        DrawnSet(
            name,
            int((rows.sets == number).sum()),
            int(held_out[rows.sets == number].sum()),
            len(drawn),
            len(drawn) / total,
        )
        for number, (name, drawn) in enumerate(zip(names, draws, strict=True))
    ]
