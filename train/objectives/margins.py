"""What a training on preferences made of each pair, or answer, in the end: margins, and those that are worst.

A margin is by how much the reward of the chosen answer, or its score by a reward model, is the larger one; of a single
answer (`kto`) it is the reward itself, or its negative where the answer is undesirable. What still has a negative
margin was not learned: it was labelled the wrong way round, contradicts other pairs, or is hard.

Preference losses see the difference alone, so that both may fall together (Pal et al. 2024, "Smaug"; Pang et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from gristmill.dataprep.documents import write_table
from gristmill.mixtures.posttraining import Dpo
from gristmill.train.data.preference_rows import AnswerRows, PairRows
from gristmill.train.evaluation.intervals import share_with_interval
from gristmill.train.objectives.preference_losses import LossSettings, PairLogps, preference_loss

MARGINS = "margins.parquet"
SHOWN = 10
"""Pairs or answers with the worst margins that a summary shows."""
EXCERPT = 300
"""Characters of a text in a summary."""
LINES_IN_A_ROW = 3
"""So many logged lines must agree before an alarm: a single batch may fall by chance."""
MOST_PAIRS = 0.5


def measured_again(ids: Sequence[str], held_out: np.ndarray, most: int) -> np.ndarray:
    """Numbers (int64, ascending) of those that are measured after training: all held-out ones, and some others.

    Args:
        ids: of P pairs or answers.
        held_out: (P,) bool.
        most: others, the first by their ids.
    """
    trained = sorted(np.flatnonzero(~held_out).tolist(), key=lambda number: (ids[number], number))
    return np.sort(np.concatenate([np.flatnonzero(held_out), np.array(trained[:most], dtype=np.int64)]))


def pair_rewards(logps: np.ndarray, reference: np.ndarray, tokens: np.ndarray, section: Dpo) -> np.ndarray:
    """Rewards of both answers of n pairs, (n, 2) float32, chosen first, as the loss of the section defines them.

    Args:
        logps, reference: (n, 2) float32, summed log-probabilities under the policy and under the reference.
        tokens: (n, 2) int64, of the answers.
        section: which loss, and its settings.
    """
    columns = [
        torch.from_numpy(np.ascontiguousarray(part[:, place], dtype=np.float32))
        for part in (logps, reference, tokens)
        for place in (0, 1)
    ]
    _, chosen, rejected = preference_loss(section.loss, PairLogps(*columns), LossSettings.of(section))
    rewards: np.ndarray = torch.stack([chosen, rejected], dim=1).numpy()
    return rewards


def pair_margins(
    rows: PairRows, names: Sequence[str], pairs: np.ndarray, rewards: np.ndarray, held_out: np.ndarray
) -> pa.Table:
    """A line per pair: `id`, `set`, `held_out`, the rewards `chosen` and `rejected`, and `margin`.

    Args:
        rows: all pairs.
        names: of their sets.
        pairs: int64 of shape (n,), those that were measured.
        rewards: (n, 2) float32.
        held_out: (P,) bool.
    """
    return score_margins(
        [rows.ids[pair] for pair in pairs], [names[place] for place in rows.sets[pairs]], held_out[pairs], rewards
    )


def score_margins(ids: Sequence[str], sets: Sequence[str], held_out: np.ndarray, scores: np.ndarray) -> pa.Table:
    """As `pair_margins`, of n pairs that were given scores.

    Args:
        ids, sets: of each pair, and the name of its set.
        held_out: (n,) bool.
        scores: (n, 2) float32, chosen first.
    """
    return _table(ids, sets, held_out, scores[:, 0], scores[:, 1], scores[:, 0] - scores[:, 1])


def answer_margins(
    rows: AnswerRows, names: Sequence[str], answers: np.ndarray, rewards: np.ndarray, held_out: np.ndarray
) -> pa.Table:
    """As `pair_margins`, a line per answer, whose reward is `chosen` where it is desirable, and else `rejected`."""
    desirable = rows.desirable[answers]
    return _table(
        [rows.ids[answer] for answer in answers],
        [names[place] for place in rows.sets[answers]],
        held_out[answers],
        pa.array(rewards, mask=~desirable),
        pa.array(rewards, mask=desirable),
        np.where(desirable, rewards, -rewards),
    )


def _table(
    ids: Sequence[str], sets: Sequence[str], held_out: np.ndarray, chosen: Any, rejected: Any, margin: np.ndarray
) -> pa.Table:
    return pa.table(
        {"id": ids, "set": sets, "held_out": held_out, "chosen": chosen, "rejected": rejected, "margin": margin}
    )


def write_margins(path: Path, table: pa.Table, records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Write the table, and say what a summary says of it.

    Args:
        path: where to.
        table: as from `pair_margins` or `answer_margins`.
        records: the examples by their ids, at least those of the table.

    Returns:
        `measured`; `right`: of the trained and of the held-out ones the share whose margin is positive, with its
        interval, where there are any; `sets`: of each, the trained and the held-out ones, how many they are, the share
        `wrong` whose margin is not positive, and the `median`; `worst`: the lines with the smallest margins, with
        excerpts of their texts.
    """
    write_table(path, table)
    # The smallest first; ids decide between equal ones.
    order = np.lexsort((np.array(table["id"].to_pylist()), table["margin"].to_numpy()))[:SHOWN]
    worst = [{**line, **_excerpts(records[line["id"]])} for line in table.take(order).to_pylist()]
    sets: dict[str, dict[str, Any]] = {}
    for name, out, margin in zip(*(table[key].to_pylist() for key in ("set", "held_out", "margin")), strict=True):
        sets.setdefault(name, {}).setdefault("held_out" if out else "trained", []).append(margin)
    is_out, right = table["held_out"].to_numpy(), table["margin"].to_numpy() > 0
    return {
        "measured": len(table),
        "worst": worst,
        "right": {
            name: found
            for name, part in (("trained", ~is_out), ("held_out", is_out))
            if (found := share_with_interval(right[part])) is not None
        },
        "sets": [
            {"name": name, **{part: _described(margins) for part, margins in sorted(parts.items())}}
            for name, parts in sets.items()
        ],
    }


