"""How many rows of each source every stage of a mixture takes: exact shares, or an error that says what is short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from gristmill.tokenize.mixing.rounding import round_table
from gristmill.tokenize.mixing.shares import MixError, Stage, exact, rows_of_stages
from gristmill.tokenize.mixing.water_filling import Table, fill


@dataclass(frozen=True)
class Supply:
    """What a source has, and its limits.

    Attributes:
        max_epochs: how many passes over its documents may be taken.
        pass_tokens: tokens of one pass over its training documents, their ends of text and repeats counted.
        min_tokens: least that the mixture takes, over all stages.
        max_tokens: most that it takes; no limit of its own if None.
    """

    max_epochs: float
    pass_tokens: int
    min_tokens: int | None = None
    max_tokens: int | None = None

    def available_rows(self, sequence_length: int) -> int:
        """Whole rows that its documents can fill."""
        return int(exact(self.max_epochs) * self.pass_tokens / sequence_length)

    def most_rows(self, sequence_length: int) -> int:
        """Whole rows that it may have."""
        available = self.available_rows(sequence_length)
        return available if self.max_tokens is None else min(available, self.max_tokens // sequence_length)

    def least_rows(self, sequence_length: int) -> int:
        """Whole rows that it must have."""
        return -(-(self.min_tokens or 0) // sequence_length)


@dataclass(frozen=True)
class Quotas:
    """The rows of a mixture.

    Attributes:
        rows: per stage and source; every number is its exact share, with or without limits, rounded down or up, and
            so is every source's sum over the stages.
        asked: exact rows per stage and source by the weights alone.
    """

    rows: tuple[tuple[int, ...], ...]
    asked: tuple[tuple[Fraction, ...], ...]

    def per_source(self) -> list[int]:
        """Rows of each source over all stages."""
        return [sum(column) for column in zip(*self.rows, strict=True)]

    def asked_per_source(self) -> list[Fraction]:
        """Exact rows of each source over all stages, by the weights alone."""
        return [sum(column, Fraction(0)) for column in zip(*self.asked, strict=True)]


@dataclass(frozen=True)
class Request:
    """What a mixture is asked to be.

    Attributes:
        tokens: of the whole set.
        sequence_length: tokens per row.
        stages: parts and weights, in order.
        supplies: source -> what it has, in the order of the weights.
    """

    tokens: int
    sequence_length: int
    stages: Sequence[Stage]
    supplies: Mapping[str, Supply]

    def total_rows(self) -> int:
        """Whole rows of the set."""
        return self.tokens // self.sequence_length

    def asked(self, total: int) -> Table:
        """Exact rows per stage and source of a set of so many rows, by the weights alone."""
        rows = rows_of_stages(total, self.stages)
        return [[number * share for share in stage.shares()] for number, stage in zip(rows, self.stages, strict=True)]

    def most(self) -> list[int]:
        """Most rows of each source."""
        return [supply.most_rows(self.sequence_length) for supply in self.supplies.values()]

    def least(self) -> list[int]:
        """Least rows of each source."""
        return [supply.least_rows(self.sequence_length) for supply in self.supplies.values()]


def plan_rows(request: Request, redistribute: bool = False) -> Quotas:
    """Rows of each source in every stage.

    Args:
        request: the mixture.
        redistribute: where a source's limit is met, let the others have the difference (see `water_filling`).

    Raises:
        MixError: less than one row; a minimum that a source cannot fill; sources whose shares break their limits, all
            of them named (with `redistribute`: limits that leave a stage without text).
    """
    total, length = request.total_rows(), request.sequence_length
    if not total:
        raise MixError(f"mix.tokens is {request.tokens}, which is less than one row of {length} tokens")
    _check_minimums(request)
    asked = request.asked(total)
    table = asked
    if redistribute:
        shares = [stage.shares() for stage in request.stages]
        table = fill([int(sum(line)) for line in asked], shares, request.least(), request.most())
    rows = round_table(table)
    quotas = Quotas(tuple(map(tuple, rows)), tuple(map(tuple, asked)))
    if not redistribute and not _fits(request, quotas.per_source()):
        raise MixError(_describe(request, quotas.per_source()))
    return quotas


def _check_minimums(request: Request) -> None:
    length = request.sequence_length
    for name, supply in request.supplies.items():
        if supply.least_rows(length) > supply.most_rows(length):
            raise MixError(f"sources.{name}: min_tokens {supply.min_tokens} needs {supply.least_rows(length)} rows of "
                           f"{length} tokens, but {_limit(supply, length)}; lower min_tokens")


def _fits(request: Request, rows: Sequence[int]) -> bool:
    limits = zip(request.least(), rows, request.most(), strict=True)
    return all(least <= number <= most for least, number, most in limits)


def _describe(request: Request, rows: Sequence[int]) -> str:
    length = request.sequence_length
    lines = [f"the mixture of {request.tokens} tokens ({sum(rows)} rows of {length}) breaks the limits of its sources:"]
    for number, (name, supply) in enumerate(request.supplies.items()):
        asks = f"  {name}: {_weight_of(request, number)} asks for {rows[number] * length} tokens, but "
        if rows[number] > supply.most_rows(length):
            excess = (rows[number] - supply.most_rows(length)) * length
            lines.append(f"{asks}{_limit(supply, length)}, {excess} too few{_remedy(request, number, rows)}")
        elif rows[number] < supply.least_rows(length):
            lines.append(f"{asks}its min_tokens is {supply.min_tokens}; raise its weight, or lower min_tokens")
    most = _most_tokens(request)
    if most:
        lines.append(f"or ask for at most {most} tokens (mix.tokens) with these weights")
    lines.append("or let the other sources have the difference: mix.short: redistribute")
    return "\n".join(lines)


def _weight_of(request: Request, number: int) -> str:
    if len(request.stages) > 1:
        return f"its share of {len(request.stages)} stages"
    return f"weight {float(request.stages[0].weights[number]):g}"


def _limit(supply: Supply, length: int) -> str:
    available, most = supply.available_rows(length), supply.most_rows(length)
    if most < available:
        return f"its max_tokens {supply.max_tokens} is {most * length} in whole rows"
    return f"{supply.pass_tokens} tokens x max_epochs {supply.max_epochs:g} fill {most * length}"


def _remedy(request: Request, number: int, rows: Sequence[int]) -> str:
    length, supply = request.sequence_length, list(request.supplies.values())[number]
    if not supply.pass_tokens:
        return "; no document of it is left: look at what dropped them, or set its weight to 0"
    advice = []
    if rows[number] > supply.available_rows(length):
        advice.append(f"raise its max_epochs to {_ceil(Fraction(rows[number] * length, supply.pass_tokens))}")
    if supply.max_tokens is not None and rows[number] > supply.max_tokens // length:
        advice.append(f"raise its max_tokens to {rows[number] * length}")
    remedy = " and ".join(advice)
    weights = request.stages[0].weights
    others, most, total = sum(weights) - weights[number], supply.most_rows(length), sum(rows)
    if len(request.stages) == 1 and others and most < total:
        remedy += f", or lower its weight to {_floor(others * most / (total - most))}"
    return f"; {remedy}"


def _most_tokens(request: Request) -> int:
    """The largest mixture that these weights allow; 0 if there is none, or where a minimum asks for a larger one."""
    if any(request.least()):
        return 0
    begins = [Fraction(0), *(stage.until for stage in request.stages)]
    sizes = [stage.until - begin for begin, stage in zip(begins, request.stages, strict=False)]
    lines = [stage.shares() for stage in request.stages]
    shares = [sum((size * line[number] for size, line in zip(sizes, lines, strict=True)), Fraction(0))
              for number in range(len(request.supplies))]
    most = min(int(rows / share) for rows, share in zip(request.most(), shares, strict=True) if share)
    # Rounding up may cost a row per source and stage, and may give one.
    candidates = range(most + len(shares) * len(lines), 0, -1)
    return next((total for total in candidates if _fits_at(request, total)), 0) * request.sequence_length


def _fits_at(request: Request, total: int) -> bool:
    try:
        asked = request.asked(total)
    except MixError:
        return False
    rows = round_table(asked)
    return _fits(request, [sum(column) for column in zip(*rows, strict=True)])


def _ceil(value: Fraction) -> str:
    return f"{-(-value * 1000 // 1) / 1000:g}"


def _floor(value: Fraction) -> str:
    return f"{float(value * 1000 // 1) / 1000:g}"
