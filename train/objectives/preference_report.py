"""Margins of pairs after preference training, and the examples with the worst margins.

A margin is the reward (or reward-model score) of the chosen answer minus that of the
rejected one. A negative margin means the example was not learned: it is mislabelled,
contradicts other pairs, or is hard.

Preference losses depend only on the difference, so the likelihood of both answers may
fall (Pal et al. 2024, "Smaug"; Pang et al. 2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Required, TypedDict

import numpy as np
import pyarrow as pa
import torch

from gristmill.core.object_stores import Warn
from gristmill.dataprep.documents import write_table
from gristmill.mixtures.schema.posttraining import Dpo
from gristmill.train.eval.intervals import Estimate, share_with_interval
from gristmill.train.loop.objective import JsonObject
from gristmill.train.objectives.preference_losses import (
    PairLogps,
    preference_loss,
)

MARGINS = "margins.parquet"
SHOWN = 10
"""Number of pairs with the worst margins in a summary."""
EXCERPT = 300
"""Maximum characters of a text in a summary."""
LINES_IN_A_ROW = 3
"""Consecutive logged lines before an alarm, as a single batch may decline by chance."""
MOST_PAIRS = 0.5


def measured_again(ids: Sequence[str], held_out: np.ndarray, most: int) -> np.ndarray:
    """Indices (int64, ascending) of examples to measure after training: all held-out
    ones, and some trained ones.

    Args:
        ids: of P pairs.
        held_out: (P,) bool.
        most: maximum number of trained examples, the first by id.
    """
    trained = sorted(
        np.flatnonzero(~held_out).tolist(), key=lambda number: (ids[number], number)
    )
    return np.array(
        sorted([*np.flatnonzero(held_out).tolist(), *trained[:most]]), np.int64
    )


def pair_rewards(
    logps: np.ndarray, reference: np.ndarray, tokens: np.ndarray, section: Dpo
) -> np.ndarray:
    """Rewards of both answers of n pairs, (n, 2) float32, chosen first, as defined by
    the section's loss.

    Args:
        logps, reference: (n, 2) float32, summed log-probabilities under the policy and
            under the reference.
        tokens: (n, 2) int64, of the answers.
        section: loss and its settings.
    """
    columns = [
        column
        for part in (logps, reference, tokens)
        for column in torch.from_numpy(part).float().unbind(1)
    ]
    _, chosen, rejected = preference_loss(PairLogps(*columns), section)
    return torch.stack([chosen, rejected], dim=1).numpy()


class MarginFigures(TypedDict):
    """Number of measured margins, the share `wrong` that is not positive, and the
    `median`.
    """

    measured: int
    wrong: float
    median: float


class SetMargins(TypedDict, total=False):
    """Margins of a set's trained and held-out examples, as far as it has any."""

    name: Required[str]
    trained: MarginFigures
    held_out: MarginFigures


class MarginSummary(TypedDict):
    """Summary of all margins.

    Attributes:
        measured: number of examples.
        worst: rows of the table with the smallest margins, and excerpts of their texts.
        right: share of positive margins, with its interval, of `trained` and of
            `held_out` examples.
        sets: margins of each set.
    """

    measured: int
    worst: list[JsonObject]
    right: dict[str, Estimate]
    sets: list[SetMargins]


