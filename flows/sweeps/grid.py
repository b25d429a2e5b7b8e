"""Which mixtures a sweep tries: written out, on a grid, or drawn from a Dirichlet distribution."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, ValidationError

from gristmill.core.seeds import seeded_key
from gristmill.mixtures.base import Positive, PositiveFloat, Section
from gristmill.mixtures.yaml_text import YamlFileError, problems_of, read_yaml

Share = Annotated[float, Field(ge=0.0)]
Weights = dict[str, float]
DIGITS = 6
"""Shares are rounded to so many, so that they read well and a mixture's name does not hang on the last bit."""


class SweepError(ValueError):
    """A sweep cannot be made, or its results cannot be compared."""


class Dirichlet(Section):
    """Mixtures drawn around the manifest's own (RegMix: Liu et al. 2024, section 3.1)."""

    samples: Positive = 16
    """Mixtures to draw."""
    concentration: PositiveFloat = 1.0
    """How near to the manifest's weights: the parameters are these shares, times the number of sources, times this.
    With equal weights, 1 draws evenly from all mixtures."""
    seed: int = 0
    """Of the draws."""


class Grid(Section):
    """What a sweep's file may say; the mixtures of all its parts are tried, each once."""

    mixtures: tuple[dict[str, Share], ...] = ()
    """Weights written out; sources that are not named get none."""
    grid: dict[str, Annotated[tuple[Share, ...], Field(min_length=1)]] = Field(default_factory=dict)
    """Source -> weights: all combinations are tried."""
    dirichlet: Dirichlet | None = None
    """Mixtures by chance."""


def read_grid(path: Path) -> Grid:
    """Read a sweep's file: a mapping as `Grid`, or a list of weights.

    Raises:
        SweepError: it cannot be read, or says something else.
    """
    try:
        raw = read_yaml(path)
        return Grid.model_validate({"mixtures": raw} if isinstance(raw, list) else raw)
    except YamlFileError as error:
        raise SweepError(str(error)) from error
    except ValidationError as error:
        raise SweepError(
            f"{path}: {problems_of(error)}; it holds a list of weights, or a mapping with "
            f"{', '.join(Grid.model_fields)}"
        ) from error


def mixtures_of(grid: Grid, own: Mapping[str, float]) -> list[Weights]:
    """All mixtures of a grid as shares of every source, summing to 1, each once, in the order of the file.

    Args:
        grid: what was asked for.
        own: the manifest's weight of each source.

    Raises:
        SweepError: an unknown source, a mixture of nothing, or less than two mixtures.
    """
    found: list[Weights] = []
    combinations = [dict(zip(grid.grid, values, strict=True)) for values in itertools.product(*grid.grid.values())]
    for weights in (*grid.mixtures, *(combinations if grid.grid else ())):
        unknown = sorted(weights.keys() - own.keys())
        if unknown:
            raise SweepError(f"no such source: {', '.join(unknown)} (sources: {', '.join(own)})")
        found.append(normalised({name: weights.get(name, 0.0) for name in own}))
    if grid.dirichlet is not None:
        found += [_draw(grid.dirichlet, own, number) for number in range(grid.dirichlet.samples)]
    distinct = list({tuple(mixture.values()): mixture for mixture in found}.values())
    if len(distinct) < 2:
        raise SweepError(f"a sweep compares mixtures, and there are {len(distinct)}; give more in its file")
    return distinct


def normalised(weights: Mapping[str, float]) -> Weights:
    """Weights as shares that sum to 1.

    Raises:
        SweepError: all of them are 0.
    """
    total = sum(weights.values())
    if not total:
        raise SweepError(f"all weights of a mixture are 0: {dict(weights)}")
    return {name: round(weight / total, DIGITS) for name, weight in weights.items()}


def matrix(mixtures: Sequence[Mapping[str, float]]) -> np.ndarray:
    """Mixtures as float64 of shape (n, sources), in the order of the sources."""
    return np.array([list(mixture.values()) for mixture in mixtures], dtype=np.float64)


def _draw(section: Dirichlet, own: Mapping[str, float], number: int) -> Weights:
    """The drawn mixture of a number: it does not depend on how many others are drawn."""
    shares = normalised(own)
    drawn = [name for name, share in shares.items() if share]
    key = seeded_key("gristmill", "sweep", section.seed, number, bits=128)
    generator: Any = np.random.Generator(np.random.Philox(key=key))
    parts = generator.dirichlet([section.concentration * len(drawn) * shares[name] for name in drawn])
    return normalised(dict.fromkeys(own, 0.0) | dict(zip(drawn, parts.tolist(), strict=True)))