def _described(margins: Sequence[float]) -> dict[str, Any]:
    found = np.array(margins)
    return {"measured": len(found), "wrong": float((found <= 0).mean()), "median": float(np.median(found))}


def _excerpts(record: Mapping[str, Any]) -> dict[str, str]:
    """The last turn of the prompt, and the answers by what the record calls them."""
    texts = {
        f"{name}_text": record[name][-1]["content"]
        for name in ("prompt", "chosen", "rejected", "completion")
        if name in record
    }
    return {name: text if len(text) <= EXCERPT else f"{text[:EXCERPT]}..." for name, text in texts.items()}


def falls(line: Mapping[str, Any]) -> bool:
    """Whether in a line of metrics the margin is positive although most chosen answers became less likely."""
    return bool(line["rewards/margins"] > 0 and line["log_ratio/chosen"] < 0 and line["fell/chosen"] > MOST_PAIRS)


def decline_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a stage's summary says of it, from its lines of metrics.

    Returns:
        `alarm_step`, the first step at which so many lines in a row had fallen, or None; and of the last line the
        shares of pairs whose chosen and whose rejected answer fell.
    """
    streak, alarm = 0, None
    measured = [line for line in lines if "fell/chosen" in line and "fell/rejected" in line]
    for line in measured:
        streak = streak + 1 if falls(line) else 0
        if streak == LINES_IN_A_ROW and alarm is None:
            alarm = line["step"]
    last = measured[-1] if measured else {}
    return {"alarm_step": alarm, "fell_chosen": last.get("fell/chosen"), "fell_rejected": last.get("fell/rejected")}


class DeclineAlarm:
    """Warns once when chosen answers keep falling.

    Args:
        warn: called with what is happening and what helps.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn, self._streak = warn, 0

    def look(self, line: Mapping[str, Any]) -> None:
        """Take in a logged line."""
        self._streak = self._streak + 1 if falls(line) else 0
        if self._streak == LINES_IN_A_ROW:
            self._warn(
                f"dpo: chosen answers fall: {line['fell/chosen']:.0%} of them are less likely than under the "
                f"reference, by {-line['log_ratio/chosen']:.3f} nats per token on average, in "
                f"{LINES_IN_A_ROW} logged steps in a row; the margin grows because rejected ones fall faster. "
                "dpo.sft_weight (1, as Pang et al. 2024) holds them up; so do a higher dpo.beta and a lower "
                "dpo.optimizer.learning_rate"
            )
