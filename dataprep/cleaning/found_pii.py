"""Personal data found per source and kind, with examples that show false alarms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pyarrow as pa
from typing_extensions import TypedDict

EXAMPLES_SHOWN = 5
"""Examples of a source and kind."""
COUNTS_PREFIX = "clean_mask_"
"""Prefix of columns with the masked values of a kind."""


class PiiExample(TypedDict):
    """A masked value.

    Attributes:
        id: of its document, hexadecimal.
        value: the value, or only its shape.
        before, after: masked text around it.
    """

    id: str
    before: str
    value: str
    after: str


class PersonalData(TypedDict):
    """Values of a kind in a source.

    Attributes:
        documents, values: numbers of documents with such values, and of values.
        examples: those of the documents with the smallest ids, which are hashes.
    """

    source: str
    kind: str
    documents: int
    values: int
    examples: list[PiiExample]


def find_personal_data(
    documents: pa.Table, measured: Mapping[str, np.ndarray], examples: pa.Array
) -> list[PersonalData]:
    """Values by source and kind in n documents.

    Args:
        documents: with `id` and `source`.
        measured: `clean_mask_<kind>` -> values of the kind in each document.
        examples: of each document (`masking.EXAMPLES_TYPE`).
    """
    sources = np.array(documents["source"].to_pylist(), object)
    rows: list[PersonalData] = []
    for column, values in measured.items():
        kind = column.removeprefix(COUNTS_PREFIX)
        if kind == column:
            continue
        for source in sorted(set(sources[values > 0])):
            chosen = np.flatnonzero((values > 0) & (sources == source))
            shown: list[PiiExample] = [
                {
                    "id": documents["id"][row].as_py().hex(),
                    "before": example["before"],
                    "value": example["value"],
                    "after": example["after"],
                }
                for row in chosen.tolist()
                for example in examples[row].as_py()
                if example["kind"] == kind
            ]
            rows.append(
                {
                    "source": source,
                    "kind": kind,
                    "documents": len(chosen),
                    "values": int(values[chosen].sum()),
                    "examples": _first(shown),
                }
            )
    return rows


def add_personal_data(rows: Iterable[PersonalData]) -> list[PersonalData]:
    """Add rows of the same source and kind; the result does not depend on shards."""
    total: dict[tuple[str, str], PersonalData] = {}
    for row in rows:
        known = total.setdefault(
            (row["source"], row["kind"]),
            {**row, "documents": 0, "values": 0, "examples": []},
        )
        known["documents"] += row["documents"]
        known["values"] += row["values"]
        known["examples"] = _first([*known["examples"], *row["examples"]])
    return [total[key] for key in sorted(total)]


def _first(examples: list[PiiExample]) -> list[PiiExample]:
    """The examples of the smallest ids, and of one document in its order."""
    return sorted(examples, key=lambda example: example["id"])[:EXAMPLES_SHOWN]
