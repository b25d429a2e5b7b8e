"""The first stage: reads every source into document shards, and everything that is not a document into quarantine.

Output: `part-<task>-<piece>.parquet` (documents), `quarantine/<task>-<piece>.parquet` where something could not be
read, and `dropped/<task>-<piece>.parquet` where a page has no text. What a web archive holds besides pages (requests,
redirects, pictures) was never meant as a document: it is in no ledger, but counted as `skipped` by what it is. The
tasks follow from the sorted listing alone: neighbouring files of a source up to `shard_bytes` of input; a larger
file, or a source with a `limit`, is one task that fills several shards.

What memory that takes does not depend on how many documents there are. A worker holds a shard and its tables, four
times `shard_bytes` (or one document, four times `max_document_bytes`), and up to 20,000 rows of quarantine; while ids
are compared, some 100 MB (`repeats.py`). The process that starts the workers holds about 1 kB of each file and, of each
task, its result: another 1 kB, and the first quarantined records. Of a tar archive the names of its members are held,
150 bytes each, since one that comes again gets another locator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from gristmill.dataprep.context import Context
from gristmill.dataprep.counts import add_counts, balance
from gristmill.dataprep.files import as_path
from gristmill.dataprep.jobs.engine import Done, Task, run_tasks
from gristmill.dataprep.reading.binary_formats import answers
from gristmill.dataprep.reading.document_shards import (
    SHOWN_DAMAGED,
    SHOWN_QUARANTINED,
    ShardWriter,
    describe_loss,
    estimate_losses,
)
from gristmill.dataprep.reading.extraction_guard import Guard, Limits, extract_pages
from gristmill.dataprep.reading.own_sources import OwnProcess
from gristmill.dataprep.reading.readers import read_file
from gristmill.dataprep.reading.records import Read, Reading
from gristmill.dataprep.reading.repeats import Repeats, settle_repeats, shards_of
from gristmill.dataprep.reading.sources import SourceError, SourceFile, SourceListing, find_files
from gristmill.dataprep.reading.table_guard import TableReader
from gristmill.mixtures.own_code import OwnCodeError
from gristmill.mixtures.sources import GENERATE, Ingest, OwnReader, Paragraphs, Source

TRIED_RECORDS = 100
"""Records of its first file by which a reader of the user's is compared with itself."""
SHOWN_CAUSES = 5
"""Causes that the warning about a source which is mostly skipped names."""
DEFAULT_EXTRACTOR = "resiliparse"
THREADS = 4
"""Workers that may share one GIL: a third of what reading JSON lines takes is hashing, a document at a time."""
THREAD_BYTES = 1 << 30
"""Of JSON lines that threads read: of 300 MB two had done before two processes had all that they import."""


class ChangedInputError(SourceError):
    """A source's files changed after the run was planned: its output would carry the wrong fingerprint."""


