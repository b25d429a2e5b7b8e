"""Which pairs are held out, and how often each of the others is trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gristmill.mixtures.posttraining import Dpo
from gristmill.tokenize.order import Order, sources_of_rows
from gristmill.train.loop.objective import mean_of_trained
from gristmill.train.objectives.answer_rows import AnswerRows
from gristmill.train.objectives.conversations import NothingToTrainError
from gristmill.train.objectives.pair_rows import PairRows
from gristmill.train.objectives.pairs import is_held_out
from gristmill.train.objectives.set_weights import copies, quotas


def held_out_mask(records: Sequence[Mapping[str, Any]], section: Dpo, seed: int) -> np.ndarray:
    """Which of n pairs are held out, (n,) bool.

    Raises:
        NothingToTrainError: all of them are.
    """
    held_out = np.array([is_held_out(record, section.holdout, seed) for record in records], dtype=bool)
    if held_out.all():
        raise NothingToTrainError(f"dpo: all {len(records)} pairs are held out; lower dpo.holdout ({section.holdout}) "
                                  "or add pairs with other prompts")
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
            raise NothingToTrainError(f"dpo data {one.path}: all of its pairs are held out, but its weight is "
                                      f"{one.weight}; lower dpo.holdout ({section.holdout}) or remove the set")
    wanted = quotas([len(of_set) for of_set in sets], [one.weight or 0.0 for one in section.data])
    return [np.repeat(of_set, copies(np.ones(len(of_set), dtype=np.int64), [rows.ids[pair] for pair in of_set], quota,
                                     seed))
            for of_set, quota in zip(sets, wanted, strict=True)]


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
            rows.fingerprint.encode() + self.numbers.astype("<i8").tobytes(), digest_size=16).hexdigest()

    def num_tokens(self, rows: np.ndarray) -> int:
        """All tokens of the conversations of some rows but padding."""
        return int(self._rows.num_tokens[self.numbers[rows]].sum())

    def describe(self, rows: np.ndarray) -> dict[str, Any]:
        """The ids of the examples of some rows."""
        return {"examples": [self._rows.ids[number] for number in self.numbers[rows]]}

    def blame(self, rows: np.ndarray, row_losses: np.ndarray) -> list[dict[str, Any]]:
        """Every one of some rows with its loss."""
        return [{"id": self._rows.ids[number], "loss": mean_of_trained(losses),
                 "tokens": int(self._rows.num_tokens[number])}
                for number, losses in zip(self.numbers[rows], row_losses, strict=True)]


def merged(draws: Sequence[np.ndarray]) -> np.ndarray:
    """The draws of all sets in one, each set's in its places of the merged order (see tokenize/order.py)."""
    counts = [len(drawn) for drawn in draws]
    set_of = sources_of_rows([counts], np.arange(sum(counts), dtype=np.int64))
    pairs = np.empty(len(set_of), dtype=np.int64)
    for number, drawn in enumerate(draws):
        pairs[set_of == number] = drawn
    return pairs


def describe_draws(
    rows: PairRows | AnswerRows, names: Sequence[str], draws: Sequence[np.ndarray], held_out: np.ndarray
) -> list[dict[str, Any]]:
    """Per set: `name`, `pairs`, `held_out`, `drawn` and `drawn_share` of all that is drawn."""
    total = sum(map(len, draws))
    return [{"name": name, "pairs": int((rows.sets == number).sum()),
             "held_out": int(held_out[rows.sets == number].sum()),
             "drawn": len(drawn), "drawn_share": len(drawn) / total}
            for number, (name, drawn) in enumerate(zip(names, draws, strict=True))]
