"""Preference pairs as rows of a packed set: row 2i holds the chosen answer of pair i, row 2i + 1 the rejected one.

An answer that is labelled as desirable or not, and is of no pair, is one row, behind the pairs of its set. Each row is
one conversation, prompt included, with a loss mask over its answer; the sets lie one after another. Beside
the rows lie

    examples.parquet    one row per example: id, set (its number in packed.json), row (its first one), rows (how many
                        it has: 2, a pair, or 1, an answer), label (of an answer: whether it is desirable), and the
                        record that it was made from, as JSON
    made-of.json        what the rows depend on, by name

so that what needs no tokens (who is held out, how often a set is read) is decided without them.
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
from gristmill.tokenize.loss_masks import LossMasks
from gristmill.tokenize.packed import PackedSet
from gristmill.train.objectives.chat import Chat
from gristmill.train.objectives.conversations import PAD_MULTIPLE, Conversation
from gristmill.train.objectives.example_rows import Piece, piece_of, write_ordered_rows
from gristmill.train.objectives.pairs import Answer, Pair

if TYPE_CHECKING:
    from torch import Tensor

EXAMPLES, MADE_OF = "examples.parquet", "made-of.json"
ROWS_OF_PAIR = 2
EXAMPLES_SCHEMA = pa.schema([
    ("id", pa.string()), ("set", pa.int32()), ("row", pa.int64()), ("rows", pa.int32()), ("label", pa.bool_()),
    ("record", pa.large_string()),
])


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
    write_table(folder / EXAMPLES, pa.table({
        "id": [one.example["id"] for one in examples],
        "set": np.repeat(np.arange(len(counts)), [len(of_set) for of_set in sets.values()]),
        "row": np.cumsum(sizes) - sizes, "rows": sizes,
        "label": [one.example.get("label") for one in examples],
        "record": [json.dumps(one.example, ensure_ascii=False) for one in examples],
    }).cast(EXAMPLES_SCHEMA))
    texts = [[one.example[name] for name in ("prompt", "chosen", "rejected", "completion", "label", "tools")
              if name in one.example] for one in examples]
    write_json(folder / MADE_OF, {"chat template and tokenizer": chat.digest, "sequence_length": length,
                                  "pairs": hashlib.sha256(canonical_json(texts)).hexdigest()})
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
        raise LabelledError(f"dpo.data: {single} of {len(counts)} examples are single answers with a label, but "
                            "dpo.loss is one of pairs; set it to kto, or leave those sets out")


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
        import torch  # here: to write the rows needs none

        from gristmill.train.objectives.losses import next_tokens

        rows = np.concatenate([self.first[pairs], self.first[pairs] + 1])
        longest = int(self.packed.boundaries(rows).filled().max())
        t = min(self.packed.sequence_length, -(-longest // PAD_MULTIPLE) * PAD_MULTIPLE)
        ids = torch.from_numpy(self.packed.read(rows)[:, :t].copy())
        return ids, next_tokens(ids, torch.from_numpy(self._masks.read(rows)[:, :t].copy()))