def write_margins(
    path: Path,
    records: Sequence[Mapping[str, Any]],
    sets: Sequence[str],
    held_out: np.ndarray,
    rewards: np.ndarray,
) -> MarginSummary:
    """Write a table with a row per pair: `id`, `set`, `held_out`, the rewards `chosen`
    and `rejected`, and `margin`; returns its summary.

    Args:
        path: destination.
        records: examples of n pairs.
        sets: set name of each.
        held_out: (n,) bool.
        rewards: (n, 2) float32, or scores; chosen first.
    """
    by_id = {record["id"]: record for record in records}
    table = pa.table(
        {
            "id": [record["id"] for record in records],
            "set": sets,
            "held_out": held_out,
            "chosen": rewards[:, 0],
            "rejected": rewards[:, 1],
            "margin": rewards[:, 0] - rewards[:, 1],
        }
    )
    write_table(path, table)
    # Smallest first, ties by id.
    ascending = [("margin", "ascending"), ("id", "ascending")]
    worst = table.sort_by(ascending).slice(0, SHOWN).to_pylist()
    for line in worst:
        record = by_id[line["id"]]
        # the last turn of the prompt, and the answers
        for name in ("prompt", "chosen", "rejected"):
            text = record[name][-1]["content"]
            line[f"{name}_text"] = (
                text if len(text) <= EXCERPT else f"{text[:EXCERPT]}..."
            )
    margins = table["margin"].to_numpy().astype(np.float64)
    set_names = np.array(sets)
    right = margins > 0
    set_margins = []
    for name in dict.fromkeys(sets):
        in_set = set_names == name
        of_set: SetMargins = {"name": name}
        if (in_set & held_out).any():
            of_set["held_out"] = _figures_of(margins[in_set & held_out])
        if (in_set & ~held_out).any():
            of_set["trained"] = _figures_of(margins[in_set & ~held_out])
        set_margins.append(of_set)
    return {
        "measured": len(table),
        "worst": worst,
        "right": {
            name: share
            for name, part in (("trained", ~held_out), ("held_out", held_out))
            if (share := share_with_interval(right[part])) is not None
        },
        "sets": set_margins,
    }


def _figures_of(margins: np.ndarray) -> MarginFigures:
    return {
        "measured": len(margins),
        "wrong": float((margins <= 0).mean()),
        "median": float(np.median(margins)),
    }


def falls(line: Mapping[str, float]) -> bool:
    """Return True if the margin of a line of metrics is positive though most chosen
    answers became less likely.
    """
    return bool(
        line["rewards/margins"] > 0
        and line["log_ratio/chosen"] < 0
        and line["fell/chosen"] > MOST_PAIRS
    )


class Decline(TypedDict):
    """Decline of answers during a training.

    Attributes:
        alarm_step: first step with LINES_IN_A_ROW declining lines in a row, or None.
        fell_chosen, fell_rejected: shares of pairs whose chosen and whose rejected
            answer became less likely, at the end.
    """

    alarm_step: int | None
    fell_chosen: float | None
    fell_rejected: float | None


def decline_of(lines: Sequence[Mapping[str, Any]]) -> Decline:
    """Summary of the decline of answers, from the lines of metrics."""
    streak = 0
    alarm = None
    measured = [
        line for line in lines if "fell/chosen" in line and "fell/rejected" in line
    ]
    for line in measured:
        streak = streak + 1 if falls(line) else 0
        if streak == LINES_IN_A_ROW and alarm is None:
            alarm = line["step"]
    last = measured[-1] if measured else {}
    return {
        "alarm_step": alarm,
        "fell_chosen": last.get("fell/chosen"),
        "fell_rejected": last.get("fell/rejected"),
    }


class DeclineAlarm:
    """Warn once if chosen answers keep becoming less likely.

    Args:
        warn: receives the observation and remedies.
    """

    def __init__(self, warn: Warn) -> None:
        self._warn = warn
        self._streak = 0

    def look(self, line: Mapping[str, float]) -> None:
        """Process a logged line."""
        self._streak = self._streak + 1 if falls(line) else 0
        if self._streak == LINES_IN_A_ROW:
            self._warn(
                f"dpo: chosen answers fall: {line['fell/chosen']:.0%} of them are less "
                f"likely than under the reference, by {-line['log_ratio/chosen']:.3f} "
                f"nats per token on average, in {LINES_IN_A_ROW} logged steps in a "
                "row; the margin grows because rejected ones fall faster. "
                "dpo.sft_weight (1, as Pang et al. 2024) holds them up; so do a higher "
                "dpo.beta and a lower dpo.optimizer.learning_rate"
            )
