"""The stage `tokenize`: every kept document's token ids, once, for all mixtures to be cut from.

Output, per document shard: `part-00000.tokens.bin`, the ids of its kept documents back to back with nothing between
(raw little-endian uint16, or uint32 for vocabularies above 65,536), and `part-00000.docs.parquet`, where each
document's ids lie. Documents that cannot be encoded are in `part-00000.quarantine.parquet`. How often a shard has each
id is in `part-00000.token_counts.npy` (int64 per id), and what all of it says about the tokenizer in `report.json`.
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
from gristmill.dataprep.counts import balance
from gristmill.dataprep.documents import (
    ID_BYTES,
    QUARANTINE_REASON,
    QUARANTINE_SCHEMA,
    count_documents,
    read_annotations,
    read_shard,
    step_with,
    write_table,
)
from gristmill.dataprep.files import as_path, atomic_write, write_json
from gristmill.dataprep.jobs.engine import Done, Task, run_tasks, shard_tasks
from gristmill.dataprep.text.kernels import text_buffers
from gristmill.mixtures.section import Judging
from gristmill.tokenize.encoding.fast_encode import FastEncoder
from gristmill.tokenize.encoding.pretokens import NotKnownError
from gristmill.tokenize.encoding.token_report import (
    UNKNOWN_LANGUAGE,
    count_text,
    describe_groups,
    describe_vocabulary,
    measure,
)
from gristmill.tokenize.encoding.tokenizer import TextTokenizer, TokenizerError, load
from gristmill.tokenize.packed_files import DTYPES, dtype_name

EXCERPT_CHARACTERS = 200
REPORT_FILE = "report.json"
LANGUAGE = "language"
"""The column that says which language a document is in."""
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


def counts_name(shard: str) -> str:
    """How often a document shard has each id."""
    return f"{shard.removesuffix('.parquet')}.token_counts.npy"


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
    counts = balance(results, Judging().max_quarantined, "tokenize", errors=out)
    tokenizer = load(inputs["tokenizer"])
    report = make_report(tokenizer, out, tasks, results)
    write_json(out / REPORT_FILE, report)
    tokens = {name: group["tokens"] for name, group in report["sources"].items()}
    return {"counts": counts, "tokens": sum(tokens.values()), "tokens_per_source": tokens,
            "vocab_size": tokenizer.vocab_size, "dtype": dtype_name(tokenizer.vocab_size), **report}


def make_report(
    tokenizer: TextTokenizer, out: Path, tasks: Sequence[Task], results: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What the tokens of all shards say about the tokenizer.

    Returns:
        `sources` and, where languages were identified, `languages` (`token_report.describe_groups`); `vocabulary`
        (`token_report.describe_vocabulary`); `encoder`: "kernels", or why the library encoded the documents.
    """
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    for task in tasks:
        with (out / counts_name(task.payload["shard"])).open("rb") as stream:
            counts += np.load(stream)
    languages = [result["languages"] for result in results if result["languages"] is not None]
    return {
        "sources": describe_groups(result["sources"] for result in results),
        **({"languages": describe_groups(languages)} if languages else {}),
        "vocabulary": describe_vocabulary(counts, tokenizer), "encoder": describe_encoder(tokenizer),
    }


def encode_shard(task: Task, inputs: Mapping[str, str], out: str) -> Done:
    """Encode one document shard and write its files."""
    folders = {name: as_path(folder) for name, folder in inputs.items()}
    shard = task.payload["shard"]
    tokenizer = _load_once(inputs["tokenizer"])
    read = read_shard(folders, shard, ["id", "source", "locator", "text"])
    documents, rows = read.documents, read.rows
    texts = documents["text"].take(pa.array(rows))
    sizes = pc.binary_length(texts).to_numpy().astype(np.int64)
    parts, lengths, errors = [], [np.empty(0, np.int64)], {}
    for batch in batches(sizes):
        ids, batch_lengths, batch_errors = encode_batch(tokenizer, texts[batch])
        parts.append(ids)
        lengths.append(batch_lengths)
        errors.update({int(rows[batch.start + number]): error for number, error in batch_errors.items()})
    good = ~np.isin(rows, list(errors))
    tokens = np.concatenate(lengths)[good]
    docs = pa.table({
        "row": rows[good], "id": documents["id"].take(pa.array(rows[good])),
        "source": documents["source"].take(pa.array(rows[good])).cast(DOCS_SCHEMA.field("source").type),
        "offset": np.cumsum(tokens) - tokens, "tokens": tokens, "bytes": sizes[good],
    }, schema=DOCS_SCHEMA)
    files = [as_path(out) / name(shard) for name in (tokens_name, docs_name, counts_name)]
    with atomic_write(files[0]) as sink:
        for part in parts:
            sink.write(part.data)
    write_table(files[1], docs)
    with atomic_write(files[2]) as sink:
        np.save(sink, sum((np.bincount(part, minlength=tokenizer.vocab_size) for part in parts),
                          np.zeros(tokenizer.vocab_size, np.int64)))
    if errors:
        files.append(as_path(out) / f"{task.name}.quarantine.parquet")
        write_table(files[-1], _quarantine_table(documents, errors))
    reasons = [QUARANTINE_REASON if row in errors else None for row in range(len(documents))]
    unchanged = np.zeros(len(documents), np.int64)
    counts = count_documents(documents, rows, pa.array(reasons, pa.string()), unchanged)
    return Done(files, {"counts": counts, **_measure(folders, shard, docs, texts.filter(pa.array(good)))})


