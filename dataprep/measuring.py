"""Measuring documents batch by batch, so that one bad document costs only itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.dataprep.secrets import mask_text

BATCH_ROWS = 1000

Measure = Callable[[Any], Mapping[str, Any]]
"""A function from n texts, or n rows of a table, to columns of n values: NumPy arrays, or Arrow's where NumPy has no
such type."""


def measure_texts(
    texts: pa.ChunkedArray | pa.Table, measure: Measure
) -> tuple[dict[str, Any], list[str | None]]:
    """Measure every text; one that raises gets an error instead of values.

    Args:
        texts: n strings, or a table of n rows.
        measure: called with a batch and, where that raises, with each of its texts alone. It must be pure.

    Returns:
        columns of the texts that did not raise, in their order; and per text its error, or None.
    """
    parts: list[Mapping[str, Any]] = [measure(texts.slice(0, 0).combine_chunks())]
    errors: list[str | None] = []
    for start in range(0, len(texts), BATCH_ROWS):
        batch = texts.slice(start, BATCH_ROWS).combine_chunks()
        measured, error = _try(measure, batch)
        if measured is not None:
            parts.append(measured)
            errors.extend([None] * len(batch))
            continue
        for row in range(len(batch)):
            measured, error = _try(measure, batch.slice(row, 1))
            errors.append(error)
            if measured is not None:
                parts.append(measured)
    return {name: _concatenate([part[name] for part in parts]) for name in parts[0]}, errors


def _concatenate(arrays: list[Any]) -> Any:
    return pa.concat_arrays(arrays) if isinstance(arrays[0], pa.Array) else np.concatenate(arrays)


def spread(values: np.ndarray | pa.Array, errors: list[str | None]) -> pa.Array:
    """A measured column with a null for every text that raised, and for NaN, which stands for "does not apply"."""
    good = np.array([error is None for error in errors], bool)
    positions = np.cumsum(good) - 1
    column = values if isinstance(values, pa.Array) else pa.array(values, from_pandas=True)
    return column.take(pa.array(positions, mask=~good))


def _try(measure: Measure, texts: pa.Array | pa.Table) -> tuple[Mapping[str, Any] | None, str | None]:
    try:
        return measure(texts), None
    except Exception as error:  # noqa: BLE001 - whatever it is, it goes to the quarantine
        return None, mask_text(f"{type(error).__name__}: {error}")
