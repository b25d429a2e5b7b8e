"""The documents that a mixture chooses from: which may train, are held out or left out, and the table that says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.counts import Counts
from gristmill.dataprep.documents import ID_BYTES, read_annotations, read_table, step_with, write_table
from gristmill.tokenize.document_sampling import drawn_below, id_words, ordered_by, word_ids
from gristmill.tokenize.encoding.encode import docs_name
from gristmill.tokenize.importing.corpora import corpus_shards
from gristmill.tokenize.mixing.quotas import MixError
from gristmill.tokenize.mixing.where import MET, UNKNOWN, judge, measured_columns, repeat
from gristmill.tokenize.order import order_key
from gristmill.tokenize.packed_files import INDEX_GROUP_ROWS, LEDGER, LEDGER_SCHEMA

CLUSTER = "cluster"
"""The column that near-duplicates share."""
VALIDATION_KEY = order_key(0, "validation")
"""No seed of the mixture moves a document between training and validation."""


@dataclass(frozen=True)
class Documents:
    """Where the tokens of all documents lie, ordered by id.

    Attributes:
        words: uint64 of shape (n, 2), the ids.
        part: int64 of shape (n,), number of the token part.
        offset: int64 of shape (n,), first token within it.
        tokens: int64 of shape (n,), without an end of text.
    """

    words: np.ndarray
    part: np.ndarray
    offset: np.ndarray
    tokens: np.ndarray


@dataclass(frozen=True)
class Candidates:
    """All tokenised documents, ordered by id, so that nothing depends on the shards that they came in.

    Attributes:
        documents: their ids and where their tokens lie.
        source: int64 of shape (n,), source numbers.
        row: int64 of shape (n,), row within the document shard.
        text_bytes: int64 of shape (n,).
        held_out: bool of shape (n,): meets its source's condition, and belongs to validation.
        trains: bool of shape (n,): meets its source's condition, and is not held out.
        unknown: bool of shape (n,): its source's condition asks for what was not measured of it.
        repeats: int64 of shape (n,): how often it is in one pass over its source's training documents (UNKNOWN where
            the expression `epochs` of its source uses a column that is null for it; such a document does not train).
    """

    documents: Documents
    source: np.ndarray
    row: np.ndarray
    text_bytes: np.ndarray
    held_out: np.ndarray
    trains: np.ndarray
    unknown: np.ndarray
    repeats: np.ndarray

    def training(self, source: int) -> np.ndarray:
        """The documents (int64 numbers) of a source that may be trained on."""
        return np.flatnonzero(self.trains & (self.repeats > 0) & (self.source == source))

    def pass_tokens(self, source: int) -> int:
        """Tokens of one pass over a source's training documents, ends of text and repeats counted."""
        these = self.training(source)
        return int(((self.documents.tokens[these] + 1) * self.repeats[these]).sum())


def collect(
    inputs: Mapping[str, Path], sources: Mapping[str, Mapping[str, Any]], validation: float, seed: int
) -> Candidates:
    """Read the tables of all tokenised documents, evaluate the sources' expressions and split off the validation set.

    A document is held out if the hash of its duplicate cluster (of its id, where no cluster was found out) is below
    the share: near-duplicates never lie on both sides.

    Args:
        inputs: `ingest`, the annotating stages and `tokenize`; `import_tokens`.
        sources: name -> `where` and `epochs`, all sources in order.
        validation: share of clusters that is held out.
        seed: of the draws that decide parts of an epoch.

    Raises:
        MixError: an expression is wrong, or documents belong to a source that is not among `sources`.
    """
    parts = [_read_shard(corpus, shard, number, sources, order_key(seed, "mix", "repeats"))
             for number, (corpus, shard) in enumerate(corpus_shards(inputs))]
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    words, clusters, source, row, part, offset, tokens, text_bytes, verdicts, repeats = columns
    order = ordered_by(words[:, 0], words[:, 1])
    split = drawn_below(clusters, VALIDATION_KEY, validation)
    met = verdicts == MET
    return Candidates(
        Documents(words[order], part[order], offset[order], tokens[order]), source[order], row[order],
        text_bytes[order], (met & split)[order], (met & ~split)[order], (verdicts == UNKNOWN)[order], repeats[order],
    )


