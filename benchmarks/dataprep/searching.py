"""Search: nearest documents by meaning and by words, against NumPy and DuckDB doing the
same over the same Parquet.

By meaning the peer reads all vectors into memory and sorts their cosines, from a file
of its own with 4 bytes a number. By words it is one query of DuckDB that counts words
by regular expressions and computes BM25. Both sides read their files each time, as a
command does; times are of the processor. Sides that return different documents are an
error.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.dataprep.stage_runs import write_shard
from benchmarks.installed_texts import CORPUS, documentation
from benchmarks.measuring import Row, fastest, row
from gristmill.dataprep.corpus import Corpus
from gristmill.dataprep.documents import read_documents
from gristmill.dataprep.semantic.embedding_store import pack_vectors
from gristmill.dataprep.semantic.vector_search import nearest
from gristmill.dataprep.words.bm25_scan import K1, B, search_words, terms_of

DOCUMENTS, DIM, MOST = 20_000, 384, 200
WORDS = ("value", "array", "context")
REPEATS = 3


def rows(repeats: int = REPEATS) -> Iterator[Row]:
    """Measure documents per second."""
    with tempfile.TemporaryDirectory(prefix="gristmill-bench-") as place:
        folder = Path(place)
        write_shard(folder / "ingest", 0, documentation(DOCUMENTS))
        corpus = Corpus({"ingest": folder / "ingest"})
        yield by_meaning(folder, corpus, repeats)
        yield by_words(corpus, repeats)


def by_meaning(folder: Path, corpus: Corpus, repeats: int) -> Row:
    """Measure cosines with stored vectors."""
    rng = np.random.default_rng(4)
    drawn = rng.normal(size=(DOCUMENTS, DIM)).astype(np.float32)
    vectors = (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float16)
    query, (shard,) = vectors[17].astype(np.float32), corpus.shards
    ids = read_documents(corpus.inputs, shard, ["id"])["id"]
    (folder / "vectors").mkdir()
    pq.write_table(
        pa.table({"id": ids, "vector": pack_vectors(vectors)}),
        folder / "vectors" / shard,
    )
    wide = pa.FixedSizeListArray.from_arrays(
        pa.array(vectors.astype(np.float32).reshape(-1)), DIM
    )
    pq.write_table(pa.table({"id": ids, "vector": wide}), folder / "wide.parquet")

    def ours() -> list[bytes]:
        return [
            hit.id for hit in nearest(folder / "vectors", corpus.shards, query, MOST)[0]
        ]

    def plain() -> list[bytes]:
        table = pq.read_table(folder / "wide.parquet")
        all_vectors = (
            table["vector"].combine_chunks().flatten().to_numpy().reshape(-1, DIM)
        )
        best = np.argsort(-(all_vectors @ query), kind="stable")[:MOST]
        best_ids: list[bytes] = table["id"].take(pa.array(best)).to_pylist()
        return best_ids

    check_same(ours(), plain())
    our_seconds, peer_seconds = fastest(repeats, ours, plain, clock=time.process_time)
    # 2.51, 2026-11-28, 2 cores
    return row(
        "search_by_meaning_vs_numpy",
        DOCUMENTS / our_seconds,
        DOCUMENTS / peer_seconds,
        "documents/s",
        f"{DOCUMENTS:,} vectors of {DIM} numbers in float16; peer: read_table and "
        "argsort, in float32",
        floor=1.8,
    )


def by_words(corpus: Corpus, repeats: int) -> Row:
    """Measure BM25 over the stored texts."""
    import duckdb

    (shard,) = corpus.shards
    terms = terms_of(" ".join(WORDS))
    counted = ", ".join(
        f"len(regexp_extract_all(lower(text), '\\b{word}\\b')) as n{at}"
        for at, word in enumerate(WORDS)
    )
    totals = ", ".join(
        f"sum((n{at} > 0)::int) over () as d{at}" for at in range(len(WORDS))
    )
    score = " + ".join(
        f"ln(1 + (n - d{at} + 0.5) / (d{at} + 0.5)) * n{at} * {K1 + 1} / (n{at} + "
        f"{K1} * ({1 - B} + {B} * size / mean))"
        for at in range(len(WORDS))
    )
    query = (
        "with counted as (select file_row_number as row, strlen(text) as size, "
        f"{counted} from read_parquet('{corpus.inputs['ingest'] / shard}', "
        "file_row_number = true)), known as (select *, count(*) over () as n, "
        f"avg(size) over () as mean, {totals} from counted) select row from known "
        f"where {' + '.join(f'n{at}' for at in range(len(WORDS)))} > 0 order by "
        f"{score} desc, row limit {MOST}"
    )
    connection = duckdb.connect(config={"threads": 1})
    connection.execute("set enable_progress_bar = false")

    def ours() -> list[int]:
        return [hit.row for hit in search_words(corpus, terms, MOST).hits]

    def plain() -> list[int]:
        return [number for (number,) in connection.execute(query).fetchall()]

    check_same(ours(), plain())
    our_seconds, peer_seconds = fastest(repeats, ours, plain, clock=time.process_time)
    return row(
        "search_by_words_vs_duckdb",
        DOCUMENTS / our_seconds,
        DOCUMENTS / peer_seconds,
        "documents/s",
        f"BM25 of {len(WORDS)} words over {DOCUMENTS:,} texts of {CORPUS}; peer: one "
        "query with regular expressions",
        floor=0.35,  # 0.67 of 4,000 texts, 2026-11-24, 2 busy cores
    )


def check_same(ours: list[bytes] | list[int], peer: list[bytes] | list[int]) -> None:
    """Check that both sides return the same documents; those of equal scores may differ
    in order.

    Raises:
        RuntimeError: they do not.
    """
    if len({*ours} & {*peer}) < 0.99 * len(peer):
        raise RuntimeError(
            f"the sides return different documents: {ours[:5]} and {peer[:5]}"
        )