def _measure(folders: Mapping[str, Path], shard: str, docs: pa.Table, texts: pa.ChunkedArray) -> dict[str, Any]:
    """What is counted of the encoded documents, by source, and by language where one was identified (else None)."""
    sizes = {name: docs[name].to_numpy() for name in ("tokens", "bytes")}
    for name in ("characters", "words"):
        sizes[name] = np.empty(len(docs), np.int64)
    count_text(*text_buffers(texts), sizes["characters"], sizes["words"])
    sources = docs["source"].cast(pa.string()).to_numpy()
    found: dict[str, Any] = {"sources": measure(sources, sizes), "languages": None}
    if (step := step_with(folders, shard, LANGUAGE)) is not None:
        language = read_annotations(folders, shard, step, [LANGUAGE])[LANGUAGE].take(docs["row"])
        found["languages"] = measure(pc.fill_null(language, UNKNOWN_LANGUAGE).to_numpy(), sizes)
    return found


@lru_cache(maxsize=1)
def _load_once(folder: str) -> TextTokenizer:
    return load(as_path(folder))


def _quarantine_table(documents: pa.Table, errors: Mapping[int, str]) -> pa.Table:
    bad = documents.take(pa.array(sorted(errors)))
    return pa.table({
        "source": bad["source"].cast(pa.string()), "file": bad["locator"].cast(pa.string()),
        "record": pa.array(sorted(errors), pa.int64()), "error": [errors[row] for row in sorted(errors)],
        "excerpt": [text[:EXCERPT_CHARACTERS] for text in bad["text"].to_pylist()],
    }, schema=QUARANTINE_SCHEMA)


BATCH_BYTES = 1 << 20
"""Text per call of the tokenizer: enough to keep all threads busy, little enough to hold its results."""
KERNELS = "kernels"
"""Of `describe_encoder`: nothing is left to the library."""


def batches(sizes: np.ndarray) -> Iterator[slice]:
    """Cut documents into runs of about BATCH_BYTES of text; a larger document is a run of its own."""
    start = 0
    while start < len(sizes):
        total = np.cumsum(sizes[start : start + BATCH_BYTES])
        stop = start + max(1, int(np.searchsorted(total, BATCH_BYTES, side="right")))
        yield slice(start, stop)
        start = stop


def encode_batch(tokenizer: TextTokenizer, texts: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray, dict[int, str]]:
    """Encode some documents; one that fails does not fail the others.

    Returns:
        the ids back to back (the dtype of the vocabulary), the number of tokens of each document (0 where it
        failed; int64), and the error of each that failed, by its number.
    """
    encoder = _encoder(tokenizer)
    if encoder is not None:
        flat, lengths = encoder.encode(texts)
        return flat, lengths, {}
    return encode_with_library(tokenizer, texts.to_pylist())


def encode_with_library(
    tokenizer: TextTokenizer, texts: Sequence[str]
) -> tuple[np.ndarray, np.ndarray, dict[int, str]]:
    """Encode some documents with a tokenizer that only the library knows; like `encode_batch`."""
    errors: dict[int, str] = {}
    try:
        ids = [encoding.ids for encoding in tokenizer.encode(texts)]
    except Exception:  # noqa: BLE001 - the library raises bare Exception; find out which document it was
        ids = [_encode_one(tokenizer, text, number, errors) for number, text in enumerate(texts)]
    flat = np.fromiter(chain.from_iterable(ids), dtype=np.int64, count=sum(map(len, ids)))
    return check_ids(flat, tokenizer), np.array([*map(len, ids)], np.int64), errors


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
            known = {tokenizer.sha256: None}  # the stage's report has the reason
        _of_thread.encoders = known
    encoder: FastEncoder | None = known[tokenizer.sha256]
    return encoder


_of_thread = threading.local()


def describe_encoder(tokenizer: TextTokenizer) -> str:
    """What encodes with a tokenizer: the kernels here, or the library and why."""
    try:
        FastEncoder.for_tokenizer(tokenizer.tokenizer)
    except NotKnownError as error:
        return f"the tokenizers library, because {error}"
    return KERNELS


def _encode_one(tokenizer: TextTokenizer, text: str, number: int, errors: dict[int, str]) -> list[int]:
    try:
        return tokenizer.encode([text])[0].ids
    except Exception as error:  # noqa: BLE001 - any failure quarantines this document alone
        errors[number] = f"{type(error).__name__}: {error}"
        return []
