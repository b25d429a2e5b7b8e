"""Vectors of documents: computed once per shard, stored as float16, and read again
without the model.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.arrays import Column, binary_numbers, binary_rows
from gristmill.dataprep.annotate_batches import Columns, measure_texts
from gristmill.dataprep.dedup.sketches import describe_seen
from gristmill.dataprep.documents import Inputs, read_shard
from gristmill.dataprep.encoders.document_scores import ReadCounts, count_read
from gristmill.dataprep.encoders.embeddings import Embedder, load_embedder
from gristmill.mixtures.schema.encoder_settings import ReadingModel

READ = ("tokens", "windows", "whole")


def pack_vectors(vectors: np.ndarray) -> pa.Array:
    """Pack vectors (n, dim) into n binary values of 2 dim bytes: float16, which changes
    a cosine by less than 1e-4.
    """
    return binary_rows(vectors.astype("<f2"))


def unpack_vectors(values: Column) -> np.ndarray:
    """Unpack values of `pack_vectors` without nulls: float16 of shape (n, dim)."""
    return binary_numbers(values, np.float16)


def embed_shard(
    inputs: Inputs,
    shard: str,
    sources: tuple[str, ...] | None,
    model: ReadingModel,
    sha256: str,
) -> tuple[pa.Table, pa.Table, pa.ChunkedArray, ReadCounts]:
    """Embed the documents of a shard that were kept so far and belong to the sources.

    Returns:
        a row per document that the model could read: `row` (in the shard), `id`,
        `locator`, `length` (code points) and `vector`; sizes and errors of all
        documents of the shard (`sketches.describe_seen`); the texts of the rows; and
        numbers of what the model read.
    """
    read = read_shard(inputs, shard, ["id", "source", "locator", "text"], sources)
    embedder = load_embedder(model, sha256)
    texts = read.judged_documents["text"]
    measured, errors = measure_texts(texts, lambda batch: _embed(embedder, batch))
    good = np.array([error is None for error in errors], bool)
    rows = read.judged[good]
    documents = read.documents.select(["id", "locator"]).take(rows)
    embedded = {
        "row": rows,
        "id": documents["id"],
        "locator": documents["locator"],
        "length": measured["length"],
        "vector": pack_vectors(measured["vector"]),
    }
    return (
        pa.table(embedded),
        describe_seen(read.documents, read.judged, errors),
        texts.filter(good),
        count_read(*(measured[name] for name in READ)),
    )


def _embed(embedder: Embedder, texts: pa.Array) -> Columns:
    if not len(texts):
        columns = _embed(embedder, pa.array([""]))
        return {name: values[:0] for name, values in columns.items()}
    rows, *counts = embedder.read(texts.to_pylist())
    return {
        "length": pc.utf8_length(texts).to_numpy(zero_copy_only=False).astype(np.int64),
        "vector": rows.astype(np.float16),
        **dict(zip(READ, counts, strict=True)),
    }
