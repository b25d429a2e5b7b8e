"""Stage `import_tokens`: imports tokens of other tools as token parts beside those of
`tokenize`.

Output: `tokens/` in the form of the stage `tokenize` (`part-00000.tokens.bin`,
`part-00000.docs.parquet`), and `documents/` in the form of `ingest`, without texts:
`part-00000.parquet` holds the file and number of each document. A mixture, its ledger,
an exclusion and a trace therefore treat both alike (`token_sources.py`).

Documents do not include an end of text: the mixture appends the tokenizer's own to
each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
import pyarrow as pa

from gristmill.core.files import as_path, atomic_write
from gristmill.core.stage_context import Context
from gristmill.dataprep.conservation import Counts, balance
from gristmill.dataprep.documents import (
    ID_BYTES,
    hash_document,
    read_table,
    write_table,
)
from gristmill.dataprep.jobs.tasks import Done, Task, run_tasks
from gristmill.dataprep.reading.ingest import ChangedInputError
from gristmill.dataprep.reading.pythondocs import ListedFile
from gristmill.dataprep.reading.records import metadata_json
from gristmill.mixtures.base import Judging
from gristmill.mixtures.sources import TokenSource
from gristmill.tokenize.encoding.encode import DOCS_SCHEMA, docs_name, tokens_name
from gristmill.tokenize.encoding.tokenizer import TextTokenizer, load
from gristmill.tokenize.importing.foreign_formats import (
    TokenFile,
    TokenFileError,
    bounds_of,
    content_of,
    runs_of,
)
from gristmill.tokenize.importing.token_files import (
    token_files,
    token_listing,
)
from gristmill.tokenize.importing.token_sources import DOCUMENTS, TOKENS
from gristmill.tokenize.packed_files import DTYPES, dtype_name, read_tokens

PART_TOKENS = 1 << 25
"""Tokens per part of whole documents: about the bytes of a shard of the packed set."""
ORIGIN_SCHEMA = pa.schema(
    [
        ("id", pa.binary(ID_BYTES)),
        ("source", pa.dictionary(pa.int32(), pa.string())),
        ("locator", pa.string()),
        ("metadata", pa.string()),
    ]
)
"""Schema of `documents/`: ingest's documents without the text."""
BOUNDS_SCHEMA = pa.schema(
    [("begin", pa.int64()), ("tokens", pa.int64()), ("metadata", pa.string())]
)
MOSTLY = 0.9
"""Share of documents with an end other than the tokenizer's that is treated as a
mistake.
"""
SAMPLE_TOKENS, SAMPLE_CHARACTERS = 64, 160
"""Tokens and characters of a source's first document, decoded for a person to check."""


class ListedSource(TypedDict):
    """Recipe of a source: its files beside its settings
    (`mixtures.sources.TokenSource`).
    """

    listing: NotRequired[list[ListedFile]]


class ImportRecipe(TypedDict):
    """Recipe of the stage: its sources by name."""

    sources: dict[str, ListedSource]


@dataclass(frozen=True)
class ImportedSource:
    """Summary of a source.

    Attributes:
        path: of its files.
        files: their number.
        formats: of the files.
        documents: in them.
        ended: documents with an end of text.
        sample: beginning of the first one.
    """

    path: str
    files: int
    formats: Sequence[str]
    documents: int
    ended: int
    sample: str


@dataclass(frozen=True)
class ImportSummary:
    """Summary of the stage.

    Attributes:
        counts: of the documents.
        tokens: of all documents.
        tokens_per_source: of each source.
        dtype: of the ids.
        vocab_size: of the tokenizer.
        warnings: about the files.
        sources: by name.
    """

    counts: Counts
    tokens: int
    tokens_per_source: Mapping[str, int]
    dtype: str
    vocab_size: int
    warnings: Sequence[str]
    sources: Mapping[str, ImportedSource]


@dataclass(frozen=True)
class ScannedFile:
    """Documents found in a file.

    Attributes:
        name: of the file.
        bounds: path of the table of its documents (BOUNDS_SCHEMA).
        dtype: of the tokens.
        documents: their number.
        tokens: of all documents.
        ended: documents with an end of text.
        other_end: see `foreign_formats.Bounds`.
        are_documents: whether its format marks documents.
        looks_wide: whether its tokens seem to be twice as wide.
    """

    name: str
    bounds: str
    dtype: str
    documents: int
    tokens: int
    ended: int
    other_end: tuple[int, int] | None
    are_documents: bool
    looks_wide: bool


@dataclass(frozen=True)
class Wanted:
    """Documents [first, stop) of a file that are copied into a part of tokens."""

    file: TokenFile
    bounds: str
    dtype: str
    first: int
    stop: int


