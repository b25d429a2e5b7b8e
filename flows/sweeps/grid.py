"""Mixtures that a sweep tries: listed, on a grid, or drawn from a Dirichlet
distribution.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import Field, ValidationError, model_validator

from gristmill.core.seeds import seeded_key
from gristmill.mixtures.base import Positive, PositiveFloat, Section
from gristmill.mixtures.yaml_text import (
    YamlFileError,
    problems_of,
    read_yaml,
    unknown_name,
)

Share = Annotated[float, Field(ge=0.0)]
Weights = dict[str, float]
Settings = TypeVar("Settings", bound=Section)
REUSED = "reused"
"""Name of the sources whose ratios stay, as one source."""
DIGITS = 6
"""Decimals of a share: the fingerprint of a mixture does not depend on its last
bits.
"""


class SweepError(ValueError):
    """A sweep that cannot be planned, or results that cannot be compared."""


class Dirichlet(Section):
    """Mixtures drawn around the manifest's own (RegMix: Liu et al. 2024, section
    3.1).
    """

    samples: Positive = 16
    """Mixtures to draw."""
    concentration: PositiveFloat = 1.0
    """Concentration around the manifest's weights: each Dirichlet parameter is a
    source's share, times the number of sources, times this. With equal weights, 1 draws
    uniformly from all mixtures.
    """
    seed: int = 0
    """Random seed of the draws."""


class Grid(Section):
    """A sweep's file. The mixtures of all its keys are tried, each once. A list is that
    of `mixtures`.
    """

    mixtures: tuple[dict[str, Share], ...] = ()
    """Explicit weights; sources that are not named get 0."""
    grid: dict[str, Annotated[tuple[Share, ...], Field(min_length=1)]] = Field(
        default_factory=dict
    )
    """Source -> weights; all combinations are tried."""
    dirichlet: Dirichlet | None = None
    """Randomly drawn mixtures."""
    reuse: dict[str, Share] = Field(default_factory=dict)
    """Source -> weight in an earlier mixture, such as a suggested one. The ratios among
    these sources stay; for all other keys they are one source, `reused` (Olmix: arXiv
    2602.12237).
    """

    @model_validator(mode="before")
    @classmethod
    def _as_mapping(cls, raw: Any) -> Any:
        return {"mixtures": raw} if isinstance(raw, list) else raw


def read_settings(path: Path, kind: type[Settings]) -> Settings:
    """Read a YAML file with the keys of a section.

    Raises:
        SweepError: the file cannot be read, or has other keys.
    """
    try:
        return settings_from(str(path), read_yaml(path), kind)
    except YamlFileError as error:
        raise SweepError(str(error)) from error


def settings_from(name: str, content: Any, kind: type[Settings]) -> Settings:
    """Validate the content of a file of settings, which `name` names in errors.

    Raises:
        SweepError: it has other keys.
    """
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise SweepError(
            f"{name}: {problems_of(error)}; its keys are {', '.join(kind.model_fields)}"
        ) from error


def mixtures_of(grid: Grid, manifest_weights: Weights) -> list[Weights]:
    """List the distinct mixtures of a grid in the order of its file, as shares of every
    source that sum to 1.

    Args:
        grid: the sweep's file.
        manifest_weights: the manifest's weight of each source.

    Raises:
        SweepError: a source is unknown, all weights of a mixture are 0, or there are
            fewer than two mixtures.
    """
    dimensions, ratios = dict(manifest_weights), grid.reuse
    if ratios:
        check_names("reuse", ratios, manifest_weights)
        ratios = normalised(ratios)
        dimensions[REUSED] = sum(dimensions.pop(name) for name in ratios)
    candidates = list(grid.mixtures)
    if grid.grid:
        combinations = itertools.product(*grid.grid.values())
        candidates += [dict(zip(grid.grid, each, strict=True)) for each in combinations]
    for weights in candidates:
        check_names("a mixture", weights, dimensions)
    if grid.dirichlet is not None:
        candidates += drawn_mixtures(grid.dirichlet, normalised(dimensions))
    mixtures = [
        normalised(
            {
                name: weights.get(
                    name, weights.get(REUSED, 0.0) * ratios.get(name, 0.0)
                )
                for name in manifest_weights
            }
        )
        for weights in candidates
    ]
    distinct = list({tuple(mixture.values()): mixture for mixture in mixtures}.values())
    if len(distinct) < 2:
        raise SweepError(
            f"a sweep needs at least 2 mixtures, not {len(distinct)}; "
            "add more to its file"
        )
    return distinct


def check_names(place: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise SweepError if a place names anything but the known sources and tasks."""
    for name in names:
        if name not in known:
            raise SweepError(
                f"{place}: no such source or task: {unknown_name(name, known)}"
            )


def drawn_mixtures(dirichlet: Dirichlet, shares: Weights) -> Iterator[Weights]:
    """Draw mixtures around shares that sum to 1; sources of share 0 are left out."""
    shares = {name: share for name, share in shares.items() if share}
    scale = dirichlet.concentration * len(shares)
    parameters = scale * np.array(list(shares.values()))
    for number in range(dirichlet.samples):
        key = seeded_key("gristmill", "sweep", dirichlet.seed, number, bits=128)
        generator = np.random.Generator(np.random.Philox(key=key))
        yield dict(zip(shares, generator.dirichlet(parameters).tolist(), strict=True))


def normalised(weights: Weights) -> Weights:
    """Scale weights to shares that sum to 1.

    Raises:
        SweepError: all weights are 0.
    """
    total = sum(weights.values())
    if not total:
        raise SweepError(f"all weights of a mixture are 0: {weights}")
    return {name: round(weight / total, DIGITS) for name, weight in weights.items()}
