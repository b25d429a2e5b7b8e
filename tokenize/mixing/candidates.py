"""Candidate documents of a mixture: for training, held out, or left out, judged shard
by shard.

Each document shard sends its documents to two sets of partitions, so that no process
holds all of them: those of the streams, by draw (`streams.py`), and those of the
ledger, by id (`ledger.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.stage_context import Context
from gristmill.dataprep.document_numbers import count_rows
from gristmill.dataprep.documents import (
    ID_BYTES,
    Inputs,
    read_annotations,
    read_table,
    shard_names,
    step_with,
)
from gristmill.dataprep.runners.shuffle import Sending, Sent, Shuffled, run_shuffle
from gristmill.dataprep.runners.tasks import Done, Task, planning_context
from gristmill.dataprep.where_sql import METADATA
from gristmill.mixtures.schema.sources import MixedSource
from gristmill.tokenize.document_sampling import drawn_below, id_words, leading
from gristmill.tokenize.encoding.encode import docs_name
from gristmill.tokenize.importing.token_sources import corpora
from gristmill.tokenize.mixing.quotas import MixError
from gristmill.tokenize.mixing.source_filters import (
    MET,
    VALIDATION_KEY,
    judge,
    measured_columns,
    repeat,
)
from gristmill.tokenize.mixing.streams import (
    ENTRIES_SCHEMA,
    ENTRY_BYTES,
    Draws,
    partition_bits,
    stream_of,
)
from gristmill.tokenize.packing.fill_in_middle import ADDED, Rearranging
from gristmill.tokenize.shuffle import order_key

CLUSTER = "cluster"
"""Column with the shared cluster id of near-duplicates."""
JOB, ENTRIES, DOCUMENTS = "candidates", "entries", "ledger"
"""Name of the job, and of its two shuffled outputs."""
HELD_OUT, TRAINS = 2, MET
"""States of a document besides NOT_MET and UNKNOWN: the verdict of its source's
condition, and the split.
"""
CANDIDATES_SCHEMA = pa.schema(
    [
        ("high", pa.uint64()),
        ("low", pa.uint64()),
        ("shard", pa.int32()),
        ("row", pa.int64()),
        ("source", pa.int32()),
        ("state", pa.int8()),
        ("repeats", pa.int32()),
        ("bytes", pa.int64()),
    ]
)
"""A document: the words of its id, its location, its source, its state, its repeats in
one pass over the source's training documents (UNKNOWN if the source's `epochs`
expression uses a column that is null; such a document does not train), and the bytes of
its text.
"""
CANDIDATE_BYTES = 49


@dataclass(frozen=True)
class Candidates:
    """Totals of all tokenised documents, and the partitions that hold them.

    Attributes:
        bits: leading bits of a draw that number the partitions of entries.
        ledger_bits: leading bits of an id that number the partitions of the ledger.
        documents: number of documents.
        most: of each source, the most repeats of a document in one pass.
        entries: of ENTRIES_SCHEMA, by draw.
        ledger: of CANDIDATES_SCHEMA, by id.
    """

    bits: int
    ledger_bits: int
    documents: int
    most: list[int]
    entries: Shuffled
    ledger: Shuffled


def collect(
    inputs: Inputs,
    sources: Mapping[str, MixedSource],
    validation: float,
    draws: Draws,
    seed: int,
    context: Context,
    rearranging: Rearranging | None = None,
) -> Candidates:
    """Judge all tokenised documents: evaluate the sources' expressions and split off
    the validation set.

    A document is held out if the hash of its duplicate cluster (of its id if it has no
    cluster) is below the share: near-duplicates never lie on both sides.

    Args:
        inputs: `ingest`, the annotating stages and `tokenize`; `import_tokens`.
        sources: name -> its settings, in order.
        validation: share of clusters that is held out.
        draws: order of the streams.
        seed: of the draws for fractional epochs.
        context: of the job.
        rearranging: selection of documents that get special tokens.

    Raises:
        MixError: an expression is wrong, or documents belong to a source that is not
            among `sources`.
    """
    shards = [
        (corpus_number, corpus["tokenize"] / docs_name(shard), shard)
        for corpus_number, corpus in enumerate(corpora(inputs))
        for shard in shard_names(corpus["ingest"])
    ]
    rows = count_rows([path for _, path, _ in shards])
    tasks = [
        Task(
            f"{number:05d}",
            {"corpus": corpus_number, "shard": shard, "number": number},
            rows[number] * ENTRY_BYTES,
        )
        for number, (corpus_number, _, shard) in enumerate(shards)
    ]
    documents = sum(rows)
    bits = partition_bits(documents, ENTRY_BYTES)
    ledger_bits = partition_bits(documents, CANDIDATE_BYTES)
    process = partial(
        judge_shard,
        inputs=inputs,
        sources=sources,
        validation=validation,
        draws=draws,
        seed=seed,
        bits=bits,
        ledger_bits=ledger_bits,
        rearranging=rearranging,
    )
    planning = planning_context(documents, context)
    partitions = {ENTRIES: 1 << bits, DOCUMENTS: 1 << ledger_bits}
    try:
        results, sent = run_shuffle(JOB, tasks, process, planning, partitions)
    except MixError as error:  # names source and key; the shard is irrelevant
        raise MixError(str(error).partition(f"{MixError.__name__}: ")[2]) from error
    most = np.max([result["most"] for result in results], axis=0, initial=1).tolist()
    return Candidates(
        bits, ledger_bits, documents, most, sent[ENTRIES], sent[DOCUMENTS]
    )


def judge_shard(
    task: Task,
    inputs: Inputs,
    sources: Mapping[str, MixedSource],
    validation: float,
    draws: Draws,
    seed: int,
    bits: int,
    ledger_bits: int,
    rearranging: Rearranging | None = None,
) -> Sending:
    """Judge the documents of a shard and send them to their partitions: payload
    `corpus`, `shard`, `number`.

    Returns:
        `most`: by source, the most repeats of a document in one pass.
    """
    corpus = corpora(inputs)[task.payload["corpus"]]
    shard = task.payload["shard"]
    docs = read_table(corpus["tokenize"] / docs_name(shard))
    names = docs["source"].cast(pa.string())
    numbers = pc.index_in(names, value_set=pa.array(list(sources), pa.string()))
    if numbers.null_count:
        stranger = names.filter(pc.is_null(numbers))[0].as_py()
        raise MixError(
            f"{corpus['tokenize'] / docs_name(shard)}: documents of {stranger!r}, "
            f"which is not a source of the mixture (sources: {', '.join(sources)})"
        )
    source = numbers.to_numpy().astype(np.int64)
    words = id_words(docs["id"])
    key = order_key(seed, "mix", "repeats")
    verdicts, repeats = _judge(corpus, shard, docs, source, words, sources, key)
    cluster_words = words
    if (step := step_with(corpus, shard, CLUSTER)) is not None:
        clusters = read_annotations(corpus, shard, step, [CLUSTER])[CLUSTER]
        cluster_ids = clusters.take(docs["row"]).cast(pa.binary(ID_BYTES))
        cluster_words = id_words(pc.coalesce(cluster_ids, docs["id"]))
    split = drawn_below(cluster_words, VALIDATION_KEY, validation)
    held_out = (verdicts == MET) & split
    trains = (verdicts == MET) & ~split
    state = np.where(held_out, HELD_OUT, verdicts).astype(np.int8)

    times = np.where(held_out, 1, np.where(trains, np.maximum(repeats, 0), 0))
    entry = np.repeat(np.arange(len(docs)), times)
    time = np.arange(len(entry)) - np.repeat(np.cumsum(times) - times, times)
    stream = stream_of(source, held_out, len(sources))[entry]
    tokens = docs["tokens"].to_numpy()[entry]
    if rearranging is not None:
        training = np.flatnonzero(trains[entry])
        tokens = tokens.copy()
        tokens[training] += ADDED * rearranging.chosen(
            source[entry[training]], words[entry[training]], time[training]
        )
    entries = pa.table(
        [
            stream.astype(np.int32),
            words[entry, 0],
            words[entry, 1],
            time.astype(np.int32),
            np.full(len(entry), task.payload["number"], np.int32),
            docs["offset"].to_numpy()[entry],
            tokens,
        ],
        schema=ENTRIES_SCHEMA,
    )
    partitions = draws.partitions(stream, words.take(entry, axis=0), time, 0, bits)
    yield Sent(ENTRIES, entries, partitions)

    documents = pa.table(
        [
            words[:, 0],
            words[:, 1],
            np.full(len(docs), task.payload["number"], np.int32),
            docs["row"].to_numpy(),
            source.astype(np.int32),
            state,
            repeats.astype(np.int32),
            docs["bytes"].to_numpy(),
        ],
        schema=CANDIDATES_SCHEMA,
    )
    yield Sent(DOCUMENTS, documents, leading(words[:, 0], ledger_bits))
    most = [
        int(times[trains & (source == number)].max(initial=1))
        for number in range(len(sources))
    ]
    return Done([], {"most": most})


def _judge(
    inputs: Inputs,
    shard: str,
    docs: pa.Table,
    source: np.ndarray,
    words: np.ndarray,
    sources: Mapping[str, MixedSource],
    key: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Verdicts (int8) and repeats (int64) of a shard's documents."""
    verdicts = np.full(len(docs), MET, np.int8)
    repeats = np.ones(len(docs), np.int64)
    expressions = [
        expression
        for settings in sources.values()
        for expression in (settings.where, settings.epochs)
        if expression
    ]
    if not expressions:
        return verdicts, repeats
    with_metadata = any(METADATA in text.lower() for text in expressions)
    measured = measured_columns(inputs, shard, docs, with_metadata)
    for number, (name, settings) in enumerate(sources.items()):
        is_source = source == number
        table = measured.filter(is_source)
        if settings.where is not None:
            verdicts[is_source] = judge(name, settings.where, table)
        if settings.epochs is not None:
            repeats[is_source] = repeat(
                name, settings.epochs, table, words[is_source], key
            )
    return verdicts, repeats
