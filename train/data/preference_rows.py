"""Preferences as rows of a packed set: row 2i holds the chosen answer of pair i, row 2i
+ 1 the rejected one.

Each row is one conversation, prompt included, with a loss mask over its answer; the
sets follow one another. Beside the rows are

    examples.parquet    one row per pair: id, set (its number in packed.json), and the
                        source record as JSON
    made-of.json        inputs that the rows depend on, by name

so held-out shares and weights of sets are decided without reading tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from gristmill.core.files import json_digest, read_json, write_json
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
)
from gristmill.train.data.example_rows import (
    WrittenRows,
    copies,
    merged_order,
    quotas,
    write_ordered_rows,
)
from gristmill.train.data.pairs import Pair, are_held_out
from gristmill.train.loop.objective import JsonObject, ReadDocument, mean_of_trained

if TYPE_CHECKING:
    from torch import Tensor

EXAMPLES, MADE_OF = "examples.parquet", "made-of.json"
EXAMPLES_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("set", pa.int32()),
        ("record", pa.large_string()),
    ]
)


def write_pair_rows(
    folder: Path,
    sets: Mapping[str, Sequence[Pair]],
    length: int,
    tokenizer: TokenizerEntry,
    chat: Chat,
) -> WrittenRows:
    """Write the pairs of all sets as one packed set.

    Args:
        folder: output folder.
        sets: name -> its pairs, at least one.
        length: tokens per row.
        tokenizer: vocab_size, eos, pad, sha256.
        chat: tokenizer and template of the pairs.
    """
    counts = np.array([len(pairs) for pairs in sets.values()], np.int64)
    all_pairs = [pair for pairs in sets.values() for pair in pairs]
    examples = [pair.example for pair in all_pairs]
    table = {
        "id": [example["id"] for example in examples],
        "set": np.repeat(np.arange(len(counts)), counts),
        "record": [json.dumps(example, ensure_ascii=False) for example in examples],
    }
    write_table(folder / EXAMPLES, pa.table(table).cast(EXAMPLES_SCHEMA))
    texts = [
        [
            example[name]
            for name in ("prompt", "chosen", "rejected", "tools")
            if name in example
        ]
        for example in examples
    ]
    write_json(
        folder / MADE_OF,
        {
            "chat template and tokenizer": chat.digest,
            "sequence_length": length,
            "pairs": json_digest(texts),
        },
    )
    return write_ordered_rows(
        folder,
        list(sets),
        [[encoded] for pair in all_pairs for encoded in pair.conversations],
        # One phase per set keeps the two rows of a pair adjacent.
        np.diag(2 * counts).tolist(),
        length,
        tokenizer,
        chat.pad,
    )


class PairRows:
    """The pairs of a packed set, by number.

    Args:
        packed: the rows, with their files of examples.

    Attributes:
        ids: of the example of each.
        sets: int64 of shape (P,), the number of each one's set.
        first: int64 of shape (P,), the row of each one's chosen answer; the rejected
            one's is the next.
        num_tokens: int64 of shape (P,), tokens of its conversations.
        scored_tokens: int64 of shape (P, 2), tokens of the chosen and of the rejected
            answer.
        made_of: inputs that the rows depend on, by name.
        fingerprint: 32 hexadecimal digits, a hash of the rows.
    """

    def __init__(self, packed: PackedSet) -> None:
        self.packed = packed
        self._masks = LossMasks(packed)
        rows = np.arange(packed.rows, dtype=np.int64)
        self._filled = packed.boundaries(rows).filled()
        self.made_of: dict[str, str | int] = read_json(packed.folder / MADE_OF)
        self.fingerprint = self._masks.fingerprint
        table = read_table(packed.folder / EXAMPLES, ["id", "set"])
        self.ids: list[str] = table["id"].to_pylist()
        self.sets = table["set"].to_numpy().astype(np.int64)
        both = rows.reshape(-1, 2)
        self.first = both[:, 0]
        self.num_tokens = self._filled[both].sum(axis=1)
        self.scored_tokens = self._masks.trained_per_row[both]

    def __len__(self) -> int:
        return len(self.ids)

    def records(self) -> list[Example]:
        """Source records of the pairs."""
        table = read_table(self.packed.folder / EXAMPLES, ["record"])
        return list(map(json.loads, table["record"].to_pylist()))

    def read(self, pairs: np.ndarray) -> tuple[Tensor, Tensor]:
        """Ids and targets of n pairs, (2n, t) each, all chosen answers first; targets
        are `IGNORED` where they are not trained; t is as small as the rows allow.
        """
        import torch  # writing rows needs no torch

        from gristmill.train.objectives.losses import next_tokens

        rows = np.concatenate([self.first[pairs], self.first[pairs] + 1])
        t = padded_length(int(self._filled[rows].max()), self.packed.sequence_length)
        ids = torch.from_numpy(self.packed.read(rows)[:, :t].copy())
        trained = torch.from_numpy(self._masks.read(rows)[:, :t].copy())
        return ids, next_tokens(ids, trained)


def held_out_mask(records: Sequence[Example], section: Dpo, seed: int) -> np.ndarray:
    """Mask of held-out pairs, (n,) bool: by prompt.

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
    rows: PairRows, held_out: np.ndarray, section: Dpo, seed: int
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
        drawn.append(
            np.repeat(of_set, copies(np.ones(len(of_set), np.int64), ids, quota, seed))
        )
    return drawn


