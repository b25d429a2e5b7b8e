"""Regressions of a sweep's measurements on mixtures, their leave-one-out errors, and
the suggested mixture.

    law       bpb_i(r) = c_i + exp(sum_j t_ij r_j)    data mixing law (Ye et al. 2024,
                                                      equation 6)
    process   bpb_i(r) ~ GP(m_i, k_i(sqrt r, sqrt r'))  Gaussian process (Rasmussen and
                                                      Williams 2006, section 2.2)

r are the shares of the sources and i is the measured source. Shares sum to 1, so a
constant next to the sum would not be identifiable (the law's factor k is part of its
t). The model with the least leave-one-out error is used, and none if the mean of the
other mixtures predicts as well. Of more than `MOST_FOLDS` mixtures, several are left
out at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from gristmill.flows.sweeps.grid import SweepError, Weights, matrix, normalised
from gristmill.flows.sweeps.proxies import MixtureOutcome, Proxy, Sweep

FIRST_PROCESS = np.log([1.0, 1.0, 0.01])
"""Logarithms of the first variance of values, length, and variance of noise, of
standardized values.
"""
PROCESS_BOUNDS = np.log([[1e-2, 1e3], [1e-2, 1e2], [1e-6, 1.0]])
MOST_FOLDS = 16
Predict = Callable[[np.ndarray], np.ndarray]
"""Shares of shape (n, sources) -> values of shape (n,)."""
MEAN = "mean"
FIRST_FLOORS = (0.5, 0.8, 0.95)
"""Starting points of the law's c, as fractions of the smallest value: the search finds
local minima only.
"""


@dataclass(frozen=True)
class Fit:
    """The model of one source's bits per byte.

    Attributes:
        model: one of `MODELS`, or `mean` if none predicts better than the mean.
        errors: model -> root mean square of its leave-one-out errors, for the models
            that have enough data.
        predict: the chosen model, fitted to all mixtures.
        left_out: float64 of shape (n,): prediction for each mixture from all others.
    """

    model: str
    errors: Mapping[str, float]
    predict: Predict
    left_out: np.ndarray


def fit_law(shares: np.ndarray, values: np.ndarray) -> Predict:
    """Fit the data mixing law by nonlinear least squares from several starting
    points.
    """
    from scipy.optimize import least_squares

    def law(parameters: np.ndarray, where: np.ndarray) -> np.ndarray:
        return parameters[0] + np.exp(np.clip(where @ parameters[1:], -50.0, 50.0))

    def residuals(parameters: np.ndarray) -> np.ndarray:
        return law(parameters, shares) - values

    def derivatives(parameters: np.ndarray) -> np.ndarray:
        growth = law(parameters, shares) - parameters[0]
        return np.column_stack([np.ones(len(shares)), growth[:, None] * shares])

    solutions = []
    for floor in FIRST_FLOORS:
        start = floor * values.min()
        exponents = np.linalg.lstsq(shares, np.log(values - start), rcond=None)[0]
        first = np.concatenate([[start], exponents])
        solutions.append(least_squares(residuals, first, derivatives))
    best = min(solutions, key=lambda solution: solution.cost)
    return partial(law, best.x)


def fit_process(shares: np.ndarray, values: np.ndarray) -> Predict:
    """Fit a Gaussian process of most likelihood, with a Matérn kernel (nu = 5/2) of the
    distance between square roots of shares (Hellinger's), in which sources of small
    shares count.
    """
    from scipy.linalg import cho_factor, cho_solve
    from scipy.optimize import minimize
    from scipy.spatial.distance import cdist

    roots, mean, scale = np.sqrt(shares), values.mean(), values.std() or 1.0
    targets = (values - mean) / scale

    between = cdist(roots, roots)

    def kernel(distances: np.ndarray, parameters: np.ndarray) -> np.ndarray:
        variance, length, _ = np.exp(parameters)
        reach = distances * (math.sqrt(5) / length)
        return variance * (1 + reach + reach**2 / 3) * np.exp(-reach)

    def factor(parameters: np.ndarray) -> tuple[np.ndarray, bool]:
        noise = np.exp(parameters[2]) * np.eye(len(shares))
        return cho_factor(kernel(between, parameters) + noise, lower=True)

    def loss(parameters: np.ndarray) -> float:
        factors = factor(parameters)
        fit = 0.5 * targets @ cho_solve(factors, targets)
        return float(fit + np.log(np.diag(factors[0])).sum())

    best = minimize(loss, FIRST_PROCESS, bounds=PROCESS_BOUNDS).x
    weights = scale * cho_solve(factor(best), targets)

    def predict(where: np.ndarray) -> np.ndarray:
        distances = cdist(np.sqrt(np.maximum(where, 0.0)), roots)
        return mean + kernel(distances, best) @ weights

    return predict


Fitting = Callable[[np.ndarray, np.ndarray], Predict]
"""(shares, values) -> a model fitted to them."""
MODELS: dict[str, tuple[Fitting, int]] = {
    "law": (fit_law, 1),
    "process": (fit_process, 0),
}
"""Model -> (its fit function, number of parameters in addition to one per source)."""


def fit_mean(shares: np.ndarray, values: np.ndarray) -> Predict:
    """Predict the mean of the values everywhere."""
    return lambda where: np.full(len(where), values.mean())


def fit(shares: np.ndarray, values: np.ndarray) -> Fit:
    """Fit all models that have enough data, and choose the one with the least
    leave-one-out error.

    Args:
        shares: (n, sources), rows summing to 1.
        values: (n,), positive.
    """
    models: dict[str, Fitting] = {MEAN: fit_mean}
    for name, (fit_model, extra_parameters) in MODELS.items():
        # The mixtures that remain without the left-out one must be at least as many as
        # the parameters.
        if len(values) - 1 >= shares.shape[1] + extra_parameters:
            models[name] = fit_model
    left_out = {
        name: leave_one_out(fit_model, shares, values)
        for name, fit_model in models.items()
    }
    errors = {
        name: root_mean_square(predicted - values)
        for name, predicted in left_out.items()
    }
    model = min(errors, key=lambda name: (errors[name], name != MEAN))
    return Fit(model, errors, models[model](shares, values), left_out[model])


def leave_one_out(
    fit_model: Fitting, shares: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """Predict each mixture with a model fitted to all others, or to all but every
    `MOST_FOLDS`-th.
    """
    predictions = np.empty(len(values))
    numbers = np.arange(len(values))
    for fold in range(min(len(values), MOST_FOLDS)):
        left_out = numbers % MOST_FOLDS == fold
        predict = fit_model(shares[~left_out], values[~left_out])
        predictions[left_out] = predict(shares[left_out])
    return predictions


def root_mean_square(errors: np.ndarray) -> float:
    """Return the root mean square of errors (n,)."""
    return float(np.sqrt(np.mean(errors**2)))


def least_within_hull(
    objective: Predict, shares: np.ndarray, max_shares: np.ndarray | None
) -> tuple[np.ndarray, float] | None:
    """Minimize the objective over the convex hull of the tried mixtures: nothing is
    extrapolated.

    Args:
        objective: shares of shape (n, sources) -> (n,).
        shares: (n, sources), the tried mixtures.
        max_shares: (sources,), upper bound of each source's share; 1 if absent.

    Returns:
        the shares (sources,) and their objective, or None if no mixture in the hull
        satisfies `max_shares`.
    """
    from scipy.optimize import LinearConstraint, minimize

    n = len(shares)

    def objective_of_average(mix_weights: np.ndarray) -> float:
        return float(objective((mix_weights @ shares)[None])[0])

    limits = np.ones(shares.shape[1]) if max_shares is None else max_shares
    constraints = [
        LinearConstraint(np.ones((1, n)), 1.0, 1.0),
        LinearConstraint(shares.T, -np.inf, limits),
    ]
    feasible = (shares <= limits + ROOM).all(axis=1)
    values = np.where(feasible, objective(shares), np.inf)
    corner = np.eye(n)[int(np.argmin(values))]
    optima = [corner] if feasible.any() else []
    for start in (np.full(n, 1.0 / n), 0.5 * corner + 0.5 / n):
        optimum = minimize(
            objective_of_average,
            np.asarray(start, dtype=np.float64),
            method="SLSQP",
            bounds=[(0.0, 1.0)] * n,
            constraints=constraints,
        )
        mix_weights = np.clip(optimum.x, 0.0, 1.0)
        mix_weights /= mix_weights.sum()
        if (mix_weights @ shares <= limits + ROOM).all():
            optima.append(mix_weights)
    if not optima:
        return None
    best = min(optima, key=objective_of_average)
    return best @ shares, objective_of_average(best)


ROOM = 1e-6
"""Tolerance of a limit, for the rounding of the search."""
LEAST_MIXTURES = 3
"""Minimum number of mixtures for a meaningful leave-one-out error."""


@dataclass(frozen=True)
class Spread:
    """Mean of several values, and their sample standard deviation; None for a single
    value.
    """

    mean: float
    spread: float | None


@dataclass(frozen=True)
class MeasuredMixture:
    """A mixture with the measurements of its proxies.

    Attributes:
        mixture: its number.
        weights: share of each source.
        proxies: its trainings.
        bits_per_byte: source -> bits per byte, or task -> error.
        target: the objective, a weighted mean of these.
    """

    mixture: int
    weights: Weights
    proxies: tuple[Proxy, ...]
    bits_per_byte: dict[str, Spread]
    target: Spread


@dataclass(frozen=True)
class FailedMixture:
    """A mixture that could not be made or trained, and the reason."""

    mixture: int
    weights: Weights
    error: str


@dataclass(frozen=True)
class SourceFit:
    """The model of one source; see `Fit`."""

    model: str
    errors: dict[str, float]


@dataclass(frozen=True)
class TargetFit:
    """The fit of the objective, in bits per byte.

    Attributes:
        error: leave-one-out error.
        mean_error: the same for the mean of the other mixtures.
        predicted: prediction for each mixture.
        left_out: prediction for each mixture from all others.
    """

    error: float
    mean_error: float
    predicted: list[float]
    left_out: list[float]


@dataclass(frozen=True)
class BestTried:
    """Number and objective of the best mixture that was tried."""

    mixture: int
    target: float


@dataclass(frozen=True)
class Suggestion:
    """The suggested mixture.

    Attributes:
        weights: share of each source.
        predicted: its predicted objective.
        best_tried: the best tried mixture within the limits, for comparison.
    """

    weights: Weights
    predicted: float
    best_tried: BestTried


@dataclass(frozen=True)
class SweepResults:
    """Results of a sweep.

    Attributes:
        seeds: seeds of the proxies of each mixture.
        overrides: settings of all proxies.
        target: share of each source or task in the objective.
        mixtures: the measured mixtures.
        failed: mixtures that could not be trained.
        fits: source or task of the target -> its model.
        suggestion: the suggested mixture, or None.
        refusal: the reason if no mixture is suggested.
        limits: source -> largest share that `max_epochs` allows in the manifest's own
            set; None if the mixtures are too few to fit a model, as is `fit`.
        fit: the fit of the objective.
    """

    seeds: tuple[int, ...]
    overrides: tuple[str, ...]
    target: Weights
    mixtures: list[MeasuredMixture]
    failed: list[FailedMixture]
    fits: dict[str, SourceFit] = field(default_factory=dict)
    suggestion: Suggestion | None = None
    refusal: str | None = None
    limits: Weights | None = None
    fit: TargetFit | None = None


def analyse(sweep: Sweep, outcomes: Sequence[MixtureOutcome]) -> SweepResults:
    """Summarize the outcomes of all mixtures, fit models to them, and suggest a
    mixture.

    Args:
        sweep: the sweep.
        outcomes: outcomes of `proxies.train_mixtures`, one per mixture, and those of
            `run_tables.read_runs`.

    Raises:
        SweepError: the mixtures were measured on different held-out rows.
    """
    trained = [outcome for outcome in outcomes if outcome.error is None]
    held_out = {tuple(sorted(outcome.validation.items())) for outcome in trained}
    # Nothing is known of the rows of runs that were measured elsewhere.
    if len(held_out - {()}) > 1:
        raise SweepError(
            "the mixtures were measured on different held-out rows, so their losses "
            "cannot be compared; held-out rows never depend on the weights, so this is "
            "a bug: please report it"
        )
    target = sweep.target
    mixtures = []
    for outcome in trained:
        seed_values = [
            {**proxy.bits_per_byte, **proxy.tasks} for proxy in outcome.proxies
        ]
        objectives = [
            sum(share * values[name] for name, share in target.items() if share)
            for values in seed_values
        ]
        mixtures.append(
            MeasuredMixture(
                outcome.mixture,
                outcome.weights,
                outcome.proxies,
                {
                    name: _spread([values[name] for values in seed_values])
                    for name in seed_values[0]
                },
                _spread(objectives),
            )
        )
    results = SweepResults(
        sweep.seeds,
        sweep.overrides,
        target,
        mixtures,
        [
            FailedMixture(outcome.mixture, outcome.weights, outcome.error)
            for outcome in outcomes
            if outcome.error is not None
        ],
    )
    if len(mixtures) < LEAST_MIXTURES:
        refusal = (
            f"{len(mixtures)} mixtures are too few to fit a model; try at least "
            f"{LEAST_MIXTURES}, better four per source"
        )
        return replace(results, refusal=refusal)
    shares = matrix([mixture.weights for mixture in mixtures])
    sampled_shares = shares[:, shares.any(axis=0)]
    source_fits = {}
    for name, share in target.items():
        if share:
            means = [mixture.bits_per_byte[name].mean for mixture in mixtures]
            source_fits[name] = fit(sampled_shares, np.array(means))
    limits = limits_of(sweep, outcomes)
    models = {
        name: SourceFit(source_fit.model, dict(source_fit.errors))
        for name, source_fit in source_fits.items()
    }
    results = replace(results, fits=models, limits=limits)
    return _suggest(results, limits, shares, source_fits)


def limits_of(sweep: Sweep, outcomes: Sequence[MixtureOutcome]) -> Weights:
    """Return the largest share of the manifest's own set that `max_epochs` allows each
    source; 1 for sources without a lower limit and for sources in no mixture.
    """
    supply: dict[str, float] = {}
    for outcome in outcomes:
        supply |= outcome.supply
    limits = dict.fromkeys(sweep.manifest_weights, 1.0)
    for name in limits:
        if sweep.tokens and name in supply:
            limits[name] = min(1.0, supply[name] / sweep.tokens)
    return limits


def _spread(values: Sequence[float]) -> Spread:
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Spread(float(np.mean(values)), spread)


def _suggest(
    results: SweepResults,
    limits: Weights,
    shares: np.ndarray,
    source_fits: Mapping[str, Fit],
) -> SweepResults:
    """Suggest the mixture of least fitted objective within the hull and the limits,
    unless the mean fits as well.
    """
    target = results.target
    values = np.array([mixture.target.mean for mixture in results.mixtures])
    left_out = np.asarray(
        sum(target[name] * fitted.left_out for name, fitted in source_fits.items())
    )
    error = root_mean_square(left_out - values)
    mean_error = root_mean_square(leave_one_out(fit_mean, shares, values) - values)
    sampled = shares.any(axis=0)

    def objective(shares: np.ndarray) -> np.ndarray:
        total = np.zeros(len(shares))
        for name, fitted in source_fits.items():
            total += target[name] * fitted.predict(shares[:, sampled])
        return total

    fit_of_target = TargetFit(
        error, mean_error, objective(shares).tolist(), left_out.tolist()
    )
    results = replace(results, fit=fit_of_target)
    if error >= mean_error or {fitted.model for fitted in source_fits.values()} == {
        MEAN
    }:
        num_sources = int(sampled.sum())
        needed = num_sources + 1 + max(extra for _, extra in MODELS.values())
        remedy = (
            "Try more mixtures, more steps, or more seeds (--seeds), so that mixtures "
            "differ more than runs do"
        )
        if len(values) < needed:
            remedy = f"Try at least {needed} mixtures of these {num_sources} sources"
        refusal = (
            "no mixture is suggested: the leave-one-out error of the fit is "
            f"{error:.4f} bits per byte, and that of the mean of the others is "
            f"{mean_error:.4f}. {remedy}"
        )
        return replace(results, refusal=refusal)
    max_shares = np.array(list(limits.values()))
    optimum = least_within_hull(objective, shares, max_shares)
    if optimum is None:
        bounds = ", ".join(
            f"{name} {share:.3f}" for name, share in limits.items() if share < 1
        )
        refusal = (
            "no mixture is suggested: no average of the tried mixtures satisfies "
            "max_epochs in the manifest's own set, where the largest shares are "
            f"{bounds}; raise a max_epochs, lower mix.tokens, or try mixtures with "
            "less of these sources"
        )
        return replace(results, refusal=refusal)
    weights, predicted_least = optimum
    feasible = (shares <= max_shares + ROOM).all(axis=1)
    if feasible.any():
        values = np.where(feasible, values, np.inf)
    best = results.mixtures[int(np.argmin(values))]
    suggestion = Suggestion(
        normalised(dict(zip(limits, weights.tolist(), strict=True))),
        predicted_least,
        BestTried(best.mixture, best.target.mean),
    )
    return replace(results, suggestion=suggestion)
