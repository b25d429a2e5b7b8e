"""The law of loss by size and data, L(N, D) = E + A / N^alpha + B / D^beta, fitted to measured trainings.

Hoffmann et al. 2022, section 3.3 and appendix D.2: the Huber loss of the logarithms, so that one bad training does not
bend the law. Given both exponents the rest is linear, and a grid of exponents has the starts of the search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from itertools import product

import numpy as np

HUBER = 1e-3
"""Where the loss turns from squares to lengths, in the logarithm of the loss (Hoffmann et al. 2022, appendix D.2)."""
EXPONENTS = tuple(np.round(np.arange(0.05, 1.2, 0.15), 2).tolist())
"""Of the grid; published ones lie between 0.2 and 0.6 (Hoffmann et al. 2022; Besiroglu et al. 2024)."""
STEEPEST, FLATTEST = 3.0, 1e-3
"""Exponents up to the first are looked for; below the second (of factors too) a term is a constant."""
STARTS = 4
LEAST_RUNS = 6
"""One more than the law has numbers: without one of the runs the others still determine it."""
CONFIDENCE = 0.95
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
        """The loss of a model of N weights after D tokens."""
        return float(self.floor + self.a * parameters**-self.alpha + self.b * tokens**-self.beta)

    def best_parameters(self, flops: float) -> float | None:
        """N of the least loss for so much arithmetic, 6 N D (Hoffmann et al. 2022, equation 4); None where one of the
        two makes no difference."""
        if min(self.alpha, self.beta) < FLATTEST or min(self.a, self.b) < FLATTEST:
            return None
        ratio = (self.alpha * self.a / (self.beta * self.b)) ** (1 / (self.alpha + self.beta))
        return float(ratio * (flops / FLOPS_PER_WEIGHT_AND_TOKEN) ** (self.beta / (self.alpha + self.beta)))


@dataclass(frozen=True)
class Interval:
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float


def fit_scaling_law(
    parameters: Sequence[float], tokens: Sequence[float], losses: Sequence[float], start: ScalingLaw | None = None
) -> ScalingLaw:
    """Fit the law to trainings of N weights on D tokens, each with its loss (nats per token).

    Args:
        start: where the search begins besides the best points of the grid.

    Raises:
        ValueError: there are fewer trainings than numbers to fit, or a loss is not positive.
    """
    from scipy.optimize import least_squares

    n, d, measured = (np.asarray(values, dtype=np.float64) for values in (parameters, tokens, losses))
    if len(measured) < LEAST_RUNS - 1 or not (measured > 0).all():
        raise ValueError(f"a law of five numbers needs at least {LEAST_RUNS - 1} positive losses, not {losses}")
    # About the middle of what was measured all terms are of one size.
    middle_n, middle_d = (math.exp(np.log(values).mean()) for values in (n, d))
    n, d = n / middle_n, d / middle_d

    def terms(logs: np.ndarray) -> np.ndarray:
        return np.stack([np.full(len(n), logs[0]), logs[1] - logs[2] * np.log(n), logs[3] - logs[4] * np.log(d)])

    def residuals(logs: np.ndarray) -> np.ndarray:
        return np.asarray(np.logaddexp.reduce(terms(logs)) - np.log(measured))

    def jacobian(logs: np.ndarray) -> np.ndarray:
        shares = np.exp(terms(logs) - np.logaddexp.reduce(terms(logs)))
        return np.stack([shares[0], shares[1], -shares[1] * np.log(n), shares[2], -shares[2] * np.log(d)], axis=1)

    low, high = [-20.0, -20.0, 0.0, -20.0, 0.0], [math.log(measured.min()), 20.0, STEEPEST, 20.0, STEEPEST]
    starts = _starts(n, d, measured)
    if start is not None:
        starts.insert(
            0,
            np.array(
                [
                    _log(start.floor),
                    _log(start.a) - start.alpha * math.log(middle_n),
                    start.alpha,
                    _log(start.b) - start.beta * math.log(middle_d),
                    start.beta,
                ]
            ),
        )
    found = [
        least_squares(
            residuals,
            np.clip(one, np.add(low, 1e-9), np.subtract(high, 1e-9)),
            jac=jacobian,
            bounds=(low, high),
            loss="huber",
            f_scale=HUBER,
            xtol=1e-12,
            ftol=1e-12,
            gtol=1e-12,
            max_nfev=400,
        )
        for one in starts
    ]
    floor, a, alpha, b, beta = min(found, key=lambda one: one.cost).x.tolist()
    return ScalingLaw(
        math.exp(floor), math.exp(a + alpha * math.log(middle_n)), alpha, math.exp(b + beta * math.log(middle_d)), beta
    )


def left_out(
    law: ScalingLaw, parameters: Sequence[float], tokens: Sequence[float], losses: Sequence[float]
) -> list[ScalingLaw]:
    """The laws without each of the trainings."""

    def but(values: Sequence[float], one: int) -> list[float]:
        return [*values[:one], *values[one + 1 :]]

    return [
        fit_scaling_law(but(parameters, one), but(tokens, one), but(losses, one), law) for one in range(len(losses))
    ]


def jackknife(law: ScalingLaw, without: Sequence[ScalingLaw], of: Callable[[ScalingLaw], float]) -> Interval:
    """A number of a law, with an interval by the laws without each training (Efron and Tibshirani 1993, chapter 11)."""
    from scipy.stats import t

    values = np.array([of(one) for one in without])
    deviation = math.sqrt((len(values) - 1) * values.var())
    reach = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * deviation
    value = of(law)
    return Interval(value, value - reach, value + reach)


def described(law: ScalingLaw, without: Sequence[ScalingLaw]) -> dict[str, dict[str, float]]:
    """The law's numbers with their intervals; of `a` and `b`, which span decades, those of their logarithms."""
    names = ("floor", "a", "alpha", "b", "beta")
    numbers = {}
    for place, name in enumerate(names):
        is_log = name in ("a", "b")
        found = jackknife(
            law,
            without,
            lambda one, place=place, is_log=is_log: (  # type: ignore[misc]
                _log(astuple(one)[place]) if is_log else astuple(one)[place]
            ),
        )
        numbers[name] = {key: _exp(value) if is_log else max(value, 0.0) for key, value in vars(found).items()}
    return numbers


def _starts(n: np.ndarray, d: np.ndarray, losses: np.ndarray) -> list[np.ndarray]:
    """The best points of a grid of exponents, with the rest by least squares of relative errors."""
    from scipy.optimize import nnls

    found = []
    for alpha, beta in product(EXPONENTS, EXPONENTS):
        columns = np.stack([np.ones(len(n)), n**-alpha, d**-beta], axis=1) / losses[:, None]
        (floor, a, b), error = nnls(columns, np.ones(len(n)))
        found.append((error, (_log(floor), _log(a), alpha, _log(b), beta)))
    return [np.array(start) for _, start in sorted(found)[:STARTS]]


def _log(value: float) -> float:
    """Of what may be 0."""
    return math.log(max(value, 1e-8))


def _exp(value: float) -> float:
    """Of what may be out of all proportion."""
    return math.exp(min(value, 300.0))
