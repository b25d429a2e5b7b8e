"""Stage `tokenize`: encodes every kept document once, for all mixtures.

Output, per document shard: `part-00000.tokens.bin`, the ids of its kept documents back
to back without separators (raw little-endian uint16, or uint32 for vocabularies above
65,536), and `part-00000.docs.parquet`, the location of each document's ids. Documents
that cannot be encoded are in `part-00000.quarantine.parquet`. `report.json` evaluates
the tokenizer on all shards.
"""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.arrays import Column
from gristmill.core.files import atomic_write, json_object, write_json
from gristmill.core.stage_context import Context
from gristmill.dataprep.conservation import Counts, balance
from gristmill.dataprep.documents import (
    ID_BYTES,
    QUARANTINE_REASON,
    QUARANTINE_SCHEMA,
    Inputs,
    combine_annotations,
    count_documents,
    read_annotations,
    read_documents,
    read_shard,
    step_with,
    write_table,
)
from gristmill.dataprep.edits import EDITS
from gristmill.dataprep.row_groups import ahead, read_texts
from gristmill.dataprep.runners.tasks import Done, Task, run_tasks, shard_tasks
from gristmill.dataprep.text.kernels import Bytes, Offsets, text_buffers
from gristmill.mixtures.base import Judging, Recipe
from gristmill.tokenize.encoding.fast_encode import FastEncoder, flat_ids, texts_of
from gristmill.tokenize.encoding.known_tokenizers import Known, NotKnownError
from gristmill.tokenize.encoding.token_report import (
    UNKNOWN_LANGUAGE,
    GroupTokens,
    describe_groups,
    measure,
)
from gristmill.tokenize.encoding.tokenizer import TextTokenizer, load
from gristmill.tokenize.encoding.utf8_counts import NONE_LISTED, Listed, scan_texts

EXCERPT_CHARACTERS = 200
REPORT_FILE = "report.json"
LANGUAGE = "language"
"""Column with the language of a document."""
DOCS_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("id", pa.binary(ID_BYTES)),
        ("source", pa.dictionary(pa.int32(), pa.string())),
        ("offset", pa.int64()),
        ("tokens", pa.int64()),
        ("bytes", pa.int64()),
    ]
)
"""Row in the document shard; offset and length in tokens; UTF-8 bytes of the text."""


def tokens_name(shard: str) -> str:
    """Token file of a document shard."""
    return f"{shard.removesuffix('.parquet')}.tokens.bin"


def docs_name(shard: str) -> str:
    """Table beside the token file of a document shard."""
    return f"{shard.removesuffix('.parquet')}.docs.parquet"


def docs_table(
    rows: np.ndarray,
    ids: Column,
    sources: Column,
    tokens: np.ndarray,
    text_bytes: np.ndarray,
) -> pa.Table:
    """Table beside a token file (DOCS_SCHEMA), whose documents are back to back."""
    names = sources.cast(DOCS_SCHEMA.field("source").type)
    offset = np.cumsum(tokens) - tokens
    return pa.table([rows, ids, names, offset, tokens, text_bytes], schema=DOCS_SCHEMA)


@dataclass(frozen=True, kw_only=True)
class TokenReport:
    """Fit of a tokenizer to the documents: `report.json`.

    Attributes:
        sources: by name.
        encoder: "gigatoken", or the reason for using the library.
        languages: by name; None if they were not identified.
    """

    sources: Mapping[str, GroupTokens]
    encoder: str
    languages: Mapping[str, GroupTokens] | None = None


@dataclass(frozen=True, kw_only=True)
class TokenizeSummary(TokenReport):
    """Summary of the stage.

    Attributes:
        counts: of the documents.
        tokens: of all documents.
        tokens_per_source: of each source.
        vocab_size: of the tokenizer.
        dtype: of the ids.
        decoded_documents: documents that were decoded again as a check.
        changed_documents: those of them whose text changed.
    """

    counts: Counts
    tokens: int
    tokens_per_source: Mapping[str, int]
    vocab_size: int
    dtype: str
    decoded_documents: int
    changed_documents: int


