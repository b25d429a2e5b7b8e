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

from gristmill.core.arrays import offsets_of
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
    Kind,
    TokenFile,
    TokenFileError,
    content_of,
    find_documents,
    runs_of,
)
from gristmill.tokenize.importing.token_files import (
    token_files,
    token_listing,
)
from gristmill.tokenize.importing.token_sources import DOCUMENTS, TOKENS

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
        name, location, kind: of the file (`TokenFile`).
        bounds: path of the table of its documents (BOUNDS_SCHEMA).
        dtype: of the tokens.
        documents: their number.
        tokens: of all documents.
        ended, other_end, are_documents: see `foreign_formats.Runs`.
    """

    name: str
    location: str
    kind: Kind
    bounds: str
    dtype: str
    documents: int
    tokens: int
    ended: int
    other_end: tuple[int, int] | None
    are_documents: bool


@dataclass(frozen=True)
class Selection:
    """Documents [first, stop) of a scanned file that are copied into a part of
    tokens.
    """

    name: str
    location: str
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
    scan_tasks: list[Task] = []
    owners: list[str] = []
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
        for place, file in enumerate(token_files(name, source)):
            payload = {
                "file": asdict(file),
                "dtype": source.dtype,
                "document_tokens": source.document_tokens,
                "end_of_text": end,
            }
            scan_tasks.append(Task(f"{number:03d}-{place:06d}", payload, file.size))
            owners.append(name)
    scan = partial(_scan, context.work / "bounds")
    scanned: dict[str, list[ScannedFile]] = {name: [] for name in sources}
    for name, result in zip(
        owners, run_tasks("bounds", scan_tasks, scan, context), strict=True
    ):
        scanned[name].append(ScannedFile(**result))
    warnings = [
        warning
        for name, source in sources.items()
        for warning in _check(name, source, scanned[name], tokenizer)
    ]
    for warning in warnings:
        context.warn(warning)
    selections = [(name, part) for name in sources for part in _parts(scanned[name])]
    parts = [
        Task(
            f"part-{number:05d}",
            {"source": name, "selections": list(map(asdict, part))},
            tokenizer.dtype.itemsize * PART_TOKENS,
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
        dtype=tokenizer.dtype.name,
        vocab_size=tokenizer.vocab_size,
        warnings=warnings,
        sources={
            name: ImportedSource(
                path=sources[name].tokens,
                files=len(files),
                formats=sorted({file.kind for file in files}),
                documents=sum(file.documents for file in files),
                ended=sum(file.ended for file in files),
                sample=samples.get(name, ""),
            )
            for name, files in scanned.items()
        },
    )


def _scan(folder: Path, task: Task) -> Done:
    """Find the documents of one file and write their bounds."""
    options = task.payload
    file = TokenFile(**options["file"])
    content = content_of(file.location)
    documents = find_documents(
        runs_of(file, content, options["dtype"]),
        content,
        options["end_of_text"],
        options["document_tokens"],
    )
    number = len(documents.begin)
    metadata = list(map(metadata_json, documents.metadata)) or pa.nulls(
        number, pa.string()
    )
    path = folder / f"{task.name}.parquet"
    columns = [documents.begin, documents.tokens, metadata]
    write_table(path, pa.table(columns, schema=BOUNDS_SCHEMA))
    scanned = ScannedFile(
        name=file.name,
        location=file.location,
        kind=file.kind,
        bounds=str(path),
        dtype=documents.dtype.str,
        documents=number,
        tokens=int(documents.tokens.sum()),
        ended=documents.ended,
        other_end=documents.other_end,
        are_documents=documents.are_documents,
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
        if file.other_end is not None:
            last_id, times = file.other_end
            end_counts[last_id] += times
    for usual, count in end_counts.most_common(1):
        if documents > 1 and count > MOSTLY * documents:
            warnings.append(
                f"source {name!r}: {count:,} of {documents:,} documents end "
                f"with id {usual}, and not with the tokenizer's end of text {end}; if "
                f"{usual} ends a text, set `end_of_text: {usual}`"
            )
    narrowest = min((np.iinfo(file.dtype) for file in files), key=lambda info: info.max)
    if narrowest.max < tokenizer.vocab_size - 1:
        warnings.append(
            f"source {name!r}: its tokens are stored as {narrowest.dtype.name}, which "
            f"holds no id above {narrowest.max:,}, but the tokenizer has "
            f"{tokenizer.vocab_size:,}; is it the tokenizer that made them?"
        )
    return warnings


def _parts(files: Sequence[ScannedFile]) -> Iterator[list[Selection]]:
    """Documents of each part of a source: whole documents of at least PART_TOKENS,
    except for the last part.
    """
    part: list[Selection] = []
    part_tokens = 0
    for file in files:
        sizes = read_table(as_path(file.bounds), ["tokens"])["tokens"].to_numpy()
        ends = offsets_of(sizes)
        first = 0
        while first < len(sizes):
            room = ends[first] + PART_TOKENS - part_tokens
            stop = min(len(sizes), int(np.searchsorted(ends[1:], room)) + 1)
            part.append(
                Selection(
                    file.name, file.location, file.bounds, file.dtype, first, stop
                )
            )
            part_tokens += int(ends[stop] - ends[first])
            first = stop
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
    selections = [Selection(**fields) for fields in task.payload["selections"]]
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
            sink.write(ids.astype(tokenizer.dtype).tobytes())
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
    selections: Sequence[Selection], vocab_size: int
) -> Iterator[tuple[str, str, np.ndarray]]:
    """Documents of a part: FILE#NUMBER, metadata as JSON, and the ids.

    Raises:
        TokenFileError: an id is outside the vocabulary.
    """
    for selection in selections:
        dtype = np.dtype(selection.dtype)
        table = read_table(as_path(selection.bounds)).slice(
            selection.first, selection.stop - selection.first
        )
        begins = table["begin"].to_numpy()
        ends = begins + table["tokens"].to_numpy() * dtype.itemsize
        offset = int(begins.min())
        content = content_of(selection.location, offset, int(ends.max()))
        columns = (table[name].to_pylist() for name in ("begin", "tokens", "metadata"))
        for number, (begin, tokens, metadata) in enumerate(
            zip(*columns, strict=True), start=selection.first
        ):
            ids = np.frombuffer(content, dtype, tokens, begin - offset)
            wrong = np.flatnonzero((ids >= vocab_size) | (ids < 0))
            if len(wrong):
                at = int(wrong[0])
                raise TokenFileError(
                    f"{selection.name}: token {at} of document {number} (byte "
                    f"{begin + at * dtype.itemsize:,}) is {int(ids[at])}, but the "
                    f"tokenizer has the ids 0 to {vocab_size - 1:,}; give the "
                    "tokenizer that made these tokens, or correct `dtype:`"
                )
            yield f"{selection.name}#{number}", metadata or "{}", ids
