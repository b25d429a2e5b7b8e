"""Whole rows from exact shares: every number is rounded down or up so that all sums stay what they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import floor, lcm

Cell = tuple[int, int]
"""Line and column."""


def round_table(table: Sequence[Sequence[Fraction]]) -> list[list[int]]:
    """Round a table of rows per stage and source (controlled rounding: Bacharach 1966; Cox 1987).

    Every cell is rounded down or up, every line (a stage) keeps its sum, which must be whole, and every column's sum
    (a source) is its own, rounded down or up. A single line is rounded by the largest remainders (Hamilton), the
    first of equal ones.

    Along a cycle of cells that are no whole numbers, alternately one is raised and the next is lowered, by as much as
    makes one of them whole. Such a cycle exists as long as a cell is not whole, since no line and no column can have
    only one of them: a line more makes the columns' sums whole.

    Args:
        table: exact numbers, not negative; table[stage][source].

    Raises:
        ValueError: a line's sum is not whole.
    """
    for line in table:
        if sum(line).denominator != 1:
            raise ValueError(f"a stage has {float(sum(line))} rows, which is no whole number")
    unit = lcm(*(cell.denominator for line in table for cell in line))
    down = [[floor(cell) for cell in line] for line in table]
    # Remainders as whole numbers of 1/unit: exact, and faster than fractions.
    parts = [[int((cell - low) * unit) for cell, low in zip(line, lows, strict=True)]
             for line, lows in zip(table, down, strict=True)]
    parts.append([-sum(column) % unit for column in zip(*parts, strict=True)])
    while (cycle := _cycle(parts, unit)) is not None:
        raised, lowered = cycle
        step = min(min(unit - parts[stage][source] for stage, source in raised),
                   min(parts[stage][source] for stage, source in lowered))
        for stage, source in raised:
            parts[stage][source] += step
        for stage, source in lowered:
            parts[stage][source] -= step
    return [[low + part // unit for low, part in zip(lows, line, strict=True)]
            for lows, line in zip(down, parts[:-1], strict=True)]


def _cycle(parts: Sequence[Sequence[int]], unit: int) -> tuple[list[Cell], list[Cell]] | None:
    """Cells to raise and cells to lower: the largest remainder goes up first. None if all numbers are whole."""
    width = len(parts[0])
    first = _extreme(parts, ((line, source) for line in range(len(parts) - 1) for source in range(width)), unit, 1)
    if first is None:
        return None
    path, lines, sources = [first], [first[0]], [first[1]]
    while True:
        line, source = path[-1]
        # A cell that closes the cycle is taken first: short cycles leave the order of the remainders as it is.
        lowered = (_extreme(parts, ((line, other) for other in sources if other != source), unit, -1)
                   or _extreme(parts, ((line, other) for other in range(width) if other != source), unit, -1))
        assert lowered is not None  # The line's sum is whole, so that another of its cells is not.
        path.append(lowered)
        if lowered[1] in sources:
            begin = 2 * sources.index(lowered[1])
            return path[begin::2], path[begin + 1 :: 2]
        sources.append(lowered[1])
        raised = (_extreme(parts, ((other, lowered[1]) for other in lines if other != line), unit, 1)
                  or _extreme(parts, ((other, lowered[1]) for other in range(len(parts)) if other != line), unit, 1))
        assert raised is not None  # The column's sum is whole.
        path.append(raised)
        if raised[0] in lines:
            begin = 2 * lines.index(raised[0]) + 1
            return path[begin + 1 :: 2], path[begin::2]
        lines.append(raised[0])


def _extreme(parts: Sequence[Sequence[int]], cells: Iterable[Cell], unit: int, sign: int) -> Cell | None:
    """Of the cells that are not whole, the largest (`sign` 1) or the smallest (-1); of equal ones the first to rise."""
    found = [cell for cell in cells if 0 < parts[cell[0]][cell[1]] < unit]
    return max(found, key=lambda cell: (sign * parts[cell[0]][cell[1]], -sign * cell[0], -sign * cell[1]), default=None)
