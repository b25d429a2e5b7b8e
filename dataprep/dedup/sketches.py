"""Sketches of documents for deduplication: digests, length, bands, shingles.

One Arrow file per shard has a row per sketched document. Tasks map it into memory, so
that only accessed pages are read. The index of an output (`dedup_index.py`) has the
same columns except the row number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.arrays import binary_numbers, binary_rows
from gristmill.dataprep.annotate_batches import measure_texts
from gristmill.dataprep.cleaning.urls import document_urls, normalise_url
from gristmill.dataprep.dedup.minhash import band_keys, signatures
from gristmill.dataprep.dedup.shingles import (
    ShingleSets,
    hash_shingles,
    no_shingles,
)
from gristmill.dataprep.document_numbers import Numbering
from gristmill.dataprep.documents import Inputs, positions, read_shard
from gristmill.dataprep.shuffle_format import open_batches
from gristmill.dataprep.text.kernels import text_buffers
from gristmill.dataprep.text.unicode_tables import word_letters
from gristmill.mixtures.steps.dedup import Dedup, MinHash

DIGEST_BYTES = 16
SKETCH_COLUMNS = ("digest", "url", "bands", "shingles")
"""Columns by which documents are compared."""


@dataclass(frozen=True)
class Sketches:
    """Sketches of n documents.

    Attributes:
        digests: uint64 of shape (n, 2), of the texts.
        urls: uint64 of shape (n, 2), of the normalised URLs; zeros for a missing URL.
        bands: uint64 of shape (n, bands), keys of the MinHash bands; no columns if
            MinHash is off.
        sets: the shingles.
    """

    digests: np.ndarray
    urls: np.ndarray
    bands: np.ndarray
    sets: ShingleSets


def sketch_path(work: Path, shard: str) -> Path:
    """File with the sketches of a shard's documents."""
    return work / "sketches" / f"{shard}.arrow"


def seen_path(work: Path, shard: str) -> Path:
    """File with the text sizes and errors of all documents of a shard."""
    return work / "sketches" / f"{shard}.seen.arrow"


def sketch_shard(
    inputs: Inputs, shard: str, section: Dedup
) -> tuple[pa.Table, pa.Table]:
    """Sketch the judged documents of a shard.

    Returns:
        one row per readable judged document: `row` (in the shard), `id`, `locator`,
        `length` (code points), `digest`, `url`, `bands` (if MinHash is on) and
        `shingles`; and one row per document of the shard as from `describe_seen`.
    """
    columns = ["id", "source", "locator", "text"]
    if section.url:
        columns.append("metadata")
    read = read_shard(inputs, shard, columns, section.sources)
    documents = _take_rows(read.documents, read.judged)
    measured, errors = measure_texts(
        documents["text"], partial(sketch_texts, section=section.minhash)
    )
    good = np.array([error is None for error in errors], bool)
    sizes_and_errors = describe_seen(read.documents, read.judged, errors)
    documents = _take_rows(documents, np.flatnonzero(good))
    urls = document_urls(documents) if section.url else [None] * len(documents)
    batch = {
        "row": read.judged[good],
        "id": documents["id"],
        "locator": documents["locator"],
        "length": measured["length"],
        "digest": measured["digest"],
        "url": binary_rows(digest(map(_encode_url, urls))),
    }
    batch |= {name: measured[name] for name in SKETCH_COLUMNS if name in measured}
    return pa.table(batch), sizes_and_errors


def _encode_url(url: str | None) -> bytes | None:
    return None if url is None else normalise_url(url).encode("utf-8", "surrogatepass")


def describe_seen(
    documents: pa.Table, judged: np.ndarray, errors: Sequence[str | None]
) -> pa.Table:
    """Table with `bytes` (of the text) and `error` (why the text could not be read, or
    null) of a shard's documents.

    Args:
        documents: with at least `text`.
        judged: int64, rows of the judged documents.
        errors: one per judged document.
    """
    sizes = pc.binary_length(documents["text"]).cast(pa.int64())
    spread_errors = pa.array(errors, pa.string()).take(
        positions(np.arange(len(documents)), judged)
    )
    return pa.table({"bytes": sizes, "error": spread_errors})


def _take_rows(table: pa.Table, rows: np.ndarray) -> pa.Table:
    """Take ascending distinct rows of a table, without a copy if it is all of them."""
    return table if len(rows) == len(table) else table.take(rows)


