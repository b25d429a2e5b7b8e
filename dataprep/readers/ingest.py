"""First stage: reads all sources into document shards; everything else goes to
quarantine.

Output: `part-<task>-<piece>.parquet` (documents), `quarantine/<task>-<piece>.parquet`
for records that could not be read, and `dropped/<task>-<piece>.parquet` for pages
without text. Other parts of a web archive (requests, redirects, images) are not
documents: they are in no ledger, but counted by kind as `skipped`. Tasks depend only on
the sorted listing: adjacent files of a source up to `shard_bytes` of input. A larger
file, or a source with a `limit`, is one task that fills several shards.

Memory does not depend on the number of documents. A worker holds a shard and its
tables, four times `shard_bytes` (or one document, four times `max_document_bytes`), and
up to 20,000 rows of quarantine. The parent process holds about 1 kB per file and the
result of each task: another 1 kB, and the first quarantined records; while it compares
ids, up to 1 GB (`duplicate_records.py`). A worker also holds the names of a tar
archive's members, 150 bytes each, as a repeated name gets another locator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from gristmill.core.files import as_path
from gristmill.core.stage_context import Context
from gristmill.dataprep.conservation import (
    Counts,
    SourceCounts,
    add_counts,
    balance,
    ranked,
)
from gristmill.dataprep.documents import Inputs
from gristmill.dataprep.licences.statements import LICENCE
from gristmill.dataprep.readers.binary_formats import answers
from gristmill.dataprep.readers.document_shards import (
    SHOWN_DAMAGED,
    SHOWN_QUARANTINED,
    Loss,
    QuarantinedRecord,
    ReadFiles,
    ShardWriter,
    SourceTotals,
    estimate_losses,
)
from gristmill.dataprep.readers.duplicate_records import (
    settle_repeats,
    shards_of,
)
from gristmill.dataprep.readers.extraction_guard import Guard, extract_pages
from gristmill.dataprep.readers.html import Options
from gristmill.dataprep.readers.own_sources import OwnProcess
from gristmill.dataprep.readers.parquet import TableReader
from gristmill.dataprep.readers.pythondocs import ListedFile
from gristmill.dataprep.readers.readers import read_file
from gristmill.dataprep.readers.records import Read, Reading
from gristmill.dataprep.readers.sources import (
    SourceError,
    SourceFile,
    SourceListing,
    check_libraries,
    find_files,
)
from gristmill.dataprep.runners.tasks import Done, Task, run_tasks
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.schema.sources import (
    GENERATE,
    PARTS,
    Ingest,
    OwnReader,
    Paragraphs,
    Source,
)
from gristmill.mixtures.user_code import OwnCodeError

TRIED_RECORDS = 100
"""Records of its first file with which a user's reader is tested for determinism."""
SHOWN_CAUSES = 5
"""Causes listed in the warning about a mostly skipped source."""
DEFAULT_EXTRACTOR = "resiliparse"
THREADS = 4
"""Most workers that share one GIL: a third of the time to read JSON lines is hashing,
one document at a time.
"""
THREAD_BYTES = 1 << 30
"""Most bytes of JSON lines read by threads: two threads had read 300 MB before two
processes had finished their imports.
"""


class ChangedInputError(SourceError):
    """A source's files changed after the run was planned, so its output would have the
    wrong fingerprint.
    """


@dataclass(frozen=True)
class SourceReport:
    """Records and damage of a source.

    Attributes:
        path: as in the manifest.
        files: number of files.
        shards: number of document shards.
        skipped: items that are not documents, by kind.
        replaced: number of `records` with invalid bytes, and of their `places`.
        lost: estimated records of files that could not be read to their end.
        formats: of the files.
        crawls: distinct statements of `warcinfo` records about the crawl of a file.
    """

    path: str
    files: int
    shards: int
    skipped: Mapping[str, int]
    replaced: Mapping[str, int]
    lost: int
    formats: Sequence[str]
    crawls: Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class IngestSummary:
    """Summary of all sources.

    Attributes:
        counts: records by outcome.
        sources: report of each source.
        lost: estimated records of files that could not be read to their end.
        damaged: the files that lost most.
        quarantined: the first quarantined records.
        skipped: items that are not documents, by kind.
        warnings: sentences for the user.
    """

    counts: Counts
    sources: Mapping[str, SourceReport]
    lost: int
    damaged: Sequence[Loss]
    quarantined: Sequence[QuarantinedRecord]
    skipped: Mapping[str, int]
    warnings: Sequence[str]


class IngestPayload(TypedDict):
    """Payload of a task that reads files of a source.

    Attributes:
        files: fields of each `SourceFile`.
        reading: fields of `Reading`.
        read: section of a user's reader.
    """

    source: str
    files: list[dict[str, Any]]
    reading: Recipe
    extract_options: Options
    limit: int | None
    read: NotRequired[Recipe]


