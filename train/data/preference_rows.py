"""Preferences as rows of a packed set: row 2i holds the chosen answer of pair i, row 2i + 1 the rejected one.

An answer that is labelled as desirable or not, and is of no pair, is one row, behind the pairs of its set. Each row is
one conversation, prompt included, with a loss mask over its answer; the sets lie one after another. Beside
the rows lie

    examples.parquet    one row per example: id, set (its number in packed.json), row (its first one), rows (how many
                        it has: 2, a pair, or 1, an answer), label (of an answer: whether it is desirable), and the
                        record that it was made from, as JSON
    made-of.json        what the rows depend on, by name

so that what needs no tokens (who is held out, how often a set is read) is decided without them.

A prompt with an answer to another prompt, of which an estimate of KL(policy || reference) is made, is put together from
two rows when it is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.documents import read_table, write_table
from gristmill.dataprep.files import canonical_json, read_json, write_json
from gristmill.mixtures.posttraining import Dpo
from gristmill.tokenize.loss_masks import LossMasks
from gristmill.tokenize.order import Order, sources_of_rows
from gristmill.tokenize.packed import PackedSet
from gristmill.train.data.conversation_tokens import (
    PAD_MULTIPLE,
    Chat,
    Conversation,
    NothingToTrainError,
    write_example_ids,
)
from gristmill.train.data.example_rows import Piece, copies, piece_of, quotas, write_ordered_rows
from gristmill.train.data.pairs import Answer, Pair, are_held_out
from gristmill.train.loop.objective import mean_of_trained

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
    folder: Path, sets: Mapping[str, Sequence[Pair | Answer]], length: int, tokenizer: dict[str, Any], chat: Chat
) -> dict[str, Any]:
    """Write the pairs and labelled answers of all sets as one packed set.

    Args:
        folder: where to.
        sets: name -> its pairs, at least one.
        length: tokens per row.
        tokenizer: vocab_size, eos, pad, sha256.
        chat: what the pairs were encoded with.

    Returns:
        see `example_rows.write_example_rows`.
    """
    examples = [one for of_set in sets.values() for one in of_set]
    rows: list[list[Piece]] = [[piece_of(one)] for example in examples for one in conversations_of(example)]
    sizes = np.array([len(conversations_of(example)) for example in examples], dtype=np.int64)
    counts = [sum(len(conversations_of(example)) for example in of_set) for of_set in sets.values()]
    # A stage for every set: one after another, so that the two rows of a pair are neighbours.
    stages = np.diag(counts).tolist()
    write_table(
        folder / EXAMPLES,
        pa.table(
            {
                "id": [one.example["id"] for one in examples],
                "set": np.repeat(np.arange(len(counts)), [len(of_set) for of_set in sets.values()]),
                "row": np.cumsum(sizes) - sizes,
                "rows": sizes,
                "label": [one.example.get("label") for one in examples],
                "record": [json.dumps(one.example, ensure_ascii=False) for one in examples],
            }
        ).cast(EXAMPLES_SCHEMA),
    )
    texts = [
        [
            one.example[name]
            for name in ("prompt", "chosen", "rejected", "completion", "label", "tools")
            if name in one.example
        ]
        for one in examples
    ]
    write_json(
        folder / MADE_OF,
        {
            "chat template and tokenizer": chat.digest,
            "sequence_length": length,
            "pairs": hashlib.sha256(canonical_json(texts)).hexdigest(),
        },
    )
    return write_ordered_rows(folder, list(sets), rows, stages, length, tokenizer, chat.pad)


def conversations_of(example: Pair | Answer) -> tuple[Conversation, ...]:
    """What becomes rows, in their order."""
    return (example.chosen, example.rejected) if isinstance(example, Pair) else (example.conversation,)


class LabelledError(ValueError):
    """Answers of no pair stand where a loss is of pairs."""


def check_pairs(packed: PackedSet) -> None:
    """Refuse a set that has other examples than pairs.

    Raises:
        LabelledError: it does.
    """
    counts = read_table(packed.folder / EXAMPLES, ["rows"])["rows"]
    if single := len(counts) - pc.sum(pc.equal(counts, ROWS_OF_PAIR)).as_py():
        raise LabelledError(
            f"dpo.data: {single} of {len(counts)} examples are single answers with a label, but "
            "dpo.loss is one of pairs; set it to kto, or leave those sets out"
        )


class PairRows:
    """The pairs of a packed set, by number.

    Args:
        packed: the rows, with what lies beside them.

    Attributes:
        ids: of each of the P pairs.
        sets: int64 of shape (P,), the number of each one's set.
        first: int64 of shape (P,), the row of its chosen answer; the rejected one's is the next.
        num_tokens: int64 of shape (P,), tokens of both conversations.
        scored_tokens: int64 of shape (P, 2), tokens of the chosen and of the rejected answer.
        made_of: what the rows depend on, by name.
        fingerprint: 32 hexadecimal digits of what the rows hold.
    """

    def __init__(self, packed: PackedSet) -> None:
        self.packed, self._masks = packed, LossMasks(packed)
        table = read_table(packed.folder / EXAMPLES, ["id", "set", "row", "rows"])
        table = table.filter(pc.equal(table["rows"], ROWS_OF_PAIR))
        self.ids: list[str] = table["id"].to_pylist()
        self.sets = table["set"].to_numpy().astype(np.int64)
        self.first = table["row"].to_numpy()
        both = np.stack([self.first, self.first + 1], axis=1)
        filled = packed.boundaries(np.arange(packed.rows, dtype=np.int64)).filled()
        self.num_tokens = filled[both].sum(axis=1)
        self.scored_tokens = self._masks.trained_per_row[both]
        self.made_of: dict[str, Any] = read_json(packed.folder / MADE_OF)
        self.fingerprint = self._masks.fingerprint

    def __len__(self) -> int:
        return len(self.first)

    def records(self) -> list[dict[str, Any]]:
        """What the pairs were made from: id, prompt, chosen, rejected."""
        table = read_table(self.packed.folder / EXAMPLES, ["rows", "record"])
        return [json.loads(one) for one in table.filter(pc.equal(table["rows"], ROWS_OF_PAIR))["record"].to_pylist()]

    def read(self, pairs: np.ndarray) -> tuple[Tensor, Tensor]:
        """Ids and targets of n pairs, (2n, t) each, all chosen answers first; t is no longer than it needs to be."""
        rows = np.concatenate([self.first[pairs], self.first[pairs] + 1])
        longest = int(self.packed.boundaries(rows).filled().max())
        t = min(self.packed.sequence_length, -(-longest // PAD_MULTIPLE) * PAD_MULTIPLE)
        return ids_and_targets(self.packed.read(rows)[:, :t], self._masks.read(rows)[:, :t])


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
        self.desirable = np.array(
            [
                kind
                for rows, label in zip(counts, labels, strict=True)
                for kind in ((True, False) if rows == ROWS_OF_PAIR else (label,))
            ],
            dtype=bool,
        )
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
        return ids_and_targets(self.packed.read(answers)[:, :t], self._masks.read(answers)[:, :t])

    def read_mismatched(self, answers: np.ndarray) -> tuple[Tensor, Tensor]:
        """Ids and targets, (n, t), of the prompts of n answers, each with its partner's answer; cut like the rows."""
        rows, others = (
            (self.packed.read(which), self._masks.read(which)) for which in (answers, self.partners[answers])
        )
        length = self.packed.sequence_length
        found = []
        for number, partner in enumerate(self.partners[answers]):
            own, other = (int(np.flatnonzero(trained[number])[0]) for _, trained in (rows, others))
            end = int(self.num_tokens[partner])
            found.append(
                [
                    np.concatenate([rows[part][number, :own], others[part][number, other:end]])[:length]
                    for part in (0, 1)
                ]
            )
            found[-1][1][:own] = False
        t = self._padded(max(len(ids) for ids, _ in found))
        ids = np.full((len(found), t), self.packed.manifest["tokenizer"]["pad"], dtype=np.int64)
        trained = np.zeros((len(found), t), dtype=bool)
        for number, (tokens, mask) in enumerate(found):
            ids[number, : len(tokens)], trained[number, : len(mask)] = tokens, mask
        return ids_and_targets(ids, trained)

    def _padded(self, longest: int) -> int:
        return min(self.packed.sequence_length, -(-longest // PAD_MULTIPLE) * PAD_MULTIPLE)


def ids_and_targets(ids: np.ndarray, trained: np.ndarray) -> tuple[Tensor, Tensor]:
    """Rows of ids, (n, t), as tensors with the next tokens as targets, `IGNORED` where these are not trained."""
    import torch  # here: who only writes the rows needs none

    from gristmill.train.objectives.losses import next_tokens

    tokens = torch.from_numpy(ids.copy())
    return tokens, next_tokens(tokens, torch.from_numpy(trained.copy()))


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
        found[answer] = answer if other == example else (firsts[other] + (answer - firsts[example]) % counts[other])
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


def held_out_mask(records: Sequence[Mapping[str, Any]], section: Dpo, seed: int) -> np.ndarray:
    """Which of n pairs are held out, (n,) bool.

    Raises:
        NothingToTrainError: all of them are.
    """
    held_out = are_held_out(records, section.holdout, seed)
    if held_out.all():
        raise NothingToTrainError(
            f"dpo: all {len(records)} pairs are held out; lower dpo.holdout ({section.holdout}) "
            "or add pairs with other prompts"
        )
    return held_out


def held_out_answers(rows: AnswerRows, section: Dpo, seed: int) -> np.ndarray:
    """Which of A answers are held out, (A,) bool: by prompt, as pairs are.

    Raises:
        NothingToTrainError: all of them are.
    """
    held_out: np.ndarray = are_held_out(rows.records, section.holdout, seed)[rows.examples]
    if held_out.all():
        raise NothingToTrainError(
            f"dpo: all {len(rows)} answers are held out; lower dpo.holdout ({section.holdout}) "
            "or add answers to other prompts"
        )
    return held_out


def draw_pairs(rows: PairRows | AnswerRows, held_out: np.ndarray, section: Dpo, seed: int) -> list[np.ndarray]:
    """The pairs to train on, set by set (int64, the numbers of pairs, repeated ones beside each other).

    Without weights every pair is there once. With them a set has its share of the pairs, and what it repeats is chosen
    by a hash of seed and id, as in fine-tuning.

    Args:
        rows: all pairs.
        held_out: (P,) bool, those that are not trained on.
        section: with the weights of the sets, in the order of the rows' sets.
        seed: of the hash.

    Raises:
        NothingToTrainError: all pairs of a weighted set are held out.
    """
    sets = [np.flatnonzero((rows.sets == number) & ~held_out) for number in range(len(section.data))]
    if section.data[0].weight is None:
        return sets
    for one, of_set in zip(section.data, sets, strict=True):
        if not len(of_set):
            raise NothingToTrainError(
                f"dpo data {one.path}: all of its pairs are held out, but its weight is "
                f"{one.weight}; lower dpo.holdout ({section.holdout}) or remove the set"
            )
    wanted = quotas([len(of_set) for of_set in sets], [one.weight or 0.0 for one in section.data])
    return [
        np.repeat(
            of_set, copies(np.ones(len(of_set), dtype=np.int64), [rows.ids[pair] for pair in of_set], quota, seed)
        )
        for of_set, quota in zip(sets, wanted, strict=True)
    ]


class Drawn:
    """What is drawn of some pairs or answers, in the order in which a training reads it.

    Args:
        rows: all of them.
        draws: as from `draw_pairs`; what is there twice is read twice an epoch.
        seed: of the order.

    Attributes:
        order: of the draws' sets, each merged with the others by their sizes.
        numbers: int64, the pair or answer behind each row of the order.
        fingerprint: 32 hexadecimal digits of what the rows hold, and of what is drawn.
    """

    def __init__(self, rows: PairRows | AnswerRows, draws: Sequence[np.ndarray], seed: int) -> None:
        self._rows = rows
        self.order = Order([len(drawn) for drawn in draws], seed)
        # The order merges the sets by their numbers of pairs: row r is the next one of the set at place r.
        self.numbers = merged(draws)
        self.fingerprint = hashlib.blake2b(
            rows.fingerprint.encode() + self.numbers.astype("<i8").tobytes(), digest_size=16
        ).hexdigest()

    def num_tokens(self, rows: np.ndarray) -> int:
        """All tokens of the conversations of some rows but padding."""
        return int(self._rows.num_tokens[self.numbers[rows]].sum())

    def describe(self, rows: np.ndarray) -> dict[str, Any]:
        """The ids of the examples of some rows."""
        return {"examples": [self._rows.ids[number] for number in self.numbers[rows]]}

    def blame(self, rows: np.ndarray, row_losses: np.ndarray) -> list[dict[str, Any]]:
        """Every one of some rows with its loss."""
        return [
            {
                "id": self._rows.ids[number],
                "loss": mean_of_trained(losses),
                "tokens": int(self._rows.num_tokens[number]),
            }
            for number, losses in zip(self.numbers[rows], row_losses, strict=True)
        ]


def merged(draws: Sequence[np.ndarray]) -> np.ndarray:
    """The draws of all sets in one, each set's in its places of the merged order (see tokenize/order.py)."""
    counts = [len(drawn) for drawn in draws]
    set_of = sources_of_rows([counts], np.arange(sum(counts), dtype=np.int64))
    pairs = np.empty(len(set_of), dtype=np.int64)
    for number, drawn in enumerate(draws):
        pairs[set_of == number] = drawn
    return pairs


def write_drawn_ids(folder: Path, rows: PairRows | AnswerRows, draws: Sequence[np.ndarray]) -> None:
    """Write which example each row of a training is (see `write_example_ids`)."""
    write_example_ids(folder, [rows.ids[number] for number in merged(draws)], [len(drawn) for drawn in draws])


def describe_draws(
    rows: PairRows | AnswerRows, names: Sequence[str], draws: Sequence[np.ndarray], held_out: np.ndarray
) -> list[dict[str, Any]]:
    """Per set: `name`, `pairs`, `held_out`, `drawn` and `drawn_share` of all that is drawn."""
    total = sum(map(len, draws))
    return [
        {
            "name": name,
            "pairs": int((rows.sets == number).sum()),
            "held_out": int(held_out[rows.sets == number].sum()),
            "drawn": len(drawn),
            "drawn_share": len(drawn) / total,
        }
        for number, (name, drawn) in enumerate(zip(names, draws, strict=True))
    ]
