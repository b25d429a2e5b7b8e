"""Lineage: ids of generated documents, examples and prompts with the ids of their
parents.

`lineage.parquet` of a generating stage has a row per child and parent, sorted by
parent: `parent`, `child` (ids) and `source` (of the child; for examples their set).
Metadata of documents and records of examples also name the parents.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import pyarrow as pa

from gristmill.dataprep.documents import ID_BYTES, Inputs, write_table
from gristmill.dataprep.row_groups import read_matching

LINEAGE = "lineage.parquet"
PARENTS = "parents"
"""Metadata key of a generated document's parents."""
GENERATED = "generated"
"""Value of the metadata key `kind` for a generated document."""
SCHEMA = pa.schema(
    [
        ("parent", pa.binary(ID_BYTES)),
        ("child", pa.binary(ID_BYTES)),
        ("source", pa.string()),
    ]
)


def lineage_rows(links: Sequence[tuple[str, str]], source: str) -> pa.Table:
    """Lineage table of (parent, child) ids in hexadecimal."""
    return pa.table(
        {
            "parent": [bytes.fromhex(parent) for parent, _ in links],
            "child": [bytes.fromhex(child) for _, child in links],
            "source": [source] * len(links),
        },
        SCHEMA,
    )


def write_lineage(folder: Path, rows: pa.Table) -> None:
    """Write the lineage table of a stage, sorted by parent."""
    order = [("parent", "ascending"), ("child", "ascending")]
    write_table(folder / LINEAGE, rows.sort_by(order))


def descendants(inputs: Inputs, ids: Collection[bytes]) -> set[bytes]:
    """Ids of all documents generated from `ids`, directly or through other generated
    documents.

    Args:
        inputs: committed stages; there are no descendants without a generating stage.
    """
    descendant_ids = set[bytes]()
    new = set(ids)
    while new:
        children = _relatives(inputs, "parent", list(new), "child")
        new = children - descendant_ids - set(ids)
        descendant_ids |= new
    return descendant_ids


def parents(inputs: Inputs, child: bytes) -> set[bytes]:
    """Ids that a document or example was generated from.

    Args:
        inputs: committed stages.
    """
    return _relatives(inputs, "child", [child], "parent")


def _relatives(
    inputs: Inputs, column: str, ids: list[bytes], relatives: str
) -> set[bytes]:
    """Values of one column where another one has some ids, in all lineage tables."""
    return {
        relative
        for folder in inputs.values()
        if (folder / LINEAGE).exists()
        for relative in read_matching(folder / LINEAGE, column, ids, [relatives])[
            relatives
        ].to_pylist()
    }