def run(inputs: Inputs, config: Recipe, out: Path, context: Context) -> IngestSummary:
    """Read all sources of `config` into document shards under `out`.

    Args:
        inputs: empty, or `generate`, whose folder has the files of the generated
            sources.
        config: `sources` (name -> Source section, with the `listing` that it was
            planned from, if any), `ingest` (Ingest section) and `generated` (names of
            generated sources).
        out: folder for the shards and the quarantine.
        context: of the stage.

    Raises:
        SourceError: a source matches nothing, has an unknown format or one whose
            library is not installed, or yields no document.
        ChangedInputError: a source's files differ from those that it was planned from.
        DuplicateIdError: records of a source with `on_repeat: fail` repeat the id and
            the text of another record.
        ExtractorError: the extracting process does not start.
        QuarantineError: more than `max_quarantined` of the records could not be read,
            or are lost with damaged files.
    """
    section = Ingest.model_validate(config.get("ingest", {}))
    settings: dict[str, Recipe] = {
        name: {**source} for name, source in config["sources"].items()
    }
    planned = {name: source.pop("listing", None) for name, source in settings.items()}
    for name in config.get("generated", ()):
        settings[name] = generated_files(inputs[GENERATE] / name)
    sources = {
        name: Source.model_validate(source) for name, source in sorted(settings.items())
    }
    listings = {name: find_files(name, source) for name, source in sources.items()}
    for name, listing in listings.items():
        check_unchanged(name, listing, planned.get(name))
    check_libraries(listings)
    unsteady = list(try_readers(sources, listings))
    tasks = plan(sources, listings, section.shard_bytes)
    process = partial(ingest_task, str(out), section)
    files = [file for listing in listings.values() for file in listing.files]
    # Little input of JSON lines only is read mostly without the GIL: processes would
    # take longer to start.
    in_threads = (
        context.beam.workers <= THREADS
        and all(file.format == "jsonl" for file in files)
        and sum(file.size for file in files) <= THREAD_BYTES
        and all(
            source.read is None and source.extract in (None, "none")
            for source in sources.values()
        )
    )
    results = run_tasks("read", tasks, process, context, holds_gil=not in_threads)
    totals = {
        name: add_counts(
            result["totals"] for result in results if result["source"] == name
        )
        for name in sources
    }
    _check_every_source(sources, totals, results)
    losses = estimate_losses(results)
    warnings = [
        *unsteady,
        *(
            f"source {name!r}: its folder also holds files that are not read: "
            + "; ".join(
                [
                    ", ".join(
                        f"{count} {kind}" for kind, count in listing.ignored.items()
                    ),
                    *answers(listing.ignored),
                ]
            )
            for name, listing in listings.items()
            if listing.ignored
        ),
        *(warning for result in results for warning in result["warnings"]),
        *_reading_warnings(totals, section.max_document_bytes),
        *(loss.describe() for loss in losses[:SHOWN_DAMAGED]),
    ]
    for warning in warnings:
        context.warn(warning)
    lost = sum(loss.lost for loss in losses)
    counts = balance(
        results, section.max_quarantined, context.stage, lost, out / "quarantine"
    )
    repeats = []
    for number, (name, source) in enumerate(sources.items()):
        # Other records have a path and a number instead of their own ids.
        if source.id_field is not None or any(
            "warc" in (file.format, file.members) or file.members == "auto"
            for file in listings[name].files
        ):
            repeat = settle_repeats(
                name,
                shards_of(out, name, results),
                f"repeats-{number:05d}",
                source.on_repeat == "fail",
                out / "dropped" / f"repeated-{number:05d}.parquet",
                context,
            )
            repeats += [] if repeat is None else [repeat]
    for repeat in repeats:
        context.warn(repeat.describe())
    emptied = {repeat.source: repeat.emptied_shards for repeat in repeats}
    return IngestSummary(
        add_counts([counts, *(repeat.counts() for repeat in repeats)]),
        {
            name: SourceReport(
                path=source.path,
                files=len(listings[name].files),
                shards=totals[name]["shards"] - emptied.get(name, 0),
                skipped=totals[name]["skipped"],
                replaced=totals[name]["replaced"],
                lost=sum(loss.lost for loss in losses if loss.source == name),
                formats=sorted({file.format for file in listings[name].files}),
                crawls=_crawls(name, results),
            )
            for name, source in sources.items()
        },
        lost,
        losses[:SHOWN_DAMAGED],
        [row for result in results for row in result["quarantined"]][
            :SHOWN_QUARANTINED
        ],
        add_counts(total["skipped"] for total in totals.values()),
        [*warnings, *(repeat.describe() for repeat in repeats)],
    )


