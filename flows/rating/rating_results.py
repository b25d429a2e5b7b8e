"""Results of ratings: win rates, their intervals, and the agreement of raters."""

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
from gristmill.train.evaluation.intervals import Estimate, mean_with_interval, wilson

SCORES = {"first": 0.0, "second": 1.0, "tie": 0.5, "both_bad": 0.5}
"""Score of the second model for each verdict."""
BOOTSTRAP_SAMPLES = 1000
SEED = 0


def results_of(ratings: Sequence[Rating]) -> list[dict[str, Any]]:
    """Counts, win rate and agreement for each two models.

    `win_rate` is the mean over pairs of the second model's mean score by their raters
    (1 for a win, 1/2 for a tie and for two bad answers), with its bootstrap interval
    over pairs; `decided` the share of pairs with a majority whose majority is for the
    second model, with Wilson's.
    """
    groups: dict[tuple[str, str], list[Rating]] = {}
    for rating in ratings:
        groups.setdefault((rating["first"], rating["second"]), []).append(rating)
    return [
        {"first": first, "second": second, **_of_group(group)}
        for (first, second), group in groups.items()
    ]


def _of_group(ratings: Sequence[Rating]) -> dict[str, Any]:
    verdicts: dict[str, dict[str, str]] = {}
    for rating in ratings:
        verdicts.setdefault(rating["pair"], {})[rating["rater"]] = rating["verdict"]
    means = np.array(
        [
            np.mean([SCORES[verdict] for verdict in by_rater.values()])
            for by_rater in verdicts.values()
        ]
    )
    majority = means[means != 0.5] > 0.5
    raters = Counter(rating["rater"] for rating in ratings)
    counts = Counter(rating["verdict"] for rating in ratings)
    return {
        "pairs": len(verdicts),
        "ratings": len(ratings),
        "raters": dict(raters),
        "verdicts": {verdict: counts[verdict] for verdict in VERDICTS},
        "win_rate": mean_with_interval(means, SEED, BOOTSTRAP_SAMPLES),
        "decided": wilson(float(majority.mean()), len(majority))
        if len(majority)
        else None,
        "left_preferred": _left_preferred(ratings),
        "alpha": krippendorff_alpha(
            [list(by_rater.values()) for by_rater in verdicts.values()]
        ),
        "kappas": [
            _kappa(rater, other, verdicts) for rater, other in combinations(raters, 2)
        ],
    }


def _left_preferred(ratings: Sequence[Rating]) -> Estimate | None:
    """Share of wins of the answer on the left: far from one half, raters prefer a
    side.
    """
    wins = [
        rating["verdict"] == rating["left"]
        for rating in ratings
        if rating["verdict"] in ("first", "second")
    ]
    return wilson(float(np.mean(wins)), len(wins)) if wins else None


def _kappa(
    rater: str, other: str, verdicts: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    """Cohen's kappa of two raters on the pairs that both rated."""
    shared = [
        by_rater
        for by_rater in verdicts.values()
        if rater in by_rater and other in by_rater
    ]
    codes: dict[str, float] = {
        verdict: float(code) for code, verdict in enumerate(VERDICTS)
    }
    first, second = (
        np.array([codes[by_rater[name]] for by_rater in shared])
        for name in (rater, other)
    )
    result = agreement(count_pairs(first, second))
    return {
        "raters": [rater, other],
        "pairs": len(shared),
        "same": result["same"],
        "kappa": result["kappa"],
    }


def krippendorff_alpha(units: Sequence[Sequence[str]]) -> float | None:
    """Krippendorff's alpha of nominal values (Krippendorff 2011, "Computing
    Krippendorff's Alpha-Reliability").

    Args:
        units: the values that the raters gave to each; units with a single value are
            not compared.

    Returns:
        1 for raters who agree, about 0 for those who draw lots; None if no unit is
        compared, or all values are the same.
    """
    compared = [Counter(values) for values in units if len(values) > 1]
    totals: Counter[str] = sum(compared, Counter())
    n = sum(totals.values())
    expected = n * n - sum(count * count for count in totals.values())
    if not expected:
        return None
    observed = 0.0
    for counts in compared:
        m = sum(counts.values())
        # Of a unit with m values, each ordered pair of two unlike ones counts 1 / (m -
        # 1).
        observed += (m * m - sum(count * count for count in counts.values())) / (m - 1)
    return 1.0 - (n - 1) * observed / expected


def print_results(results: Sequence[Mapping[str, Any]]) -> None:
    """Print the results for people."""
    console = plain_console()
    for result in results:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        table.add_column(overflow="fold")
        table.add_column(overflow="fold")
        for name, value in _lines(result):
            table.add_row(name, value)
        console.print(table)


def _lines(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    first, second, verdicts = result["first"], result["second"], result["verdicts"]
    verdict_counts = [
        f"{verdicts[verdict]:,}" for verdict in ("second", "first", "tie", "both_bad")
    ]
    raters = [f"{name} {number:,}" for name, number in result["raters"].items()]
    lines = [
        (
            f"{second} wins against {first}",
            f"{_share(result['win_rate'])}, ties as halves",
        ),
        ("where raters are of one mind or a majority", _share(result["decided"])),
        ("pairs, ratings", f"{result['pairs']:,}, {result['ratings']:,}"),
        (f"{second}, {first}, tie, both bad", ", ".join(verdict_counts)),
        ("raters", ", ".join(raters)),
        ("the answer on the left wins", _share(result["left_preferred"])),
        ("Krippendorff's alpha", _number(result["alpha"])),
    ]
    for kappa in result["kappas"]:
        name = f"Cohen's kappa, {' and '.join(kappa['raters'])}"
        lines.append((name, f"{_number(kappa['kappa'])} on {kappa['pairs']:,} pairs"))
    return lines


def _share(value: Mapping[str, float] | None) -> str:
    return (
        "-"
        if value is None
        else f"{value['value']:.1%} [{value['low']:.1%}, {value['high']:.1%}]"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
