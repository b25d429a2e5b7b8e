"""The packed set's table of documents: every tokenised document by id, so that one is found without a search."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import pyarrow as pa

from gristmill.dataprep.documents import ID_BYTES, write_table
from gristmill.dataprep.row_groups import read_matching
from gristmill.tokenize.mixing.candidates import Candidates, unused
from gristmill.tokenize.mixing.draws import word_ids
from gristmill.tokenize.packed import INDEX_GROUP_ROWS

DOCUMENTS = "documents.parquet"
SCHEMA = pa.schema([
    ("id", pa.binary(ID_BYTES)), ("shard", pa.int32()), ("row", pa.int64()), ("source", pa.int32()),
    ("held_out", pa.bool_()), ("reason", pa.dictionary(pa.int8(), pa.string())),
])
"""`shard` and `row` say where ingest's document is, `shard` counting its sorted files; `source` is the number in
packed.json; `reason` is why no row holds it (`candidates.unused`), null where one does."""


def write_ledger(out: Path, candidates: Candidates, used: np.ndarray) -> None:
    """Write the table of all documents of a mixture, ordered by id.

    Args:
        out: the packed set's folder.
        candidates: all documents.
        used: bool of shape (n,): which of them are in a row.
    """
    rules = unused(candidates, used)
    reason = np.full(len(used), -1, dtype=np.int8)
    for number, mask in enumerate(rules.values()):
        reason[mask] = number
    codes = pa.array(reason, pa.int8(), mask=reason < 0)
    documents = candidates.documents
    write_table(out / DOCUMENTS, pa.table([
        word_ids(documents.words), documents.part.astype(np.int32), candidates.row, candidates.source.astype(np.int32),
        candidates.held_out, pa.DictionaryArray.from_arrays(codes, pa.array(list(rules), pa.string())),
    ], schema=SCHEMA), INDEX_GROUP_ROWS)


def read_ledger(mix: Path, documents: Collection[bytes]) -> pa.Table:
    """What the table of a packed set says of some documents (SCHEMA); those that were never tokenised are not in it."""
    return read_matching(mix / DOCUMENTS, "id", list(documents))
