"""Vectors of documents: computed once per shard, stored as float16, and read again
without the model.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.annotate_batches import Columns, measure_texts
from gristmill.dataprep.documents import Inputs, judged_rows, read_shard
from gristmill.dataprep.duplicates.sketches import describe_seen
from gristmill.dataprep.encoders.document_scores import ReadCounts, count_read
from gristmill.dataprep.encoders.embeddings import Embedder, load_embedder
from gristmill.mixtures.encoder_settings import ReadingModel

READ = ("tokens", "windows", "whole")


def pack_vectors(vectors: np.ndarray) -> pa.Array:
    """Pack vectors (n, dim) into n binary values of 2 dim bytes: float16, which changes
    a cosine by less than 1e-4.
    """
    halves = np.ascontiguousarray(vectors, "<f2")
    kind = pa.binary(2 * halves.shape[1])
    return pa.FixedSizeBinaryArray.from_buffers(
        kind, len(halves), [None, pa.py_buffer(halves.tobytes())]
    )


def unpack_vectors(values: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Unpack values of `pack_vectors` without nulls: float16 of shape (n, dim)."""
    array = (
        pa.concat_arrays(values.chunks)
        if isinstance(values, pa.ChunkedArray) and values.num_chunks
        else values
    )
    width = array.type.byte_width
    if not len(array):
        return np.empty((0, width // 2), np.float16)
    data = np.frombuffer(array.buffers()[1], np.uint8)[
        array.offset * width : (array.offset + len(array)) * width
    ]
    return data.view("<f2").reshape(len(array), width // 2)


def embed_shard(
    inputs: Inputs,
    shard: str,
    sources: tuple[str, ...] | None,
    model: ReadingModel,
    sha256: str,
) -> tuple[pa.RecordBatch, pa.RecordBatch, pa.ChunkedArray, ReadCounts]:
    """Embed the documents of a shard that were kept so far and belong to the sources.

    Returns:
        a row per document that the model could read: `row` (in the shard), `id`,
        `locator`, `length` (code points) and `vector`; sizes and errors of all
        documents of the shard (`sketches.describe_seen`); the texts of the rows; and
        numbers of what the model read.
    """
    kept_shard = read_shard(inputs, shard, ["id", "source", "locator", "text"])
    judged = judged_rows(kept_shard.documents, kept_shard.rows, sources)
    embedder = load_embedder(model, sha256)
    texts = kept_shard.documents["text"].take(pa.array(judged))
    measured, errors = measure_texts(texts, lambda batch: _embed(embedder, batch))
    good = np.array([error is None for error in errors], bool)
    rows = judged[good]
    document_columns = {
        name: kept_shard.documents[name].take(pa.array(rows)).combine_chunks()
        for name in ("id", "locator")
    }
    batch = pa.record_batch(
        {
            "row": pa.array(rows),
            **document_columns,
            "length": pa.array(measured["length"]),
            "vector": pack_vectors(measured["vector"]),
        }
    )
    return (
        batch,
        describe_seen(kept_shard.documents, judged, errors),
        texts.filter(pa.array(good)),
        count_read(*(measured[name] for name in READ)),
    )


def _embed(embedder: Embedder, texts: pa.Array) -> Columns:
    if not len(texts):
        zeros = np.zeros(0, np.int64)
        return {
            "length": zeros,
            "vector": np.zeros((0, embedder.dim), np.float16),
            "tokens": zeros,
            "windows": zeros,
            "whole": np.zeros(0, bool),
        }
    embeddings = embedder.read(texts.to_pylist())
    return {
        "length": pc.utf8_length(texts).to_numpy(zero_copy_only=False).astype(np.int64),
        "vector": embeddings.rows.astype(np.float16),
        "tokens": embeddings.tokens,
        "windows": embeddings.windows,
        "whole": embeddings.whole,
    }
