"""What a sweep's measurements say of mixtures that were not tried: two regressions, and how far to trust them.

    linear    bpb_i(r) = sum_j b_ij r_j                      RegMix's linear model (Liu et al. 2024, section 3.2)
    law       bpb_i(r) = c_i + exp(sum_j t_ij r_j)           data mixing law (Ye et al. 2024, equation 6)

r are the shares of the sources and i the source that is measured; shares sum to 1, so a constant beside the sum would
be determined twice (the law's factor k is part of its t). The model whose leave-one-out error is smaller is used, and
none where the mean of the other mixtures predicts as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gristmill.flows.sweeps.grid import SweepError, matrix, normalised
from gristmill.flows.sweeps.proxies import Sweep

Predict = Callable[[np.ndarray], np.ndarray]
"""Shares of shape (n, sources) -> values of shape (n,)."""
MEAN = "mean"
FIRST_FLOORS = (0.5, 0.8, 0.95)
"""Where the law's c is first looked for, as shares of the least value: the search finds local minima only."""


@dataclass(frozen=True)
class Fit:
    """The model of one source's bits per byte.

    Attributes:
        model: linear or law; `mean` where neither predicts better than that.
        errors: model -> root mean square of its leave-one-out errors, of those models that there is enough data for.
        predict: the chosen model, fitted to all mixtures.
        left_out: float64 of shape (n,): what it predicts for each mixture from all others.
    """

    model: str
    errors: Mapping[str, float]
    predict: Predict
    left_out: np.ndarray


def fit_linear(shares: np.ndarray, values: np.ndarray) -> Predict:
    """Least squares of values (n,) over shares (n, sources)."""
    coefficients = np.linalg.lstsq(shares, values, rcond=None)[0]
    return lambda where: where @ coefficients


def fit_law(shares: np.ndarray, values: np.ndarray) -> Predict:
    """The data mixing law, by nonlinear least squares from several beginnings."""
    from scipy.optimize import least_squares

    def residuals(parameters: np.ndarray) -> np.ndarray:
        return parameters[0] + np.exp(np.clip(shares @ parameters[1:], -50.0, 50.0)) - values

    def jacobian(parameters: np.ndarray) -> np.ndarray:
        growth = np.exp(np.clip(shares @ parameters[1:], -50.0, 50.0))
        return np.column_stack([np.ones(len(shares)), growth[:, None] * shares])

    best = None
    for floor in FIRST_FLOORS:
        start = floor * values.min()
        exponents = np.linalg.lstsq(shares, np.log(values - start), rcond=None)[0]
        found = least_squares(residuals, np.concatenate([[start], exponents]), jacobian, method="trf")
        if best is None or found.cost < best.cost:
            best = found
    assert best is not None
    c, t = best.x[0], best.x[1:]
    return lambda where: c + np.exp(np.clip(where @ t, -50.0, 50.0))


MODELS: dict[str, tuple[Callable[[np.ndarray, np.ndarray], Predict], int]] = {
    "linear": (fit_linear, 0),
    "law": (fit_law, 1),
}
"""Name -> (how to fit it, parameters beyond one per source)."""


def fit(shares: np.ndarray, values: np.ndarray) -> Fit:
    """Fit all models that there is enough data for, and choose by leave-one-out error.

    Args:
        shares: (n, sources), rows summing to 1.
        values: (n,), positive.
    """
    mean = np.array([np.delete(values, left_out).mean() for left_out in range(len(values))])
    candidates: dict[str, tuple[np.ndarray, Predict]] = {MEAN: (mean, lambda where: np.full(len(where), values.mean()))}
    for name, (model, more) in MODELS.items():
        # Without the mixture that is left out there must be as many as there are parameters.
        if len(values) - 1 >= shares.shape[1] + more:
            candidates[name] = (leave_one_out(model, shares, values), model(shares, values))
    errors = {name: root_mean_square(predicted - values) for name, (predicted, _) in candidates.items()}
    chosen = min(errors, key=lambda name: (errors[name], name != MEAN))
    return Fit(chosen, errors, candidates[chosen][1], candidates[chosen][0])


