"""Repeated records of one source: same locator (id) and same text, so the same document
id.

Only an `id_field` and the record ids of WARC files can repeat; all other locators are a
path and a record number. The first in the order of the sorted listing is kept,
whichever worker read it; the others are removed from the written shards. A rewritten
shard differs in size from its task's record, so an interrupted attempt repeats that
task and ends with the same bytes.

DuckDB compares the ids, on disk if they are many, and one shard at a time is in memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.core.files import atomic_write
from gristmill.dataprep.conservation import Counts, SourceCounts
from gristmill.dataprep.documents import (
    ID_BYTES,
    ROW_GROUP_ROWS,
    read_table,
    write_table,
)
from gristmill.dataprep.readers.document_shards import DROPPED_SCHEMA, ReadFiles
from gristmill.dataprep.readers.sources import SourceError

REPEATED = "ingest/repeated"
"""Reason for dropping a repeated record."""
LIMITS = {"memory_limit": "1GB", "threads": 2}
"""Settings of DuckDB, which sorts on disk beyond this memory."""


class DuplicateIdError(SourceError):
    """Two records of a source are the same document: same id field and same text."""


@dataclass(frozen=True)
class Repeats:
    """Repeated documents of a source."""

    source: str
    documents: int
    text_bytes: int
    first: str
    """Locator of the first one."""
    emptied_shards: int
    """Number of shards without remaining documents."""

    def counts(self) -> Counts:
        """Changes to the ledger, which counted them as kept."""
        change = SourceCounts(
            kept=-self.documents,
            dropped={REPEATED: self.documents},
            bytes_kept=-self.text_bytes,
        )
        return {**change, "sources": {self.source: change}}

    def describe(self) -> str:
        """Sentence for a warning."""
        return (
            f"source {self.source!r}: {self.documents:,} records repeat the id and "
            "the text of one before, first "
            f"{self.first!r}; they are dropped (`on_repeat: fail` refuses them)"
        )


def shards_of(out: Path, source: str, results: Sequence[ReadFiles]) -> list[Path]:
    """Shards of a source in the order of its listing."""
    return [
        out / f"part-{task:05d}-{piece:03d}.parquet"
        for task, result in enumerate(results)
        if result["source"] == source
        for piece in range(result["totals"]["shards"])
    ]


def settle_repeats(
    source: str, shards: Sequence[Path], refuse: bool, ledger: Path
) -> Repeats | None:
    """Remove repeated documents from their shards and list them in `ledger`; None if
    there are none.

    A shard without remaining documents is removed.

    Args:
        source: name of the source.
        shards: of the source, in the order of its listing.
        refuse: raise instead of changing shards.
        ledger: file for the list of dropped documents.

    Raises:
        DuplicateIdError: there are repeated documents, and `refuse` is set.
    """
    import duckdb

    with (
        tempfile.TemporaryDirectory() as folder,
        duckdb.connect(config={**LIMITS, "temp_directory": folder}) as connection,
    ):
        connection.execute(
            "CREATE TABLE ids (high UBIGINT, low UBIGINT, shard INTEGER, place INTEGER)"
        )
        for number, path in enumerate(shards):
            ids = read_table(path, ["id"])["id"].combine_chunks()
            halves = np.frombuffer(
                ids.buffers()[1], np.uint64, len(ids) * 2, ids.offset * ID_BYTES
            ).reshape(-1, 2)
            columns = {
                "high": halves[:, 0].copy(),
                "low": halves[:, 1].copy(),
                "shard": np.full(len(ids), number, np.int32),
                "place": np.arange(len(ids), dtype=np.int32),
            }
            connection.register("shard_ids", pa.table(columns))
            connection.execute("INSERT INTO ids FROM shard_ids")
        connection.execute(
            "CREATE TABLE repeats AS SELECT shard, place FROM ids QUALIFY row_number() "
            "OVER (PARTITION BY high, low ORDER BY shard, place) > 1"
        )
        numbers = connection.execute(
            "SELECT shard, count(*) FROM repeats GROUP BY shard ORDER BY shard"
        ).fetchall()
        if not numbers:
            return None

        def repeated_rows(shard: int) -> np.ndarray:
            rows: np.ndarray = connection.execute(
                "SELECT place FROM repeats WHERE shard = ? ORDER BY place", [shard]
            ).fetchnumpy()["place"]
            return rows

        documents = sum(number for _, number in numbers)
        first_shard, _ = numbers[0]
        locators = read_table(shards[first_shard], ["locator"])["locator"]
        first: str = locators[int(repeated_rows(first_shard)[0])].as_py()
        if refuse:
            raise DuplicateIdError(
                f"source {source!r}: {documents} records repeat the id and the "
                f"text of another, one of them {first!r}; name a field that is "
                "unique as `id_field`, leave it out, list every WARC file once, or "
                "keep the first of each with `on_repeat: keep_first`"
            )
        text_bytes = emptied = 0
        with (
            atomic_write(ledger) as sink,
            pq.ParquetWriter(
                sink, DROPPED_SCHEMA, compression="zstd", write_page_checksum=True
            ) as writer,
        ):
            for shard, number in numbers:
                table = read_table(shards[shard])
                rows = repeated_rows(shard)
                repeats = table.take(pa.array(rows))
                text_bytes += pc.sum(pc.binary_length(repeats["text"])).as_py()
                dropped = {
                    "source": [source] * number,
                    "file": [""] * number,
                    "record": [0] * number,
                    "locator": repeats["locator"],
                    "reason": [REPEATED] * number,
                }
                writer.write_table(pa.table(dropped, DROPPED_SCHEMA), ROW_GROUP_ROWS)
                kept = np.setdiff1d(np.arange(len(table)), rows)
                if len(kept):
                    write_table(shards[shard], table.take(pa.array(kept)))
                else:
                    shards[shard].unlink()
                    emptied += 1
        return Repeats(source, documents, text_bytes, first, emptied)
