"""Rows of each source in every phase of a mixture: exact shares, or an error that names
the shortage.

    weights -> shares of each phase -> within the sources' limits -> whole rows

Weights come from the source, from the mixture, or from the source's size. With
`on_shortfall: redistribute`, the other sources get the rows above a source's limit, by
their weights. Every number of rows is its exact share, rounded down or up so that all
sums are preserved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from itertools import pairwise, product
from math import ceil, floor, lcm

from gristmill.mixtures.schema.mix import Mix, temperature
from gristmill.mixtures.schema.sources import MixedSource

DECIMAL_DIGITS = 28
"""Precision of powers: Python's decimals have the same digits on every machine, unlike
the C library's `pow`.
"""


class MixError(ValueError):
    """A mixture that cannot be built from the available documents."""


@dataclass(frozen=True)
class Phase:
    """Part of the training order, with its weights.

    Attributes:
        end: as a share of the rows of the whole set.
        weights: of every source, in order; relative to each other.
    """

    end: Fraction
    weights: tuple[Fraction, ...]

    def shares(self) -> list[Fraction]:
        """Weights scaled to sum to 1.

        Raises:
            MixError: all of them are zero.
        """
        total = sum(self.weights)
        if not total:
            raise MixError(
                "the weights of all sources are 0; give at least one "
                "source a weight above 0"
            )
        return [weight / total for weight in self.weights]


def exact(value: float) -> Fraction:
    """Exact fraction of a decimal number: 0.7 is 7/10, not the nearest binary
    number.
    """
    return Fraction(str(value))


def plan_phases(
    section: Mix, own_weights: Mapping[str, float], pass_tokens: Mapping[str, int]
) -> list[Phase]:
    """Phases of a mixture; a single one if the section defines none.

    Args:
        section: `weights` override the sources' own; a phase's `weights` (`mix.phases`)
            override these.
        own_weights: source -> its `weight`, of all sources in order.
        pass_tokens: source -> tokens of one pass over its training documents, for
            shares by size.
    """
    settings = [
        (
            1.0 if phase.end is None else phase.end,
            section.weights if phase.weights is None else phase.weights,
        )
        for phase in section.phases
    ]
    phases = []
    for end, weights in settings or [(1.0, section.weights)]:
        alpha = None if weights is None else temperature(weights)
        if alpha is not None:
            shares = by_size([pass_tokens[name] for name in own_weights], alpha)
        elif weights is None:
            shares = tuple(map(exact, own_weights.values()))
        else:
            shares = tuple(exact(weights.get(name, 0.0)) for name in own_weights)
        phases.append(Phase(exact(end), shares))
    return phases


def by_size(tokens: Sequence[int], alpha: float) -> tuple[Fraction, ...]:
    """Weights proportional to token counts to the power of alpha (XLM-R, section 3.1;
    mT5, section 3.1).

    alpha 1 keeps the proportions of the sources and 0 makes them equal, both exactly. A
    source without tokens has weight 0 for any alpha.
    """
    if exact(alpha) == 1:
        return tuple(Fraction(number) for number in tokens)
    context = Context(prec=DECIMAL_DIGITS)
    power = Decimal(str(alpha))
    return tuple(
        Fraction(context.power(Decimal(number), power)) if number else Fraction(0)
        for number in tokens
    )


@dataclass(frozen=True)
class Supply:
    """Available tokens of a source.

    Attributes:
        max_epochs: most passes over its documents.
        pass_tokens: tokens of one pass over its training documents, with ends of text
            and repeats.
    """

    max_epochs: float
    pass_tokens: int

    def available_rows(self, sequence_length: int) -> int:
        """Whole rows that its documents can fill."""
        return int(exact(self.max_epochs) * self.pass_tokens / sequence_length)


@dataclass(frozen=True)
class Quotas:
    """Rows of a mixture.

    Attributes:
        rows: by phase and source; each number, and each source's sum over the phases,
            is its exact share (within limits) rounded down or up.
        requested: exact rows by phase and source from the weights alone.
    """

    rows: tuple[tuple[int, ...], ...]
    requested: tuple[tuple[Fraction, ...], ...]

    def per_source(self) -> list[int]:
        """Rows of each source over all phases."""
        return [sum(column) for column in zip(*self.rows, strict=True)]

    def requested_per_source(self) -> list[Fraction]:
        """Exact rows of each source over all phases, from the weights alone."""
        return column_sums(self.requested)


@dataclass(frozen=True)
class MixRequest:
    """Requested size, phases and supplies of a mixture.

    Attributes:
        tokens: of the whole set.
        sequence_length: tokens per row.
        phases: in order, with their weights.
        supplies: source -> its supply, in the order of the weights.
    """

    tokens: int
    sequence_length: int
    phases: Sequence[Phase]
    supplies: Mapping[str, Supply]

    def requested(self, total: int) -> Table:
        """Exact rows by phase and source of a set of `total` rows, from the weights
        alone: the ends of phases are rounded to whole rows, halves up.

        Raises:
            MixError: a phase has no row.
        """
        ends = [int(phase.end * total + Fraction(1, 2)) for phase in self.phases]
        rows = [end - begin for begin, end in pairwise([0, *ends])]
        if 0 in rows:
            raise MixError(
                f"mix.phases[{rows.index(0)}] has no row: the phases have {rows} of "
                f"{total} rows; ask for more "
                "tokens (mix.tokens), or move the `end` of a phase"
            )
        return [
            [phase_rows * share for share in phase.shares()]
            for phase_rows, phase in zip(rows, self.phases, strict=True)
        ]

    def filled(self, total: int) -> Table:
        """Exact rows within the sources' limits (see `fill`)."""
        requested = self.requested(total)
        shares = [[part / sum(line) for part in line] for line in requested]
        rows = [int(sum(line)) for line in requested]
        return fill(rows, shares, self.most())

    def most(self) -> list[int]:
        """Most rows of each source."""
        return [
            supply.available_rows(self.sequence_length)
            for supply in self.supplies.values()
        ]


