"""Scaling law of loss by size and data, L(N, D) = E + A / N^alpha + B / D^beta, fitted
to measured trainings.

Hoffmann et al. 2022, section 3.3 and appendix D.2: the Huber loss of the logarithms, so
that one outlier does not distort the law. With both exponents fixed the law is linear,
and a grid of exponents gives the search's starting points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import product

import numpy as np
from numpy.typing import ArrayLike

HUBER = 1e-3
"""Huber threshold, in the logarithm of the loss (Hoffmann et al. 2022, appendix
D.2).
"""
EXPONENTS = tuple(np.round(np.arange(0.05, 1.2, 0.15), 2).tolist())
"""Grid of exponents; published ones lie between 0.2 and 0.6 (Hoffmann et al. 2022;
Besiroglu et al. 2024).
"""
STEEPEST, FLATTEST = 3.0, 1e-3
"""Upper bound of the exponents, and the exponent or factor below which a term counts as
constant.
"""
STARTS = 4
LEAST_RUNS = 6
"""One more than the law's parameters: any run can be left out, and the others still
determine the law.
"""
CONFIDENCE = 0.95
LOGARITHMIC = ("a", "b")
FLOPS_PER_WEIGHT_AND_TOKEN = 6
"""Kaplan et al. 2020, section 2.1: forward 2, backward 4."""


@dataclass(frozen=True)
class ScalingLaw:
    """L(N, D) = floor + a / N^alpha + b / D^beta, in nats per token."""

    floor: float
    a: float
    alpha: float
    b: float
    beta: float

    def __call__(self, parameters: float, tokens: float) -> float:
        """Return the loss of a model of N weights after D tokens."""
        return float(
            self.floor + self.a * parameters**-self.alpha + self.b * tokens**-self.beta
        )

    def best_parameters(self, flops: float) -> float | None:
        """Return the N of least loss for a budget of 6 N D FLOPs (Hoffmann et al. 2022,
        equation 4), or None if the loss does not depend on both N and D.
        """
        if min(self.alpha, self.beta) < FLATTEST or min(self.a, self.b) < FLATTEST:
            return None
        ratio = (self.alpha * self.a / (self.beta * self.b)) ** (
            1 / (self.alpha + self.beta)
        )
        return float(
            ratio
            * (flops / FLOPS_PER_WEIGHT_AND_TOKEN)
            ** (self.beta / (self.alpha + self.beta))
        )


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % confidence interval."""

    value: float
    low: float
    high: float


def fit_scaling_law(
    parameters: ArrayLike,
    tokens: ArrayLike,
    losses: ArrayLike,
    start: ScalingLaw | None = None,
) -> ScalingLaw:
    """Fit the law to trainings of N weights on D tokens, each with its loss (nats per
    token).

    Args:
        parameters: N of each training.
        tokens: D of each training.
        losses: loss of each training, at least as many as the law has parameters.
        start: starting point of the search, in addition to the best points of the grid.
    """
    from scipy.optimize import least_squares

    measured = np.asarray(losses, dtype=np.float64)
    # Relative to the geometric means all terms are of one order of magnitude.
    log_n, log_d = np.log(parameters), np.log(tokens)
    middle_n, middle_d = float(log_n.mean()), float(log_d.mean())
    log_n, log_d = log_n - middle_n, log_d - middle_d

    def residuals(point: np.ndarray) -> np.ndarray:
        floor, log_a, alpha, log_b, beta = point
        size_terms, data_terms = log_a - alpha * log_n, log_b - beta * log_d
        fitted = np.logaddexp(floor, np.logaddexp(size_terms, data_terms))
        return np.asarray(fitted - np.log(measured))

    low = [-20.0, -20.0, 0.0, -20.0, 0.0]
    high = [math.log(measured.min()), 20.0, STEEPEST, 20.0, STEEPEST]
    starts = _starts(log_n, log_d, measured)
    if start is not None:
        log_a = _log(start.a) - start.alpha * middle_n
        log_b = _log(start.b) - start.beta * middle_d
        starts.append((_log(start.floor), log_a, start.alpha, log_b, start.beta))
    solutions = [
        least_squares(
            residuals,
            np.clip(point, np.add(low, 1e-9), np.subtract(high, 1e-9)),
            jac="3-point",
            bounds=(low, high),
            loss="huber",
            f_scale=HUBER,
            xtol=1e-12,
            ftol=1e-12,
            gtol=1e-12,
            max_nfev=400,
        )
        for point in starts
    ]
    best = min(solutions, key=lambda solution: solution.cost)
    log_floor, log_a, alpha, log_b, beta = best.x.tolist()
    a, b = math.exp(log_a + alpha * middle_n), math.exp(log_b + beta * middle_d)
    return ScalingLaw(math.exp(log_floor), a, alpha, b, beta)


def left_out(
    law: ScalingLaw, parameters: ArrayLike, tokens: ArrayLike, losses: ArrayLike
) -> list[ScalingLaw]:
    """Fit one law per training, without that training."""
    columns = np.array([parameters, tokens, losses])
    laws = []
    for index in range(columns.shape[1]):
        n, d, measured = np.delete(columns, index, axis=1)
        laws.append(fit_scaling_law(n, d, measured, law))
    return laws


def jackknife(value: float, left_out_values: Sequence[float]) -> Interval:
    """Return a statistic of a law with its jackknife interval (Efron and Tibshirani
    1993, chapter 11), from its values of the laws without one training.
    """
    from scipy.stats import t

    n = len(left_out_values)
    deviation = math.sqrt((n - 1) * np.var(left_out_values))
    half_width = float(t.ppf((1 + CONFIDENCE) / 2, n - 1)) * deviation
    return Interval(value, value - half_width, value + half_width)


def parameter_intervals(
    law: ScalingLaw, left_out_laws: Sequence[ScalingLaw]
) -> dict[str, Interval]:
    """Return the law's parameters with their intervals; those of `a` and `b`, which
    span decades, are logarithmic.
    """
    intervals = {}
    for name, value in asdict(law).items():
        values = [getattr(fitted, name) for fitted in left_out_laws]
        if name in LOGARITHMIC:
            ends = astuple(jackknife(_log(value), list(map(_log, values))))
            # The upper end may be too large for a float.
            intervals[name] = Interval(*(math.exp(min(end, 300.0)) for end in ends))
        else:
            ends = astuple(jackknife(value, values))
            intervals[name] = Interval(*(max(end, 0.0) for end in ends))
    return intervals


def _starts(
    log_n: np.ndarray, log_d: np.ndarray, losses: np.ndarray
) -> list[tuple[float, ...]]:
    """Return the best points of a grid of exponents; the other parameters are least
    squares of relative errors.
    """
    from scipy.optimize import nnls

    candidates = []
    for alpha, beta in product(EXPONENTS, EXPONENTS):
        terms = np.exp([0.0 * log_n, -alpha * log_n, -beta * log_d])
        (floor, a, b), error = nnls((terms / losses).T, np.ones(len(losses)))
        candidates.append((error, (_log(floor), _log(a), alpha, _log(b), beta)))
    return [start for _, start in sorted(candidates)[:STARTS]]


def _log(value: float) -> float:
    """Return the logarithm of a value that may be 0."""
    return math.log(max(value, 1e-8))
