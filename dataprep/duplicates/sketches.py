"""What deduplication remembers of each document while it compares them: digests, length, bands, shingles.

One Arrow file per shard, a row per document that takes part, mapped into memory by whoever compares: only what is
looked at is read. Its columns but the row number are also those of the index that an output keeps (`dedup_index.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.cleaning.urls import document_urls, normalise_url
from gristmill.dataprep.document_numbers import Numbering
from gristmill.dataprep.documents import judged_rows, read_shard
from gristmill.dataprep.duplicates.minhash import band_keys, signatures
from gristmill.dataprep.duplicates.shingles import ShingleSets, hash_shingles, no_shingles
from gristmill.dataprep.files import atomic_write
from gristmill.dataprep.measuring import measure_texts
from gristmill.dataprep.shuffle import open_batches
from gristmill.dataprep.text.blake2b import digest_texts
from gristmill.dataprep.text.kernels import text_buffers
from gristmill.mixtures.steps.dedup import Dedup, MinHash

DIGEST_BYTES = 16
NO_DIGEST = bytes(DIGEST_BYTES)
"""In place of the digest of a URL where a document has none."""
SKETCH_COLUMNS = ("digest", "url", "bands", "shingles")
"""What documents are compared by."""


@dataclass(frozen=True)
class Sketches:
    """What n documents are compared by.

    Attributes:
        digests: uint64 of shape (n, 2), of the texts.
        urls: uint64 of shape (n, 2), of the normalised URLs; zeros where there is none.
        bands: uint64 of shape (n, bands), keys of the MinHash bands; no bands where MinHash is off.
        sets: the shingles.
    """

    digests: np.ndarray
    urls: np.ndarray
    bands: np.ndarray
    sets: ShingleSets


def sketch_path(work: Path, shard: str) -> Path:
    """The file with the sketches of a shard's documents."""
    return work / "sketches" / f"{shard}.arrow"


def seen_path(work: Path, shard: str) -> Path:
    """The file with what was seen of all documents of a shard: bytes and errors."""
    return work / "sketches" / f"{shard}.seen.arrow"


