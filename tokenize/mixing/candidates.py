"""The documents that a mixture chooses from, and which of them may train, are held out or are left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.counts import Counts
from gristmill.dataprep.documents import ID_BYTES, read_annotations, read_table, shard_names
from gristmill.tokenize.encoding.encode import docs_name
from gristmill.tokenize.mixing.draws import drawn_below, id_words
from gristmill.tokenize.mixing.pack import Documents
from gristmill.tokenize.mixing.quotas import MixError
from gristmill.tokenize.mixing.where import MET, UNKNOWN, judge, measured_columns
from gristmill.tokenize.order import order_key

VALIDATION_KEY = order_key(0, "validation")
"""No seed of the mixture moves a document between training and validation."""


@dataclass(frozen=True)
class Candidates:
    """All tokenised documents, ordered by id, so that nothing depends on the shards that they came in.

    Attributes:
        documents: their ids and where their tokens lie.
        source: int64 of shape (n,), source numbers.
        row: int64 of shape (n,), row within the document shard.
        text_bytes: int64 of shape (n,).
        held_out: bool of shape (n,): meets its source's condition, and belongs to validation.
        trains: bool of shape (n,): meets its source's condition, and may be trained on.
        unknown: bool of shape (n,): its source's condition asks for what was not measured of it.
    """

    documents: Documents
    source: np.ndarray
    row: np.ndarray
    text_bytes: np.ndarray
    held_out: np.ndarray
    trains: np.ndarray
    unknown: np.ndarray


def collect(
    inputs: Mapping[str, Path], conditions: Mapping[str, str | None], validation: float
) -> Candidates:
    """Read the tables of all tokenised documents, judge the conditions and split off the validation set.

    A document is held out if the hash of its duplicate cluster (of its id, where no cluster was found out) is below
    the share: near-duplicates never lie on both sides.

    Args:
        inputs: `ingest`, the annotating stages, `tokenize`.
        conditions: source -> its `where`, all sources in order.
        validation: share of clusters that is held out.

    Raises:
        MixError: a condition is wrong, or documents belong to a source that is not among `conditions`.
    """
    parts = [_read_shard(inputs, shard, number, conditions)
             for number, shard in enumerate(shard_names(inputs["ingest"]))]
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    words, clusters, source, row, part, offset, tokens, text_bytes, verdicts = columns
    order = np.lexsort((words[:, 1], words[:, 0]))
    split = drawn_below(clusters, VALIDATION_KEY, validation)
    met = verdicts == MET
    return Candidates(
        Documents(words[order], part[order], offset[order], tokens[order]), source[order], row[order],
        text_bytes[order],
        (met & split)[order], (met & ~split)[order], (verdicts == UNKNOWN)[order],
    )


def unused(candidates: Candidates, used: np.ndarray) -> dict[str, np.ndarray]:
    """Why documents are in no row: rule -> bool of shape (n,).

    The rules are `where` (its condition is not met), `where_unknown` (the condition asks for what was not measured),
    `quota` (may train, but its source's share was full) and `validation_rest` (held out, but the validation rows were
    full, or too little for one more).
    """
    ruled_out = ~candidates.held_out & ~candidates.trains
    return {
        "where": ruled_out & ~candidates.unknown, "where_unknown": ruled_out & candidates.unknown,
        "quota": candidates.trains & ~used, "validation_rest": candidates.held_out & ~used,
    }


def count(candidates: Candidates, used: np.ndarray, sources: Sequence[str]) -> Counts:
    """The ledger of a mixture: a document is kept if any of its tokens is in a row.

    Args:
        candidates: all documents.
        used: bool of shape (n,).
        sources: names by number.

    Returns:
        counts with the rules of `unused`.
    """
    rules = unused(candidates, used)

    def ledger(these: np.ndarray) -> Counts:
        dropped = {rule: int((mask & these).sum()) for rule, mask in rules.items()}
        return {
            "read": int(these.sum()), "kept": int((used & these).sum()), "quarantined": 0,
            "dropped": {rule: number for rule, number in dropped.items() if number},
            "bytes_read": int(candidates.text_bytes[these].sum()),
            "bytes_kept": int(candidates.text_bytes[these & used].sum()),
        }

    per_source = {name: ledger(candidates.source == number) for number, name in enumerate(sources)}
    return {**ledger(np.ones(len(used), dtype=bool)), "sources": per_source}


def _read_shard(
    inputs: Mapping[str, Path], shard: str, number: int, conditions: Mapping[str, str | None]
) -> tuple[np.ndarray, ...]:
    docs = read_table(inputs["tokenize"] / docs_name(shard))
    names = docs["source"].cast(pa.string())
    source = pc.index_in(names, value_set=pa.array(list(conditions), pa.string()))
    if source.null_count:
        stranger = names.filter(pc.is_null(source))[0].as_py()
        raise MixError(f"{inputs['tokenize'] / docs_name(shard)}: documents of {stranger!r}, which is no source of the "
                       f"mixture (sources: {', '.join(conditions)})")
    numbers = source.to_numpy().astype(np.int64)
    return (
        id_words(docs["id"]), _cluster_words(inputs, shard, docs), numbers, docs["row"].to_numpy(),
        np.full(len(docs), number, dtype=np.int64), docs["offset"].to_numpy(), docs["tokens"].to_numpy(),
        docs["bytes"].to_numpy(),
        _verdicts(inputs, shard, docs, numbers, conditions),
    )


def _cluster_words(inputs: Mapping[str, Path], shard: str, docs: pa.Table) -> np.ndarray:
    if "dedup" not in inputs:
        return id_words(docs["id"])
    clusters = read_annotations(inputs, shard, "dedup", ["cluster"])["cluster"].take(docs["row"])
    return id_words(pc.coalesce(clusters.cast(pa.binary(ID_BYTES)), docs["id"]))


def _verdicts(
    inputs: Mapping[str, Path], shard: str, docs: pa.Table, source: np.ndarray, conditions: Mapping[str, str | None]
) -> np.ndarray:
    verdicts = np.full(len(docs), MET, dtype=np.int8)
    if not any(conditions.values()):
        return verdicts
    measured = measured_columns(inputs, shard, docs)
    for number, (name, condition) in enumerate(conditions.items()):
        if condition is not None:
            own = source == number
            verdicts[own] = judge(name, condition, measured.filter(pa.array(own)))
    return verdicts