def plan_quotas(
    section: Mix,
    sources: Mapping[str, MixedSource],
    pass_tokens: Mapping[str, int],
) -> Quotas:
    """Rows of each source in every phase, as the manifest requests them.

    Args:
        section: the mixture.
        sources: name -> its settings, in order.
        pass_tokens: source -> tokens of one pass over its training documents.

    Raises:
        MixError: a share cannot be filled.
    """
    own_weights = {name: source.weight for name, source in sources.items()}
    request = MixRequest(
        section.tokens,
        section.sequence_length,
        plan_phases(section, own_weights, pass_tokens),
        {
            name: Supply(source.max_epochs, pass_tokens[name])
            for name, source in sources.items()
        },
    )
    return plan_rows(request, section.on_shortfall == "redistribute")


def plan_rows(request: MixRequest, redistribute: bool = False) -> Quotas:
    """Rows of each source in every phase.

    Args:
        request: the mixture.
        redistribute: give the other sources the rows above a source's limit (see
            `fill`).

    Raises:
        MixError: less than one row; shares that break the sources' limits, naming every
            such source (with `redistribute`: limits that leave a phase short).
    """
    length = request.sequence_length
    total = request.tokens // length
    if not total:
        raise MixError(
            f"mix.tokens is {request.tokens}, which is less than one row "
            f"of {length} tokens"
        )
    requested = request.requested(total)
    rows = round_table(request.filled(total) if redistribute else requested)
    quotas = Quotas(tuple(map(tuple, rows)), tuple(map(tuple, requested)))
    if not redistribute and not _fits(request, quotas.per_source()):
        raise MixError(_describe(request, quotas.per_source()))
    return quotas


def _fits(request: MixRequest, rows: Sequence[int]) -> bool:
    limits = zip(rows, request.most(), strict=True)
    return all(number <= most for number, most in limits)


