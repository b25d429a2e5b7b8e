"""Writing the packed set's table of documents: every tokenised document by id, to be found without a search."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from gristmill.dataprep.documents import write_table
from gristmill.tokenize.mixing.candidates import Candidates, unused
from gristmill.tokenize.mixing.draws import word_ids
from gristmill.tokenize.packed_files import INDEX_GROUP_ROWS, LEDGER, LEDGER_SCHEMA


def write_ledger(
    out: Path, candidates: Candidates, used: np.ndarray, emptied: Mapping[str, np.ndarray]
) -> None:
    """Write the table of all documents of a mixture, ordered by id.

    Args:
        out: the packed set's folder.
        candidates: all documents.
        used: bool of shape (n,): which of them are in a row.
        emptied: rule -> bool of shape (n,), of documents whose rows were emptied.
    """
    rules = unused(candidates, used, emptied)
    reason = np.full(len(used), -1, dtype=np.int8)
    for number, mask in enumerate(rules.values()):
        reason[mask] = number
    codes = pa.array(reason, pa.int8(), mask=reason < 0)
    documents = candidates.documents
    write_table(out / LEDGER, pa.table([
        word_ids(documents.words), documents.part.astype(np.int32), candidates.row, candidates.source.astype(np.int32),
        candidates.held_out, pa.DictionaryArray.from_arrays(codes, pa.array(list(rules), pa.string())),
    ], schema=LEDGER_SCHEMA), INDEX_GROUP_ROWS, repeating=("shard", "source", "reason"))