def run(inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context) -> dict[str, Any]:
    """Read all sources of `config` into document shards under `out`.

    Args:
        inputs: nothing, or `generate`, whose folder has the files of the generated sources.
        config: `sources` (name -> Source section, with the `listing` that it was planned from, if any) and `ingest`
            (Ingest section); `generated`, the names of generated sources.
        out: receives the shards and the quarantine.
        context: where to run.

    Returns:
        `counts`, `sources` (files, shards and what was skipped of each), `quarantined` (the first of them), `lost`
        (records of files that could not be read to their end, estimated), `damaged` (those that lost most), `skipped`
        (number by what it is) and `warnings`.

    Raises:
        SourceError: a source matches nothing, is of no known format, or gave no document at all.
        ChangedInputError: a source's files are no longer those that it was planned from.
        DuplicateIdError: records of a source with `on_repeat: fail` repeat the id and the text of another.
        ExtractorError: the extracting process does not start.
        QuarantineError: more than `max_quarantined` of the records could not be read, or are lost with damaged files.
    """
    section = Ingest.model_validate(config.get("ingest", {}))
    planned = {name: source.get("listing") for name, source in config["sources"].items()}
    sources = {
        name: Source.model_validate({key: value for key, value in source.items() if key != "listing"})
        for name, source in sorted({**config["sources"], **_generated(inputs, config)}.items())
    }
    listings = {name: find_files(name, source.model_dump()) for name, source in sources.items()}
    for name, listing in listings.items():
        check_unchanged(name, listing, planned.get(name))
    unsteady = list(try_readers(sources, listings))
    tasks = plan(sources, listings, section.shard_bytes)
    process = partial(ingest_task, str(out), section)
    in_threads = context.workers <= THREADS and _is_read_in_kernels(sources, listings)
    results = run_tasks("read", tasks, process, context, holds_gil=not in_threads)
    _check_every_source(sources, results)
    losses = estimate_losses(results)
    warnings = [
        *unsteady,
        *_ignored_files(listings),
        *(warning for result in results for warning in result["warnings"]),
        *_mostly_skipped(sources, results),
        *_replaced(sources, results),
        *_too_long(sources, results, section.max_document_bytes),
        *map(describe_loss, losses[:SHOWN_DAMAGED]),
    ]
    for warning in warnings:
        context.warn(warning)
    lost = sum(loss["lost"] for loss in losses)
    counts = balance(results, section.max_quarantined, context.stage, lost, out / "quarantine")
    repeats = _settle_repeats(out, sources, listings, results, context)
    for repeat in repeats:
        context.warn(repeat.describe())
    described = {name: _describe(name, source, listings[name], results, losses) for name, source in sources.items()}
    for repeat in repeats:
        described[repeat.source]["shards"] -= repeat.emptied_shards
    return {
        "counts": add_counts([counts, *(repeat.counts() for repeat in repeats)]),
        "sources": described,
        "lost": lost,
        "damaged": losses[:SHOWN_DAMAGED],
        "quarantined": [shown for result in results for shown in result["quarantined"]][:SHOWN_QUARANTINED],
        "skipped": add_counts(result["skipped"] for result in results),
        "warnings": [*warnings, *(repeat.describe() for repeat in repeats)],
    }


