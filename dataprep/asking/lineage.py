"""Who was made from whom: generated documents, examples and prompts, and their parents, by id.

`lineage.parquet` of a stage that generates has a row per child and parent, sorted by the parent: `parent`, `child`
(ids), `source` (of the child; of examples their set). A document's own metadata name its parents, an example's record
does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import pyarrow as pa

from gristmill.dataprep.documents import ID_BYTES, write_table
from gristmill.dataprep.row_groups import read_matching

LINEAGE = "lineage.parquet"
KIND, PARENTS, STYLE = "kind", "parents", "style"
"""Keys of a generated document's metadata."""
GENERATED = "generated"
"""Its kind."""
SCHEMA = pa.schema([("parent", pa.binary(ID_BYTES)), ("child", pa.binary(ID_BYTES)), ("source", pa.string())])


def write_lineage(folder: Path, rows: pa.Table) -> None:
    """Write the table of a stage, sorted by the parent."""
    write_table(folder / LINEAGE, rows.cast(SCHEMA).sort_by([("parent", "ascending"), ("child", "ascending")]))


def descendants(inputs: Mapping[str, Path], ids: Collection[bytes]) -> set[bytes]:
    """All documents that were made from some, and those that were made from these.

    Args:
        inputs: committed stages; without a generating one there are none.
    """
    tables = [folder / LINEAGE for folder in inputs.values() if (folder / LINEAGE).exists()]
    found, new = set[bytes](), set(ids)
    while new and tables:
        children = {
            child
            for table in tables
            for child in read_matching(table, "parent", list(new), ["child"])["child"].to_pylist()
        }
        new = children - found - set(ids)
        found |= new
    return found


def parents(inputs: Mapping[str, Path], child: bytes) -> set[bytes]:
    """What one document or example was made from.

    Args:
        inputs: committed stages.
    """
    return {
        parent
        for folder in inputs.values()
        if (folder / LINEAGE).exists()
        for parent in read_matching(folder / LINEAGE, "child", [child], ["parent"])["parent"].to_pylist()
    }
