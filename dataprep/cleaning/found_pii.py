"""Personal data found per source and kind, with examples that show false alarms."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter

import pyarrow as pa
from typing_extensions import TypedDict

EXAMPLES_SHOWN = 5
"""Examples of a source and kind."""


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


def find_personal_data(documents: pa.Table, found: pa.Array) -> list[PersonalData]:
    """Values by source and kind in n documents.

    Args:
        documents: with `id` and `source`.
        found: of each document (`masking.FOUND_TYPE`).
    """
    rows: list[PersonalData] = []
    for document, kinds in zip(
        documents.select(["id", "source"]).to_pylist(), found.to_pylist(), strict=True
    ):
        name = document["id"].hex()
        rows += [
            {
                "source": document["source"],
                "kind": of_kind["kind"],
                "documents": 1,
                "values": of_kind["values"],
                "examples": [
                    {
                        "id": name,
                        "before": shown["before"],
                        "value": shown["value"],
                        "after": shown["after"],
                    }
                    for shown in of_kind["examples"]
                ],
            }
            for of_kind in kinds
        ]
    return add_personal_data(rows)


def add_personal_data(rows: Iterable[PersonalData]) -> list[PersonalData]:
    """Add rows of the same source and kind; the result does not depend on shards."""
    total: dict[tuple[str, str], PersonalData] = {}
    for row in rows:
        key = row["source"], row["kind"]
        if key not in total:
            total[key] = row
            continue
        total[key]["documents"] += row["documents"]
        total[key]["values"] += row["values"]
        # the smallest ids, and those of one document in its order
        total[key]["examples"] = sorted(
            total[key]["examples"] + row["examples"], key=itemgetter("id")
        )[:EXAMPLES_SHOWN]
    return [total[key] for key in sorted(total)]
