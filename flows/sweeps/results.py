"""What a sweep found: bits per byte of every mixture and source, a fit, and a suggestion, or why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gristmill.flows.sweeps.fit import MEAN, MODELS, Fit, fit, least_within_hull, root_mean_square
from gristmill.flows.sweeps.grid import SweepError, matrix, normalised
from gristmill.flows.sweeps.proxies import Sweep

LEAST_MIXTURES = 3
"""Below this a leave-one-out error says nothing."""


def analyse(sweep: Sweep, outcomes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Bring the outcomes of all mixtures together.

    Args:
        sweep: what was tried.
        outcomes: of `proxies.run_mixture`, one per mixture.

    Returns:
        `mixtures` (weights, `bits_per_byte` with `mean` and `spread` per source, `target`: the weighted mean and its
        spread), `failed`, `fits` per source (model, leave-one-out errors), `fit` of the target, `suggestion` or None,
        and `refusal`, the sentence that says why there is none.

    Raises:
        SweepError: the mixtures were measured on different held-out rows.
    """
    good = [outcome for outcome in outcomes if "error" not in outcome]
    if len({tuple(sorted(outcome["validation"].items())) for outcome in good}) > 1:
        raise SweepError("the mixtures were measured on different held-out rows, so their losses cannot be compared; "
                         "this should not be: held-out rows depend on no weight (report it)")
    shares = sweep.target
    counted = [name for name, share in shares.items() if share]
    mixtures = [_summarise(outcome, shares) for outcome in good]
    found: dict[str, Any] = {
        "seeds": list(sweep.seeds), "overrides": list(sweep.overrides), "target": shares, "mixtures": mixtures,
        "failed": [{"mixture": one["mixture"], "weights": one["weights"], "error": one["error"]}
                   for one in outcomes if "error" in one],
        "fits": {}, "suggestion": None, "refusal": None,
    }
    if len(mixtures) < LEAST_MIXTURES:
        return {**found, "refusal": f"{len(mixtures)} mixtures are too few to fit anything; try at least "
                                    f"{LEAST_MIXTURES}, better four per source"}
    tried = matrix([one["weights"] for one in mixtures])
    used = tried[:, tried.any(axis=0)]
    fits = {name: fit(used, np.array([one["bits_per_byte"][name]["mean"] for one in mixtures])) for name in counted}
    found["fits"] = {name: {"model": one.model, "errors": dict(one.errors)} for name, one in fits.items()}
    return {**found, **_suggest(mixtures, list(sweep.own), tried, fits, shares)}


def _summarise(outcome: Mapping[str, Any], target: Mapping[str, float]) -> dict[str, Any]:
    per_seed = [proxy["bits_per_byte"] for proxy in outcome["proxies"]]
    weighted = [sum(share * values[name] for name, share in target.items() if share) for values in per_seed]
    return {"mixture": outcome["mixture"], "weights": outcome["weights"], "proxies": outcome["proxies"],
            "bits_per_byte": {name: _spread([values[name] for values in per_seed]) for name in per_seed[0]},
            "target": _spread(weighted)}


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean, and sample standard deviation where there are several."""
    return {"mean": float(np.mean(values)), "spread": float(np.std(values, ddof=1)) if len(values) > 1 else None}


def _suggest(
    mixtures: Sequence[Mapping[str, Any]], sources: Sequence[str], tried: np.ndarray, fits: Mapping[str, Fit],
    target: Mapping[str, float],
) -> dict[str, Any]:
    """The least of the fit within what was tried, unless the fit is no better than the mean."""
    values = np.array([one["target"]["mean"] for one in mixtures])
    predicted = sum(target[name] * one.left_out for name, one in fits.items())
    mean = np.array([np.delete(values, number).mean() for number in range(len(values))])
    error, mean_error = root_mean_square(predicted - values), root_mean_square(mean - values)
    used = np.asarray(tried.any(axis=0))

    def objective(shares: np.ndarray) -> np.ndarray:
        total = np.zeros(len(shares))
        for name, one in fits.items():
            total += target[name] * one.predict(shares[:, used])
        return total

    fitted: dict[str, Any] = {"error": error, "mean_error": mean_error, "predicted": objective(tried).tolist(),
                              "left_out": np.asarray(predicted).tolist()}
    if error >= mean_error or all(one.model == MEAN for one in fits.values()):
        return {"fit": fitted, "refusal": (
            f"no mixture is suggested: left out one by one, the mixtures are predicted with an error of {error:.4f} "
            f"bits per byte, and by the mean of the others with {mean_error:.4f}. {_remedy(len(values), used)}")}
    weights, least = least_within_hull(objective, tried)
    best = int(np.argmin(values))
    return {"fit": fitted, "suggestion": {
        "weights": normalised(dict(zip(sources, weights.tolist(), strict=True))), "predicted": least,
        "best_tried": {"mixture": mixtures[best]["mixture"], "target": mixtures[best]["target"]["mean"]}}}


def _remedy(mixtures: int, used: np.ndarray) -> str:
    needed = int(used.sum()) + 1 + max(more for _, more in MODELS.values())
    if mixtures < needed:
        return f"Try at least {needed} mixtures of these {int(used.sum())} sources"
    return "Try more mixtures, more steps, or more seeds (--seeds), so that the mixtures differ by more than runs do"
