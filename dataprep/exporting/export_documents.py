"""Stage `documents`, and `gristmill export-documents`: a run's documents as files in
common formats.

    parquet    documents-00000-of-00003.parquet ...       compressed with zstd
    jsonl      documents-00000-of-00003.jsonl.zst ...     one object per line
    hf         data/train-00000-of-00003.parquet ...      with README.md (the dataset
                                                          card) and croissant.json

Each also has `_documents.json`, written last: the selection, and every file with its
documents, bytes and SHA-256.

1. measure: per document shard, select documents and measure their texts.
2. write: the sizes determine the documents of each file, so that the files do not
   depend on how tasks are scheduled.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any, TypedDict, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.core.files import (
    array_bytes,
    write_bytes,
    write_json,
    write_text,
)
from gristmill.core.stage_context import Context
from gristmill.dataprep.conservation import ConservationError, ranked
from gristmill.dataprep.corpus import TEXT, Corpus
from gristmill.dataprep.documents import Inputs
from gristmill.dataprep.exporting.dataset_card import (
    About,
    Exported,
    ExportedColumn,
    ExportedFile,
    FunnelStep,
    cards,
)
from gristmill.dataprep.exporting.hashed_files import HashedSink, hashed_write
from gristmill.dataprep.licences.shares import (
    SIZES,
    LicenceShare,
    licence_column,
    measure_sizes,
    sum_shares,
)
from gristmill.dataprep.runners.tasks import (
    Done,
    ShardTask,
    Task,
    run_tasks,
    shard_tasks,
)
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.schema.evaluation import Documents
from gristmill.mixtures.schema.sources import INGEST

LIST = "_documents.json"
"""Name of the list of files: Arrow, Spark and pandas skip names with a leading
underscore in a folder of Parquet.
"""
NAMES = {
    "parquet": ("documents", ".parquet"),
    "jsonl": ("documents", ".jsonl.zst"),
    "hf": ("data/train", ".parquet"),
}
"""Format -> prefix and suffix of its files."""
ROW_GROUP_BYTES = 64_000_000
"""Size in memory, before compression: a reader holds one row group (Hugging Face's
viewer: at most 300 MB).
"""
TASK_BYTES = 64_000_000
"""Least text of a write task: it writes several small files, so that shards are not
read once per file.
"""
LANGUAGE = "language"


class ExportError(ValueError):
    """The documents cannot be written to `out`; the message says why."""


@dataclass(frozen=True)
class Cut:
    """Documents of one file: a range of the selected documents, across shards.

    Attributes:
        first, stop: (number of the shard, index among its selected documents); `stop`
            is exclusive.
        documents, text_bytes: number of documents, and size of their texts in UTF-8.
    """

    first: tuple[int, int]
    stop: tuple[int, int]
    documents: int
    text_bytes: int


@dataclass(frozen=True)
class DocumentsSummary:
    """Summary of the exported documents.

    Attributes:
        format: of the files.
        documents, text_bytes: number of documents, and size of their texts in UTF-8.
        sources: documents by source and licence.
        funnel: steps of the run.
        files: number of files.
    """

    format: str
    documents: int
    text_bytes: int
    sources: Sequence[LicenceShare]
    funnel: Sequence[FunnelStep]
    files: int


class MeasuredShard(TypedDict):
    """Result of measuring a shard.

    Attributes:
        read: all documents of the shard.
        drops: step, reason and number of dropped documents.
        sources: fields of the `LicenceShare` of each source and licence, of the
            selected documents.
    """

    read: int
    drops: list[tuple[str, str, int]]
    sources: list[dict[str, Any]]
    languages: dict[str, int]


class WritePayload(TypedDict):
    """Payload of a task that writes consecutive files.

    Attributes:
        first: number of the first file.
        cuts: fields of the `Cut` of each file.
    """

    first: int
    cuts: list[dict[str, Any]]


class WrittenFiles(TypedDict):
    """Result of writing files, by name."""

    files: dict[str, ExportedFile]


def run(
    inputs: Inputs, config: Recipe, out: Path, context: Context
) -> DocumentsSummary:
    """Write the documents that all steps kept, or the dropped documents."""
    about: About = config["about"]
    licences = {
        source["name"]: source["licence"]
        for source in about["sources"]
        if source["licence"] is not None
    }
    exported = export_documents(
        Corpus(inputs, licences),
        Documents.model_validate(config["documents"]),
        about,
        out,
        context,
    )
    return DocumentsSummary(
        exported.format,
        exported.documents,
        exported.text_bytes,
        exported.sources,
        exported.funnel,
        len(exported.files),
    )


def export_documents(
    corpus: Corpus,
    section: Documents,
    about: About,
    out: Path,
    context: Context,
    identity: str | None = None,
) -> Exported:
    """Write documents as files; repeating an interrupted call resumes it.

    Args:
        corpus: the documents.
        section: selection and format.
        about: facts of the manifest for the dataset card.
        out: folder or URL.
        context: of the stage; `work` must be the same if the call is repeated.
        identity: identity of the export, for `_documents.json`.

    Raises:
        ConservationError: the documents written are not the documents selected.
    """
    columns = list(section.columns or corpus.columns)
    corpus.check(columns)  # fail on an unknown column before any work
    sizes = context.work / "sizes"
    measure_results = run_tasks(
        "measure",
        shard_tasks(corpus.inputs[INGEST]),
        partial(measure_shard, corpus=corpus, section=section, out=sizes),
        context,
    )
    cuts = plan_files(
        (
            np.load(io.BytesIO((sizes / f"{shard}.npy").read_bytes()))
            for shard in corpus.shards
        ),
        section.shard_bytes,
    )
    tasks = write_tasks(cuts)
    write_results = run_tasks(
        "write",
        tasks,
        partial(write_files, corpus=corpus, section=section, out=out, total=len(cuts)),
        context,
        holds_gil=section.format == "jsonl",
    )
    files = {
        name: entry
        for result in write_results
        for name, entry in result["files"].items()
    }
    exported = _exported(corpus, section, columns, measure_results, files, identity)
    _check_conservation(exported, cuts)
    if section.format == "hf":
        for name, text in cards(about, section, exported).items():
            write_text(out / name, text)
    description = asdict(exported)
    if identity is None:
        del description["identity"]
    write_json(out / LIST, description)
    return exported


def measure_shard(
    task: ShardTask, corpus: Corpus, section: Documents, out: Path
) -> Done[MeasuredShard]:
    """Count drops and sources of a shard's documents, and write the sizes of the
    selected texts.
    """
    result, lengths = count_shard(corpus, task.name, section)
    write_bytes(out / f"{task.name}.npy", array_bytes(lengths))
    return Done([out / f"{task.name}.npy"], result)


def count_shard(
    corpus: Corpus, shard: str, section: Documents
) -> tuple[MeasuredShard, np.ndarray]:
    """Counts of a shard, and the size of each selected text."""
    outcomes = corpus.read(shard, ["dropped_by", "reason"], kept=None)
    language, licence = corpus.last_measured(LANGUAGE), licence_column(corpus)
    columns = ["source", licence, TEXT, *([language] if language else [])]
    selected = corpus.read(shard, columns, not section.dropped, section.where)
    sizes = measure_sizes(selected, licence)
    drops = Counter(
        zip(*(column.to_pylist() for column in outcomes.columns), strict=True)
    )
    languages = selected[language].drop_null().to_pylist() if language else []
    result = MeasuredShard(
        read=len(outcomes),
        drops=[(*key, number) for key, number in drops.items() if key[0] is not None],
        sources=list(map(asdict, sum_shares([sizes]))),
        languages=dict(Counter(languages)),
    )
    return result, sizes["text_bytes"].to_numpy()


def describe_documents(corpus: Corpus, section: Documents) -> Exported:
    """Description of the selected documents, without writing them."""
    results = [count_shard(corpus, shard, section)[0] for shard in corpus.shards]
    columns = section.columns or corpus.columns
    return _exported(corpus, section, columns, results, {}, None)


def plan_files(sizes: Iterable[np.ndarray], shard_bytes: int) -> list[Cut]:
    """Split the selected documents, in order, into files of at most `shard_bytes` of
    text, and at least one document.

    Args:
        sizes: int64 per shard, the bytes of each selected text.
        shard_bytes: largest text of a file, unless a single document is larger.

    Returns:
        the files in their order; one empty file if nothing is selected.
    """
    cuts: list[Cut] = []
    first = (0, 0)
    documents = text_bytes = 0
    number = -1
    for number, lengths in enumerate(sizes):
        for position, size in enumerate(lengths.tolist()):
            if documents and text_bytes + size > shard_bytes:
                place = number, position
                cuts.append(Cut(first, place, documents, text_bytes))
                first = place
                documents = text_bytes = 0
            documents += 1
            text_bytes += size
    if documents or not cuts:
        cuts.append(Cut(first, (number + 1, 0), documents, text_bytes))
    return cuts


def write_tasks(cuts: Sequence[Cut]) -> list[Task[WritePayload]]:
    """Group consecutive files into tasks of at least TASK_BYTES."""
    tasks: list[Task[WritePayload]] = []
    pending: list[Cut] = []
    for number, cut in enumerate(cuts):
        pending.append(cut)
        size = sum(entry.text_bytes for entry in pending)
        if size >= TASK_BYTES or number + 1 == len(cuts):
            first = number + 1 - len(pending)
            payload = WritePayload(first=first, cuts=list(map(asdict, pending)))
            tasks.append(Task(f"{first:05d}-{number:05d}", payload, size))
            pending = []
    return tasks


def write_files(
    task: Task[WritePayload],
    corpus: Corpus,
    section: Documents,
    out: Path,
    total: int,
) -> Done[WrittenFiles]:
    """Write consecutive files, reading every shard once."""
    columns = list(section.columns or corpus.columns)
    schema = pa.schema([corpus.schema.field(name) for name in columns])
    prefix, ending = NAMES[section.format]
    read: dict[int, pa.Table] = {}

    def shard(number: int) -> pa.Table:
        if number not in read:
            read.clear()
            read[number] = corpus.read(
                corpus.shards[number], columns, not section.dropped, section.where
            )
        return read[number]

    files: dict[str, ExportedFile] = {}
    for number, fields in enumerate(task.payload["cuts"], task.payload["first"]):
        name = f"{prefix}-{number:05d}-of-{total:05d}{ending}"
        pieces = _pieces(Cut(**fields), shard)
        files[name] = _write_file(out / name, ending, schema, pieces)
    return Done([out / name for name in files], {"files": files})


def _pieces(cut: Cut, shard: Callable[[int], pa.Table]) -> Iterator[pa.Table]:
    """Documents of a file, by shard; `shard` reads the selected ones of a shard."""
    (first, first_position), (last, stop_position) = cut.first, cut.stop
    for number in range(first, last + (stop_position > 0)):
        begin = first_position if number == first else 0
        piece = shard(number)[begin : stop_position if number == last else None]
        if len(piece):
            yield piece


def _write_file(
    path: Path, ending: str, schema: pa.Schema, pieces: Iterable[pa.Table]
) -> ExportedFile:
    """Write one file."""
    documents = text_bytes = 0

    def counted() -> Iterator[pa.Table]:
        nonlocal documents, text_bytes
        for piece in pieces:
            documents += len(piece)
            if TEXT in schema.names:
                text_bytes += pc.sum(pc.binary_length(piece[TEXT])).as_py()
            yield piece

    write = _write_parquet if ending == ".parquet" else _write_json_lines
    checksums: dict[str, str] = {}
    with hashed_write(path, checksums) as sink:
        write(sink, schema, counted())
    return ExportedFile(
        documents=documents,
        text_bytes=text_bytes,
        bytes=sink.size,
        sha256=checksums[path.name],
    )


def _write_parquet(
    sink: HashedSink, schema: pa.Schema, pieces: Iterable[pa.Table]
) -> None:
    with pq.ParquetWriter(
        sink,
        schema,
        compression="zstd",
        write_page_checksum=True,
        write_page_index=True,
    ) as writer:
        pending: list[pa.Table] = []
        size = 0
        for piece in chain(pieces, [None]):
            if pending and (piece is None or size >= ROW_GROUP_BYTES):
                group = pa.concat_tables(pending)
                writer.write_table(group, row_group_size=len(group))
                pending, size = [], 0
            if piece is not None:
                pending.append(piece)
                size += piece.nbytes


def _write_json_lines(
    sink: HashedSink, schema: pa.Schema, pieces: Iterable[pa.Table]
) -> None:
    import zstandard

    with zstandard.ZstdCompressor().stream_writer(
        cast(IO[bytes], sink), closefd=False
    ) as compressed:
        for piece in pieces:
            for row in piece.to_pylist():
                # NaN and infinities, which JSON does not have, become null
                compressed.write(orjson.dumps(row, str, orjson.OPT_APPEND_NEWLINE))


def _exported(
    corpus: Corpus,
    section: Documents,
    columns: Sequence[str],
    measure_results: Sequence[MeasuredShard],
    files: Mapping[str, ExportedFile],
    identity: str | None,
) -> Exported:
    drops: dict[str, Counter[str]] = {step: Counter() for step in corpus.steps}
    languages: Counter[str] = Counter()
    for shard in measure_results:
        languages.update(shard["languages"])
        for step, reason, number in shard["drops"]:
            drops[step][reason] += number
    remaining = sum(shard["read"] for shard in measure_results)
    funnel: list[FunnelStep] = []
    for step, reasons in drops.items():
        kept = remaining - reasons.total()
        dropped = dict(sorted(reasons.items()))
        funnel.append(
            {"step": step, "read": remaining, "dropped": dropped, "kept": kept}
        )
        remaining = kept
    columns_of_files: list[ExportedColumn] = [
        {
            "name": name,
            "type": str(corpus.schema.field(name).type),
            "step": corpus.measured.get(name, (None,))[0],
        }
        for name in columns
    ]
    sources = sum_shares(
        pa.Table.from_pylist(shard["sources"], SIZES) for shard in measure_results
    )
    counted = [file["documents"] for file in files.values()]
    return Exported(
        documents=sum(counted or [source.documents for source in sources]),
        text_bytes=sum(source.text_bytes for source in sources),
        columns=columns_of_files,
        sources=sources,
        funnel=funnel,
        measured=[column for _, column in corpus.measured.values()],
        languages=dict(ranked(languages)),
        files=files,
        format=section.format,
        dropped=section.dropped,
        where=section.where,
        identity=identity,
    )


def _check_conservation(exported: Exported, cuts: Sequence[Cut]) -> None:
    """Raise ConservationError unless every file has exactly the documents selected for
    it.
    """
    has_text = TEXT in [column["name"] for column in exported.columns]
    for (name, entry), cut in zip(exported.files.items(), cuts, strict=True):
        size = entry["text_bytes"] if has_text else cut.text_bytes
        if (entry["documents"], size) != (cut.documents, cut.text_bytes):
            raise ConservationError(
                f"documents: {name} has {entry['documents']} documents with {size} "
                f"bytes of text, but {cut.documents} with {cut.text_bytes} were "
                "chosen; nothing was committed"
            )
    selected = sum(source.documents for source in exported.sources)
    if exported.documents != selected:
        raise ConservationError(
            f"documents: {exported.documents} were written, but {selected} were "
            "chosen; nothing was committed"
        )
