"""Records of a source that come twice: same id field (or WARC record id) and same text, so the same document id.

Only an `id_field` and the record ids of WARC files can repeat; elsewhere a locator is a path and a record number. The
first stays, in the order of the sorted listing, whichever worker read it; the others leave the shards that were
written. A rewritten shard has another size than its task's record says, so an interrupted attempt does that task again
and ends with the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.counts import Counts
from gristmill.dataprep.documents import ID_BYTES, read_table, write_table
from gristmill.dataprep.reading.document_shards import DROPPED_SCHEMA
from gristmill.dataprep.reading.sources import SourceError

REPEATED = "ingest/repeated"
"""Reason for which a record that comes again is dropped."""
Shards = Sequence[tuple[Path, np.ndarray]]


class DuplicateIdError(SourceError):
    """Two records of a source are the same document: same id field and same text."""


@dataclass(frozen=True)
class Repeats:
    """The documents of a source that were dropped since they came before."""

    source: str
    documents: int
    text_bytes: int
    first: str
    """Locator of the first of them."""
    emptied_shards: int
    """Shards of which nothing was left."""

    def counts(self) -> Counts:
        """What changes in the ledger, which counted them as kept."""
        change = {"kept": -self.documents, "dropped": {REPEATED: self.documents}, "bytes_kept": -self.text_bytes}
        return {**change, "sources": {self.source: change}}

    def describe(self) -> str:
        """One sentence."""
        return (f"source {self.source!r}: {self.documents:,} records repeat the id and the text of one before, first "
                f"{self.first!r}; they are dropped (`on_repeat: fail` refuses them)")


def shards_of(out: Path, source: str, results: Sequence[Mapping[str, Any]]) -> list[Path]:
    """The shards of a source in the order of its listing."""
    return [out / f"part-{task:05d}-{piece:03d}.parquet"
            for task, result in enumerate(results) if result["source"] == source
            for piece in range(result["shards"])]  # fmt: skip


def refuse_repeats(source: str, shards: Sequence[Path]) -> None:
    """Raise DuplicateIdError where two documents of a source have one id."""
    repeated = list(find_repeats(shards))
    if repeated:
        number = sum(len(rows) for _, rows in repeated)
        raise DuplicateIdError(
            f"source {source!r}: {number} records repeat the id and the text of another, one of them "
            f"{_locators(repeated)[0]!r}; name a field that is unique as `id_field`, leave it out, list every WARC "
            "file once, or keep the first of each with `on_repeat: keep_first`"
        )


def drop_repeats(source: str, shards: Sequence[Path], ledger: Path) -> Repeats | None:
    """Take the documents that come again out of their shards, and write them down in `ledger`; None without any.

    A shard of which nothing is left is removed.
    """
    repeated = list(find_repeats(shards))
    if not repeated:
        return None
    locators, text_bytes, emptied = _locators(repeated), 0, 0
    rows = [{"source": source, "file": "", "record": 0, "locator": locator, "reason": REPEATED} for locator in locators]
    write_table(ledger, pa.Table.from_pylist(rows, schema=DROPPED_SCHEMA))
    for path, repeats in repeated:
        table = read_table(path)
        text_bytes += pc.sum(pc.binary_length(table["text"].take(pa.array(repeats)))).as_py()
        kept = np.setdiff1d(np.arange(len(table)), repeats)
        if len(kept):
            write_table(path, table.take(pa.array(kept)))
        else:
            path.unlink()
            emptied += 1
    return Repeats(source, len(locators), text_bytes, locators[0], emptied)


def find_repeats(shards: Sequence[Path]) -> Iterator[tuple[Path, np.ndarray]]:
    """The rows (ascending) of each shard whose id came before, in an earlier shard or row; shards with such rows."""
    ids = [_ids(path) for path in shards]
    if not ids:
        return
    begins = np.cumsum([0, *map(len, ids)])
    low, high = np.concatenate(ids).T
    order = np.lexsort((low, high))  # stable: of equal ids the first comes first
    again = (low[order][1:] == low[order][:-1]) & (high[order][1:] == high[order][:-1])
    repeats = np.sort(order[1:][again])
    for path, begin, end in zip(shards, begins[:-1], begins[1:], strict=True):
        rows = repeats[np.searchsorted(repeats, begin) : np.searchsorted(repeats, end)] - begin
        if len(rows):
            yield path, rows


def _ids(path: Path) -> np.ndarray:
    """uint64 of shape (n, 2): the halves of a shard's ids."""
    column = read_table(path, ["id"])["id"].combine_chunks()
    content = np.frombuffer(column.buffers()[1], np.uint64, len(column) * 2, column.offset * ID_BYTES)
    return content.reshape(-1, 2)


def _locators(repeated: Shards) -> list[str]:
    return [locator for path, rows in repeated
            for locator in read_table(path, ["locator"])["locator"].take(pa.array(rows)).to_pylist()]  # fmt: skip
