"""What deduplication remembers of each document while it compares them: digests, length, bands, shingles.

One Arrow file per shard, a row per document that takes part, mapped into memory by whoever compares: only what is
looked at is read. Its columns but the row number are also those of the index that an output keeps (`dedup_index.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.cleaning.urls import document_urls, normalise_url
from gristmill.dataprep.document_numbers import Numbering
from gristmill.dataprep.documents import judged_rows, read_shard
from gristmill.dataprep.duplicates.minhash import band_keys, signatures
from gristmill.dataprep.duplicates.shingles import ShingleSets, join_sets, no_shingles, shingle_sets
from gristmill.dataprep.files import atomic_write
from gristmill.dataprep.measuring import BATCH_ROWS, measure_texts
from gristmill.dataprep.shuffle import open_batches
from gristmill.dataprep.text.kernels import text_buffers
from gristmill.mixtures.steps.dedup import Dedup, MinHash

DIGEST_BYTES = 16
NO_DIGEST = bytes(DIGEST_BYTES)
"""In place of the digest of a URL where a document has none."""


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


def sketch_shard(inputs: Mapping[str, Path], shard: str, section: Dedup) -> tuple[pa.RecordBatch, dict[str, str]]:
    """Sketch the documents of a shard that take part.

    Returns:
        one row each: `row` (in the shard), `id`, `locator`, `length` (code points), `digest`, `url`, `bands` (where
        MinHash is on) and `shingles`; and row number -> error of the documents that raised one and do not take part.
    """
    columns = ["id", "source", "locator", "text", *(["metadata"] if section.url else [])]
    read = read_shard(inputs, shard, columns)
    documents, judged = read.documents, judged_rows(read.documents, read.rows, section.sources)
    measured, errors = measure_texts(documents["text"].take(judged), measure_lengths)
    good = np.array([error is None for error in errors], bool)
    raised = {str(row): error for row, error in zip(judged, errors, strict=True) if error is not None}
    rows = judged[good]
    documents = documents.take(pa.array(rows))
    sets, bands = _sketch_texts(documents["text"], section.minhash)
    urls = digest_urls(documents) if section.url else np.zeros((len(rows), 2), np.uint64)
    return sketch_batch(
        {
            "row": pa.array(rows),
            "id": documents["id"].combine_chunks(),
            "locator": documents["locator"].combine_chunks(),
            "length": pa.array(measured["length"]),
        },
        Sketches(digest_texts(documents["text"]), urls, bands, sets),
    ), raised


def sketch_batch(columns: Mapping[str, pa.Array], sketches: Sketches) -> pa.RecordBatch:
    """The columns of documents, followed by those of their sketches."""
    named = {**columns, "digest": _binary(sketches.digests), "url": _binary(sketches.urls)}
    if sketches.bands.shape[1]:
        named["bands"] = _binary(sketches.bands)
    shingles = pa.LargeListArray.from_arrays(pa.array(sketches.sets.offsets), pa.array(sketches.sets.hashes))
    return pa.record_batch({**named, "shingles": shingles})


def write_sketches(path: Path, batch: pa.RecordBatch) -> None:
    """Write the sketches of a shard."""
    with atomic_write(path) as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def read_sketches(work: Path, shard: str) -> pa.RecordBatch:
    """The sketches of a shard, mapped into memory where the file is local."""
    return open_batches(sketch_path(work, shard)).get_batch(0)


def load_columns(work: Path, numbering: Numbering, documents: np.ndarray, names: Sequence[str]) -> pa.Table:
    """Read columns of the sketches of some documents that take part.

    Args:
        documents: int64, ascending and distinct.
    """
    parts = []
    for shard, rows in numbering.split(documents):
        batch = read_sketches(work, numbering.shards[shard])
        take = pa.array(np.searchsorted(batch["row"].to_numpy(), rows))
        parts.append(pa.table({name: batch[name].take(take) for name in names}))
    if not parts:
        schema = read_sketches(work, numbering.shards[0]).schema
        return pa.schema([schema.field(name) for name in names]).empty_table()
    return pa.concat_tables(parts)


def load_sketches(work: Path, numbering: Numbering, documents: np.ndarray) -> Sketches:
    """Read the sketches of some documents that take part; `documents` as in `load_columns`."""
    if not len(documents):
        nothing = np.empty((0, 2), np.uint64)
        return Sketches(nothing, nothing, nothing[:, :0], no_shingles(0))
    has_bands = "bands" in read_sketches(work, numbering.shards[0]).schema.names
    names = ["digest", "url", "shingles", *(["bands"] if has_bands else [])]
    return unpack_sketches(load_columns(work, numbering, documents, names))


def unpack_sketches(table: pa.Table | pa.RecordBatch) -> Sketches:
    """The inverse of `sketch_batch`; without the column `bands` there are none."""
    lists = _combined(table["shingles"])
    has_bands = "bands" in table.schema.names
    bands = _numbers(table["bands"]) if has_bands else np.empty((len(lists), 0), np.uint64)
    offsets = lists.offsets.to_numpy()
    sets = ShingleSets(lists.values.to_numpy()[offsets[0] : offsets[-1]], offsets - offsets[0])
    return Sketches(_numbers(table["digest"]), _numbers(table["url"]), bands, sets)


def measure_lengths(texts: pa.Array) -> dict[str, np.ndarray]:
    """Code points of every text; raises where one is not UTF-8."""
    text_buffers(texts)
    return {"length": pc.utf8_length(texts).to_numpy(zero_copy_only=False).astype(np.int64)}


def digest_texts(texts: pa.ChunkedArray) -> np.ndarray:
    """BLAKE2b-128 of every text: uint64 of shape (n, 2)."""
    data, offsets = text_buffers(texts)
    view = memoryview(data)  # type: ignore[arg-type]
    return _digests(view[begin:end] for begin, end in pairwise(offsets.tolist()))


def digest_urls(documents: pa.Table) -> np.ndarray:
    """BLAKE2b-128 of every document's normalised URL: uint64 of shape (n, 2); zeros where it has none."""
    urls = (None if url is None else normalise_url(url) for url in document_urls(documents))
    return _digests(None if url is None else url.encode("utf-8", "surrogatepass") for url in urls)


