"""What a GPU costs for an hour: from a file that its user edits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field, ValidationError

from gristmill.mixtures.section import Section

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
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Prices.model_validate({**read, "as_of": str(read["as_of"])})
    except (OSError, yaml.YAMLError, ValidationError, KeyError, TypeError) as error:
        raise PricesError(f"{path}: no table of prices (as_of, currency, per_gpu_hour): {error}") from error
