"""The vectors of documents in files: made once per shard, of 2 bytes a number, and read again without the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.documents import judged_rows, read_shard
from gristmill.dataprep.duplicates.sketches import describe_seen
from gristmill.dataprep.measuring import measure_texts
from gristmill.dataprep.models.embeddings import Embedder, load_embedder
from gristmill.mixtures.reading_model import ReadingModel

READ = ("tokens", "windows", "whole")


def pack_vectors(vectors: np.ndarray) -> pa.Array:
    """Vectors (n, dim) as n binary values of 2 dim bytes: float16, which changes a cosine by less than 1e-4."""
    halves = np.ascontiguousarray(vectors, "<f2")
    kind = pa.binary(2 * halves.shape[1])
    return pa.FixedSizeBinaryArray.from_buffers(kind, len(halves), [None, pa.py_buffer(halves.tobytes())])


def unpack_vectors(values: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """The inverse of `pack_vectors`: float16 of shape (n, dim), without nulls."""
    whole = pa.concat_arrays(values.chunks) if isinstance(values, pa.ChunkedArray) and values.num_chunks else values
    width = whole.type.byte_width
    if not len(whole):
        return np.empty((0, width // 2), np.float16)
    data = np.frombuffer(whole.buffers()[1], np.uint8)[whole.offset * width : (whole.offset + len(whole)) * width]
    return data.view("<f2").reshape(len(whole), width // 2)


def embed_shard(
    inputs: Mapping[str, Path], shard: str, sources: tuple[str, ...] | None, model: ReadingModel, sha256: str
) -> tuple[pa.RecordBatch, pa.RecordBatch, pa.ChunkedArray, dict[str, int]]:
    """The vectors of a shard's documents that were kept so far and belong to the sources.

    Returns:
        a row for each that the model could read: `row` (in the shard), `id`, `locator`, `length` (code points) and
        `vector`; what was seen of all of the shard (`sketches.describe_seen`); row for row
        the texts; and how many `documents`, `tokens` and
        `windows` were read, and of how many documents not all (`cut`).
    """
    read = read_shard(inputs, shard, ["id", "source", "locator", "text"])
    judged = judged_rows(read.documents, read.rows, sources)
    embedder = load_embedder(model, sha256)
    texts = read.documents["text"].take(pa.array(judged))
    measured, errors = measure_texts(texts, lambda batch: _embed(embedder, batch))
    good = np.array([error is None for error in errors], bool)
    rows = judged[good]
    own = {name: read.documents[name].take(pa.array(rows)).combine_chunks() for name in ("id", "locator")}
    batch = pa.record_batch(
        {
            "row": pa.array(rows),
            **own,
            "length": pa.array(measured["length"]),
            "vector": pack_vectors(measured["vector"]),
        }
    )
    tokens, windows, whole = (measured[name] for name in READ)
    counted = {
        "documents": len(rows),
        "tokens": int(tokens.sum()),
        "windows": int(windows.sum()),
        "cut": int((~whole).sum()),
    }
    return batch, describe_seen(read.documents, judged, errors), texts.filter(pa.array(good)), counted


def _embed(embedder: Embedder, texts: pa.Array) -> dict[str, Any]:
    if not len(texts):
        nothing = np.zeros(0, np.int64)
        return {
            "length": nothing,
            "vector": np.zeros((0, embedder.dim), np.float16),
            "tokens": nothing,
            "windows": nothing,
            "whole": np.zeros(0, bool),
        }
    found = embedder.read(texts.to_pylist())
    return {
        "length": pc.utf8_length(texts).to_numpy(zero_copy_only=False).astype(np.int64),
        "vector": found.rows.astype(np.float16),
        "tokens": found.tokens,
        "windows": found.windows,
        "whole": found.whole,
    }
