"""Which share of a mixture's tokens each source is given: its own weight, the mixture's, or by its size; per stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction

from gristmill.mixtures.mix import Mix, Weights, temperature

DECIMAL_DIGITS = 28
"""Of powers: Python's decimal arithmetic has the same digits on every machine, a C library's `pow` has not."""


class MixError(ValueError):
    """The mixture that was asked for cannot be made from the documents that there are."""


@dataclass(frozen=True)
class Stage:
    """A part of the training order and the weights within it.

    Attributes:
        until: where it ends, as a share of the rows of the whole set.
        weights: of every source, in order; relative to each other.
    """

    until: Fraction
    weights: tuple[Fraction, ...]

    def shares(self) -> list[Fraction]:
        """The weights, scaled to sum to 1.

        Raises:
            MixError: all of them are zero.
        """
        whole = sum(self.weights)
        if not whole:
            raise MixError("the weights of all sources are 0; give at least one source a weight above 0")
        return [weight / whole for weight in self.weights]


def exact(value: float) -> Fraction:
    """The decimal number that a manifest has, rather than the binary one nearest to it: 0.7 is 7/10."""
    return Fraction(str(value))


def plan_stages(section: Mix, own_weights: Mapping[str, float], pass_tokens: Mapping[str, int]) -> list[Stage]:
    """The stages of a mixture; one where the section has none.

    Args:
        section: `weights` override the sources' own; a stage's `weights` override these.
        own_weights: source -> its `weight`, of all sources in order.
        pass_tokens: source -> tokens of one pass over its training documents, for shares by size.
    """
    if not section.stages:
        return [Stage(Fraction(1), _weigh(section.weights, own_weights, pass_tokens))]
    return [Stage(exact(1.0 if stage.until is None else stage.until),
                  _weigh(section.weights if stage.weights is None else stage.weights, own_weights, pass_tokens))
            for stage in section.stages]  # fmt: skip


def _weigh(
    weights: Weights | None, own_weights: Mapping[str, float], pass_tokens: Mapping[str, int]
) -> tuple[Fraction, ...]:
    if weights is None:
        return tuple(exact(weight) for weight in own_weights.values())
    alpha = temperature(weights)
    if alpha is None:
        return tuple(exact(weights.get(name, 0.0)) for name in own_weights)
    return by_size([pass_tokens[name] for name in own_weights], alpha)


def by_size(tokens: Sequence[int], alpha: float) -> tuple[Fraction, ...]:
    """Weights that are numbers of tokens to the power of alpha (XLM-R, section 3.1; mT5, section 3.1).

    1 keeps the proportions of the sources and 0 makes them equal, both exactly. A source without a token has no
    weight, whatever alpha is.
    """
    if exact(alpha) == 1:
        return tuple(Fraction(number) for number in tokens)
    context, power = Context(prec=DECIMAL_DIGITS), Decimal(str(alpha))
    return tuple(Fraction(context.power(Decimal(number), power)) if number else Fraction(0) for number in tokens)


def rows_of_stages(total: int, stages: Sequence[Stage]) -> list[int]:
    """How many of `total` rows each stage has: its borders are rounded to whole rows, halves up.

    Raises:
        MixError: a stage is left without a row.
    """
    ends = [int(stage.until * total + Fraction(1, 2)) for stage in stages]
    rows = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    if not all(rows):
        raise MixError(f"mix.stages[{rows.index(0)}] has no row: the stages have {rows} of {total} rows; ask for more "
                       "tokens (mix.tokens), or move the stage's `until`")
    return rows
