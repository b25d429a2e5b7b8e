"""How many rows of each source a mixture takes: exact shares, or an error that says what is short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction


class MixError(ValueError):
    """The mixture that was asked for cannot be made from the documents that there are."""


@dataclass(frozen=True)
class Supply:
    """What a source has.

    Attributes:
        weight: relative to the other sources' weights.
        max_epochs: how often a document may be repeated.
        pass_tokens: tokens of all its training documents once, their ends of text counted.
    """

    weight: float
    max_epochs: float
    pass_tokens: int

    def available_rows(self, sequence_length: int) -> int:
        """Whole rows that it can fill."""
        return int(Fraction(self.max_epochs) * self.pass_tokens / sequence_length)


def largest_remainder(total: int, weights: Sequence[float]) -> list[int]:
    """Split a whole number by weights, exactly (the method of Hamilton): each part is its share, rounded down or up.

    Raises:
        MixError: all weights are zero.
    """
    exact = [Fraction(weight) for weight in weights]
    whole = sum(exact)
    if not whole:
        raise MixError("the weights of all sources are 0; give at least one source a weight above 0")
    shares = [total * weight / whole for weight in exact]
    parts = [int(share) for share in shares]
    by_remainder = sorted(range(len(parts)), key=lambda number: (parts[number] - shares[number], number))
    for number in by_remainder[: total - sum(parts)]:
        parts[number] += 1
    return parts


def plan_rows(tokens: int, sequence_length: int, supplies: Mapping[str, Supply]) -> dict[str, int]:
    """Rows of each source in a training set of `tokens` tokens.

    Raises:
        MixError: less than one row, or sources that cannot fill their share, with all of them named.
    """
    total = tokens // sequence_length
    if not total:
        raise MixError(f"mix.tokens is {tokens}, which is less than one row of {sequence_length} tokens")
    parts = largest_remainder(total, [supply.weight for supply in supplies.values()])
    rows = dict(zip(supplies, parts, strict=True))
    short = {name: supply for name, supply in supplies.items()
             if rows[name] > supply.available_rows(sequence_length)}
    if short:
        raise MixError(_describe(tokens, sequence_length, rows, supplies, short))
    return rows


def _describe(
    tokens: int, length: int, rows: Mapping[str, int], supplies: Mapping[str, Supply], short: Mapping[str, Supply]
) -> str:
    lines = [f"the mixture of {tokens} tokens ({sum(rows.values())} rows of {length}) needs more text than there is:"]
    for name, supply in short.items():
        requested, available = rows[name] * length, supply.available_rows(length) * length
        lines.append(
            f"  {name}: weight {supply.weight:g} asks for {requested} tokens, but {supply.pass_tokens} tokens x "
            f"max_epochs {supply.max_epochs:g} fill {available}, {requested - available} too few"
            + _remedy(name, length, rows, supplies)
        )
    lines.append(f"or ask for at most {_most_tokens(length, supplies)} tokens (mix.tokens) with these weights")
    return "\n".join(lines)


def _remedy(name: str, length: int, rows: Mapping[str, int], supplies: Mapping[str, Supply]) -> str:
    supply = supplies[name]
    if not supply.pass_tokens:
        return "; no document of it is left: look at what dropped them, or set its weight to 0"
    epochs = Fraction(rows[name] * length, supply.pass_tokens)
    advice = f"; raise its max_epochs to {_ceil(epochs)}"
    others = sum(Fraction(other.weight) for key, other in supplies.items() if key != name)
    available, total = supply.available_rows(length), sum(rows.values())
    if others and available < total:
        advice += f", or lower its weight to {_floor(others * available / (total - available))}"
    return advice


def _most_tokens(length: int, supplies: Mapping[str, Supply]) -> int:
    """The largest mixture that these weights allow: no source is short at any size up to it."""
    weights = [supply.weight for supply in supplies.values()]
    whole = sum(map(Fraction, weights))
    available = [supply.available_rows(length) for supply in supplies.values()]
    most = min(int(rows * whole / Fraction(weight)) for rows, weight in zip(available, weights, strict=True) if weight)

    def fits(total: int) -> bool:
        return all(part <= rows for part, rows in zip(largest_remainder(total, weights), available, strict=True))

    # Rounding up may cost a row per source, and may give one.
    most += len(weights)
    while most and not fits(most):
        most -= 1
    return most * length


def _ceil(value: Fraction) -> str:
    return f"{-(-value * 1000 // 1) / 1000:g}"


def _floor(value: Fraction) -> str:
    return f"{float(value * 1000 // 1) / 1000:g}"