def _describe(request: MixRequest, rows: Sequence[int]) -> str:
    length = request.sequence_length
    lines = [
        f"the mixture of {request.tokens} tokens ({sum(rows)} rows of {length}) "
        "breaks the limits of its sources:"
    ]
    for number, (name, supply) in enumerate(request.supplies.items()):
        weight = f"weight {float(request.phases[0].weights[number]):g}"
        if len(request.phases) > 1:
            weight = f"its share of {len(request.phases)} phases"
        most_rows = supply.available_rows(length)
        if rows[number] > most_rows:
            excess = (rows[number] - most_rows) * length
            lines.append(
                f"  {name}: {weight} asks for {rows[number] * length} tokens, but "
                f"{supply.pass_tokens} tokens x max_epochs {supply.max_epochs:g} fill "
                f"{most_rows * length}, {excess} too few; "
                f"{_remedy(request, number, rows)}"
            )
    most = _most_tokens(request)
    if most:
        lines.append(
            f"or ask for at most {most} tokens (mix.tokens) with these weights"
        )
    lines.append(
        "or let the other sources have the difference: mix.on_shortfall: redistribute"
    )
    return "\n".join(lines)


def _remedy(request: MixRequest, number: int, rows: Sequence[int]) -> str:
    length = request.sequence_length
    supply = list(request.supplies.values())[number]
    if not supply.pass_tokens:
        return (
            "no document of it is left: look at what dropped them, or set its "
            "weight to 0"
        )
    epochs = ceil(Fraction(rows[number] * length, supply.pass_tokens) * 1000) / 1000
    remedy = f"raise its max_epochs to {epochs:g}"
    weights = request.phases[0].weights
    other_weights = sum(weights) - weights[number]
    most = supply.available_rows(length)
    other_rows = sum(rows) - most
    if len(request.phases) == 1 and other_weights and other_rows > 0:
        weight = floor(other_weights * most / other_rows * 1000) / 1000
        remedy += f", or lower its weight to {weight:g}"
    return remedy


def _most_tokens(request: MixRequest) -> int:
    """Largest mixture that the weights allow; 0 if there is none."""
    ends = [Fraction(0), *(phase.end for phase in request.phases)]
    shares = column_sums(
        [
            [(end - begin) * share for share in phase.shares()]
            for (begin, end), phase in zip(pairwise(ends), request.phases, strict=True)
        ]
    )
    exact_rows = min(
        int(rows / share)
        for rows, share in zip(request.most(), shares, strict=True)
        if share
    )
    # Rounding may change the total by one row per source and phase.
    for total in range(exact_rows + len(shares) * len(request.phases), 0, -1):
        try:
            rows = round_table(request.requested(total))
        except MixError:
            continue
        if _fits(request, [sum(column) for column in zip(*rows, strict=True)]):
            return total * request.sequence_length
    return 0


Table = list[list[Fraction]]
"""Rows per phase and source: table[phase][source]."""


def column_sums(table: Sequence[Sequence[Fraction]]) -> list[Fraction]:
    """Rows of each source over all phases."""
    return [sum(column, Fraction(0)) for column in zip(*table, strict=True)]


def fill(
    rows: Sequence[int],
    shares: Sequence[Sequence[Fraction]],
    most: Sequence[int],
) -> Table:
    """Distribute the rows of every phase by its shares, with every source's sum over
    all phases within its limit.

    A source above its limit is fixed at the limit, in the proportions of its phases;
    the remaining rows of each phase are distributed among the other sources by its
    shares, until no limit is broken. A single phase thus gets the only solution of `sum
    of min(level x share, most) = rows` (water-filling).

    Args:
        rows: of each phase.
        shares: of each phase, for each source; they sum to 1.
        most: rows of each source, over all phases.

    Returns:
        exact rows, in general not whole; each phase's sum to its rows.

    Raises:
        MixError: a phase cannot be filled.
    """
    fixed: dict[int, list[Fraction]] = {}
    while True:
        table = []
        for number, (phase_rows, parts) in enumerate(zip(rows, shares, strict=True)):
            remaining = phase_rows - sum(
                (column[number] for column in fixed.values()), Fraction(0)
            )
            free_share = sum(
                (share for source, share in enumerate(parts) if source not in fixed),
                Fraction(0),
            )
            location = (
                f"phase {number + 1} of {len(rows)}" if len(rows) > 1 else "the mixture"
            )
            if remaining and not free_share:
                raise MixError(
                    f"{location} has {phase_rows} rows, of which {ceil(remaining)} are "
                    "left without a source: all that have a weight in it are at their "
                    "limits; raise a max_epochs, give another source a "
                    "weight, or ask for fewer tokens (mix.tokens)"
                )
            level = remaining / free_share if free_share else Fraction(0)
            table.append(
                [
                    fixed[source][number] if source in fixed else level * share
                    for source, share in enumerate(parts)
                ]
            )
        totals = column_sums(table)
        above = [source for source, total in enumerate(totals) if total > most[source]]
        if not above:
            return table
        for source in above:
            fixed[source] = [
                phase[source] * most[source] / totals[source] for phase in table
            ]


