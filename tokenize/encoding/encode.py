"""The stage `tokenize`: every kept document's token ids, once, for all mixtures to be cut from.

Output, per document shard: `part-00000.tokens.bin`, the ids of its kept documents back to back with nothing between
(raw little-endian uint16, or uint32 for vocabularies above 65,536), and `part-00000.docs.parquet`, where each
document's ids lie. Documents that cannot be encoded are in `part-00000.quarantine.parquet`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.context import Context
from gristmill.dataprep.counts import add_counts, balance
from gristmill.dataprep.documents import (
    ID_BYTES,
    QUARANTINE_REASON,
    QUARANTINE_SCHEMA,
    count_documents,
    kept_rows,
    read_documents,
    write_table,
)
from gristmill.dataprep.files import as_path, atomic_write
from gristmill.dataprep.jobs.engine import Done, Task, run_tasks, shard_tasks
from gristmill.mixtures.section import Judging
from gristmill.tokenize.encoding.fast_encode import FastEncoder
from gristmill.tokenize.encoding.patterns import NotKnownError
from gristmill.tokenize.encoding.tokenizer import TextTokenizer, load
from gristmill.tokenize.encoding.vocabulary import TokenizerError
from gristmill.tokenize.packed import DTYPES, dtype_name

BATCH_BYTES = 1 << 20
"""Text per call of the tokenizer: enough to keep all threads busy, little enough to hold its results."""
EXCERPT_CHARACTERS = 200
DOCS_SCHEMA = pa.schema([
    ("row", pa.int64()), ("id", pa.binary(ID_BYTES)), ("source", pa.dictionary(pa.int32(), pa.string())),
    ("offset", pa.int64()), ("tokens", pa.int64()), ("bytes", pa.int64()),
])
"""Row in the document shard; offset and length in tokens; UTF-8 bytes of the text."""


def tokens_name(shard: str) -> str:
    """The token file of a document shard."""
    return f"{shard.removesuffix('.parquet')}.tokens.bin"


def docs_name(shard: str) -> str:
    """The table beside the token file of a document shard."""
    return f"{shard.removesuffix('.parquet')}.docs.parquet"


def run(inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context) -> dict[str, Any]:
    """Encode the documents that every annotating stage kept.

    Args:
        inputs: `ingest`, the annotating stages, `tokenizer`.
        config: empty; the tokenizer decides everything.
        out: output folder.
        context: where to run.

    Raises:
        gristmill.dataprep.counts.QuarantineError: too many documents cannot be encoded.
    """
    os.environ.setdefault("RAYON_NUM_THREADS", str(context.workers))
    folders = {name: str(folder) for name, folder in inputs.items()}
    process = partial(encode_shard, inputs=folders, out=str(out))
    tasks = [
        Task(task.name.removesuffix(".parquet"), {"shard": task.name}, task.size_bytes)
        for task in shard_tasks(inputs["ingest"])
    ]
    results = run_tasks("encode", tasks, process, context)
    counts = balance(results, Judging().max_quarantined, "tokenize")
    tokens = add_counts(result["tokens"] for result in results)
    tokenizer = load(inputs["tokenizer"])
    return {"counts": counts, "tokens": sum(tokens.values()), "tokens_per_source": tokens,
            "vocab_size": tokenizer.vocab_size, "dtype": dtype_name(tokenizer.vocab_size)}


def encode_shard(task: Task, inputs: Mapping[str, str], out: str) -> Done:
    """Encode one document shard and write its files."""
    folders = {name: as_path(folder) for name, folder in inputs.items()}
    shard = task.payload["shard"]
    tokenizer = _load_once(inputs["tokenizer"])
    documents = read_documents(folders, shard, ["id", "source", "locator", "text"])
    rows = kept_rows(folders, shard)
    texts = documents["text"].take(pa.array(rows))
    sizes = pc.binary_length(texts).to_numpy().astype(np.int64)
    parts, lengths, errors = [], [], {}
    for batch in batches(sizes):
        ids, batch_lengths, batch_errors = encode_batch(tokenizer, texts[batch])
        parts.append(ids)
        lengths.extend(batch_lengths)
        errors.update({int(rows[batch.start + number]): error for number, error in batch_errors.items()})
    good = ~np.isin(rows, list(errors))
    tokens = np.array(lengths, dtype=np.int64)[good]
    docs = pa.table({
        "row": rows[good], "id": documents["id"].take(pa.array(rows[good])),
        "source": documents["source"].take(pa.array(rows[good])).cast(DOCS_SCHEMA.field("source").type),
        "offset": np.cumsum(tokens) - tokens, "tokens": tokens, "bytes": sizes[good],
    }, schema=DOCS_SCHEMA)
    files = [as_path(out) / tokens_name(shard), as_path(out) / docs_name(shard)]
    with atomic_write(files[0]) as sink:
        for part in parts:
            sink.write(part.tobytes())
    write_table(files[1], docs)
    if errors:
        files.append(as_path(out) / f"{task.name}.quarantine.parquet")
        write_table(files[-1], _quarantine_table(documents, errors))
    reasons = [QUARANTINE_REASON if row in errors else None for row in range(len(documents))]
    unchanged = np.zeros(len(documents), np.int64)
    counts = count_documents(documents, rows, pa.array(reasons, pa.string()), unchanged)
    return Done(files, {"counts": counts, "tokens": _tokens_per_source(docs)})


def batches(sizes: np.ndarray) -> Iterator[slice]:
    """Cut documents into runs of about BATCH_BYTES of text; a larger document is a run of its own."""
    start = 0
    while start < len(sizes):
        total = np.cumsum(sizes[start : start + BATCH_BYTES])
        stop = start + max(1, int(np.searchsorted(total, BATCH_BYTES, side="right")))
        yield slice(start, stop)
        start = stop


def encode_batch(tokenizer: TextTokenizer, texts: pa.ChunkedArray) -> tuple[np.ndarray, list[int], dict[int, str]]:
    """Encode some documents; one that fails does not fail the others.

    Returns:
        the ids back to back (the dtype of the vocabulary), the number of tokens of each document (0 where it
        failed), and the error of each that failed, by its number.
    """
    encoder = _encoder(tokenizer)
    if encoder is not None:
        flat, lengths = encoder.encode(texts)
        return flat, lengths.tolist(), {}
    return encode_with_library(tokenizer, texts.to_pylist())


def encode_with_library(tokenizer: TextTokenizer, texts: Sequence[str]) -> tuple[np.ndarray, list[int], dict[int, str]]:
    """Encode some documents with a tokenizer that only the library knows; like `encode_batch`."""
    errors: dict[int, str] = {}
    try:
        ids = [encoding.ids for encoding in tokenizer.encode(texts)]
    except Exception:  # noqa: BLE001 - the library raises bare Exception; find out which document it was
        ids = [_encode_one(tokenizer, text, number, errors) for number, text in enumerate(texts)]
    flat = np.fromiter(chain.from_iterable(ids), dtype=np.int64, count=sum(map(len, ids)))
    return check_ids(flat, tokenizer), list(map(len, ids)), errors


def check_ids(ids: np.ndarray, tokenizer: TextTokenizer) -> np.ndarray:
    """The ids in the dtype of the vocabulary.

    Raises:
        TokenizerError: an id lies outside of it.
    """
    if ids.size and ids.max() >= tokenizer.vocab_size:
        raise TokenizerError(f"the tokenizer gave id {ids.max()}, outside its vocabulary of {tokenizer.vocab_size}; "
                             "run the tokenizer stage again")
    return ids.astype(DTYPES[dtype_name(tokenizer.vocab_size)])


def _encoder(tokenizer: TextTokenizer) -> FastEncoder | None:
    """This thread's fast encoder of a tokenizer; None where only the library can encode with it."""
    known = getattr(_of_thread, "encoders", {})
    if tokenizer.sha256 not in known:
        try:
            known = {tokenizer.sha256: FastEncoder.for_tokenizer(tokenizer.tokenizer)}
        except NotKnownError:
            known = {tokenizer.sha256: None}
        _of_thread.encoders = known
    encoder: FastEncoder | None = known[tokenizer.sha256]
    return encoder


