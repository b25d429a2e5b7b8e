"""Stage `documents`, and `gristmill export-documents`: a run's documents as files that everybody reads.

    parquet    documents-00000-of-00003.parquet ...       zstd
    jsonl      documents-00000-of-00003.jsonl.zst ...     an object a line
    hf         data/train-00000-of-00003.parquet ..., README.md (the dataset card), croissant.json

and in each `_documents.json`, written last: what was exported, and every file with its documents, bytes and SHA-256.

1. measure: per document shard, which documents are chosen, and how much text each has.
2. write: which documents each file holds follows from that, so that nothing depends on who writes it.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.dataprep.context import Context
from gristmill.dataprep.corpus import TEXT, Corpus
from gristmill.dataprep.counts import ConservationError
from gristmill.dataprep.exporting.croissant import croissant
from gristmill.dataprep.exporting.dataset_card import Exported, card
from gristmill.dataprep.files import array_bytes, atomic_write, write_json
from gristmill.dataprep.jobs.engine import Done, Task, run_tasks, shard_tasks
from gristmill.mixtures.evaluation import Documents
from gristmill.mixtures.sources import INGEST

LIST = "_documents.json"
"""Readers of a folder of Parquet files (Arrow, Spark, pandas) pass over what begins with an underscore."""
NAMES = {"parquet": ("documents", ".parquet"), "jsonl": ("documents", ".jsonl.zst"), "hf": ("data/train", ".parquet")}
"""What files of a format are called, and their ending."""
ROW_GROUP_BYTES = 64_000_000
"""In memory, before compression: a reader of one row group holds as much (Hugging Face's viewer: at most 300 MB)."""
TASK_BYTES = 64_000_000
"""Text that one task writes at least: small files are written several at a time, so that no shard is read for each."""
LANGUAGE = "language"


class ExportError(ValueError):
    """The documents cannot be written there; says what is in the way."""


@dataclass(frozen=True)
class Cut:
    """The documents of one file: from one place up to another, among the chosen ones of each shard.

    Attributes:
        first, stop: (number of the shard, position among its chosen documents); `stop` is the first one behind.
        documents, text_bytes: how many, and of their texts in UTF-8.
    """

    first: tuple[int, int]
    stop: tuple[int, int]
    documents: int
    text_bytes: int


def run(inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context) -> dict[str, Any]:
    """Write the documents that all steps kept, or those that one dropped."""
    about = config["about"]
    licences = {one["name"]: one["licence"] for one in about["sources"] if one["licence"] is not None}
    found = export_documents(
        Corpus(inputs, licences), Documents.model_validate(config["documents"]), about, out, context
    )
    return {key: found[key] for key in ("format", "documents", "text_bytes", "sources", "funnel")} | {
        "files": len(found["files"])
    }


def export_documents(
    corpus: Corpus,
    section: Documents,
    about: Mapping[str, Any],
    out: Path,
    context: Context,
    identity: str | None = None,
) -> dict[str, Any]:
    """Write documents as files; an interrupted call is resumed by the same one.

    Args:
        corpus: the documents.
        section: which ones, and how they are written.
        about: what the dataset card tells of the manifest (`flows/stages/documents.py`).
        out: folder or URL.
        context: where to run; `work` must be the same when the call is resumed.
        identity: names what is exported, for `_documents.json`.

    Returns:
        what `_documents.json` says.

    Raises:
        ConservationError: other documents were written than were chosen.
    """
    columns = list(section.columns or corpus.columns)
    corpus.check(columns)  # an unknown one is an error before any work
    sizes = context.work / "sizes"
    measured = run_tasks(
        "measure",
        shard_tasks(corpus.inputs[INGEST]),
        partial(measure_shard, corpus=corpus, section=section, out=sizes),
        context,
    )
    cuts = plan_files((_read_sizes(sizes, shard) for shard in corpus.shards), section.shard_bytes)
    tasks = write_tasks(cuts)
    written = run_tasks(
        "write",
        tasks,
        partial(write_files, corpus=corpus, section=section, out=out, total=len(cuts)),
        context,
        holds_gil=section.format == "jsonl",
    )
    files = {name: entry for one in written for name, entry in one["files"].items()}
    exported = _exported(corpus, section, columns, measured, files)
    _check_conservation(exported, cuts)
    if section.format == "hf":
        with atomic_write(out / "README.md") as sink:
            sink.write(card(about, section, exported).encode())
        write_json(out / "croissant.json", croissant(about, section, exported))
    described = {
        **asdict(exported),
        "format": section.format,
        "dropped": section.dropped,
        "where": section.where,
        **({} if identity is None else {"identity": identity}),
    }
    write_json(out / LIST, described)
    return described


def measure_shard(task: Task, corpus: Corpus, section: Documents, out: Path) -> Done:
    """Count what became of a shard's documents, and write how long the chosen texts are."""
    fates = corpus.read(task.name, ["source", "dropped_by", "reason"], kept=None)
    language = next((name for name, (_, column) in reversed(corpus.measured.items()) if column == LANGUAGE), None)
    columns = ["source", "licence", TEXT, *([language] if language else [])]
    chosen = corpus.read(task.name, columns, not section.dropped, section.where)
    lengths = pc.binary_length(chosen[TEXT]).to_numpy().astype(np.int64)
    with atomic_write(out / f"{task.name}.npy") as sink:
        sink.write(array_bytes(lengths))
    drops = Counter(zip(fates["dropped_by"].to_pylist(), fates["reason"].to_pylist(), strict=True))
    per_source: dict[tuple[str, str], list[int]] = {}
    for source, licence, length in zip(
        chosen["source"].to_pylist(), chosen["licence"].to_pylist(), lengths.tolist(), strict=True
    ):
        entry = per_source.setdefault((source, licence or ""), [0, 0])
        entry[0] += 1
        entry[1] += length
    languages = Counter(one for one in chosen[language].to_pylist() if one is not None) if language else {}
    return Done(
        [out / f"{task.name}.npy"],
        {
            "read": len(fates),
            "drops": [[*fate, number] for fate, number in drops.items() if fate[0] is not None],
            "sources": [[*key, *entry] for key, entry in per_source.items()],
            "languages": dict(languages),
        },
    )


def _read_sizes(folder: Path, shard: str) -> np.ndarray:
    lengths: np.ndarray = np.load(io.BytesIO((folder / f"{shard}.npy").read_bytes()), allow_pickle=False)
    return lengths


def plan_files(sizes: Iterable[np.ndarray], shard_bytes: int) -> list[Cut]:
    """Cut the chosen documents, in their order, into files of at most so much text, and at least one document.

    Args:
        sizes: int64 per shard, the bytes of each chosen text.
        shard_bytes: what a file holds at most, unless one document alone is larger.

    Returns:
        the files in their order; a single empty one where nothing is chosen.
    """
    cuts: list[Cut] = []
    first, documents, held, number = (0, 0), 0, 0, -1
    for number, lengths in enumerate(sizes):
        ends, at = np.cumsum(lengths), 0
        while at < len(lengths):
            before = int(ends[at - 1]) if at else 0
            stop = max(int(np.searchsorted(ends, before + shard_bytes - held, side="right")), at)
            stop = stop if documents or stop > at else at + 1
            if stop > at:
                documents, held = documents + stop - at, held + int(ends[stop - 1]) - before
            if stop < len(lengths):
                cuts.append(Cut(first, (number, stop), documents, held))
                first, documents, held = (number, stop), 0, 0
            at = stop
    if documents or not cuts:
        cuts.append(Cut(first, (number + 1, 0), documents, held))
    return cuts


def write_tasks(cuts: Sequence[Cut]) -> list[Task]:
    """Consecutive files in tasks of TASK_BYTES and more."""
    tasks: list[Task] = []
    held: list[Cut] = []
    for number, cut in enumerate(cuts):
        held.append(cut)
        size = sum(one.text_bytes for one in held)
        if size >= TASK_BYTES or number + 1 == len(cuts):
            first = number + 1 - len(held)
            payload = {"first": first, "cuts": [asdict(one) for one in held]}
            tasks.append(Task(f"{first:05d}-{number:05d}", payload, size))
            held = []
    return tasks


def write_files(task: Task, corpus: Corpus, section: Documents, out: Path, total: int) -> Done:
    """Write some consecutive files, having read every shard once."""
    columns = list(section.columns or corpus.columns)
    schema = pa.schema([corpus.schema.field(name) for name in columns])
    prefix, ending = NAMES[section.format]
    read: dict[int, pa.Table] = {}

    def shard(number: int) -> pa.Table:
        if number not in read:
            read.clear()
            read[number] = corpus.read(corpus.shards[number], columns, not section.dropped, section.where)
        return read[number]

    files: dict[str, dict[str, Any]] = {}
    for number, one in enumerate(task.payload["cuts"], task.payload["first"]):
        cut = Cut(**{**one, "first": tuple(one["first"]), "stop": tuple(one["stop"])})
        name = f"{prefix}-{number:05d}-of-{total:05d}{ending}"
        pieces = (shard(place).slice(begin, length) for place, begin, length in _places(cut, lambda n: len(shard(n))))
        files[name] = _write_file(out / name, ending, schema, pieces)
    return Done([out / name for name in files], {"files": files})


def _places(cut: Cut, chosen: Any) -> Iterator[tuple[int, int, int]]:
    """The parts of shards that are in a file: number, first position, how many; `chosen(number)` are in a shard."""
    (first, begin), (last, end) = cut.first, cut.stop
    for number in range(first, last + (end > 0)):
        start = begin if number == first else 0
        length = (end if number == last else chosen(number)) - start
        if length:
            yield number, start, length


def _write_file(path: Path, ending: str, schema: pa.Schema, pieces: Iterable[pa.Table]) -> dict[str, Any]:
    """Write one file; returns its documents, bytes of text, bytes and SHA-256."""
    counts = {"documents": 0, "text_bytes": 0}

    def counted() -> Iterator[pa.Table]:
        for piece in pieces:
            counts["documents"] += len(piece)
            counts["text_bytes"] += pc.sum(pc.binary_length(piece[TEXT])).as_py() if TEXT in schema.names else 0
            yield piece

    with atomic_write(path) as sink:
        hashed = _Hashed(sink)
        (_write_parquet if ending == ".parquet" else _write_json_lines)(hashed, schema, counted())
    return {**counts, "bytes": hashed.size, "sha256": hashed.digest.hexdigest()}


class _Hashed(io.RawIOBase):
    """Takes bytes for a file, and for its size and checksum."""

    def __init__(self, sink: BinaryIO) -> None:
        self._sink, self.digest, self.size = sink, hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        given = bytes(data)
        self.digest.update(given)
        self._sink.write(given)
        self.size += len(given)
        return len(given)

    def tell(self) -> int:
        return self.size


def _write_parquet(sink: _Hashed, schema: pa.Schema, pieces: Iterable[pa.Table]) -> None:
    with pq.ParquetWriter(sink, schema, compression="zstd", write_page_checksum=True, write_page_index=True) as writer:
        for group in _row_groups(schema, pieces):
            writer.write_table(group, row_group_size=max(len(group), 1))


def _row_groups(schema: pa.Schema, pieces: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The pieces joined to tables of ROW_GROUP_BYTES and more, as far as there is so much."""
    held: list[pa.Table] = []
    for piece in pieces:
        held.append(piece)
        if sum(one.nbytes for one in held) >= ROW_GROUP_BYTES:
            yield pa.concat_tables(held)
            held = []
    if held:
        yield pa.concat_tables(held)


def _write_json_lines(sink: _Hashed, schema: pa.Schema, pieces: Iterable[pa.Table]) -> None:
    import zstandard

    encode = json.JSONEncoder(ensure_ascii=False, default=str).encode
    with zstandard.ZstdCompressor().stream_writer(cast(IO[bytes], sink), closefd=False) as compressed:
        for piece in pieces:
            for row in _finite(piece).to_pylist():
                compressed.write(encode(row).encode() + b"\n")


def _finite(table: pa.Table) -> pa.Table:
    """The table without infinite numbers, for which JSON has no words."""
    for place, one in enumerate(table.schema):
        if pa.types.is_floating(one.type):
            values = table[one.name]
            table = table.set_column(place, one, pc.if_else(pc.is_finite(values), values, pa.scalar(None, one.type)))
    return table


def _exported(
    corpus: Corpus,
    section: Documents,
    columns: Sequence[str],
    measured: Sequence[Mapping[str, Any]],
    files: Mapping[str, Any],
) -> Exported:
    sources: dict[tuple[str, str], list[int]] = {}
    drops: Counter[tuple[str, str]] = Counter()
    languages: Counter[str] = Counter()
    for one in measured:
        languages.update(one["languages"])
        drops.update({(step, reason): number for step, reason, number in one["drops"]})
        for source, licence, documents, size in one["sources"]:
            entry = sources.setdefault((source, licence), [0, 0])
            entry[0], entry[1] = entry[0] + documents, entry[1] + size
    left, funnel = sum(one["read"] for one in measured), []
    for step in corpus.steps:
        dropped = {reason: number for (by, reason), number in sorted(drops.items()) if by == step}
        funnel.append({"step": step, "read": left, "dropped": dropped, "kept": left - sum(dropped.values())})
        left = funnel[-1]["kept"]
    kinds = {name: str(corpus.schema.field(name).type) for name in columns}
    return Exported(
        documents=sum(one["documents"] for one in files.values()),
        text_bytes=sum(size for _, size in sources.values()),
        columns=[
            {"name": name, "type": kinds[name], "step": corpus.measured.get(name, (None,))[0]} for name in columns
        ],
        sources=[
            {"source": source, "licence": licence or None, "documents": entry[0], "text_bytes": entry[1]}
            for (source, licence), entry in sorted(sources.items())
        ],
        funnel=funnel,
        measured=[column for _, column in corpus.measured.values()],
        languages=dict(sorted(languages.items(), key=lambda item: (-item[1], item[0]))),
        files=dict(files),
    )


def _check_conservation(exported: Exported, cuts: Sequence[Cut]) -> None:
    """Raise ConservationError unless what was written is what was chosen, file by file."""
    has_text = TEXT in [one["name"] for one in exported.columns]
    for (name, entry), cut in zip(exported.files.items(), cuts, strict=True):
        size = entry["text_bytes"] if has_text else cut.text_bytes
        if (entry["documents"], size) != (cut.documents, cut.text_bytes):
            raise ConservationError(
                f"documents: {name} has {entry['documents']} documents with {size} bytes of text, but "
                f"{cut.documents} with {cut.text_bytes} were chosen; nothing was committed"
            )
    chosen = sum(one["documents"] for one in exported.sources)
    if exported.documents != chosen:
        raise ConservationError(
            f"documents: {exported.documents} were written, but {chosen} were chosen; nothing was committed"
        )
