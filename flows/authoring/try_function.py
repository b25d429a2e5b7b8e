"""`gristmill try`: run a user's function on some documents of a source or a file before
it is in a manifest.

The function is called by the same code as in a run. Documents come from a committed
`ingest`, with all measurements of later steps, or else straight from the files. They
are taken from several shards or files to be representative.
"""

from __future__ import annotations

import contextlib
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa

from gristmill.core.files import as_path, is_local
from gristmill.dataprep.documents import (
    annotation_stages,
    as_numbers,
    read_table,
    shard_names,
    spread,
)
from gristmill.dataprep.readers.document_shards import ShardWriter
from gristmill.dataprep.readers.extraction_guard import Guard, extract_pages
from gristmill.dataprep.readers.ingest import DEFAULT_EXTRACTOR, own_records, reading_of
from gristmill.dataprep.readers.own_sources import OwnProcess
from gristmill.dataprep.readers.parquet import TableReader
from gristmill.dataprep.readers.readers import read_file
from gristmill.dataprep.readers.records import (
    Read,
    Rejected,
)
from gristmill.dataprep.readers.sources import SourceError, find_files
from gristmill.dataprep.user_code import annotate, edit
from gristmill.dataprep.user_code.own_documents import (
    DocumentFunction,
    JudgedColumns,
    known_columns,
    load_document_function,
    read_judged_columns,
)
from gristmill.dataprep.user_code.time_limits import TimeLimit
from gristmill.flows.questions.find_documents import committed_corpus
from gristmill.mixtures.schema.sources import INGEST, Ingest, Source
from gristmill.mixtures.steps.own_steps import Edit, OwnAnnotate
from gristmill.mixtures.yaml_text import unknown_name

if TYPE_CHECKING:
    from gristmill.flows.running.session import Session

T = TypeVar("T")
PARTS = 10
"""Maximum number of shards or files that the documents come from."""
FILE = "file"
"""Name of the source if a file is given."""
SHOWN = 3
"""Number of documents shown of each kind."""
AROUND_BYTES = 16
"""Bytes shown on either side of an edit."""
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Sample:
    """Documents as stages read them.

    Attributes:
        inputs: `ingest`, and the annotating stages.
        shards: shards of the documents.
        sources: sources of the documents; None means all.
        described: origin of the documents.
        failures: (file name, unreadable record).
    """

    inputs: Mapping[str, Path]
    shards: Sequence[str]
    sources: tuple[str, ...] | None
    described: str
    failures: Sequence[tuple[str, Rejected]] = ()


@contextlib.contextmanager
def take_sample(
    on: str, session: Session | None, documents: int, most_bytes: float = math.inf
) -> Iterator[Sample]:
    """Read some documents of a source of a manifest, or of a file, glob, folder or URL.

    Args:
        on: name of the source, or path of its files.
        session: session of the manifest.
        documents: maximum number of documents to read from files.
        most_bytes: bytes of text after which no further document is read from files.

    Raises:
        SourceError: the source does not exist, or has no readable data.
    """
    source = None if session is None else session.manifest.document_sources.get(on)
    if session is not None and source is None:
        sources = session.manifest.document_sources
        raise SourceError(
            f"--on: {session.manifest_file} has no source of documents "
            f"{unknown_name(on, sources, 'it has')}"
        )
    if session is not None and session.committed(INGEST) is not None:
        yield _sample_of_run(session, on)
        return
    name = on
    if source is None:
        from gristmill.flows.authoring.look_at_data import look_at
        from gristmill.flows.authoring.new_manifest import source_settings

        name = FILE
        source = Source.model_validate(source_settings(look_at(FILE, on)))
    with tempfile.TemporaryDirectory(prefix="gristmill-try-") as folder:
        yield _sample_of_files(name, source, documents, most_bytes, Path(folder))


def _sample_of_run(session: Session, source: str) -> Sample:
    inputs = committed_corpus(session).inputs
    shards = [
        shard
        for shard in shard_names(inputs[INGEST])
        if str(read_table(inputs[INGEST] / shard, ["source"])["source"][0]) == source
    ]
    described = f"source {source!r} of the run"
    steps = annotation_stages(inputs)
    if steps:
        described += f", as {steps[-1]} left them"
    return Sample(inputs, shards, (source,), described)