Cell = tuple[int, int]
"""Line and column of a table."""


def round_table(table: Sequence[Sequence[Fraction]]) -> list[list[int]]:
    """Round a table of rows per phase and source (controlled rounding: Bacharach 1966;
    Cox 1987).

    Every cell is rounded down or up. Every line (a phase) keeps its sum, which must be
    whole; every column (a source) keeps its sum rounded down or up. A single line is
    rounded by the largest remainders (Hamilton); the first of equal remainders wins.

    Along a cycle of fractional cells, cells are alternately raised and lowered by the
    amount that makes one of them whole. Such a cycle exists while any cell is
    fractional: no line or column can have only one fractional cell, since an extra line
    makes the columns' sums whole.

    Args:
        table: exact numbers, not negative; table[phase][source].

    Raises:
        ValueError: a line's sum is not whole.
    """
    for line in table:
        if sum(line).denominator != 1:
            raise ValueError(
                f"a phase has {float(sum(line))} rows, which is not a whole number"
            )
    unit = lcm(*(cell.denominator for line in table for cell in line))
    down = [[floor(cell) for cell in line] for line in table]
    # Remainders in units of 1/unit: exact, and faster than fractions.
    parts = [
        [int((cell - low) * unit) for cell, low in zip(line, lows, strict=True)]
        for line, lows in zip(table, down, strict=True)
    ]
    parts.append([-sum(column) % unit for column in zip(*parts, strict=True)])
    while (cycle := _cycle(parts, unit)) is not None:
        raised, lowered = cycle
        step = min(
            min(unit - parts[phase][source] for phase, source in raised),
            min(parts[phase][source] for phase, source in lowered),
        )
        for phase, source in raised:
            parts[phase][source] += step
        for phase, source in lowered:
            parts[phase][source] -= step
    return [
        [low + part // unit for low, part in zip(lows, line, strict=True)]
        for lows, line in zip(down, parts[:-1], strict=True)
    ]


def _cycle(
    parts: Sequence[Sequence[int]], unit: int
) -> tuple[list[Cell], list[Cell]] | None:
    """Cells to raise and cells to lower, starting with the largest remainder; None if
    all cells are whole.
    """
    shape = (len(parts), len(parts[0]))
    first = _extreme(parts, product(range(shape[0] - 1), range(shape[1])), unit, 1)
    if first is None:
        return None
    path = [first]
    visited = ([first[0]], [first[1]])
    while True:
        # Along a line to a cell that is lowered, then along a column to a raised one.
        axis = len(path) % 2
        sign = -1 if axis else 1
        line, source = path[-1]
        cells = [
            (line, position) if axis else (position, source)
            for position in range(shape[axis])
            if position != path[-1][axis]
        ]
        # Prefer a cell that closes the cycle: short cycles keep the order of the
        # remainders.
        closing = [cell for cell in cells if cell[axis] in visited[axis]]
        cell = _extreme(parts, closing, unit, sign) or _extreme(
            parts, cells, unit, sign
        )
        # A line or column with a whole sum has another fractional cell.
        assert cell is not None
        path.append(cell)
        if cell[axis] in visited[axis]:
            begin = 2 * visited[axis].index(cell[axis]) + 1 - axis
            return path[begin + begin % 2 :: 2], path[begin + 1 - begin % 2 :: 2]
        visited[axis].append(cell[axis])


def _extreme(
    parts: Sequence[Sequence[int]], cells: Iterable[Cell], unit: int, sign: int
) -> Cell | None:
    """Largest (`sign` 1) or smallest (-1) fractional cell; of equal ones, the first in
    order of raising.
    """
    fractional_cells = [cell for cell in cells if 0 < parts[cell[0]][cell[1]] < unit]
    return max(
        fractional_cells,
        key=lambda cell: (
            sign * parts[cell[0]][cell[1]],
            -sign * cell[0],
            -sign * cell[1],
        ),
        default=None,
    )