def _digests(values: Iterable[bytes | memoryview | None]) -> np.ndarray:
    digests = b"".join(
        NO_DIGEST if value is None else hashlib.blake2b(value, digest_size=DIGEST_BYTES).digest() for value in values
    )
    return np.frombuffer(digests, np.uint64).reshape(-1, 2)


def _sketch_texts(texts: pa.ChunkedArray, section: MinHash | None) -> tuple[ShingleSets, np.ndarray]:
    """The shingle sets of n texts, and band keys: uint64 of shape (n, bands). Without MinHash both are empty."""
    if section is None:
        return no_shingles(len(texts)), np.empty((len(texts), 0), np.uint64)
    sets, keys = [], [np.empty((0, section.bands), np.uint64)]
    for at in range(0, len(texts), BATCH_ROWS):
        sets.append(shingle_sets(texts.slice(at, BATCH_ROWS), section.ngram))
        signature = signatures(sets[-1], section.bands * section.rows, section.seed)
        keys.append(band_keys(signature, section.bands, section.rows))
    return join_sets(sets), np.concatenate(keys)


def _binary(numbers: np.ndarray) -> pa.Array:
    """Rows of 64-bit numbers as values of fixed size."""
    width = 8 * numbers.shape[1]
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(width), len(numbers), [None, pa.py_buffer(np.ascontiguousarray(numbers))]
    )


def _numbers(values: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """The inverse of `_binary`."""
    values = _combined(values)
    width = values.type.byte_width // 8
    flat = np.frombuffer(values.buffers()[1], np.uint64, len(values) * width, offset=8 * width * values.offset)
    return flat.reshape(-1, width)


def _combined(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