def run(
    inputs: Inputs,
    config: Recipe,
    out: Path,
    context: Context,
) -> TokenizeSummary:
    """Encode the documents that every annotating stage kept.

    Args:
        inputs: `ingest`, the annotating stages, `tokenizer`.
        config: empty; the tokenizer determines the output.
        out: output folder.
        context: where to run.

    Raises:
        gristmill.dataprep.conservation.QuarantineError: too many documents cannot be
            encoded.
    """
    os.environ.setdefault("RAYON_NUM_THREADS", str(context.beam.workers))
    tasks = [
        Task(task.name.removesuffix(".parquet"), {"shard": task.name}, task.size_bytes)
        for task in shard_tasks(inputs["ingest"])
    ]
    tokenizer = _load_once(inputs["tokenizer"])  # before all threads load it
    results = run_tasks(
        "encode", tasks, partial(encode_shard, inputs=inputs, out=out), context
    )
    counts = balance(results, Judging().max_quarantined, "tokenize", errors=out)
    checked, changed = map(sum, zip((0, 0), *(result["decoded"] for result in results)))
    if changed:
        context.warn(
            f"{changed} of {checked} documents that were decoded again come back "
            "changed from the tokenizer (a normalizer in tokenizer.json, or tokens "
            "that it lacks); a tokenizer trained here loses nothing"
        )
    languages = [
        result["languages"] for result in results if result["languages"] is not None
    ]
    report = TokenReport(
        sources=describe_groups(result["sources"] for result in results),
        encoder=describe_encoder(tokenizer),
        languages=describe_groups(languages) if languages else None,
    )
    write_json(out / REPORT_FILE, json_object(report))
    tokens = {name: group.tokens for name, group in report.sources.items()}
    return TokenizeSummary(
        **vars(report),
        counts=counts,
        tokens=sum(tokens.values()),
        tokens_per_source=tokens,
        vocab_size=tokenizer.vocab_size,
        dtype=tokenizer.dtype.name,
        decoded_documents=checked,
        changed_documents=changed,
    )