def leave_one_out(
    model: Callable[[np.ndarray, np.ndarray], Predict], shares: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """What a model predicts for each mixture when it is fitted to all others."""
    return np.array(
        [
            model(np.delete(shares, number, axis=0), np.delete(values, number))(shares[number : number + 1])[0]
            for number in range(len(values))
        ]
    )


def root_mean_square(errors: np.ndarray) -> float:
    """Of errors (n,)."""
    return float(np.sqrt(np.mean(errors**2)))


def least_within_hull(
    objective: Predict, shares: np.ndarray, most: np.ndarray | None = None
) -> tuple[np.ndarray, float] | None:
    """The mixture of least objective among all averages of those that were tried: nothing is extrapolated.

    Args:
        objective: shares of shape (n, sources) -> (n,).
        shares: (n, sources), what was tried.
        most: (sources,), no source may have more; 1 if absent.

    Returns:
        the shares (sources,), and the objective there; None where no average keeps to `most`.
    """
    from scipy.optimize import LinearConstraint, linprog, minimize

    n = len(shares)

    def of_average(parts: np.ndarray) -> float:
        return float(objective((parts @ shares)[None])[0])

    limits = np.ones(shares.shape[1]) if most is None else most
    constraints = [LinearConstraint(np.ones((1, n)), 1.0, 1.0), LinearConstraint(shares.T, -np.inf, limits)]
    allowed = (shares <= limits + ROOM).all(axis=1)
    if allowed.any():
        values = np.where(allowed, objective(shares), np.inf)
        corner = np.eye(n)[int(np.argmin(values))]
    else:
        point = linprog(np.zeros(n), A_ub=shares.T, b_ub=limits, A_eq=np.ones((1, n)), b_eq=[1.0], bounds=(0.0, 1.0))
        if not point.success:
            return None
        corner = point.x
    found = [corner]
    for start in (np.full(n, 1.0 / n), 0.5 * corner + 0.5 / n):
        result = minimize(
            of_average,
            np.asarray(start, dtype=np.float64),
            method="SLSQP",
            bounds=[(0.0, 1.0)] * n,
            constraints=constraints,
        )
        parts = np.clip(result.x, 0.0, 1.0)
        parts /= parts.sum()
        if (parts @ shares <= limits + ROOM).all():
            found.append(parts)
    best = min(found, key=of_average)
    return best @ shares, of_average(best)


ROOM = 1e-6
"""By which a share may miss a limit, of the search's rounding."""
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
        raise SweepError(
            "the mixtures were measured on different held-out rows, so their losses cannot be compared; "
            "this should not be: held-out rows depend on no weight (report it)"
        )
    shares = sweep.target
    counted = [name for name, share in shares.items() if share]
    mixtures = [_summarise(outcome, shares) for outcome in good]
    found: dict[str, Any] = {
        "seeds": list(sweep.seeds),
        "overrides": list(sweep.overrides),
        "target": shares,
        "mixtures": mixtures,
        "failed": [
            {"mixture": one["mixture"], "weights": one["weights"], "error": one["error"]}
            for one in outcomes
            if "error" in one
        ],
        "fits": {},
        "suggestion": None,
        "refusal": None,
    }
    if len(mixtures) < LEAST_MIXTURES:
        return {
            **found,
            "refusal": f"{len(mixtures)} mixtures are too few to fit anything; try at least "
            f"{LEAST_MIXTURES}, better four per source",
        }
    tried = matrix([one["weights"] for one in mixtures])
    used = tried[:, tried.any(axis=0)]
    fits = {name: fit(used, np.array([one["bits_per_byte"][name]["mean"] for one in mixtures])) for name in counted}
    found["fits"] = {name: {"model": one.model, "errors": dict(one.errors)} for name, one in fits.items()}
    found["limits"] = limits = limits_of(sweep, outcomes)
    return {**found, **_suggest(mixtures, tried, fits, shares, limits)}


def limits_of(sweep: Sweep, outcomes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The largest share of the manifest's own set that `max_epochs` allows each source; sources without a limit below
    1, or that no mixture has, have 1."""
    supply: dict[str, float] = {}
    for outcome in outcomes:
        supply |= outcome.get("supply", {})
    return {
        name: min(1.0, supply[name] / sweep.tokens) if sweep.tokens and name in supply else 1.0 for name in sweep.own
    }


def _summarise(outcome: Mapping[str, Any], target: Mapping[str, float]) -> dict[str, Any]:
    per_seed = [{**proxy["bits_per_byte"], **proxy.get("tasks", {})} for proxy in outcome["proxies"]]
    weighted = [sum(share * values[name] for name, share in target.items() if share) for values in per_seed]
    return {
        "mixture": outcome["mixture"],
        "weights": outcome["weights"],
        "proxies": outcome["proxies"],
        "bits_per_byte": {name: _spread([values[name] for values in per_seed]) for name in per_seed[0]},
        "target": _spread(weighted),
    }


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean, and sample standard deviation where there are several."""
    return {"mean": float(np.mean(values)), "spread": float(np.std(values, ddof=1)) if len(values) > 1 else None}


def _suggest(
    mixtures: Sequence[Mapping[str, Any]],
    tried: np.ndarray,
    fits: Mapping[str, Fit],
    target: Mapping[str, float],
    limits: Mapping[str, float],
) -> dict[str, Any]:
    """The least of the fit within what was tried and may be repeated, unless the fit is no better than the mean."""
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

    fitted: dict[str, Any] = {
        "error": error,
        "mean_error": mean_error,
        "predicted": objective(tried).tolist(),
        "left_out": np.asarray(predicted).tolist(),
    }
    if error >= mean_error or all(one.model == MEAN for one in fits.values()):
        return {
            "fit": fitted,
            "refusal": (
                f"no mixture is suggested: left out one by one, the mixtures are predicted with an error of {error:.4f} "
                f"bits per byte, and by the mean of the others with {mean_error:.4f}. {_remedy(len(values), used)}"
            ),
        }
    most = np.array(list(limits.values()))
    found = least_within_hull(objective, tried, most)
    if found is None:
        bounds = ", ".join(f"{name} {share:.3f}" for name, share in limits.items() if share < 1)
        return {
            "fit": fitted,
            "refusal": (
                "no mixture is suggested: none between those that were tried keeps to max_epochs in the manifest's own "
                f"set, where the largest shares are {bounds}; raise a max_epochs, lower mix.tokens, or try mixtures with "
                "less of these sources"
            ),
        }
    weights, least = found
    within = (tried <= most + ROOM).all(axis=1)
    best = int(np.argmin(np.where(within, values, np.inf) if within.any() else values))
    return {
        "fit": fitted,
        "suggestion": {
            "weights": normalised(dict(zip(limits, weights.tolist(), strict=True))),
            "predicted": least,
            "best_tried": {"mixture": mixtures[best]["mixture"], "target": mixtures[best]["target"]["mean"]},
        },
    }


def _remedy(mixtures: int, used: np.ndarray) -> str:
    needed = int(used.sum()) + 1 + max(more for _, more in MODELS.values())
    if mixtures < needed:
        return f"Try at least {needed} mixtures of these {int(used.sum())} sources"
    return "Try more mixtures, more steps, or more seeds (--seeds), so that the mixtures differ by more than runs do"