def _generated(inputs: Mapping[str, Path], config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """How the sources are read that the stage before has written."""
    return {name: generated_files(inputs[GENERATE] / name) for name in config.get("generated", ())}


def generated_files(folder: Path) -> dict[str, Any]:
    """The files of a generated source, as a section of `sources`."""
    return {"path": f"{folder}/part-*.jsonl", "format": "jsonl", "id_field": "locator"}


def check_unchanged(name: str, listing: SourceListing, planned: Sequence[Mapping[str, Any]] | None) -> None:
    """Raise ChangedInputError where a source's files differ from the listing that it was planned from.

    Names, sizes and modification times or etags are compared; content that was hashed when planning is not hashed
    again. The Python sources have no files.
    """
    if planned is None or any(file.format == "python" for file in listing.files):
        return
    before = {entry["path"]: entry for entry in planned}
    now = {file.name: file for file in listing.files}
    changed = sorted(before.keys() ^ now.keys())
    for path in before.keys() & now.keys():
        hashed = before[path]["stamp"].startswith("sha256:")
        if before[path]["size"] != now[path].size or not (hashed or before[path]["stamp"] == now[path].stamp):
            changed.append(path)
    if changed:
        again = f", or mend {listing.by} if it lists others at every call" if listing.by else ""
        raise ChangedInputError(
            f"source {name!r}: {len(changed)} files changed since the run was planned, first "
            f"{min(changed)}; run again{again}"
        )
    if listing.by and list(before) != list(now):
        raise ChangedInputError(
            f"source {name!r}: {listing.by} lists its files in another order than when the run "
            "was planned; let it sort them"
        )


def plan(sources: Mapping[str, Source], listings: Mapping[str, SourceListing], shard_bytes: int) -> list[Task]:
    """Cut the listings into tasks, in the order of the names of sources and files; a pure function of both."""
    tasks: list[Task] = []
    for name, source in sorted(sources.items()):
        reading, listing = reading_of(source), listings[name]
        for files in _groups(listing.files, shard_bytes, whole=source.limit is not None):
            payload = {
                "source": name,
                "files": [asdict(file) for file in files],
                "reading": asdict(reading),
                "extract_options": source.extract_options.model_dump(),
                "limit": source.limit,
                **({"read": source.read.model_dump(mode="json")} if source.read else {}),
            }
            tasks.append(Task(f"{len(tasks):05d}", payload, sum(file.size for file in files)))
    return tasks


def reading_of(source: Source) -> Reading:
    """Settings for reading a source's records."""
    split = source.split if source.format != "hf" else None
    chapters: Any = split.paragraphs if isinstance(split, Paragraphs) else split
    return Reading(
        source.text_field,
        source.id_field,
        source.metadata_fields,
        source.encoding,
        source.extract,
        source.encoding_errors,
        chapters,
    )


def _groups(files: Sequence[SourceFile], shard_bytes: int, whole: bool) -> Iterator[list[SourceFile]]:
    group: list[SourceFile] = []
    held = 0
    for file in files:
        if group and not whole and (held + file.size > shard_bytes or file.format == "python"):
            yield group
            group, held = [], 0
        group.append(file)
        held += file.size
    if group:
        yield group


def ingest_task(out: str, section: Ingest, task: Task) -> Done:
    """Read the files of one task; a function of the task's payload and the files alone.

    Args:
        out: receives shards and what was quarantined or dropped.
        section: how.
        task: one of `plan`.
    """
    source = task.payload["source"]
    writer = ShardWriter(
        as_path(out), task.name, source, section.shard_bytes, section.max_document_bytes, task.payload["limit"]
    )
    reading = Reading(**task.payload["reading"])
    warnings = []
    limits = Limits(section.extract_seconds, section.extract_memory_bytes)
    extractor = Guard(reading.extract or DEFAULT_EXTRACTOR, task.payload["extract_options"], limits)
    with extractor as guard, TableReader() as tables, _own_reader(task.payload) as own:
        for file in (SourceFile(**entry) for entry in task.payload["files"]):
            before, skipped = writer.read, writer.skipped.total()
            records = read_file(file, reading, tables) if own is None else own_records(own, file, reading)
            for record in extract_pages(records, guard, reading):
                writer.add(file.name, record)
                if writer.is_full:
                    break
            if writer.read == before:
                only = " but what is skipped" if writer.skipped.total() > skipped else ""
                warnings.append(f"source {source!r}: {file.name} holds no records{only}")
            if writer.is_full:
                break
    writer.close()
    result = {
        "source": source,
        "counts": writer.counts(),
        "skipped": dict(sorted(writer.skipped.items())),
        "skipped_candidates": writer.skipped_candidates,
        "shards": writer.shards,
        "quarantined": writer.shown,
        "warnings": warnings,
        "replaced": writer.replaced,
        "too_long": writer.too_long,
        "whole": writer.whole,
        "damaged": [asdict(file) for file in writer.damaged],
    }
    return Done(writer.files, result)


def _own_reader(payload: Mapping[str, Any]) -> AbstractContextManager[OwnProcess | None]:
    return OwnProcess(OwnReader.model_validate(payload["read"])) if "read" in payload else nullcontext()


def own_records(own: OwnProcess, file: SourceFile, reading: Reading) -> Iterator[Read]:
    """What a reader of the user's makes of a file."""
    return own.records(file.name, file.location, file.compression, file.size, reading)


def try_readers(sources: Mapping[str, Source], listings: Mapping[str, SourceListing]) -> Iterator[str]:
    """Call every reader of the user's twice on its first file, and yield a warning where it gives something else then.

    Raises:
        SourceError: it cannot be loaded or called, or gives no records.
    """
    for name, source in sources.items():
        if source.read is None:
            continue
        file, reading = listings[name].files[0], reading_of(source)
        try:
            with OwnProcess(source.read) as once, OwnProcess(source.read) as again:
                first, second = (list(islice(own_records(own, file, reading), TRIED_RECORDS)) for own in (once, again))
        except OwnCodeError as error:
            raise SourceError(f"source {name!r}: read: {error}") from error
        if first != second:
            yield (
                f"source {name!r}: {source.read.use.reference} is not deterministic: called twice on {file.name}, "
                "it gives other records; runs of this manifest will differ"
            )


def _check_every_source(sources: Mapping[str, Source], results: Sequence[Mapping[str, Any]]) -> None:
    counts = add_counts(result["counts"]["sources"] for result in results)
    for name, source in sources.items():
        part = counts.get(name, {})
        if part.get("kept"):
            continue
        shown = next((row for result in results for row in result["quarantined"] if row["source"] == name), None)
        why = f"; the first: {shown['file']}, record {shown['record']}: {shown['error']}" if shown else ""
        empty = sum(part.get("dropped", {}).values())
        skipped = _skipped(name, results)
        raise SourceError(
            f"source {name!r}: no documents came out of {source.path}: "
            + (
                f"{part['quarantined']} of {part['read']} records could not be read{why}"
                if part.get("quarantined")
                else f"its {part['read']} records hold no text"
                if part.get("read")
                else "its files hold no records"
            )
            + (f"; {empty} pages had no text" if empty else "")
            + (f"; skipped: {', '.join(f'{number} x {what}' for what, number in skipped.items())}" if skipped else "")
            + "; correct the source or remove it"
        )


def _skipped(name: str, results: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return add_counts(result["skipped"] for result in results if result["source"] == name)


def _mostly_skipped(names: Iterable[str], results: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence about each source of which more responses or members were skipped than read."""
    found = []
    for name in names:
        own = [result for result in results if result["source"] == name]
        candidates = add_counts(result["skipped_candidates"] for result in own)
        skipped, read = sum(candidates.values()), sum(result["counts"]["read"] for result in own)
        if skipped > read:
            causes = sorted(candidates.items(), key=lambda item: (-item[1], item[0]))[:SHOWN_CAUSES]
            found.append(
                f"source {name!r}: {skipped:,} of {skipped + read:,} responses and members were skipped; most "
                f"often: {', '.join(f'{what} ({number:,})' for what, number in causes)}"
            )
    return found


def _replaced(names: Iterable[str], results: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence about each source with bytes that its encoding does not hold."""
    found = {name: _count_replaced(name, results) for name in names}
    return [
        f"source {name!r}: {count['records']:,} records had bytes that their encoding does not hold; "
        f"{count['places']:,} places have U+FFFD instead (`encoding_errors: strict` quarantines such records)"
        for name, count in found.items()
        if count["records"]
    ]


def _count_replaced(name: str, results: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return add_counts(result["replaced"] for result in results if result["source"] == name)


def _too_long(names: Iterable[str], results: Sequence[Mapping[str, Any]], most: int) -> list[str]:
    """A sentence about each source with texts beyond the limit: one may hold more than all other documents."""
    found = {name: add_counts(result["too_long"] for result in results if result["source"] == name) for name in names}
    return [
        f"source {name!r}: quarantined texts longer than ingest.max_document_bytes = {most:,}: {count['records']:,}, "
        f"with {count['bytes']:,} bytes in all; split them, or raise that"
        for name, count in found.items()
        if count["records"]
    ]


def _holds_warc(listing: SourceListing) -> bool:
    return any("warc" in (file.format, file.members) or file.members == "auto" for file in listing.files)


def _ignored_files(listings: Mapping[str, SourceListing]) -> list[str]:
    return [
        f"source {name!r}: its folder also holds files that are not read: "
        + "; ".join(
            [", ".join(f"{count} {ending}" for ending, count in listing.ignored.items()), *answers(listing.ignored)]
        )
        for name, listing in listings.items()
        if listing.ignored
    ]


def _is_read_in_kernels(sources: Mapping[str, Source], listings: Mapping[str, SourceListing]) -> bool:
    """Whether little is read but JSON lines, most of it without the GIL: processes take longer to start than that."""
    files = [file for listing in listings.values() for file in listing.files]
    plain = all(source.read is None and source.extract in (None, "none") for source in sources.values())
    return plain and all(file.format == "jsonl" for file in files) and sum(file.size for file in files) <= THREAD_BYTES


def _may_repeat(source: Source, listing: SourceListing) -> bool:
    """Whether records have ids of their own, and not a path and a number."""
    return source.id_field is not None or _holds_warc(listing)


def _settle_repeats(
    out: Path,
    sources: Mapping[str, Source],
    listings: Mapping[str, SourceListing],
    results: Sequence[Mapping[str, Any]],
    context: Context,
) -> list[Repeats]:
    """Drop or refuse the records that come again, where they can."""
    found = []
    for number, (name, source) in enumerate(sources.items()):
        if _may_repeat(source, listings[name]):
            documents = sum(result["counts"]["kept"] for result in results if result["source"] == name)
            found.append(
                settle_repeats(
                    name,
                    shards_of(out, name, results),
                    documents,
                    f"repeats-{number:05d}",
                    source.on_repeat == "fail",
                    out / "dropped" / f"repeated-{number:05d}.parquet",
                    context,
                )
            )
    return [repeats for repeats in found if repeats is not None]


def _describe(
    name: str,
    source: Source,
    listing: SourceListing,
    results: Sequence[Mapping[str, Any]],
    losses: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    return {
        "path": source.path,
        "files": len(listing.files),
        "input_bytes": sum(file.size for file in listing.files),
        "shards": sum(result["shards"] for result in results if result["source"] == name),
        "skipped": _skipped(name, results),
        "replaced": _count_replaced(name, results),
        "lost": sum(loss["lost"] for loss in losses if loss["source"] == name),
    }