def run(
    inputs: Mapping[str, Path], config: ImportRecipe, out: Path, context: Context
) -> ImportSummary:
    """Copy the documents of all token files into token parts.

    Args:
        inputs: `tokenizer`.
        config: the sources.
        out: output folder.
        context: of the jobs.

    Raises:
        gristmill.dataprep.reading.sources.SourceError: a source has no such files.
        ChangedInputError: its files changed since the run was planned.
        TokenFileError: a file is damaged, has another format or another tokenizer.
    """
    tokenizer = load(inputs["tokenizer"])
    sources = {
        name: TokenSource.model_validate(
            {key: value for key, value in section.items() if key != "listing"}
        )
        for name, section in config["sources"].items()
    }
    files: dict[str, list[TokenFile]] = {}
    for name, source in sources.items():
        planned = config["sources"][name].get("listing")
        if planned is not None and planned != token_listing(
            name,
            source,
            verify=any(file["stamp"].startswith("sha256:") for file in planned),
        ):
            raise ChangedInputError(
                f"source {name!r}: its files changed since the run was planned; run "
                "again"
            )
        files[name] = token_files(name, source)
        if (source.end_of_text or 0) >= tokenizer.vocab_size:
            raise TokenFileError(
                f"sources.{name}.end_of_text: {source.end_of_text} is beyond the "
                f"tokenizer's vocabulary of {tokenizer.vocab_size:,}; is it the "
                "tokenizer that made these tokens?"
            )
    scan_tasks = {
        name: [
            Task(
                f"{number:03d}-{place:06d}",
                {
                    "file": asdict(file),
                    "dtype": source.dtype,
                    "column": source.column,
                    "document_tokens": source.document_tokens,
                    "end_of_text": tokenizer.eos
                    if source.end_of_text is None
                    else source.end_of_text,
                },
                file.size,
            )
            for place, file in enumerate(files[name])
        ]
        for number, (name, source) in enumerate(sources.items())
    }
    all_scan_tasks = [task for tasks in scan_tasks.values() for task in tasks]
    bounds = str(context.work / "bounds")
    results = dict(
        zip(
            (task.name for task in all_scan_tasks),
            run_tasks("bounds", all_scan_tasks, partial(_look, bounds), context),
            strict=True,
        )
    )
    scanned = {
        name: [ScannedFile(**results[task.name]) for task in tasks]
        for name, tasks in scan_tasks.items()
    }
    warnings = [
        warning
        for name, source in sources.items()
        for warning in _check(name, source, scanned[name], tokenizer)
    ]
    for warning in warnings:
        context.warn(warning)
    parts = [
        Task(
            f"part-{number:05d}",
            {"source": name, "wanted": [asdict(selection) for selection in part]},
            DTYPES[dtype_name(tokenizer.vocab_size)].itemsize * PART_TOKENS,
        )
        for number, (name, part) in enumerate(
            (name, part)
            for name in sources
            for part in _parts(files[name], scanned[name])
        )
    ]
    copied = run_tasks(
        "copy", parts, partial(_copy, str(out), str(inputs["tokenizer"])), context
    )
    counts = balance(copied, Judging().max_quarantined, context.stage)
    tokens = {
        name: sum(
            result["tokens"]
            for result, part in zip(copied, parts, strict=True)
            if part.payload["source"] == name
        )
        for name in sources
    }
    return ImportSummary(
        counts=counts,
        tokens=sum(tokens.values()),
        tokens_per_source=tokens,
        dtype=dtype_name(tokenizer.vocab_size),
        vocab_size=tokenizer.vocab_size,
        warnings=warnings,
        sources={
            name: ImportedSource(
                path=source.tokens,
                files=len(files[name]),
                formats=sorted({file.kind for file in files[name]}),
                documents=sum(file.documents for file in scanned[name]),
                ended=sum(file.ended for file in scanned[name]),
                sample=_sample(out, parts, name, tokenizer),
            )
            for name, source in sources.items()
        },
    )


def _look(folder: str, task: Task) -> Done:
    """Find the documents of one file and write their bounds."""
    file = TokenFile(**task.payload["file"])
    options = task.payload
    content = content_of(file)
    runs = runs_of(file, content, options["dtype"], options["column"])
    document_bounds = bounds_of(
        runs, content, options["end_of_text"], options["document_tokens"]
    )
    metadata = [metadata_json(entry) for entry in document_bounds.metadata] or pa.nulls(
        len(document_bounds.begin), pa.string()
    )
    path = as_path(folder) / f"{task.name}.parquet"
    write_table(
        path,
        pa.table(
            {
                "begin": document_bounds.begin,
                "tokens": document_bounds.tokens,
                "metadata": metadata,
            },
            schema=BOUNDS_SCHEMA,
        ),
    )
    scanned = ScannedFile(
        name=file.name,
        bounds=str(path),
        dtype=document_bounds.dtype.str,
        documents=len(document_bounds.begin),
        tokens=int(document_bounds.tokens.sum()),
        ended=document_bounds.ended,
        other_end=document_bounds.other_end,
        are_documents=runs.are_documents,
        looks_wide=_looks_wide(runs.dtype, content, runs.begin),
    )
    return Done([path], asdict(scanned))


