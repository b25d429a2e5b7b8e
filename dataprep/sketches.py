"""What deduplication remembers of each document while it compares them: digest, length, shingles, keys.

Documents are numbered 0, 1, 2, ... through the shards for the time of the job. The numbers depend on how the
documents are cut into shards and therefore never reach the output.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.dataprep.documents import judged_rows, kept_rows, read_documents, shard_names
from gristmill.dataprep.files import atomic_write
from gristmill.dataprep.measuring import BATCH_ROWS, measure_texts
from gristmill.dataprep.minhash import band_keys, signatures
from gristmill.dataprep.shingles import ShingleSets, join_sets, no_shingles, shingle_sets
from gristmill.dataprep.shuffle import open_batches, write_partitions
from gristmill.dataprep.text_buffers import text_buffers
from gristmill.mixtures.dedup import Dedup, MinHash

DIGEST_BYTES = 16
BYTES_PER_KEY = 24


@dataclass(frozen=True)
class Numbering:
    """Documents as numbers.

    Attributes:
        shards: names of the document shards, in order.
        starts: int64 of shape (shards + 1,); shard i holds the documents from starts[i] up to starts[i + 1].
    """

    shards: Sequence[str]
    starts: np.ndarray

    def split(self, documents: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Cut ascending document numbers into (shard, row numbers) for every shard that has any."""
        ends = np.searchsorted(documents, self.starts)
        return [
            (shard, documents[ends[shard] : ends[shard + 1]] - self.starts[shard])
            for shard in range(len(self.shards))
            if ends[shard] < ends[shard + 1]
        ]


@dataclass(frozen=True)
class Sketches:
    """What is remembered of n documents.

    Attributes:
        digests: uint64 of shape (n, 2), of the text.
        lengths: int64 of shape (n,), code points.
        sets: the shingles.
    """

    digests: np.ndarray
    lengths: np.ndarray
    sets: ShingleSets


def number_documents(ingest: Path) -> Numbering:
    """Number the documents of a committed ingest."""
    shards = shard_names(ingest)
    sizes = []
    for shard in shards:
        with (ingest / shard).open("rb") as stream:
            sizes.append(pq.read_metadata(stream).num_rows)
    return Numbering(shards, np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64))


def keys_per_document(section: Dedup) -> int:
    """How many keys a document has at the most: one for its text, one per band."""
    return int(section.exact) + (section.minhash.bands if section.minhash else 0)


def sketch_path(work: Path, shard: str) -> Path:
    """The file with digests, lengths and shingles of a shard's documents."""
    return work / "sketches" / f"{shard}.arrow"


def keys_path(work: Path, shard: str) -> Path:
    """The file with the keys of a shard's documents, by partition."""
    return work / "sketches" / f"{shard}.keys.arrow"


def sketch_shard(
    inputs: Mapping[str, Path], shard: str, start: int, section: Dedup, num_partitions: int, work: Path
) -> tuple[list[Path], dict[str, str]]:
    """Sketch the documents of a shard that take part, into `sketch_path` and `keys_path`.

    Args:
        start: number of the shard's first document.

    Returns:
        the files; and row number -> error of the documents that raised one and do not take part.
    """
    documents = read_documents(inputs, shard, ["source", "text"])
    judged = judged_rows(documents, kept_rows(inputs, shard), section.sources)
    texts = documents["text"].take(judged)
    measured, errors = measure_texts(texts, measure_lengths)
    good = np.array([error is None for error in errors], bool)
    rows, texts = judged[good], texts.filter(pa.array(good))
    digests = digest_texts(texts)
    sets, bands = _sketch_texts(texts, section.minhash)
    keys = _key_table(start + rows, digests, sets, bands, section.exact)
    partitions = (keys["key"].to_numpy() >> np.uint64(32)).astype(np.int64) % num_partitions
    _write_sketches(sketch_path(work, shard), rows, Sketches(digests, measured["length"], sets))
    write_partitions(keys_path(work, shard), keys, partitions, num_partitions)
    raised = {str(row): error for row, error in zip(judged, errors, strict=True) if error is not None}
    return [sketch_path(work, shard), keys_path(work, shard)], raised


def measure_lengths(texts: pa.Array) -> dict[str, np.ndarray]:
    """Code points of every text; raises where one is not UTF-8."""
    text_buffers(texts)
    return {"length": pc.utf8_length(texts).to_numpy(zero_copy_only=False).astype(np.int64)}


def digest_texts(texts: pa.ChunkedArray) -> np.ndarray:
    """BLAKE2b-128 of every text: uint64 of shape (n, 2)."""
    data, offsets = text_buffers(texts)
    digests = b"".join(
        hashlib.blake2b(data[begin:end], digest_size=DIGEST_BYTES).digest()  # type: ignore[arg-type]
        for begin, end in pairwise(offsets.tolist())
    )
    return np.frombuffer(digests, np.uint64).reshape(-1, 2)


def load_sketches(work: Path, numbering: Numbering, documents: np.ndarray) -> Sketches:
    """Read the sketches of some documents that take part.

    Args:
        documents: int64, ascending and distinct.
    """
    parts = []
    for shard, rows in numbering.split(documents):
        batch = open_batches(sketch_path(work, numbering.shards[shard])).get_batch(0)
        parts.append(batch.take(pa.array(np.searchsorted(batch["row"].to_numpy(), rows))))
    if not parts:
        return Sketches(np.empty((0, 2), np.uint64), np.empty(0, np.int64), no_shingles(0))
    lists = pa.chunked_array([part["shingles"] for part in parts]).combine_chunks()
    digests = pa.chunked_array([part["digest"] for part in parts]).combine_chunks()
    return Sketches(
        np.frombuffer(digests.buffers()[1], np.uint64).reshape(-1, 2),
        np.concatenate([part["length"].to_numpy() for part in parts]),
        ShingleSets(lists.values.to_numpy(), lists.offsets.to_numpy()),
    )


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


def _write_sketches(path: Path, rows: np.ndarray, sketches: Sketches) -> None:
    batch = pa.record_batch(
        {
            "row": pa.array(rows),
            "length": pa.array(sketches.lengths),
            "digest": pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(DIGEST_BYTES), len(rows), [None, pa.py_buffer(np.ascontiguousarray(sketches.digests))]
            ),
            "shingles": pa.LargeListArray.from_arrays(pa.array(sketches.sets.offsets), pa.array(sketches.sets.hashes)),
        }
    )
    with atomic_write(path) as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def _key_table(
    documents: np.ndarray, digests: np.ndarray, sets: ShingleSets, bands: np.ndarray, exact: bool
) -> pa.Table:
    """Rows (key, document, text) of all keys: that of the text where `exact`, and those of the bands.

    `text` is half of the text's digest; a text without shingles has no band keys.
    """
    found = np.flatnonzero(np.diff(sets.offsets))
    columns = [(digests[:, 1], np.arange(len(documents)))] if exact else []
    columns += [(bands[found, band], found) for band in range(bands.shape[1])]
    keys = np.concatenate([np.empty(0, np.uint64), *(keys for keys, _ in columns)])
    which = np.concatenate([np.empty(0, np.int64), *(positions for _, positions in columns)])
    return pa.table({"key": keys, "document": documents[which], "text": digests[which, 0]})