def _crawls(source: str, results: Sequence[ReadFiles]) -> list[Mapping[str, str]]:
    crawls: list[Mapping[str, str]] = []
    for result in results:
        if result["source"] == source:
            crawls += [crawl for crawl in result["crawls"] if crawl not in crawls]
    return crawls


def generated_files(folder: Path) -> Recipe:
    """Files of a generated source, as a section of `sources`."""
    return {"path": f"{folder}/part-*.jsonl", "format": "jsonl", "id_field": "locator"}


def check_unchanged(
    name: str, listing: SourceListing, planned: Sequence[ListedFile] | None
) -> None:
    """Raise ChangedInputError if a source's files differ from the listing that it was
    planned from.

    Compares names, sizes and modification times or etags; content hashed during
    planning is not hashed again. Python sources have no files.
    """
    if planned is None or any(file.format == "python" for file in listing.files):
        return
    before = {entry["path"]: entry for entry in planned}
    now = {file.name: file for file in listing.files}
    changed = before.keys() ^ now.keys()
    for path in before.keys() & now.keys():
        stamp = before[path]["stamp"]
        is_same = stamp.startswith("sha256:") or stamp == now[path].stamp
        is_same &= before[path].get("licence") == now[path].metadata.get(LICENCE)
        if before[path]["size"] != now[path].size or not is_same:
            changed.add(path)
    if changed:
        again = ""
        if listing.by:
            again = f", or mend {listing.by} if it lists others at every call"
        raise ChangedInputError(
            f"source {name!r}: {len(changed)} files changed since the run was planned, "
            f"first {min(changed)}; run again{again}"
        )
    if listing.by and list(before) != list(now):
        raise ChangedInputError(
            f"source {name!r}: {listing.by} lists its files in another order than when "
            "the run was planned; let it sort them"
        )


def plan(
    sources: Mapping[str, Source],
    listings: Mapping[str, SourceListing],
    shard_bytes: int,
) -> list[Task[IngestPayload]]:
    """Split the listings into tasks, ordered by source and file name; a pure function
    of both.
    """
    tasks: list[Task[IngestPayload]] = []
    size = 0
    for name, source in sorted(sources.items()):
        groups: list[list[SourceFile]] = []
        for file in listings[name].files:
            is_full = source.limit is None and (
                size + file.size > shard_bytes or file.format == "python"
            )
            if not groups or is_full:
                groups.append([])
                size = 0
            groups[-1].append(file)
            size += file.size
        for group in groups:
            payload = IngestPayload(
                source=name,
                files=[asdict(file) for file in group],
                reading=asdict(reading_of(source)),
                extract_options=source.extract_options.model_dump(),
                limit=source.limit,
            )
            if source.read:
                payload["read"] = source.read.model_dump(mode="json")
            group_bytes = sum(file.size for file in group)
            tasks.append(Task(f"{len(tasks):05d}", payload, group_bytes))
    return tasks


def reading_of(source: Source) -> Reading:
    """Settings for reading a source's records."""
    return Reading(
        source.text_field,
        source.id_field,
        source.metadata_fields,
        source.encoding,
        source.extract,
        source.encoding_errors,
        source.split.paragraphs if isinstance(source.split, Paragraphs) else None,
        source.split in PARTS,
    )


def ingest_task(
    out: str, section: Ingest, task: Task[IngestPayload]
) -> Done[ReadFiles]:
    """Read the files of one task; a function of the task's payload and the files alone.

    Args:
        out: folder for shards, quarantined and dropped records.
        section: settings.
        task: one of `plan`.
    """
    source = task.payload["source"]
    writer = ShardWriter(
        as_path(out),
        task.name,
        source,
        section.shard_bytes,
        section.max_document_bytes,
        task.payload["limit"],
    )
    reading = Reading(**task.payload["reading"])
    warnings: list[str] = []
    extractor = Guard(
        reading.extract or DEFAULT_EXTRACTOR,
        task.payload["extract_options"],
        section.extract_seconds,
        section.extract_memory_bytes,
    )
    reader_settings = task.payload.get("read")
    with (
        extractor as guard,
        TableReader() as tables,
        nullcontext()
        if reader_settings is None
        else OwnProcess(OwnReader.model_validate(reader_settings)) as own_reader,
    ):
        for file in (SourceFile(**entry) for entry in task.payload["files"]):
            before = writer.read
            skipped = writer.totals["skipped"].total()
            records = (
                read_file(file, reading, tables)
                if own_reader is None
                else own_records(own_reader, file, reading)
            )
            for record in extract_pages(records, guard, reading):
                writer.add(file.name, record)
                if writer.is_full:
                    break
            if writer.read == before:
                has_skipped = writer.totals["skipped"].total() > skipped
                warnings.append(
                    f"source {source!r}: {file.name} holds no records"
                    + (" except skipped ones" if has_skipped else "")
                )
            if writer.is_full:
                break
    writer.close()
    result = ReadFiles(
        source=source,
        counts=writer.counts(),
        totals=SourceTotals(
            read=writer.read,
            shards=writer.shards,
            skipped=dict(sorted(writer.totals["skipped"].items())),
            skipped_candidates=writer.totals["skipped_candidates"],
            replaced=writer.totals["replaced"],
            too_long=writer.totals["too_long"],
        ),
        quarantined=writer.first_quarantined,
        warnings=warnings,
        whole={name: {**counted} for name, counted in writer.whole.items()},
        crawls=writer.crawls,
        damaged=writer.damaged,
    )
    return Done(writer.files, result)