def encode_shard(task: Task, inputs: Inputs, out: Path) -> Done:
    """Encode one document shard and write its files."""
    shard = task.payload["shard"]
    tokenizer = _load_once(inputs["tokenizer"])
    documents = read_documents(inputs, shard, ["id", "source"])
    annotations = combine_annotations(inputs, shard, documents["id"], [EDITS])
    rows = np.flatnonzero(annotations.keep)
    files = [out / name(shard) for name in (tokens_name, docs_name)]
    sizes = {
        name: np.zeros(len(rows), np.int64)
        for name in ("bytes", "tokens", "characters", "words")
    }
    errors: dict[int, str] = {}
    encoder = _encoder(tokenizer)
    batch_bytes, library_characters = (
        (LIBRARY_BATCH_BYTES, NONE_LISTED)
        if isinstance(encoder, str)
        else (BATCH_BYTES, encoder.unlike)
    )
    texts = read_texts(inputs, shard, annotations, PART_BYTES)
    begin = 0
    decoded = (0, 0)
    with ThreadPoolExecutor(1, "flush") as flushing:
        with ExitStack() as opened:
            sink = opened.enter_context(atomic_write(files[0]))
            with closing(ahead(_counted(texts, library_characters))) as parts:
                for data, offsets, characters, words, for_library in parts:
                    part = slice(begin, begin + len(words))
                    sizes["bytes"][part] = np.diff(offsets)
                    sizes["characters"][part] = characters
                    sizes["words"][part] = words
                    for batch in batches(sizes["bytes"][part], batch_bytes):
                        ids, lengths, batch_errors = encode_batch(
                            tokenizer,
                            data,
                            offsets[batch.start : batch.stop + 1],
                            for_library[batch],
                        )
                        sink.write(ids.astype(tokenizer.dtype, copy=False).data)
                        first = begin + batch.start
                        if first == 0 and not batch_errors:
                            decoded = decode_some(
                                tokenizer, data, offsets, ids, lengths
                            )
                        sizes["tokens"][first : first + len(lengths)] = lengths
                        for number, error in batch_errors.items():
                            errors[int(rows[first + number])] = error
                    begin = part.stop
            # the disk takes about as long as the code below
            flushed = flushing.submit(opened.pop_all().close)
        good = ~np.isin(rows, list(errors))
        written = rows[good]
        written_sizes = {name: values[good] for name, values in sizes.items()}
        kept = documents
        if len(written) < len(documents):
            kept = documents.take(written)
        docs = docs_table(
            written,
            kept["id"],
            kept["source"],
            written_sizes["tokens"],
            written_sizes["bytes"],
        )
        write_table(files[1], docs)
        flushed.result()
    if errors:
        bad = read_shard(inputs, shard, ["source", "locator", "text"]).documents.take(
            pa.array(sorted(errors))
        )
        quarantine = pa.table(
            {
                "source": bad["source"].cast(pa.string()),
                "file": bad["locator"].cast(pa.string()),
                "record": pa.array(sorted(errors), pa.int64()),
                "error": [errors[row] for row in sorted(errors)],
                "excerpt": [
                    text[:EXCERPT_CHARACTERS] for text in bad["text"].to_pylist()
                ],
            },
            schema=QUARANTINE_SCHEMA,
        )
        files.append(out / f"{task.name}.quarantine.parquet")
        write_table(files[-1], quarantine)
    reasons = np.full(len(documents), None)
    reasons[list(errors)] = QUARANTINE_REASON
    text_bytes = np.zeros(len(documents), np.int64)
    text_bytes[rows] = sizes["bytes"]
    counts = count_documents(
        documents,
        rows,
        pa.array(reasons, pa.string()),
        np.zeros_like(text_bytes),
        pa.array(text_bytes),
    )
    languages = None
    if (step := step_with(inputs, shard, LANGUAGE)) is not None:
        column = read_annotations(inputs, shard, step, [LANGUAGE])[LANGUAGE]
        language = pc.fill_null(column.take(docs["row"]), UNKNOWN_LANGUAGE)
        languages = measure(language, written_sizes)
    return Done(
        files,
        {
            "counts": counts,
            "decoded": decoded,
            "sources": measure(docs["source"], written_sizes),
            "languages": languages,
        },
    )


def decode_some(
    tokenizer: TextTokenizer,
    data: Bytes,
    offsets: Offsets,
    ids: np.ndarray,
    lengths: np.ndarray,
) -> tuple[int, int]:
    """Decode the tokens of the first documents, up to DECODED_BYTES.

    Returns:
        the number of decoded documents, and the number whose text changed.
    """
    sizes = offsets[1 : len(lengths) + 1] - offsets[0]
    number = int(np.searchsorted(sizes, DECODED_BYTES, side="right"))
    parts = np.split(ids, np.cumsum(lengths[:number]))[:number]
    again = [tokenizer.decode(part.tolist()) for part in parts]
    return number, sum(map(operator.ne, texts_of(data, offsets[: number + 1]), again))


def _counted(
    texts: Iterator[pa.Array], unlike: Listed
) -> Iterator[tuple[np.ndarray, ...]]:
    """Parts of the texts as `text_buffers`, with the characters, words (int64) and hits
    (bool) of each document.
    """
    for part in texts:
        data, offsets = text_buffers(part, checked=False)
        characters, words, hits = (
            np.empty(len(part), kind) for kind in (np.int64, np.int64, np.bool_)
        )
        if not scan_texts(data, offsets, unlike, characters, words, hits):
            raise pa.ArrowInvalid(
                "a document's text is not UTF-8; what the shard "
                "was made of has been changed"
            )
        yield data, offsets, characters, words, hits


@lru_cache(maxsize=1)
def _load_once(folder: Path) -> TextTokenizer:
    return load(folder)