def _sample_of_files(
    name: str, source: Source, documents: int, most_bytes: float, folder: Path
) -> Sample:
    """Read documents of evenly spaced files into shards: PARTS files, and while these
    have too few, others of a local source.
    """
    files = find_files(name, source).files
    section, reading = Ingest(), reading_of(source)
    writer = ShardWriter(
        folder, "00000", name, section.shard_bytes, section.max_document_bytes
    )
    failures: list[tuple[str, Rejected]] = []
    num_sampled = 0
    with contextlib.ExitStack() as stack:
        guard = stack.enter_context(
            Guard(
                reading.extract or DEFAULT_EXTRACTOR,
                source.extract_options.model_dump(),
                section.extract_seconds,
                section.extract_memory_bytes,
            )
        )
        tables = stack.enter_context(TableReader())
        process = None
        if source.read is not None:
            process = stack.enter_context(OwnProcess(source.read))

        num_first = min(PARTS, len(files))
        order = evenly_spaced_first(files)
        if not is_local(as_path(files[0].location)):
            order = order[:num_first]
        for number, file in enumerate(order, start=1):
            if number > num_first and (
                writer.kept >= documents or writer.bytes_taken >= most_bytes
            ):
                break
            records: Iterator[Read] = (
                read_file(file, reading, tables)
                if process is None
                else own_records(process, file, reading)
            )
            share = min(number / num_first, 1.0)
            writer.limit = max(int(documents * share), writer.kept + 1)
            for record in extract_pages(records, guard, reading):
                if isinstance(record, Rejected):
                    failures.append((file.name, record))
                writer.add(file.name, record)
                if writer.is_full or writer.bytes_taken >= most_bytes * share:
                    break
            num_sampled = number
    writer.close()
    if not writer.kept:
        reason = f": {failures[0][1].error}" if failures else ""
        prefix = "" if name == FILE else f"source {name!r}: "
        raise SourceError(f"{prefix}no document can be read from {source.path}{reason}")
    return Sample(
        {INGEST: folder},
        shard_names(folder),
        None,
        source.path
        if len(files) == 1
        else f"{num_sampled} of {len(files)} files of {source.path}",
        failures,
    )


def evenly_spaced(items: Sequence[T], number: int) -> list[T]:
    """Return at most this many items, evenly spaced from the first to the last."""
    places = {int(place) for place in np.linspace(0, len(items) - 1, number)}
    return [items[place] for place in sorted(places)] if items else []


def evenly_spaced_first(items: Sequence[T]) -> list[T]:
    """Return PARTS evenly spaced items, then all others in their order."""
    first = evenly_spaced(range(len(items)), PARTS)
    chosen = set(first)
    others = (place for place in range(len(items)) if place not in chosen)
    return [items[place] for place in (*first, *others)]


@dataclass(frozen=True)
class TriedDocument:
    """A document, and the effect of the function on it: an error, the reason for
    dropping it, measured values, and edits (begin, end, new text) in bytes.
    """

    locator: str
    text: str
    error: str | None
    reason: str | None
    values: Mapping[str, Any]
    edits: Sequence[tuple[int, int, str]]


@dataclass(frozen=True)
class DocumentError:
    """A document on which the function failed."""

    locator: str
    error: str | None


@dataclass(frozen=True)
class DocumentErrors:
    """Number of such documents, and the first ones."""

    total: int
    shown: list[DocumentError]


@dataclass(frozen=True)
class DroppedDocument:
    """A document that the step would drop, with its measurements."""

    locator: str
    reason: str | None
    text: str
    values: Mapping[str, object]


@dataclass(frozen=True)
class DroppedDocuments:
    """Number of such documents, also by reason, and the first ones."""

    total: int
    by_reason: dict[str | None, int]
    shown: list[DroppedDocument]


@dataclass(frozen=True)
class CountedColumn:
    """A column of strings or booleans: number of missing values, counts of the most
    frequent values, and of all others.
    """

    missing: int
    values: dict[str, int]
    others: int


@dataclass(frozen=True)
class NumberColumn:
    """A column of numbers: number of missing values, and the distribution; `bars` is
    its histogram in block characters.
    """

    missing: int
    min: float
    median: float
    max: float
    bars: str


@dataclass(frozen=True)
class Difference:
    """Text before and after an edit, with the text to its left and right in whole
    characters.
    """

    left: str
    before: str
    after: str
    right: str


@dataclass(frozen=True)
class EditedDocument:
    """The first edits of a document."""

    locator: str
    differences: list[Difference]


@dataclass(frozen=True)
class EditCounts:
    """Number of changed documents, of edits, and of their bytes; and the first
    documents.
    """

    changed: int
    times: int
    bytes_removed: int
    bytes_added: int
    shown: list[EditedDocument]


@dataclass(frozen=True)
class StepTrial:
    """Effect of an annotator or editor on some documents.

    Attributes:
        function: reference of the function.
        kind: `annotate` or `edit`.
        on: origin of the documents.
        documents: number of documents.
        columns: columns of an annotator, by name.
        edits: edits of an editor.
        differs: description of a difference between two calls, or None.
        seconds: time of the calls.
    """

    function: str
    kind: str
    on: str
    documents: int
    errors: DocumentErrors
    dropped: DroppedDocuments
    columns: dict[str, CountedColumn | NumberColumn]
    edits: EditCounts | None
    differs: str | None
    seconds: float


