"""Scaling law of loss by size and data, L(N, D) = E + A / N^alpha + B / D^beta, fitted
to measured trainings.

Hoffmann et al. 2022, section 3.3 and appendix D.2: the Huber loss of the logarithms, so
that one outlier does not distort the law. With both exponents fixed the law is linear,
and a grid of exponents gives the search's starting points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import product

import numpy as np

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
    parameters: Sequence[float],
    tokens: Sequence[float],
    losses: Sequence[float],
    start: ScalingLaw | None = None,
) -> ScalingLaw:
    """Fit the law to trainings of N weights on D tokens, each with its loss (nats per
    token).

    Args:
        parameters: N of each training.
        tokens: D of each training.
        losses: loss of each training.
        start: starting point of the search, in addition to the best points of the grid.

    Raises:
        ValueError: there are fewer trainings than parameters to fit, or a loss is not
            positive.
    """
    from scipy.optimize import least_squares

    n = np.asarray(parameters, dtype=np.float64)
    d = np.asarray(tokens, dtype=np.float64)
    measured = np.asarray(losses, dtype=np.float64)
    if len(measured) < LEAST_RUNS - 1 or not (measured > 0).all():
        raise ValueError(
            f"a law of five parameters needs at least {LEAST_RUNS - 1} "
            f"positive losses, not {losses}"
        )
    # Dividing by the geometric means brings all terms to one order of magnitude.
    middle_n = math.exp(np.log(n).mean())
    middle_d = math.exp(np.log(d).mean())
    n = n / middle_n
    d = d / middle_d

    log_n, log_d = np.log(n), np.log(d)

    def terms(logs: np.ndarray) -> np.ndarray:
        floor, log_a, alpha, log_b, beta = logs
        constant = np.full(len(n), floor)
        return np.stack([constant, log_a - alpha * log_n, log_b - beta * log_d])

    def residuals(logs: np.ndarray) -> np.ndarray:
        return np.asarray(np.logaddexp.reduce(terms(logs)) - np.log(measured))

    low = [-20.0, -20.0, 0.0, -20.0, 0.0]
    high = [math.log(measured.min()), 20.0, STEEPEST, 20.0, STEEPEST]
    starts = _starts(n, d, measured)
    if start is not None:
        log_a = _log(start.a) - start.alpha * math.log(middle_n)
        log_b = _log(start.b) - start.beta * math.log(middle_d)
        starts.insert(
            0, np.array([_log(start.floor), log_a, start.alpha, log_b, start.beta])
        )
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
    return ScalingLaw(
        floor=math.exp(log_floor),
        a=math.exp(log_a + alpha * math.log(middle_n)),
        alpha=alpha,
        b=math.exp(log_b + beta * math.log(middle_d)),
        beta=beta,
    )


def left_out(
    law: ScalingLaw,
    parameters: Sequence[float],
    tokens: Sequence[float],
    losses: Sequence[float],
) -> list[ScalingLaw]:
    """Fit one law per training, without that training."""
    laws = []
    for index in range(len(losses)):
        n, d, measured = (
            [*values[:index], *values[index + 1 :]]
            for values in (parameters, tokens, losses)
        )
        laws.append(fit_scaling_law(n, d, measured, law))
    return laws


def jackknife(
    law: ScalingLaw,
    left_out_laws: Sequence[ScalingLaw],
    statistic: Callable[[ScalingLaw], float],
) -> Interval:
    """Return a statistic of a law with its jackknife interval (Efron and Tibshirani
    1993, chapter 11).
    """
    from scipy.stats import t

    values = np.array([statistic(left_out_law) for left_out_law in left_out_laws])
    deviation = math.sqrt((len(values) - 1) * values.var())
    half_width = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * deviation
    value = statistic(law)
    return Interval(value, value - half_width, value + half_width)


def parameter_intervals(
    law: ScalingLaw, left_out_laws: Sequence[ScalingLaw]
) -> dict[str, Interval]:
    """Return the law's parameters with their intervals; those of `a` and `b`, which
    span decades, are logarithmic.
    """
    intervals = {}
    for name in asdict(law):

        def parameter(fitted: ScalingLaw, name: str = name) -> float:
            value: float = getattr(fitted, name)
            return _log(value) if name in LOGARITHMIC else value

        ends = astuple(jackknife(law, left_out_laws, parameter))
        if name in LOGARITHMIC:
            # The upper end may be too large for a float.
            intervals[name] = Interval(*(math.exp(min(end, 300.0)) for end in ends))
        else:
            intervals[name] = Interval(*(max(end, 0.0) for end in ends))
    return intervals


def _starts(n: np.ndarray, d: np.ndarray, losses: np.ndarray) -> list[np.ndarray]:
    """Return the best points of a grid of exponents; the other parameters are least
    squares of relative errors.
    """
    from scipy.optimize import nnls

    candidates = []
    for alpha, beta in product(EXPONENTS, EXPONENTS):
        columns = (
            np.stack([np.ones(len(n)), n**-alpha, d**-beta], axis=1) / losses[:, None]
        )
        (floor, a, b), error = nnls(columns, np.ones(len(n)))
        candidates.append((error, (_log(floor), _log(a), alpha, _log(b), beta)))
    return [np.array(start) for _, start in sorted(candidates)[:STARTS]]


def _log(value: float) -> float:
    """Return the logarithm of a value that may be 0."""
    return math.log(max(value, 1e-8))