def _looks_wide(dtype: np.dtype[Any], content: np.ndarray, begin: np.ndarray) -> bool:
    """Return whether every other 16-bit token is 0, as in 32-bit tokens read at the
    wrong width.
    """
    if dtype.itemsize != 2 or not len(begin):
        return False
    first = int(begin[0])
    head = np.frombuffer(content, dtype, min(4096, (len(content) - first) // 2), first)
    return len(head) >= 64 and not head[1::2].any() and bool(head[::2].any())


def _check(
    name: str,
    source: TokenSource,
    files: Sequence[ScannedFile],
    tokenizer: TextTokenizer,
) -> list[str]:
    """Warnings about a source's files.

    Raises:
        TokenFileError: they cannot be read as they are.
    """
    wide = next((file.name for file in files if file.looks_wide), None)
    if wide is not None:
        raise TokenFileError(
            f"source {name!r}: {wide}: every other token is 0, as where 32-bit tokens "
            "are read as 16-bit ones; set `dtype: uint32`"
        )
    documents = sum(file.documents for file in files)
    tokens = sum(file.tokens for file in files)
    if not tokens:
        raise TokenFileError(
            f"source {name!r}: {source.tokens} holds no tokens; correct `tokens:` or "
            "remove the source"
        )
    end = tokenizer.eos if source.end_of_text is None else source.end_of_text
    warnings = []
    if source.document_tokens is None and not any(
        file.ended or file.are_documents for file in files
    ):
        if len(files) == documents:
            raise TokenFileError(
                f"source {name!r}: none of its {tokens:,} tokens is the end of text "
                f"{end}, so that its documents cannot be told apart; set "
                "`end_of_text:` to the id that its documents end with, or "
                "`document_tokens:` to cut them after so many tokens"
            )
        warnings.append(
            f"source {name!r}: no end of text {end} is in its samples; each is taken "
            "for a document"
        )
    end_counts: dict[int, int] = {}
    for file in files:
        if file.other_end is not None:
            number, count = file.other_end
            end_counts[number] = end_counts.get(number, 0) + count
    usual = max(end_counts, key=lambda number: end_counts[number], default=None)
    if usual is not None and end_counts[usual] > MOSTLY * documents and documents > 1:
        warnings.append(
            f"source {name!r}: {end_counts[usual]:,} of {documents:,} documents end "
            f"with id {usual}, and not with the tokenizer's end of text {end}; if "
            f"{usual} ends a text, set `end_of_text: {usual}`"
        )
    narrow = next(
        (
            dtype
            for dtype in {np.dtype(file.dtype) for file in files}
            if np.iinfo(dtype).max < tokenizer.vocab_size - 1
        ),
        None,
    )
    if narrow is not None:
        warnings.append(
            f"source {name!r}: its tokens are stored as {narrow.name}, which holds no "
            f"id above {np.iinfo(narrow).max:,}, but the tokenizer has "
            f"{tokenizer.vocab_size:,}; is it the tokenizer that made them?"
        )
    return warnings


def _parts(
    files: Sequence[TokenFile], scanned: Sequence[ScannedFile]
) -> Iterator[list[Wanted]]:
    """Documents of each part of a source: whole documents of at least PART_TOKENS,
    except for the last part.
    """
    part: list[Wanted] = []
    part_tokens = 0
    for file, documents in zip(files, scanned, strict=True):
        ends = np.cumsum(
            read_table(as_path(documents.bounds), ["tokens"])["tokens"].to_numpy()
        )
        first = 0
        while first < len(ends):
            before = int(ends[first - 1]) if first else 0
            stop = min(
                len(ends),
                int(np.searchsorted(ends, before + PART_TOKENS - part_tokens)) + 1,
            )
            part.append(Wanted(file, documents.bounds, documents.dtype, first, stop))
            part_tokens += int(ends[stop - 1]) - before
            first = stop
            if part_tokens >= PART_TOKENS:
                yield part
                part = []
                part_tokens = 0
    if part:
        yield part


def _copy(out: str, tokenizer_folder: str, task: Task) -> Done:
    """Write the tokens, document table and origins of one part."""
    tokenizer = load(as_path(tokenizer_folder))
    source = task.payload["source"]
    dtype = DTYPES[dtype_name(tokenizer.vocab_size)]
    shard = f"{task.name}.parquet"
    folder = as_path(out)
    tokens_path, docs_path = (
        folder / TOKENS / name(shard) for name in (tokens_name, docs_name)
    )
    rows: dict[str, list[Any]] = {
        key: [] for key in ("id", "locator", "metadata", "tokens", "bytes")
    }
    dropped = 0
    with atomic_write(tokens_path) as sink:
        selections = [
            Wanted(**(fields | {"file": TokenFile(**fields["file"])}))
            for fields in task.payload["wanted"]
        ]
        for locator, metadata, ids in _documents(selections, tokenizer.vocab_size):
            if not len(ids):
                dropped += 1
                continue
            # An id does not depend on how the tokens are stored.
            rows["id"].append(
                hash_document(
                    source.encode(), locator.encode(), ids.astype("<u4").tobytes()
                )
            )
            rows["locator"].append(locator)
            rows["metadata"].append(metadata)
            rows["tokens"].append(len(ids))
            rows["bytes"].append(int(tokenizer.token_bytes[ids].sum(dtype=np.int64)))
            sink.write(ids.astype(dtype).tobytes())
    number = len(rows["id"])
    names = (
        pa.array([source] * number, pa.string())
        .dictionary_encode()
        .cast(DOCS_SCHEMA.field("source").type)
    )
    tokens = np.array(rows["tokens"], np.int64)
    write_table(
        docs_path,
        pa.table(
            {
                "row": np.arange(number),
                "id": pa.array(rows["id"], pa.binary(ID_BYTES)),
                "source": names,
                "offset": np.cumsum(tokens) - tokens,
                "tokens": tokens,
                "bytes": pa.array(rows["bytes"], pa.int64()),
            },
            schema=DOCS_SCHEMA,
        ),
    )
    origin_path = folder / DOCUMENTS / shard
    write_table(
        origin_path,
        pa.table(
            {
                "id": pa.array(rows["id"], pa.binary(ID_BYTES)),
                "source": names,
                "locator": pa.array(rows["locator"], pa.string()),
                "metadata": pa.array(rows["metadata"], pa.string()),
            },
            schema=ORIGIN_SCHEMA,
        ),
    )
    size = sum(rows["bytes"])
    counts = {
        "read": number + dropped,
        "kept": number,
        "quarantined": 0,
        "dropped": {"empty": dropped} if dropped else {},
        "bytes_read": size,
        "bytes_kept": size,
    }
    return Done(
        [tokens_path, docs_path, origin_path],
        {
            "counts": {**counts, "sources": {source: counts}},
            "tokens": int(tokens.sum()),
        },
    )


def _documents(
    selections: Sequence[Wanted], vocab_size: int
) -> Iterator[tuple[str, str, np.ndarray]]:
    """Documents of a part: FILE#NUMBER, metadata as JSON, and the ids.

    Raises:
        TokenFileError: an id is outside the vocabulary.
    """
    for selection in selections:
        file = selection.file
        dtype = np.dtype(selection.dtype)
        table = read_table(as_path(selection.bounds)).slice(
            selection.first, selection.stop - selection.first
        )
        begins = table["begin"].to_numpy()
        sizes = table["tokens"].to_numpy() * dtype.itemsize
        offset = int(begins.min())
        content = content_of(file, offset, int((begins + sizes).max()))
        columns = (table[name].to_pylist() for name in ("begin", "tokens", "metadata"))
        for number, (begin, tokens, metadata) in enumerate(
            zip(*columns, strict=True), start=selection.first
        ):
            ids = np.frombuffer(content, dtype, tokens, begin - offset)
            if tokens and not (ids.max() < vocab_size and ids.min() >= 0):
                at = int(np.flatnonzero((ids >= vocab_size) | (ids < 0))[0])
                raise TokenFileError(
                    f"{file.name}: token {at} of document {number} (byte "
                    f"{begin + at * dtype.itemsize:,}) is {int(ids[at])}, but the "
                    f"tokenizer has the ids 0 to {vocab_size - 1:,}; give the "
                    "tokenizer that made these tokens, or correct `dtype:`"
                )
            yield f"{file.name}#{number}", metadata or "{}", ids


def _sample(
    out: Path, parts: Sequence[Task], source: str, tokenizer: TextTokenizer
) -> str:
    """Beginning of a source's first document."""
    first = next(
        (part.name for part in parts if part.payload["source"] == source), None
    )
    if first is None:
        return ""
    shard = f"{first}.parquet"
    docs = (
        read_table(out / TOKENS / docs_name(shard), ["tokens"])
        .slice(0, 1)["tokens"]
        .to_pylist()
    )
    ids = read_tokens(
        out / TOKENS / tokens_name(shard), DTYPES[dtype_name(tokenizer.vocab_size)]
    )
    return (
        tokenizer.decode(ids[: min(docs[0], SAMPLE_TOKENS)].tolist())[
            :SAMPLE_CHARACTERS
        ]
        if docs
        else ""
    )