class Drawn:
    """Pairs drawn for training, in reading order: the part of an objective that depends
    neither on the model nor on the loss (see objective.Objective).

    Args:
        ids: of the examples of all pairs.
        num_tokens: int64 of shape (P,), tokens of their conversations.
        draws: as from `draw_pairs`; repeated numbers are read repeatedly in an epoch.
        seed: of the order.

    Attributes:
        order: of the draws' sets, each merged with the others by their sizes.
        numbers: int64, number of the pair of each row of the order.
    """

    def __init__(
        self,
        ids: Sequence[str],
        num_tokens: np.ndarray,
        draws: Sequence[np.ndarray],
        seed: int,
    ) -> None:
        self._ids = ids
        self._num_tokens = num_tokens
        self.order = Order([len(drawn) for drawn in draws], seed)
        # The order merges the sets by their numbers of pairs: row r is the next one of
        # the set at place r.
        self.numbers = merged(draws)

    def digest(self, rows: str) -> str:
        """Hash of the fingerprint of the rows and of the draws: 32 hexadecimal
        digits.
        """
        return hashlib.blake2b(
            rows.encode() + self.numbers.astype("<i8").tobytes(), digest_size=16
        ).hexdigest()

    def weight(self, rows: np.ndarray, cuts: int = 1, step: int = 0) -> float:
        """Number of pairs: all count equally, whatever their length."""
        return float(len(rows))

    def num_tokens(self, rows: np.ndarray) -> int:
        """Tokens of the conversations of some rows, without padding."""
        return int(self._num_tokens[self.numbers[rows]].sum())

    def describe(self, rows: np.ndarray) -> dict[str, list[str]]:
        """The ids of the examples of some rows."""
        return {"examples": [self._ids[number] for number in self.numbers[rows]]}

    def blame(self, rows: np.ndarray, row_losses: np.ndarray) -> list[ReadDocument]:
        """Ids, losses and token counts of some rows."""
        return [
            {
                "id": self._ids[number],
                "loss": mean_of_trained(losses),
                "tokens": int(self._num_tokens[number]),
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


def describe_draws(
    rows: PairRows,
    names: Sequence[str],
    draws: Sequence[np.ndarray],
    held_out: np.ndarray,
) -> list[JsonObject]:
    """Use of each set in training: `name`, number of `pairs`, of `held_out` ones, and of
    those `drawn` for an epoch with repetitions, with their share of all drawn ones.
    """
    return [
        {
            "name": name,
            "pairs": int((rows.sets == number).sum()),
            "held_out": int(held_out[rows.sets == number].sum()),
            "drawn": len(drawn),
            "drawn_share": len(drawn) / sum(map(len, draws)),
        }
        for number, (name, drawn) in enumerate(zip(names, draws, strict=True))
    ]