DECODED_BYTES = 20_000
"""Text per shard that is decoded again as a check: a thousandth of the encoding
time.
"""
PART_BYTES = 4 << 20
"""Text read at a time, in parallel to the encoding: three quarters of a shard of 16 MB
are read meanwhile.
"""
BATCH_BYTES = 8 << 20
"""Text per call of gigatoken: large against the half millisecond that a call costs; the
ids take no more memory.
"""
LIBRARY_BATCH_BYTES = 1 << 20
"""Text per call of `tokenizers`: enough to keep all threads busy, little enough to hold
its results.
"""
GIGATOKEN = "gigatoken"
"""Value of `describe_encoder` for a tokenizer encoded by gigatoken."""


def batches(sizes: np.ndarray, most_bytes: int) -> Iterator[slice]:
    """Cut documents into runs of about `most_bytes` of text; a larger document is a run
    of its own.
    """
    ends = np.cumsum(sizes)
    start = 0
    while start < len(sizes):
        room = ends[start] - sizes[start] + most_bytes
        stop = max(start + 1, int(np.searchsorted(ends, room, side="right")))
        yield slice(start, stop)
        start = stop


def encode_batch(
    tokenizer: TextTokenizer,
    data: Bytes,
    offsets: Offsets,
    theirs: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, dict[int, str]]:
    """Encode documents; a failing document does not affect the others.

    Args:
        tokenizer: of the documents.
        data, offsets: `kernels.text_buffers`, or a part of its offsets.
        theirs: see `FastEncoder.encode_buffers`.

    Returns:
        the ids back to back (uint32), the tokens of each document (0 if it failed;
        int64), and the errors of failed documents by number.
    """
    encoder = _encoder(tokenizer)
    if isinstance(encoder, str):
        return encode_with_library(tokenizer, texts_of(data, offsets))
    flat, lengths = encoder.encode_buffers(data, offsets, theirs)
    return flat, lengths, {}


def encode_with_library(
    tokenizer: TextTokenizer, texts: Sequence[str]
) -> tuple[np.ndarray, np.ndarray, dict[int, str]]:
    """Encode documents with the `tokenizers` library; see `encode_batch`."""
    errors: dict[int, str] = {}
    try:
        ids = [encoding.ids for encoding in tokenizer.encode(texts)]
    except Exception:  # noqa: BLE001 - the library raises bare Exception; find out which document it was
        ids = [[] for _ in texts]
        for number, text in enumerate(texts):
            try:
                ids[number] = tokenizer.encode([text])[0].ids
            except Exception as error:  # noqa: BLE001 - any failure quarantines this document alone
                errors[number] = f"{type(error).__name__}: {error}"
    return *flat_ids(ids), errors


def _encoder(tokenizer: TextTokenizer) -> FastEncoder | str:
    """Fast encoder of this thread, or the reason why only the library can encode; the
    first thread checks the tokenizer against the library for all threads.
    """
    cached: tuple[str, FastEncoder | str] | None = getattr(_of_thread, "encoder", None)
    if cached is not None and cached[0] == tokenizer.sha256:
        return cached[1]
    _of_thread.encoder = None  # two encoders at once would double the memory
    encoder: FastEncoder | str | None = None
    with _reading:
        if tokenizer.sha256 not in _known:
            _known.clear()
            try:
                encoder = FastEncoder.for_tokenizer(tokenizer.tokenizer)
                _known[tokenizer.sha256] = encoder.known
            except NotKnownError as error:
                _known[tokenizer.sha256] = str(error)
        settings = _known[tokenizer.sha256]
    if isinstance(settings, str):
        encoder = settings
    elif encoder is None:
        encoder = FastEncoder(tokenizer.tokenizer, settings)
    _of_thread.encoder = (tokenizer.sha256, encoder)
    return encoder


_of_thread = threading.local()


_reading = threading.Lock()
_known: dict[str, Known | str] = {}
"""Settings for gigatoken, or the reason it cannot encode, of the last tokenizer by
sha256.
"""


def describe_encoder(tokenizer: TextTokenizer) -> str:
    """Encoder of a tokenizer: gigatoken, or the library with the reason."""
    encoder = _known.get(tokenizer.sha256) or _encoder(tokenizer)
    if isinstance(encoder, str):
        return f"the tokenizers library, because {encoder}"
    return GIGATOKEN
