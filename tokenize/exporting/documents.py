"""Which document each stretch of an exported file came from: a table beside every file, of every format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.dataprep.documents import ID_BYTES
from gristmill.dataprep.files import atomic_write
from gristmill.tokenize.exporting.split import Scratch, Split
from gristmill.tokenize.mixing.draws import word_ids

SCHEMA = pa.schema([
    ("start", pa.int64()), ("length", pa.int32()), ("row", pa.int64()), ("id", pa.binary(ID_BYTES)),
    ("source", pa.int32()), ("copy", pa.int32()), ("offset", pa.int64()),
])
"""`start` is the first token within the exported file, `row` the row of the packed set, the rest as PIECES_SCHEMA."""


def write_documents(path: Path, split: Split, scratch: Scratch, first: int, stop: int) -> int:
    """Write the table of the document pieces at positions [first, stop), in their order; returns how many there are."""
    at = written = 0
    with atomic_write(path) as sink, pq.ParquetWriter(sink, SCHEMA, compression="zstd") as writer:
        for places in split.places(first, stop):
            pieces = scratch.of(places.rows)
            ends = at + np.cumsum(places.lengths)
            writer.write_table(pa.table({
                "start": ends - places.lengths, "length": places.lengths.astype(np.int32),
                "row": np.repeat(places.rows, places.counts),
                "id": word_ids(np.stack([pieces["high"], pieces["low"]], axis=1)),
                **{name: np.ascontiguousarray(pieces[name]) for name in ("source", "copy", "offset")},
            }, schema=SCHEMA))
            at, written = int(ends[-1]), written + len(pieces)
    return written
