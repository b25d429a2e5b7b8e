"""Shares of licences: documents, text and tokens by source and SPDX expression."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.arrays import Column
from gristmill.dataprep.corpus import TEXT, Corpus
from gristmill.dataprep.licences.licences import SPDX
from gristmill.mixtures.spdx import UNKNOWN, spdx_of

LICENCE = "licence"


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
    measured = reversed(corpus.measured.items())
    return next((name for name, (_, own) in measured if own == SPDX), LICENCE)


def expressions(licences: Column) -> pa.Array:
    """SPDX expressions, or `unknown`, of n stated licences."""
    names = pc.dictionary_encode(licences, null_encoding="encode")
    names = names.combine_chunks() if isinstance(names, pa.ChunkedArray) else names
    known = [
        (spdx_of(name) if name and name != UNKNOWN else None) or UNKNOWN
        for name in names.dictionary.to_pylist()
    ]
    return pa.array(known, pa.string()).take(names.indices)


def count_shares(tables: Iterable[pa.Table]) -> list[LicenceShare]:
    """Shares by source and licence, of tables with `source`, `licence`, `bytes` and
    `tokens`, null if unknown, per document.
    """
    keys = ["source", LICENCE]
    sizes = [("bytes", "sum"), ("tokens", "sum")]
    parts = [
        table.group_by(keys).aggregate([([], "count_all"), *sizes]) for table in tables
    ]
    sums = [(name, "sum") for name in ("count_all", "bytes_sum", "tokens_sum")]
    grouped = pa.concat_tables(parts).group_by(keys).aggregate(sums)
    *groups, documents, text_bytes, tokens = grouped.sort_by(
        [(key, "ascending") for key in keys]
    ).columns
    size = text_bytes if tokens.null_count else tokens
    share = pc.divide(size.cast(pa.float64()), max(pc.sum(size).as_py() or 0, 1))
    columns = [*groups, documents, text_bytes, tokens, share]
    return [
        LicenceShare(*row)
        for row in zip(*(column.to_pylist() for column in columns), strict=True)
    ]


def shard_tables(
    corpus: Corpus, tokens_of: Callable[[str], pa.Table] | None = None
) -> Iterator[pa.Table]:
    """Source, licence and size of the kept documents of each shard, for `count_shares`.

    Args:
        corpus: the documents.
        tokens_of: reads `id`, `tokens` and `bytes` of a shard's tokenised documents;
            without it the texts are measured.
    """
    column = licence_column(corpus)
    for shard in corpus.shards:
        if tokens_of is None:
            documents = corpus.read(shard, ["source", column, TEXT])
            text_bytes = pc.binary_length(documents[TEXT]).cast(pa.int64())
            tokens = pa.nulls(len(documents), pa.int64())
        else:
            tokenized = tokens_of(shard)
            documents = corpus.read(shard, ["id", "source", column])
            ids = [each.hex() for each in tokenized["id"].to_pylist()]
            places = pc.index_in(pa.array(ids, pa.string()), documents["id"])
            documents = documents.take(places)
            text_bytes, tokens = tokenized["bytes"], tokenized["tokens"]
        licences = expressions(documents[column])
        yield pa.table(
            [documents["source"], licences, text_bytes, tokens],
            ["source", LICENCE, "bytes", "tokens"],
        )


def by_licence(shares: Iterable[LicenceShare]) -> dict[str, float]:
    """Share of each licence, the largest first."""
    sums: dict[str, float] = defaultdict(float)
    for share in shares:
        sums[share.licence] += share.share
    return dict(sorted(sums.items(), key=lambda item: -item[1]))
