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

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypedDict

import numpy as np
import pyarrow as pa

from gristmill.core.files import as_path, atomic_write
from gristmill.core.stage_context import Context
from gristmill.dataprep.conservation import Counts, balance
from gristmill.dataprep.documents import (
    ID_BYTES,
    Inputs,
    hash_document,
    read_table,
    write_table,
)
from gristmill.dataprep.readers.ingest import ChangedInputError
from gristmill.dataprep.readers.pythondocs import ListedFile
from gristmill.dataprep.readers.records import metadata_json
from gristmill.dataprep.runners.tasks import Done, Task, run_tasks
from gristmill.mixtures.base import Judging
from gristmill.mixtures.schema.sources import TokenSource
from gristmill.tokenize.encoding.encode import docs_name, docs_table, tokens_name
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
from gristmill.tokenize.packed_files import DTYPES, dtype_name

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
    (`mixtures.schema.sources.TokenSource`).
    """

    listing: list[ListedFile]


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
    inputs: Inputs, config: ImportRecipe, out: Path, context: Context
) -> ImportSummary:
    """Copy the documents of all token files into token parts.

    Args:
        inputs: `tokenizer`.
        config: the sources.
        out: output folder.
        context: of the jobs.

    Raises:
        gristmill.dataprep.readers.sources.SourceError: a source has no such files.
        ChangedInputError: its files changed since the run was planned.
        TokenFileError: a file is damaged, has another format or another tokenizer.
    """
    tokenizer = load(inputs["tokenizer"])
    sources: dict[str, TokenSource] = {}
    scan_tasks: dict[str, list[Task]] = {}
    files: dict[str, list[TokenFile]] = {}
    for number, (name, section) in enumerate(config["sources"].items()):
        settings = {key: value for key, value in section.items() if key != "listing"}
        source = TokenSource.model_validate(settings)
        planned = section["listing"]
        verify = any(file["stamp"].startswith("sha256:") for file in planned)
        if planned != token_listing(name, source, verify):
            raise ChangedInputError(
                f"source {name!r}: its files changed since the run was planned; "
                "run again"
            )
        end = tokenizer.eos if source.end_of_text is None else source.end_of_text
        if end >= tokenizer.vocab_size:
            raise TokenFileError(
                f"sources.{name}.end_of_text: {source.end_of_text} is beyond the "
                f"tokenizer's vocabulary of {tokenizer.vocab_size:,}; is it the "
                "tokenizer that made these tokens?"
            )
        sources[name] = source
        files[name] = token_files(name, source)
        scan_tasks[name] = [
            Task(
                f"{number:03d}-{place:06d}",
                {
                    "file": asdict(file),
                    "dtype": source.dtype,
                    "document_tokens": source.document_tokens,
                    "end_of_text": end,
                },
                file.size,
            )
            for place, file in enumerate(files[name])
        ]
    results = iter(
        run_tasks(
            "bounds",
            [task for tasks in scan_tasks.values() for task in tasks],
            partial(_look, context.work / "bounds"),
            context,
        )
    )
    scanned = {
        name: [ScannedFile(**next(results)) for _ in tasks]
        for name, tasks in scan_tasks.items()
    }
    warnings = [
        warning
        for name, source in sources.items()
        for warning in _check(name, source, scanned[name], tokenizer)
    ]
    for warning in warnings:
        context.warn(warning)
    selections = [
        (name, part) for name in sources for part in _parts(files[name], scanned[name])
    ]
    parts = [
        Task(
            f"part-{number:05d}",
            {"source": name, "wanted": [asdict(selection) for selection in part]},
            DTYPES[dtype_name(tokenizer.vocab_size)].itemsize * PART_TOKENS,
        )
        for number, (name, part) in enumerate(selections)
    ]
    copied = run_tasks("copy", parts, partial(_copy, out, inputs["tokenizer"]), context)
    counts = balance(copied, Judging().max_quarantined, context.stage)
    tokens = dict.fromkeys(sources, 0)
    samples: dict[str, str] = {}
    for (name, _), result in zip(selections, copied, strict=True):
        tokens[name] += result["tokens"]
        samples.setdefault(name, result["sample"])
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
                sample=samples.get(name, ""),
            )
            for name, source in sources.items()
        },
    )


def _look(folder: Path, task: Task) -> Done:
    """Find the documents of one file and write their bounds."""
    options = task.payload
    file = TokenFile(**options["file"])
    content = content_of(file)
    runs = runs_of(file, content, options["dtype"])
    bounds = bounds_of(
        runs, content, options["end_of_text"], options["document_tokens"]
    )
    number = len(bounds.begin)
    metadata = list(map(metadata_json, bounds.metadata)) or pa.nulls(
        number, pa.string()
    )
    path = folder / f"{task.name}.parquet"
    columns = [bounds.begin, bounds.tokens, metadata]
    write_table(path, pa.table(columns, schema=BOUNDS_SCHEMA))
    looks_wide = False
    if runs.dtype.itemsize == 2 and len(runs.begin):
        # 32-bit tokens read at the wrong width: every other 16-bit token is 0.
        first = int(runs.begin[0])
        most = min(4096, (len(content) - first) // 2)
        head = np.frombuffer(content, runs.dtype, most, first)
        looks_wide = most >= 64 and not head[1::2].any() and bool(head[::2].any())
    scanned = ScannedFile(
        name=file.name,
        bounds=str(path),
        dtype=bounds.dtype.str,
        documents=number,
        tokens=int(bounds.tokens.sum()),
        ended=bounds.ended,
        other_end=bounds.other_end,
        are_documents=runs.are_documents,
        looks_wide=looks_wide,
    )
    return Done([path], asdict(scanned))


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
    for file in files:
        if file.looks_wide:
            raise TokenFileError(
                f"source {name!r}: {file.name}: every other token is 0, as where "
                "32-bit tokens are read as 16-bit ones; set `dtype: uint32`"
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
        raise TokenFileError(
            f"source {name!r}: none of its {tokens:,} tokens is the end of text "
            f"{end}, so that its documents cannot be told apart; set "
            "`end_of_text:` to the id that its documents end with, or "
            "`document_tokens:` to cut them after so many tokens"
        )
    end_counts = Counter[int]()
    for file in files:
        end_counts.update(dict([file.other_end] if file.other_end else []))
    for usual, count in end_counts.most_common(1):
        if documents > 1 and count > MOSTLY * documents:
            warnings.append(
                f"source {name!r}: {count:,} of {documents:,} documents end "
                f"with id {usual}, and not with the tokenizer's end of text {end}; if "
                f"{usual} ends a text, set `end_of_text: {usual}`"
            )
    for dtype in {np.dtype(file.dtype) for file in files}:
        if np.iinfo(dtype).max < tokenizer.vocab_size - 1:
            warnings.append(
                f"source {name!r}: its tokens are stored as {dtype.name}, which holds "
                f"no id above {np.iinfo(dtype).max:,}, but the tokenizer has "
                f"{tokenizer.vocab_size:,}; is it the tokenizer that made them?"
            )
            break
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
        sizes = read_table(as_path(documents.bounds), ["tokens"])["tokens"].to_numpy()
        ends = np.cumsum(sizes)
        first = before = 0
        while first < len(ends):
            room = before + PART_TOKENS - part_tokens
            stop = min(len(ends), int(np.searchsorted(ends, room)) + 1)
            part.append(Wanted(file, documents.bounds, documents.dtype, first, stop))
            part_tokens += int(ends[stop - 1]) - before
            first, before = stop, int(ends[stop - 1])
            if part_tokens >= PART_TOKENS:
                yield part
                part, part_tokens = [], 0
    if part:
        yield part


def _copy(out: Path, tokenizer_folder: Path, task: Task) -> Done:
    """Write the tokens, document table and origins of one part."""
    tokenizer = load(tokenizer_folder)
    source = task.payload["source"]
    shard = f"{task.name}.parquet"
    tokens_path, docs_path = (
        out / TOKENS / name(shard) for name in (tokens_name, docs_name)
    )
    origin_path = out / DOCUMENTS / shard
    ids_of: list[bytes] = []
    locators: list[str] = []
    metadata_of: list[str] = []
    sizes: list[tuple[int, int]] = []
    dropped = 0
    sample = ""
    selections = [
        Wanted(**(fields | {"file": TokenFile(**fields["file"])}))
        for fields in task.payload["wanted"]
    ]
    with atomic_write(tokens_path) as sink:
        for locator, metadata, ids in _documents(selections, tokenizer.vocab_size):
            if not len(ids):
                dropped += 1
                continue
            # An id does not depend on how the tokens are stored.
            content = ids.astype("<u4").tobytes()
            ids_of.append(hash_document(source.encode(), locator.encode(), content))
            locators.append(locator)
            metadata_of.append(metadata)
            text_bytes = int(tokenizer.token_bytes[ids].sum(dtype=np.int64))
            sizes.append((len(ids), text_bytes))
            sink.write(ids.astype(DTYPES[dtype_name(tokenizer.vocab_size)]).tobytes())
            if len(sizes) == 1:
                decoded = tokenizer.decode(ids[:SAMPLE_TOKENS].tolist())
                sample = decoded[:SAMPLE_CHARACTERS]
    number = len(sizes)
    document_ids = pa.array(ids_of, pa.binary(ID_BYTES))
    names = pa.array([source] * number, pa.string()).dictionary_encode()
    tokens, text_sizes = np.array(sizes, np.int64).reshape(-1, 2).T
    docs = docs_table(np.arange(number), document_ids, names, tokens, text_sizes)
    write_table(docs_path, docs)
    origins = [docs["id"], docs["source"], locators, metadata_of]
    write_table(origin_path, pa.table(origins, schema=ORIGIN_SCHEMA))
    size = int(text_sizes.sum())
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
            "sample": sample,
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
        ends = begins + table["tokens"].to_numpy() * dtype.itemsize
        offset = int(begins.min())
        content = content_of(file, offset, int(ends.max()))
        columns = (table[name].to_pylist() for name in ("begin", "tokens", "metadata"))
        for number, (begin, tokens, metadata) in enumerate(
            zip(*columns, strict=True), start=selection.first
        ):
            ids = np.frombuffer(content, dtype, tokens, begin - offset)
            wrong = np.flatnonzero((ids >= vocab_size) | (ids < 0))
            if len(wrong):
                at = int(wrong[0])
                raise TokenFileError(
                    f"{file.name}: token {at} of document {number} (byte "
                    f"{begin + at * dtype.itemsize:,}) is {int(ids[at])}, but the "
                    f"tokenizer has the ids 0 to {vocab_size - 1:,}; give the "
                    "tokenizer that made these tokens, or correct `dtype:`"
                )
            yield f"{file.name}#{number}", metadata or "{}", ids
