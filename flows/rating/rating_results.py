"""What ratings come to: who wins how often, how sure that is, and how far raters agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from rich.table import Table

from gristmill.dataprep.llm.agreement import agreement, count_pairs
from gristmill.flows.rating.ratings import VERDICTS, Rating
from gristmill.flows.running.terminal import plain_console
from gristmill.train.evaluation.intervals import mean_with_interval, wilson

SCORES = {"first": 0.0, "second": 1.0, "tie": 0.5, "both_bad": 0.5}
"""What a rating gives to the second model."""
BOOTSTRAP_SAMPLES = 1000
SEED = 0


def results_of(ratings: Sequence[Rating]) -> list[dict[str, Any]]:
    """Per two models their counts, win rate and agreement.

    `win_rate` is the mean over pairs of what their raters give to the second model (1 for a win, 1/2 for a tie and for
    two bad answers), with its bootstrap interval over pairs; `decided` the share of the pairs with a majority in which
    it is for the second, with Wilson's.
    """
    groups: dict[tuple[str, str], list[Rating]] = {}
    for one in ratings:
        groups.setdefault((one["first"], one["second"]), []).append(one)
    return [{"first": first, "second": second, **_of_group(group)} for (first, second), group in groups.items()]


def _of_group(ratings: Sequence[Rating]) -> dict[str, Any]:
    by_pair: dict[str, dict[str, str]] = {}
    for one in ratings:
        by_pair.setdefault(one["pair"], {})[one["rater"]] = one["verdict"]
    means = np.array([np.mean([SCORES[verdict] for verdict in of_pair.values()]) for of_pair in by_pair.values()])
    majority = means[means != 0.5] > 0.5
    raters = Counter(one["rater"] for one in ratings)
    return {
        "pairs": len(by_pair),
        "ratings": len(ratings),
        "raters": dict(raters),
        "verdicts": {verdict: sum(one["verdict"] == verdict for one in ratings) for verdict in VERDICTS},
        "win_rate": mean_with_interval(means, SEED, BOOTSTRAP_SAMPLES),
        "decided": wilson(float(majority.mean()), len(majority)) if len(majority) else None,
        "left_preferred": _left_preferred(ratings),
        "alpha": krippendorff_alpha([list(of_pair.values()) for of_pair in by_pair.values()]),
        "kappas": [_kappa(one, other, by_pair) for one, other in combinations(raters, 2)],
    }


def _left_preferred(ratings: Sequence[Rating]) -> dict[str, float] | None:
    """How often the answer on the left wins: far from one half it is the side that was rated."""
    decided = [one["verdict"] == one["left"] for one in ratings if one["verdict"] in ("first", "second")]
    return wilson(float(np.mean(decided)), len(decided)) if decided else None


def _kappa(one: str, other: str, by_pair: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Cohen's kappa of two raters on the pairs that both have rated."""
    both = [(of_pair[one], of_pair[other]) for of_pair in by_pair.values() if one in of_pair and other in of_pair]
    codes = np.array([[VERDICTS.index(verdict) for verdict in pair] for pair in both], np.float64).reshape(-1, 2)  # type: ignore[arg-type]
    found = agreement(count_pairs(codes[:, 0], codes[:, 1]))
    return {"raters": [one, other], "pairs": len(both), "same": found["same"], "kappa": found["kappa"]}


def krippendorff_alpha(units: Sequence[Sequence[str]]) -> float | None:
    """Krippendorff's alpha of nominal values (Krippendorff 2011, "Computing Krippendorff's Alpha-Reliability").

    Args:
        units: the values that the raters gave to each; units with a single value say nothing.

    Returns:
        1 for raters who agree, about 0 for those who draw lots; None where there is nothing to compare, or all values
        are the same.
    """
    compared = [Counter(values) for values in units if len(values) > 1]
    totals: Counter[str] = sum(compared, Counter())
    n = sum(totals.values())
    expected = n * n - sum(number * number for number in totals.values())
    if not expected:
        return None
    # Of a unit with m values, each ordered pair of two unlike ones counts 1 / (m - 1).
    observed = sum(
        (sum(one.values()) ** 2 - sum(number * number for number in one.values())) / (sum(one.values()) - 1)
        for one in compared
    )
    return 1.0 - (n - 1) * observed / expected


def print_results(results: Sequence[Mapping[str, Any]]) -> None:
    """Print the results for people."""
    console = plain_console()
    for found in results:
        first, second, verdicts = found["first"], found["second"], found["verdicts"]
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        table.add_column(overflow="fold")
        table.add_column(overflow="fold")
        for name, value in (
            (f"{second} wins against {first}", _share(found["win_rate"]) + ", ties as halves"),
            ("where raters are of one mind or a majority", _share(found["decided"])),
            ("pairs, ratings", f"{found['pairs']:,}, {found['ratings']:,}"),
            (
                f"{second}, {first}, tie, both bad",
                ", ".join(f"{verdicts[one]:,}" for one in ("second", "first", "tie", "both_bad")),
            ),
            ("raters", ", ".join(f"{name} {number:,}" for name, number in found["raters"].items())),
            ("the answer on the left wins", _share(found["left_preferred"])),
            ("Krippendorff's alpha", _number(found["alpha"])),
            *(
                (f"Cohen's kappa, {' and '.join(one['raters'])}", f"{_number(one['kappa'])} on {one['pairs']:,} pairs")
                for one in found["kappas"]
            ),
        ):
            table.add_row(name, value)
        console.print(table)


def _share(found: Mapping[str, float] | None) -> str:
    return "-" if found is None else f"{found['value']:.1%} [{found['low']:.1%}, {found['high']:.1%}]"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
