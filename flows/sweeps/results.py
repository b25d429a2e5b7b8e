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

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from gristmill.flows.sweeps.grid import Weights, normalised
from gristmill.flows.sweeps.proxies import Proxy, Sweep, TriedMixture

MOST_FOLDS = 16
SAME_RATIO = 1e-3
"""Difference of relative shares up to which ratios are equal: shares are rounded."""
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
    """Fit a Gaussian process of most likelihood, with a Matérn kernel of the distance
    between square roots of shares (Hellinger's), in which sources of small shares
    count.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    signal = ConstantKernel(1.0, (1e-2, 1e3)) * Matern(1.0, (1e-2, 1e2), nu=2.5)
    noise = WhiteKernel(0.01, (1e-6, 1.0))
    process = GaussianProcessRegressor(signal + noise, alpha=0.0, normalize_y=True)
    with warnings.catch_warnings():
        # A parameter at its bound: values without noise, or without a trend.
        warnings.simplefilter("ignore", ConvergenceWarning)
        process.fit(np.sqrt(shares), values)

    return lambda where: np.asarray(process.predict(np.sqrt(np.maximum(where, 0.0))))


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
    members = members_of(shares)
    shares = shares @ members
    # The mixtures that remain without the left-out one must be at least as many as the
    # parameters.
    models = {MEAN: fit_mean} | {
        name: fit_model
        for name, (fit_model, extra_parameters) in MODELS.items()
        if len(values) - 1 >= shares.shape[1] + extra_parameters
    }
    left_out = {
        name: leave_one_out(fit_model, shares, values)
        for name, fit_model in models.items()
    }
    errors = {
        name: root_mean_square(predicted - values)
        for name, predicted in left_out.items()
    }
    model = min(errors, key=lambda name: (errors[name], name != MEAN))
    predict = models[model](shares, values)
    return Fit(model, errors, lambda where: predict(where @ members), left_out[model])


def members_of(shares: np.ndarray) -> np.ndarray:
    """Return a matrix (sources, groups) that adds up the shares of sources whose ratios
    are those of all other mixtures too: one source for the models, whose distances and
    exponents do not change. Sources without a share are in no group.
    """
    from scipy.spatial.distance import cdist

    largest = shares.max(axis=0)
    relative = (shares / np.where(largest, largest, 1.0)).T
    is_same = cdist(relative, relative, "chebyshev") < SAME_RATIO
    groups = is_same.argmax(axis=1)
    return (groups[:, None] == np.unique(groups[largest > 0])).astype(np.float64)


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
    objective: Predict, shares: np.ndarray, limits: np.ndarray
) -> tuple[np.ndarray, float] | None:
    """Minimize the objective over the convex hull of the tried mixtures: nothing is
    extrapolated.

    Args:
        objective: shares of shape (n, sources) -> (n,).
        shares: (n, sources), the tried mixtures.
        limits: (sources,), upper bound of each source's share.

    Returns:
        the shares (sources,) and their objective, or None if no mixture in the hull
        satisfies `limits`.
    """
    from scipy.optimize import LinearConstraint, minimize

    n = len(shares)

    def value(mix_weights: np.ndarray) -> float:
        return float(objective((mix_weights @ shares)[None])[0])

    def slope(mix_weights: np.ndarray) -> np.ndarray:
        nearby = mix_weights + STEP * np.eye(n)
        return (objective(nearby @ shares) - value(mix_weights)) / STEP

    constraints = [
        LinearConstraint(np.ones((1, n)), 1.0, 1.0),
        LinearConstraint(shares.T, -np.inf, limits),
    ]
    is_feasible = (shares <= limits + ROOM).all(axis=1)
    tried = np.where(is_feasible, objective(shares), np.inf)
    corner = np.eye(n)[int(np.argmin(tried))]
    optima = [corner]
    for start in (np.full(n, 1.0 / n), 0.5 * corner + 0.5 / n):
        optimum = minimize(
            value,
            start,
            jac=slope,
            method="SLSQP",
            bounds=[(0.0, 1.0)] * n,
            constraints=constraints,
        )
        mix_weights = np.clip(optimum.x, 0.0, 1.0)
        optima.append(mix_weights / mix_weights.sum())
    within = [mix for mix in optima if (mix @ shares <= limits + ROOM).all()]
    if not within:
        return None
    best = min(within, key=value)
    return best @ shares, value(best)


STEP = 1e-7
"""Of forward differences."""
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


def analyse(sweep: Sweep, tried: Sequence[TriedMixture]) -> SweepResults:
    """Summarize the proxies of all mixtures, fit models to them, and suggest a mixture.

    Args:
        sweep: the sweep.
        tried: mixtures of `proxies.train_mixtures` and of `run_tables.read_runs`.
    """
    mixtures = [
        _measured(entry, sweep.target) for entry in tried if entry.trained.error is None
    ]
    failed = [
        FailedMixture(entry.mixture, entry.weights, entry.trained.error)
        for entry in tried
        if entry.trained.error is not None
    ]
    target = sweep.target
    measured = (sweep.seeds, sweep.overrides, target, mixtures, failed)
    if len(mixtures) < LEAST_MIXTURES:
        too_few = (
            f"{len(mixtures)} mixtures are too few to fit a model; try at least "
            f"{LEAST_MIXTURES}, better four per source"
        )
        return SweepResults(*measured, refusal=too_few)
    shares = np.array([list(mixture.weights.values()) for mixture in mixtures])
    fits = {}
    for name, share in target.items():
        if share:
            means = [mixture.bits_per_byte[name].mean for mixture in mixtures]
            fits[name] = fit(shares, np.array(means))
    weights = [target[name] for name in fits]

    def objective(where: np.ndarray) -> np.ndarray:
        return np.dot(weights, [each.predict(where) for each in fits.values()])

    values = np.array([mixture.target.mean for mixture in mixtures])
    left_out = np.dot(weights, [each.left_out for each in fits.values()])
    combined = TargetFit(
        root_mean_square(left_out - values),
        root_mean_square(leave_one_out(fit_mean, shares, values) - values),
        objective(shares).tolist(),
        left_out.tolist(),
    )
    limits = limits_of(sweep, tried)
    suggestion: Suggestion | None = None
    refusal: str | None = None
    is_mean = all(each.model == MEAN for each in fits.values())
    if is_mean or combined.error >= combined.mean_error:
        refusal = _why_mean(combined, shares)
    else:
        suggestion = _suggest(mixtures, limits, shares, objective)
        refusal = None if suggestion else _why_infeasible(limits)
    return SweepResults(
        *measured,
        {name: SourceFit(each.model, dict(each.errors)) for name, each in fits.items()},
        suggestion,
        refusal and f"no mixture is suggested: {refusal}",
        limits,
        combined,
    )


def _measured(tried: TriedMixture, target: Weights) -> MeasuredMixture:
    proxies = tried.trained.proxies
    return MeasuredMixture(
        tried.mixture,
        tried.weights,
        proxies,
        {
            name: _spread([proxy.values[name] for proxy in proxies])
            for name in proxies[0].values
        },
        _spread([proxy.mean(target) for proxy in proxies]),
    )


def limits_of(sweep: Sweep, tried: Sequence[TriedMixture]) -> Weights:
    """Return the largest share of the manifest's own set that `max_epochs` allows each
    source; 1 for sources without a lower limit and for sources in no mixture.
    """
    limits = dict.fromkeys(sweep.manifest_weights, 1.0)
    for mixture in tried:
        packed = mixture.trained.packed
        for name, entry in packed.get("realised", {}).items():
            if name in packed["requested"]:
                epochs = packed["requested"][name]["max_epochs"]
                supply = entry["available_tokens"] * epochs
                limits[name] = min(1.0, supply / sweep.tokens)
    return limits


def _spread(values: Sequence[float]) -> Spread:
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Spread(float(np.mean(values)), spread)


def _why_mean(combined: TargetFit, shares: np.ndarray) -> str:
    """Describe a fit that is no better than the mean, and what could improve it."""
    num_sources = members_of(shares).shape[1]
    needed = num_sources + 1 + max(extra for _, extra in MODELS.values())
    remedy = (
        "Try more mixtures, more steps, or more seeds (--seeds), so that mixtures "
        "differ more than runs do"
    )
    if len(shares) < needed:
        remedy = f"Try at least {needed} mixtures of these {num_sources} sources"
    return (
        f"the leave-one-out error of the fit is {combined.error:.4f} bits per byte, "
        f"and that of the mean of the others is {combined.mean_error:.4f}. {remedy}"
    )


def _why_infeasible(limits: Weights) -> str:
    """Describe limits that no average of the tried mixtures satisfies."""
    bounds = ", ".join(
        f"{name} {share:.3f}" for name, share in limits.items() if share < 1
    )
    return (
        "no average of the tried mixtures satisfies max_epochs in the manifest's own "
        f"set, where the largest shares are {bounds}; raise a max_epochs, lower "
        "mix.tokens, or try mixtures with less of these sources"
    )


def _suggest(
    mixtures: Sequence[MeasuredMixture],
    limits: Weights,
    shares: np.ndarray,
    objective: Predict,
) -> Suggestion | None:
    """Return the mixture of least fitted objective within the hull and the limits; None
    if no mixture is within the limits.
    """
    max_shares = np.array(list(limits.values()))
    optimum = least_within_hull(objective, shares, max_shares)
    if optimum is None:
        return None
    weights, predicted = optimum
    is_within = np.all(shares <= max_shares + ROOM, axis=1)
    within = [
        mixture for mixture, fits in zip(mixtures, is_within, strict=True) if fits
    ]
    best = min(within or mixtures, key=lambda mixture: mixture.target.mean)
    return Suggestion(
        normalised(dict(zip(limits, weights.tolist(), strict=True))),
        predicted,
        BestTried(best.mixture, best.target.mean),
    )
