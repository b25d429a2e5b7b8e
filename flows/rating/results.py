"""Results of ratings: win rates, their intervals, and the agreement of raters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from gristmill.dataprep.llm.agreement import agreement, count_pairs
from gristmill.flows.pages.page_elements import Table
from gristmill.flows.pages.terminal_tables import print_table
from gristmill.flows.rating.ratings import VERDICTS, Rating, Verdict
from gristmill.flows.running.terminal import plain_console
from gristmill.train.evaluation.intervals import (
    Estimate,
    mean_with_interval,
    share_with_interval,
)

SCORES = {"first": 0.0, "second": 1.0, "tie": 0.5, "both_bad": 0.5}
"""Score of the second model for each verdict."""
BOOTSTRAP_SAMPLES = 1000
SEED = 0


@dataclass(frozen=True)
class Kappa:
    """Cohen's kappa of two raters, and the share of equal verdicts, on the pairs that
    both rated.
    """

    raters: tuple[str, str]
    pairs: int
    same: float | None
    kappa: float | None


@dataclass(frozen=True)
class RatingResult:
    """Ratings of two models.

    Attributes:
        first, second: the models' labels.
        pairs, ratings: number of them.
        raters: name -> number of ratings.
        verdicts: verdict -> number of ratings.
        win_rate: mean over pairs of the second model's mean score by their raters (1
            for a win, 1/2 for a tie and for two bad answers), with its bootstrap
            interval over pairs.
        decided: share of pairs with a majority whose majority is for the second model,
            with Wilson's interval.
        left_preferred: share of wins of the answer on the left: far from one half,
            raters prefer a side.
        alpha: Krippendorff's.
        kappas: of each two raters.
    """

    first: str
    second: str
    pairs: int
    ratings: int
    raters: dict[str, int]
    verdicts: dict[Verdict, int]
    win_rate: Estimate
    decided: Estimate | None
    left_preferred: Estimate | None
    alpha: float | None
    kappas: list[Kappa]


def results_of(ratings: Iterable[Rating]) -> list[RatingResult]:
    """Counts, win rate and agreement for each two models."""
    groups: dict[tuple[str, str], list[Rating]] = {}
    for rating in ratings:
        groups.setdefault((rating["first"], rating["second"]), []).append(rating)
    results = []
    for (first, second), group in groups.items():
        verdicts: dict[str, dict[str, Verdict]] = {}
        for rating in group:
            by_rater = verdicts.setdefault(rating["pair"], {})
            by_rater[rating["rater"]] = rating["verdict"]
        units = [list(by_rater.values()) for by_rater in verdicts.values()]
        means = np.array([np.mean([SCORES[name] for name in unit]) for unit in units])
        raters = Counter(rating["rater"] for rating in group)
        counts = Counter(rating["verdict"] for rating in group)
        wins = [
            rating["verdict"] == rating["left"]
            for rating in group
            if rating["verdict"] in ("first", "second")
        ]
        kappas = []
        for pair in combinations(raters, 2):
            shared = [
                [VERDICTS.index(by_rater[rater]) for rater in pair]
                for by_rater in verdicts.values()
                if by_rater.keys() >= {*pair}
            ]
            codes = np.array(shared, np.float64).reshape(-1, 2)
            both = agreement(count_pairs(*codes.T))
            kappas.append(Kappa(pair, len(shared), both["same"], both["kappa"]))
        results.append(
            RatingResult(
                first,
                second,
                len(verdicts),
                len(group),
                dict(raters),
                {verdict: counts[verdict] for verdict in VERDICTS},
                mean_with_interval(means, SEED, BOOTSTRAP_SAMPLES),
                share_with_interval(means[means != 0.5] > 0.5),
                share_with_interval(np.array(wins)),
                krippendorff_alpha(units),
                kappas,
            )
        )
    return results


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


def print_results(results: Iterable[RatingResult]) -> None:
    """Print the results for people."""
    for result in results:
        first, second, counts = result.first, result.second, result.verdicts
        raters = [f"{name} {number:,}" for name, number in result.raters.items()]
        order: list[Verdict] = ["second", "first", "tie", "both_bad"]
        verdicts = ", ".join(f"{counts[verdict]:,}" for verdict in order)
        wins = f"{_share(result.win_rate)}, ties as halves"
        rows = [
            [f"{second} wins against {first}", wins],
            ["where raters are of one mind or a majority", _share(result.decided)],
            ["pairs, ratings", f"{result.pairs:,}, {result.ratings:,}"],
            [f"{second}, {first}, tie, both bad", verdicts],
            ["raters", ", ".join(raters)],
            ["the answer on the left wins", _share(result.left_preferred)],
            ["Krippendorff's alpha", _number(result.alpha)],
        ]
        for kappa in result.kappas:
            value = f"{_number(kappa.kappa)} on {kappa.pairs:,} pairs"
            rows.append([f"Cohen's kappa, {' and '.join(kappa.raters)}", value])
        print_table(plain_console(), Table(["", ""], rows))


def _share(value: Estimate | None) -> str:
    if value is None:
        return "-"
    return f"{value['value']:.1%} [{value['low']:.1%}, {value['high']:.1%}]"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
