"""The tables beside the shards of a packed set, read by row or by document."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.documents import ID_BYTES, read_table
from gristmill.dataprep.row_groups import read_matching
from gristmill.tokenize.packed_files import PIECES_SCHEMA, ids_name, pieces_name


def all_pieces(folder: Path, file: str) -> pa.Table:
    """The document pieces (PIECES_SCHEMA) of a shard, ordered by row and start."""
    return read_table(folder / pieces_name(file)).cast(PIECES_SCHEMA)


def pieces_of_rows(folder: Path, file: str, rows: np.ndarray) -> pa.Table:
    """The document pieces (PIECES_SCHEMA) of some rows (int64) of a shard; reads only the row groups that have them."""
    return read_matching(folder / pieces_name(file), "row", rows.tolist()).cast(PIECES_SCHEMA)


def pieces_of_documents(folder: Path, file: str, documents: Collection[bytes]) -> pa.Table:
    """The pieces (PIECES_SCHEMA) of documents in a shard, found by the index beside it."""
    found = read_matching(folder / ids_name(file), "id", list(documents), ["row"])["row"]
    pieces = pieces_of_rows(folder, file, np.unique(found.to_numpy()))
    return pieces.filter(pc.is_in(pieces["id"], value_set=pa.array(list(documents), pa.binary(ID_BYTES))))