def sketch_texts(
    texts: pa.Array, section: MinHash | None
) -> dict[str, np.ndarray | pa.Array]:
    """Compute `length`, `digest`, `bands` and `shingles` of every text; raises if one
    is not UTF-8.

    Without MinHash there is no column `bands`, and the lists of shingles are empty.
    """
    data, offsets = text_buffers(texts)
    sets = (
        no_shingles(len(texts))
        if section is None
        else hash_shingles(data, offsets, word_letters(invisible=False), section.ngram)
    )
    columns: dict[str, np.ndarray | pa.Array] = {
        "length": pc.utf8_length(texts).to_numpy(zero_copy_only=False).astype(np.int64),
        "digest": binary_rows(
            digest(data.data[begin:end] for begin, end in pairwise(offsets.tolist()))
        ),
        "shingles": pa.LargeListArray.from_arrays(
            pa.array(sets.offsets), pa.array(sets.hashes)
        ),
    }
    if section is not None:
        signature = signatures(sets, section.bands * section.rows, section.seed)
        columns["bands"] = binary_rows(
            band_keys(signature, section.bands, section.rows)
        )
    return columns


def digest(values: Iterable[bytes | memoryview | None]) -> np.ndarray:
    """BLAKE2b-128 of some bytes: uint64 of shape (n, 2), whose bytes are the digests;
    zeros for None.
    """
    digests = b"".join(
        bytes(DIGEST_BYTES)
        if value is None
        else hashlib.blake2b(value, digest_size=DIGEST_BYTES).digest()
        for value in values
    )
    return np.frombuffer(digests, np.uint64).reshape(-1, 2)


def read_sketches(work: Path, shard: str) -> pa.Table:
    """Read the sketches of a shard, mapped into memory if the file is local."""
    return open_batches(sketch_path(work, shard)).read_all()


Parts = Iterator[tuple[pa.Table, np.ndarray]]


class Source(Protocol):
    """Source of the sketches that a task reads."""

    def parts(self, documents: np.ndarray) -> Parts:
        """Tables of sketches with the rows of `documents` (int64, ascending and
        distinct) in each, in order.
        """
        ...


@dataclass(frozen=True)
class ShardSketches:
    """Sketch files of the shards, mapped into memory if they are local, so that only
    accessed pages are read.

    Attributes:
        work: the stage's work folder.
        numbering: of the documents.
    """

    work: Path
    numbering: Numbering

    def parts(self, documents: np.ndarray) -> Parts:
        """Implement `Source`; every document must have a sketch."""
        for shard, rows in self.numbering.split(documents):
            batch = read_sketches(self.work, self.numbering.shards[shard])
            yield batch, np.searchsorted(batch["row"].to_numpy(), rows)


class SentSketches:
    """Sketches sent by the shards to one partition: rows with `document`, ascending
    within and across pieces.

    Args:
        pieces: `Shuffled.pieces`.
    """

    def __init__(self, pieces: Iterable[pa.Table]) -> None:
        self._batches = [piece.combine_chunks() for piece in pieces if len(piece)]
        self._ends = np.array(
            [batch["document"][-1].as_py() for batch in self._batches], np.int64
        )

    def parts(self, documents: np.ndarray) -> Parts:
        """Implement `Source`; every document must have been sent."""
        places = np.searchsorted(self._ends, documents)
        for place in np.unique(places).tolist():
            batch = self._batches[place]
            rows = documents[places == place]
            yield batch, np.searchsorted(batch["document"].to_numpy(), rows)


def load_columns(
    source: Source, documents: np.ndarray, names: Sequence[str]
) -> pa.Table:
    """Read columns of the sketches of some documents.

    Args:
        documents: int64, not empty, ascending and distinct; each must have a sketch.
        names: the columns; missing columns are skipped.
    """
    return pa.concat_tables(
        batch.select([name for name in names if name in batch.column_names]).take(rows)
        for batch, rows in source.parts(documents)
    )


def load_sketches(source: Source, documents: np.ndarray) -> Sketches:
    """Read the sketches of some documents; `documents` as in `load_columns`, or
    empty.
    """
    if not len(documents):
        empty = np.empty((0, 2), np.uint64)
        return Sketches(empty, empty, empty[:, :0], no_shingles(0))
    return unpack_sketches(load_columns(source, documents, SKETCH_COLUMNS))


def count_shingles(source: Source, documents: np.ndarray) -> np.ndarray:
    """Number of shingles of each of some documents (ascending and distinct)."""
    counts = [np.empty(0, np.int64)]
    for batch, rows in source.parts(documents):
        counts.append(np.diff(batch["shingles"].chunk(0).offsets.to_numpy())[rows])
    return np.concatenate(counts)


def unpack_sketches(table: pa.Table) -> Sketches:
    """Sketches from their columns; the column `bands` may be missing."""
    lists = table["shingles"].combine_chunks()
    offsets = lists.offsets.to_numpy()
    sets = ShingleSets(
        lists.values.to_numpy()[offsets[0] : offsets[-1]], offsets - offsets[0]
    )
    digests, urls = binary_numbers(table["digest"]), binary_numbers(table["url"])
    has_bands = "bands" in table.column_names
    bands = binary_numbers(table["bands"]) if has_bands else digests[:, :0]
    return Sketches(digests, urls, bands, sets)
