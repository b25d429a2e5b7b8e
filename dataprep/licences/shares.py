"""Shares of licences: documents, text and tokens by source and SPDX expression."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.arrays import Column
from gristmill.dataprep.corpus import TEXT, Corpus
from gristmill.dataprep.licences.licences import SPDX
from gristmill.dataprep.licences.statements import LICENCE
from gristmill.mixtures.spdx import expression_of

SIZES = pa.schema(
    {
        "source": pa.string(),
        "licence": pa.string(),
        "documents": pa.int64(),
        "text_bytes": pa.int64(),
        "tokens": pa.int64(),
    }
)
"""Sizes of documents by source and SPDX expression; tokens are null if not counted."""
_SUMS = """
    WITH sums AS (
        SELECT source, licence, sum(documents)::BIGINT AS documents,
            sum(text_bytes)::BIGINT AS text_bytes, sum(tokens)::BIGINT AS tokens,
            sum(coalesce(tokens, text_bytes))::BIGINT AS size
        FROM sizes GROUP BY source, licence
    )
    SELECT * EXCLUDE size, size / greatest(sum(size) OVER (), 1)
    FROM sums ORDER BY source, licence
"""


@dataclass(frozen=True)
class LicenceShare:
    """Documents of a source under one licence.

    Attributes:
        source: its name.
        licence: SPDX expression, or `unknown`.
        documents, text_bytes: number of documents, and size of their texts in UTF-8.
        tokens: of their texts; None if nothing is tokenised.
        share: of the tokens, or of the text without them, among all sources.
    """

    source: str
    licence: str
    documents: int
    text_bytes: int
    tokens: int | None
    share: float = 0.0


def licence_column(corpus: Corpus) -> str:
    """Column with the licences: that of the last step `licences`, or `licence`, which
    has what the metadata and the manifest state.
    """
    return corpus.last_measured(SPDX) or LICENCE


def expressions(licences: Column) -> pa.Array:
    """SPDX expressions, or `unknown`, of n stated licences."""
    names = pc.dictionary_encode(licences, null_encoding="encode")
    names = names.combine_chunks() if isinstance(names, pa.ChunkedArray) else names
    known = map(expression_of, names.dictionary.to_pylist())
    return pa.array(known, pa.string()).take(names.indices)


def measure_sizes(
    documents: pa.Table, licence: str, tokenized: pa.Table | None = None
) -> pa.Table:
    """SIZES of n documents.

    Args:
        documents: `source`, the column with the licence, and the text if it is to be
            measured.
        tokenized: `tokens` and `bytes` of the n documents, if they are tokenised.
    """
    if tokenized is None:
        text_bytes = pc.binary_length(documents[TEXT])
        tokens = pa.nulls(len(documents), pa.int64())
    else:
        text_bytes, tokens = tokenized["bytes"], tokenized["tokens"]
    licences = expressions(documents[licence])
    ones = np.ones(len(documents), np.int64)
    columns = [documents["source"], licences, ones, text_bytes, tokens]
    return pa.table(columns, schema=SIZES)


def sum_shares(sizes: Iterable[pa.Table]) -> list[LicenceShare]:
    """Shares by source and licence, of tables of SIZES."""
    import duckdb

    batches = (batch for table in sizes for batch in table.to_batches())
    reader = pa.RecordBatchReader.from_batches(SIZES, batches)
    with duckdb.connect() as connection:
        rows = connection.register("sizes", reader).sql(_SUMS).fetchall()
    return [LicenceShare(*row) for row in rows]


def shares_by(
    key: Literal["source", "licence"], shares: Iterable[LicenceShare]
) -> dict[str, float]:
    """Share of each source or licence, the largest first."""
    sums: dict[str, float] = defaultdict(float)
    for share in shares:
        sums[getattr(share, key)] += share.share
    return dict(sorted(sums.items(), key=lambda item: -item[1]))
