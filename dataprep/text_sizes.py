"""How much text a corpus has, from the footers of its files alone: what the number of partitions is chosen by."""

from __future__ import annotations

from pathlib import Path

from gristmill.dataprep.documents import open_table, shard_names


def text_bytes(ingest: Path) -> int:
    """Bytes of the text of a committed ingest before compression (with Parquet's small overhead)."""
    total = 0
    for shard in shard_names(ingest):
        with open_table(ingest / shard) as file:
            column = file.schema_arrow.names.index("text")
            for group in range(file.metadata.num_row_groups):
                total += file.metadata.row_group(group).column(column).total_uncompressed_size
    return total