def own_records(own: OwnProcess, file: SourceFile, reading: Reading) -> Iterator[Read]:
    """Records that a user's reader yields for a file."""
    return own.records(file.name, file.location, file.compression, file.size, reading)


def try_readers(
    sources: Mapping[str, Source], listings: Mapping[str, SourceListing]
) -> Iterator[str]:
    """Call every user's reader twice on its first file; yield a warning if the results
    differ.

    Raises:
        SourceError: a reader cannot be loaded or called, or yields no records.
    """
    for name, source in sources.items():
        if source.read is None:
            continue
        file = listings[name].files[0]
        reading = reading_of(source)
        try:
            with (
                OwnProcess(source.read) as first_process,
                OwnProcess(source.read) as second_process,
            ):
                first, second = (
                    list(islice(own_records(process, file, reading), TRIED_RECORDS))
                    for process in (first_process, second_process)
                )
        except OwnCodeError as error:
            raise SourceError(f"source {name!r}: read: {error}") from error
        if first != second:
            yield (
                f"source {name!r}: {source.read.use.reference} is not deterministic: "
                f"called twice on {file.name}, "
                "it gives other records; runs of this manifest will differ"
            )


def _check_every_source(
    sources: Mapping[str, Source],
    totals: Mapping[str, SourceTotals],
    results: Sequence[ReadFiles],
) -> None:
    counts = add_counts(result["counts"]["sources"] for result in results)
    for name, source in sources.items():
        part = counts.get(name, SourceCounts())
        if part.get("kept"):
            continue
        quarantined, read = part.get("quarantined"), part.get("read")
        problem = "its files hold no records"
        if quarantined:
            first = next(
                row
                for result in results
                for row in result["quarantined"]
                if row["source"] == name
            )
            problem = (
                f"{quarantined} of {read} records could not be read; the first: "
                f"{first['file']}, record {first['record']}: {first['error']}"
            )
        elif read:
            problem = f"its {read} records hold no text"
        empty = sum(part.get("dropped", {}).values())
        skipped = [
            f"{number} x {kind}"
            for kind, number in totals[name].get("skipped", {}).items()
        ]
        raise SourceError(
            f"source {name!r}: no documents came out of {source.path}: {problem}"
            + (f"; {empty} pages had no text" if empty else "")
            + (f"; skipped: {', '.join(skipped)}" if skipped else "")
            + "; correct the source or remove it"
        )


def _reading_warnings(
    totals: Mapping[str, SourceTotals], max_bytes: int
) -> Iterator[str]:
    """Yield warnings about sources with more skipped than read responses or members,
    with bytes that are invalid in their encoding, or with texts beyond the limit: one
    text may be longer than all other documents.
    """
    for name, total in totals.items():
        skipped = sum(total["skipped_candidates"].values())
        if skipped > total["read"]:
            causes = ranked(total["skipped_candidates"])[:SHOWN_CAUSES]
            yield (
                f"source {name!r}: {skipped:,} of {skipped + total['read']:,} "
                "responses and members were skipped; most often: "
                f"{', '.join(f'{cause} ({number:,})' for cause, number in causes)}"
            )
    for name, total in totals.items():
        if total["replaced"]["records"]:
            yield (
                f"source {name!r}: bytes that are invalid in the encoding were replaced "
                f"by U+FFFD (places: {total['replaced']['places']:,}, records: "
                f"{total['replaced']['records']:,}); set `encoding:`, or quarantine "
                "such records with `encoding_errors: strict`"
            )
    for name, total in totals.items():
        if total["too_long"]["records"]:
            yield (
                f"source {name!r}: quarantined texts longer than "
                f"ingest.max_document_bytes = {max_bytes:,}: "
                f"{total['too_long']['records']:,}, with "
                f"{total['too_long']['bytes']:,} bytes in all; split them, or raise "
                "that"
            )