def unused(
    candidates: Candidates, used: np.ndarray, emptied: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Why documents are in no row: rule -> bool of shape (n,), each document under one rule at most.

    The rules are `where` (its condition is not met), `where_unknown` (the condition asks for what was not measured),
    `epochs` and `epochs_unknown` (its source takes it no times, or by what was not measured), `quota` (may train, but
    its source's share was full) and `validation_rest` (held out, but the validation rows were full, or too little for
    one more). What was emptied comes first (`exclude.without_emptied`).
    """
    ruled_out, repeats = ~candidates.held_out & ~candidates.trains, candidates.repeats
    rules = {
        "where": ruled_out & ~candidates.unknown, "where_unknown": ruled_out & candidates.unknown,
        "epochs": candidates.trains & (repeats == 0), "epochs_unknown": candidates.trains & (repeats == UNKNOWN),
        "quota": candidates.trains & (repeats > 0) & ~used, "validation_rest": candidates.held_out & ~used,
    }
    before = np.zeros(len(used), dtype=bool)
    for mask in emptied.values():
        before = before | mask
    return {**emptied, **{rule: mask & ~before for rule, mask in rules.items()}}


def count(
    candidates: Candidates, used: np.ndarray, sources: Sequence[str], emptied: Mapping[str, np.ndarray]
) -> Counts:
    """The ledger of a mixture: a document is kept if any of its tokens is in a row.

    Args:
        candidates: all documents.
        used: bool of shape (n,).
        sources: names by number.
        emptied: rule -> bool of shape (n,), of documents whose rows were emptied.

    Returns:
        counts with the rules of `unused`.
    """
    rules = unused(candidates, used, emptied)

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
    inputs: Mapping[str, Path], shard: str, number: int, sources: Mapping[str, Mapping[str, Any]], key: int
) -> tuple[np.ndarray, ...]:
    docs = read_table(inputs["tokenize"] / docs_name(shard))
    names = docs["source"].cast(pa.string())
    source = pc.index_in(names, value_set=pa.array(list(sources), pa.string()))
    if source.null_count:
        stranger = names.filter(pc.is_null(source))[0].as_py()
        raise MixError(f"{inputs['tokenize'] / docs_name(shard)}: documents of {stranger!r}, which is not a source of "
                       f"the mixture (sources: {', '.join(sources)})")
    numbers, words = source.to_numpy().astype(np.int64), id_words(docs["id"])
    verdicts, repeats = _judge_shard(inputs, shard, docs, numbers, words, sources, key)
    return (
        words, _cluster_words(inputs, shard, docs), numbers, docs["row"].to_numpy(),
        np.full(len(docs), number, dtype=np.int64), docs["offset"].to_numpy(), docs["tokens"].to_numpy(),
        docs["bytes"].to_numpy(), verdicts, repeats,
    )


def _cluster_words(inputs: Mapping[str, Path], shard: str, docs: pa.Table) -> np.ndarray:
    step = step_with(inputs, shard, CLUSTER)
    if step is None:
        return id_words(docs["id"])
    clusters = read_annotations(inputs, shard, step, [CLUSTER])[CLUSTER].take(docs["row"])
    return id_words(pc.coalesce(clusters.cast(pa.binary(ID_BYTES)), docs["id"]))


def _judge_shard(
    inputs: Mapping[str, Path], shard: str, docs: pa.Table, source: np.ndarray, words: np.ndarray,
    sources: Mapping[str, Mapping[str, Any]], key: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Verdicts (int8) and repeats (int64) of a shard's documents."""
    verdicts, repeats = np.full(len(docs), MET, dtype=np.int8), np.ones(len(docs), dtype=np.int64)
    if not any(config["where"] or config["epochs"] for config in sources.values()):
        return verdicts, repeats
    measured = measured_columns(inputs, shard, docs)
    for number, (name, config) in enumerate(sources.items()):
        own = source == number
        table = measured.filter(pa.array(own))
        if config["where"] is not None:
            verdicts[own] = judge(name, config["where"], table)
        if config["epochs"] is not None:
            repeats[own] = repeat(name, config["epochs"], table, words[own], key)
    return verdicts, repeats


def write_ledger(
    out: Path, candidates: Candidates, used: np.ndarray, emptied: Mapping[str, np.ndarray]
) -> None:
    """Write the table of all documents of a mixture, ordered by id.

    Args:
        out: the packed set's folder.
        candidates: all documents.
        used: bool of shape (n,): which of them are in a row.
        emptied: rule -> bool of shape (n,), of documents whose rows were emptied.
    """
    rules = unused(candidates, used, emptied)
    reason = np.full(len(used), -1, dtype=np.int8)
    for number, mask in enumerate(rules.values()):
        reason[mask] = number
    codes = pa.array(reason, pa.int8(), mask=reason < 0)
    documents = candidates.documents
    write_table(out / LEDGER, pa.table([
        word_ids(documents.words), documents.part.astype(np.int32), candidates.row, candidates.source.astype(np.int32),
        candidates.held_out, pa.DictionaryArray.from_arrays(codes, pa.array(list(rules), pa.string())),
    ], schema=LEDGER_SCHEMA), INDEX_GROUP_ROWS, repeating=("shard", "source", "reason"))