_of_thread = threading.local()


def _encode_one(tokenizer: TextTokenizer, text: str, number: int, errors: dict[int, str]) -> list[int]:
    try:
        return tokenizer.encode([text])[0].ids
    except Exception as error:  # noqa: BLE001 - any failure quarantines this document alone
        errors[number] = f"{type(error).__name__}: {error}"
        return []


@lru_cache(maxsize=1)
def _load_once(folder: str) -> TextTokenizer:
    return load(as_path(folder))


def _tokens_per_source(docs: pa.Table) -> dict[str, int]:
    sums = docs.group_by("source").aggregate([("tokens", "sum")])
    return dict(sorted(zip(sums["source"].cast(pa.string()).to_pylist(), sums["tokens_sum"].to_pylist(), strict=True)))


def _quarantine_table(documents: pa.Table, errors: Mapping[int, str]) -> pa.Table:
    bad = documents.take(pa.array(sorted(errors)))
    return pa.table({
        "source": bad["source"].cast(pa.string()), "file": bad["locator"].cast(pa.string()),
        "record": pa.array(sorted(errors), pa.int64()), "error": [errors[row] for row in sorted(errors)],
        "excerpt": [text[:EXCERPT_CHARACTERS] for text in bad["text"].to_pylist()],
    }, schema=QUARANTINE_SCHEMA)
