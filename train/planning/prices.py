"""What a GPU costs for an hour: from a file that its user edits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from gristmill.mixtures.section import Section
from gristmill.mixtures.yaml_text import YamlFileError, problems_of, read_yaml

DEFAULT = Path(__file__).with_name("prices.yaml")


class PricesError(ValueError):
    """A file of prices cannot be read."""


class Prices(Section):
    """A table of prices."""

    as_of: str
    """When they were written down."""
    currency: str
    """Of all figures."""
    per_gpu_hour: dict[str, Annotated[float, Field(ge=0.0)]]
    """GPU, by its name in the table of devices -> price."""


def read_prices(path: Path | None = None) -> Prices:
    """Read a file like `prices.yaml`, which is the default.

    Raises:
        PricesError: it is no such file, with what is wrong.
    """
    path = path or DEFAULT
    try:
        read = read_yaml(path)
    except YamlFileError as error:
        raise PricesError(str(error)) from error
    if not isinstance(read, dict):
        raise PricesError(f"{path}: a table of prices is a mapping with {', '.join(Prices.model_fields)}")
    try:
        # YAML reads a bare 2026-01-31 as a date.
        return Prices.model_validate({**read, **({"as_of": str(read["as_of"])} if "as_of" in read else {})})
    except ValidationError as error:
        raise PricesError(f"{path}: {problems_of(error)}") from error