def sketch_shard(inputs: Mapping[str, Path], shard: str, section: Dedup) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Sketch the documents of a shard that take part.

    Returns:
        one row for each of them: `row` (in the shard), `id`, `locator`, `length` (code points), `digest`, `url`,
        `bands` (where MinHash is on) and `shingles`; and for each of the shard's documents `bytes` (of its text) and
        `error` (why its text cannot be read, so that it does not take part, or null).
    """
    columns = ["id", "source", "locator", "text", *(["metadata"] if section.url else [])]
    read = read_shard(inputs, shard, columns)
    judged = judged_rows(read.documents, read.rows, section.sources)
    documents = _take_rows(read.documents, judged)
    measured, errors = measure_texts(documents["text"], partial(sketch_texts, section=section.minhash))
    good = np.array([error is None for error in errors], bool)
    seen = describe_seen(read.documents, judged, errors)
    documents = _take_rows(documents, np.flatnonzero(good))
    urls = digest_urls(documents) if section.url else np.zeros((len(documents), 2), np.uint64)
    of_documents = {name: documents[name].combine_chunks() for name in ("id", "locator")}
    batch = {
        "row": pa.array(judged[good]),
        **of_documents,
        "length": pa.array(measured["length"]),
        "digest": measured["digest"],
        "url": _binary(urls),
    }
    batch |= {name: measured[name] for name in ("bands", "shingles") if name in measured}
    return pa.record_batch(batch), seen


def describe_seen(documents: pa.Table, judged: np.ndarray, errors: Sequence[str | None]) -> pa.RecordBatch:
    """Of each of a shard's documents `bytes` (of its text) and `error` (why it does not take part, or null).

    Args:
        documents: with at least `text`.
        judged: int64, rows of them.
        errors: one for each of these.
    """
    places = np.full(len(documents), -1)
    places[judged] = np.arange(len(judged))
    return pa.record_batch(
        {
            "bytes": pc.binary_length(documents["text"]).cast(pa.int64()).combine_chunks(),
            "error": pa.array(errors, pa.string()).take(pa.array(places, mask=places < 0)),
        }
    )


def _take_rows(table: pa.Table, rows: np.ndarray) -> pa.Table:
    """Some rows of a table, ascending and distinct; all of them without a copy."""
    return table if len(rows) == len(table) else table.take(pa.array(rows))


def sketch_texts(texts: pa.Array, section: MinHash | None) -> dict[str, np.ndarray | pa.Array]:
    """`length`, `digest`, `bands` and `shingles` of every text; raises where one is not UTF-8.

    Without MinHash there are no bands, and the lists of shingles are empty.
    """
    data, offsets = text_buffers(texts)
    sets = no_shingles(len(texts)) if section is None else hash_shingles(data, offsets, section.ngram)
    found: dict[str, np.ndarray | pa.Array] = {
        "length": pc.utf8_length(texts).to_numpy(zero_copy_only=False).astype(np.int64),
        "digest": _binary(digest_texts(data, offsets)),
        "shingles": _lists(sets),
    }
    if section is not None:
        signature = signatures(sets, section.bands * section.rows, section.seed)
        found["bands"] = _binary(band_keys(signature, section.bands, section.rows))
    return found


def sketch_batch(columns: Mapping[str, pa.Array], sketches: Sketches) -> pa.RecordBatch:
    """The columns of documents, followed by those of their sketches."""
    named = {**columns, "digest": _binary(sketches.digests), "url": _binary(sketches.urls)}
    if sketches.bands.shape[1]:
        named["bands"] = _binary(sketches.bands)
    return pa.record_batch({**named, "shingles": _lists(sketches.sets)})


def write_sketches(path: Path, batch: pa.RecordBatch) -> None:
    """Write the sketches of a shard, or what was seen of its documents."""
    with atomic_write(path, durable=False) as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def read_sketches(work: Path, shard: str) -> pa.RecordBatch:
    """The sketches of a shard, mapped into memory where the file is local."""
    return open_batches(sketch_path(work, shard)).get_batch(0)


class Source(Protocol):
    """Where a task finds the sketches of documents."""

    def parts(self, documents: np.ndarray) -> Iterator[tuple[pa.RecordBatch, np.ndarray]]:
        """Batches of sketches, and which rows of each some documents (int64, ascending and distinct) have; in order."""
        ...


@dataclass(frozen=True)
class ShardSketches:
    """The files that the shards have left, mapped into memory where they are local: only what is asked for is read.

    Attributes:
        work: the stage's work folder.
        numbering: of the documents.
    """

    work: Path
    numbering: Numbering

    def parts(self, documents: np.ndarray) -> Iterator[tuple[pa.RecordBatch, np.ndarray]]:
        """See `Source`; every document takes part."""
        for shard, rows in self.numbering.split(documents):
            batch = read_sketches(self.work, self.numbering.shards[shard])
            yield batch, np.searchsorted(batch["row"].to_numpy(), rows)


class SentSketches:
    """What the shards have sent to one partition: rows with `document`, which ascends from each piece to the next.

    Args:
        pieces: `Shuffled.pieces`.
    """

    def __init__(self, pieces: Iterable[pa.Table]) -> None:
        self._batches = [piece.combine_chunks().to_batches()[0] for piece in pieces if len(piece)]
        self._ends = np.array([batch["document"][-1].as_py() for batch in self._batches], np.int64)

    def parts(self, documents: np.ndarray) -> Iterator[tuple[pa.RecordBatch, np.ndarray]]:
        """See `Source`; every document was sent."""
        places = np.searchsorted(self._ends, documents)
        for place in np.unique(places).tolist():
            batch = self._batches[place]
            yield batch, np.searchsorted(batch["document"].to_numpy(), documents[places == place])


def load_columns(source: Source, documents: np.ndarray, names: Sequence[str]) -> pa.Table:
    """Read columns of the sketches of some documents that take part.

    Args:
        documents: int64, one at least, ascending and distinct.
        names: the columns; those that there are not are left out.
    """
    return pa.concat_tables(
        [
            pa.table({name: batch[name].take(pa.array(rows)) for name in names if name in batch.schema.names})
            for batch, rows in source.parts(documents)
        ]
    )


def load_sketches(source: Source, documents: np.ndarray) -> Sketches:
    """Read the sketches of some documents that take part; `documents` as in `load_columns`, or none."""
    if not len(documents):
        nothing = np.empty((0, 2), np.uint64)
        return Sketches(nothing, nothing, nothing[:, :0], no_shingles(0))
    return unpack_sketches(load_columns(source, documents, SKETCH_COLUMNS))


def count_shingles(source: Source, documents: np.ndarray) -> np.ndarray:
    """How many shingles each of some documents has; they are ascending and distinct."""
    return np.concatenate(
        [
            np.empty(0, np.int64),
            *(np.diff(batch["shingles"].offsets.to_numpy())[rows] for batch, rows in source.parts(documents)),
        ]
    )


def unpack_sketches(table: pa.Table | pa.RecordBatch) -> Sketches:
    """The inverse of `sketch_batch`; without the column `bands` there are none."""
    lists = _combined(table["shingles"])
    has_bands = "bands" in table.schema.names
    bands = binary_numbers(table["bands"]) if has_bands else np.empty((len(lists), 0), np.uint64)
    offsets = lists.offsets.to_numpy()
    sets = ShingleSets(lists.values.to_numpy()[offsets[0] : offsets[-1]], offsets - offsets[0])
    return Sketches(binary_numbers(table["digest"]), binary_numbers(table["url"]), bands, sets)


def digest_urls(documents: pa.Table) -> np.ndarray:
    """BLAKE2b-128 of every document's normalised URL: uint64 of shape (n, 2); zeros where it has none."""
    urls = (None if url is None else normalise_url(url) for url in document_urls(documents))
    digests = b"".join(NO_DIGEST if url is None else _digest(url) for url in urls)
    return np.frombuffer(digests, np.uint64).reshape(-1, 2)


def _digest(url: str) -> bytes:
    return hashlib.blake2b(url.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def _lists(sets: ShingleSets) -> pa.Array:
    return pa.LargeListArray.from_arrays(pa.array(sets.offsets), pa.array(sets.hashes))


def _binary(numbers: np.ndarray) -> pa.Array:
    """Rows of 64-bit numbers as values of fixed size."""
    width = 8 * numbers.shape[1]
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(width), len(numbers), [None, pa.py_buffer(np.ascontiguousarray(numbers))]
    )


def binary_numbers(values: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Values of fixed size as rows of 64-bit numbers, in the byte order of this machine: uint64 of shape (n, w)."""
    values = _combined(values)
    width = values.type.byte_width // 8
    flat = np.frombuffer(values.buffers()[1], np.uint64, len(values) * width, offset=8 * width * values.offset)
    return flat.reshape(-1, width)


def _combined(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
