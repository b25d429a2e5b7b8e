"""Shares under limits: what a source may not take goes to the others by their weights, exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import ceil

from gristmill.tokenize.mixing.shares import MixError

Table = list[list[Fraction]]
"""Rows per stage and source: table[stage][source]."""


def fill(rows: Sequence[int], shares: Sequence[Sequence[Fraction]], least: Sequence[int], most: Sequence[int]) -> Table:
    """Distribute the rows of every stage by its shares, with every source's sum over all stages within its limits.

    A source that would have too much or too little is set to its limit, in the proportions that its stages had; what
    is left of each stage is distributed anew among the other sources by its shares, until no limit is broken. Of the
    sources that have too little and those that have too much, those go first whose sum of differences is larger: so
    a single stage gets the only solution of `sum of min(max(level x share, least), most) = rows` (water-filling;
    CSS resolves flexible lengths in the same way, section 9.7).

    Args:
        rows: of each stage.
        shares: of each stage, for each source; they sum to 1.
        least: rows of each source, over all stages.
        most: the same; not below `least`.

    Returns:
        exact rows, in general not whole; each stage's sum to its rows.

    Raises:
        MixError: a stage cannot be filled, or the minimums do not fit in.
    """
    fixed: dict[int, list[Fraction]] = {}
    while True:
        table = _distribute(rows, shares, fixed)
        totals = [sum(column, Fraction(0)) for column in zip(*table, strict=True)]
        under = [source for source, total in enumerate(totals) if total < least[source]]
        over = [source for source, total in enumerate(totals) if total > most[source]]
        if not under and not over:
            return table
        lacking = sum(least[source] - totals[source] for source in under)
        spare = sum(totals[source] - most[source] for source in over)
        for source in under if lacking > spare else over if spare > lacking else [*under, *over]:
            limit = least[source] if source in under else most[source]
            fixed[source] = _scale([stage[source] for stage in table], limit, rows)


def _distribute(
    rows: Sequence[int], shares: Sequence[Sequence[Fraction]], fixed: Mapping[int, list[Fraction]]
) -> Table:
    table = []
    for stage, (number, parts) in enumerate(zip(rows, shares, strict=True)):
        left = number - sum((column[stage] for column in fixed.values()), Fraction(0))
        free = sum((share for source, share in enumerate(parts) if source not in fixed), Fraction(0))
        where = f"stage {stage + 1} of {len(rows)}" if len(rows) > 1 else "the mixture"
        if left < 0:
            raise MixError(f"{where} has {number} rows, and the sources' min_tokens need {ceil(number - left)}; "
                           "lower min_tokens, or ask for more tokens (mix.tokens)")
        if left and not free:
            raise MixError(f"{where} has {number} rows, of which {ceil(left)} are left without a source: all that "
                           "have a weight in it are at their limits; raise a max_epochs or max_tokens, give another "
                           "source a weight, or ask for fewer tokens (mix.tokens)")
        level = left / free if free else Fraction(0)
        table.append([fixed[source][stage] if source in fixed else level * share
                      for source, share in enumerate(parts)])  # fmt: skip
    return table


def _scale(column: Sequence[Fraction], total: int, rows: Sequence[int]) -> list[Fraction]:
    """A source's rows in proportion, with another sum; in proportion to the stages where it had none."""
    parts = column if any(column) else [Fraction(number) for number in rows]
    whole = sum(parts, Fraction(0))
    return [part * total / whole for part in parts]