def try_step(step: OwnAnnotate | Edit, sample: Sample, documents: int) -> StepTrial:
    """Apply an annotator or editor to some documents.

    Raises:
        gristmill.mixtures.user_code.OwnCodeError: the function cannot be called, or
            returns an invalid value.
    """
    function = load_document_function(step, known_columns(sample.inputs))
    tried: list[TriedDocument] = []
    seconds, differs = 0.0, None
    with (
        TimeLimit(step.time_limit_seconds) as limit,
        contextlib.redirect_stdout(sys.stderr),
    ):
        for read in _read_documents(function, sample, documents):
            judged = read.documents["text"].take(pa.array(read.judged))
            values: list[dict[str, Any]] = [{}] * len(judged)
            edits: list[list[tuple[int, int, str]]] = [[]] * len(judged)
            started = time.perf_counter()
            if isinstance(step, OwnAnnotate):
                measured = annotate.measure(function, step, read.given, limit)
                seconds += time.perf_counter() - started
                differs = differs or annotate.compare_calls(
                    function, step, read, measured, limit
                )
                numbers = {
                    name: as_numbers(values)
                    for name, values in measured.columns.items()
                    if annotate.is_number(values.type)
                }
                verdicts, errors = (
                    annotate.judge(step, measured, numbers)[0],
                    measured.errors,
                )
                reasons = spread(pa.array(verdicts, pa.string()), errors).to_pylist()
                columns = {
                    name: spread(column, errors)
                    for name, column in measured.columns.items()
                }
                values = pa.table(columns).to_pylist() or values
            else:
                edited, errors = edit.edit_texts(function, read.given, limit)
                edits, errors = edit.compare_texts(judged, edited, errors)
                seconds += time.perf_counter() - started
                differs = differs or edit.compare_calls(
                    function, read, edited, errors, limit
                )
                reasons = [
                    edit.EMPTY if text is not None and not text.strip() else None
                    for text in edited
                ]
            locators = read.given["locator"].to_pylist()
            texts = judged.to_pylist()
            tried += map(TriedDocument, locators, texts, errors, reasons, values, edits)
    dropped = [document for document in tried if document.reason is not None]
    failed = [document for document in tried if document.error is not None]
    names = tried[0].values if tried else {}
    is_annotator = isinstance(step, OwnAnnotate)
    return StepTrial(
        step.use.reference,
        "annotate" if is_annotator else "edit",
        sample.described,
        len(tried),
        DocumentErrors(
            len(failed),
            [
                DocumentError(document.locator, document.error)
                for document in failed[:SHOWN]
            ],
        ),
        DroppedDocuments(
            len(dropped),
            dict(Counter(document.reason for document in dropped).most_common()),
            [
                DroppedDocument(
                    document.locator, document.reason, document.text, document.values
                )
                for document in dropped[:SHOWN]
            ],
        ),
        {
            name: describe_column([document.values[name] for document in tried])
            for name in names
        },
        None if is_annotator else _count_edits(tried),
        differs,
        seconds,
    )


def _read_documents(
    function: DocumentFunction, sample: Sample, documents: int
) -> Iterator[JudgedColumns]:
    """Yield documents of evenly spaced shards, then of all other shards while more are
    needed.
    """
    num_first = min(PARTS, len(sample.shards))
    remaining = documents
    for number, shard in enumerate(evenly_spaced_first(sample.shards)):
        if not remaining:
            return
        read = read_judged_columns(
            sample.inputs,
            shard,
            sample.sources,
            [*function.reads, "locator"],
        )
        num_taken = min(
            remaining, -(-remaining // max(num_first - number, 1)), len(read.judged)
        )
        remaining -= num_taken
        if num_taken:
            yield replace(
                read,
                judged=read.judged[:num_taken],
                given=read.given.slice(0, num_taken),
            )


def describe_column(values: Sequence[Any]) -> CountedColumn | NumberColumn:
    """Summarize a column."""
    present = [value for value in values if value is not None]
    missing = len(values) - len(present)
    if not present or isinstance(present[0], bool | str):
        ranked = Counter(present).most_common()
        return CountedColumn(
            missing,
            {str(value): number for value, number in ranked[:SHOWN]},
            sum(number for _, number in ranked[SHOWN:]),
        )
    numbers = np.array(present, np.float64)
    counts, _ = np.histogram(numbers, bins=len(BARS))
    bars = [
        BARS[-(-int(count) * (len(BARS) - 1) // int(counts.max()))] for count in counts
    ]
    return NumberColumn(
        missing, min(present), float(np.median(numbers)), max(present), "".join(bars)
    )


def _count_edits(tried: Sequence[TriedDocument]) -> EditCounts:
    documents = [document for document in tried if document.edits]
    all_edits = [edit for document in documents for edit in document.edits]
    shown = []
    for document in documents[:SHOWN]:
        content = document.text.encode()
        differences = [
            Difference(
                content[max(begin - AROUND_BYTES, 0) : begin].decode(errors="ignore"),
                content[begin:end].decode(),
                after,
                content[end : end + AROUND_BYTES].decode(errors="ignore"),
            )
            for begin, end, after in document.edits[:SHOWN]
        ]
        shown.append(EditedDocument(document.locator, differences))
    return EditCounts(
        len(documents),
        len(all_edits),
        sum(end - begin for begin, end, _ in all_edits),
        sum(len(after.encode()) for _, _, after in all_edits),
        shown,
    )
