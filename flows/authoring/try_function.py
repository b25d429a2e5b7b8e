"""`gristmill try`: a user's function on some documents of a source or a file, before it stands in any manifest.

It is called by what calls it in a run. Documents come from a committed `ingest` with all that the steps after it have
measured, otherwise straight from the files; some of several shards or files, so that one of them does not speak for
all.
"""

from __future__ import annotations

import ast
import contextlib
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from gristmill.core.files import as_path, is_local
from gristmill.dataprep.annotate_batches import spread
from gristmill.dataprep.documents import annotation_stages, read_table, shard_names
from gristmill.dataprep.reading.document_shards import ShardWriter
from gristmill.dataprep.reading.extraction_guard import Guard, Limits, extract_pages
from gristmill.dataprep.reading.ingest import DEFAULT_EXTRACTOR, own_records, reading_of
from gristmill.dataprep.reading.own_sources import OwnProcess
from gristmill.dataprep.reading.pythondocs import is_python_source
from gristmill.dataprep.reading.readers import read_file
from gristmill.dataprep.reading.records import Dropped, Ended, Page, Read, Record, Rejected
from gristmill.dataprep.reading.sources import SourceError, SourceFile, find_files
from gristmill.dataprep.reading.table_guard import TableReader
from gristmill.dataprep.user_code import annotate, edit
from gristmill.dataprep.user_code.own_documents import (
    DocumentFunction,
    JudgedColumns,
    known_columns,
    load_document_function,
    read_judged_columns,
)
from gristmill.dataprep.user_code.time_limits import TimeLimit
from gristmill.mixtures.sources import INGEST, Ingest, OwnReader, Source
from gristmill.mixtures.steps.own_steps import Edit, OwnAnnotate
from gristmill.mixtures.user_code import OwnFunction
from gristmill.mixtures.yaml_text import did_you_mean

if TYPE_CHECKING:
    from gristmill.flows.running.session import Session

PARTS = 10
"""Shards or files that the documents come from, where there are so many."""
FILE = "file"
"""What the source is called where a file is given."""
SHOWN = 3
"""Documents that are shown of each kind."""
AROUND_BYTES = 16
"""That are shown on either side of an edit."""
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Sample:
    """Some documents, as stages read them.

    Attributes:
        inputs: `ingest`, and the annotating stages.
        shards: of them.
        sources: whose documents count; all if None.
        whole: how many documents the whole has; None where nothing tells.
        is_exact: whether that was counted.
        described: where they are from.
        failures: what could not be read on the way, and the names of its files.
    """

    inputs: Mapping[str, Path]
    shards: Sequence[str]
    sources: tuple[str, ...] | None
    whole: int | None
    is_exact: bool
    described: str
    failures: Sequence[tuple[str, Rejected]] = ()


def kind_of(function: OwnFunction) -> str:
    """What a function is for, as its definition says: `read`, `edit` or `annotate`."""
    found = function.definition()
    if found is None or isinstance(found, ast.ClassDef):
        return "annotate"
    arguments = [*found.args.posonlyargs, *found.args.args]
    first, hint = (
        (arguments[0].arg, ast.unparse(arguments[0].annotation) if arguments[0].annotation else "")
        if (arguments)
        else ("", "")
    )
    if first in ("path", "stream") or hint.rpartition(".")[2] in ("Path", "BinaryIO"):
        return "read"
    returns = "" if found.returns is None else ast.unparse(found.returns).strip("'\"")
    return "edit" if returns in ("str", "str | None") and first == "text" else "annotate"


@contextlib.contextmanager
def take_sample(on: str, session: Session | None, documents: int, most_bytes: float = math.inf) -> Iterator[Sample]:
    """Some documents of a source of a manifest, or of a file, glob, folder or URL.

    Args:
        on: the source, or where its files are.
        session: of the manifest.
        documents: how many to read of files at most.
        most_bytes: of text to read of files, after which no further document is taken.

    Raises:
        SourceError: there is no such source, or nothing of it can be read.
    """
    source = None if session is None else session.manifest.document_sources.get(on)
    if session is not None and source is None:
        names = list(session.manifest.document_sources)
        raise SourceError(
            f"--on {on}: {session.manifest_file} has no such source of documents"
            f"{did_you_mean(on, names) or ';'} it has {', '.join(names)}"
        )
    if session is not None and session.committed(INGEST) is not None:
        yield _of_run(session, on)
        return
    with tempfile.TemporaryDirectory(prefix="gristmill-try-") as folder:
        section = _as_source(on) if source is None else source
        yield _of_files(FILE if source is None else on, section, documents, most_bytes, Path(folder))


def _as_source(path: str) -> Source:
    """A file that nobody has described, as a source: its format and the field of its text are guessed."""
    from gristmill.flows.authoring.look_at_data import look_at, split_setting

    look = look_at(FILE, path)
    return Source.model_validate(
        {
            "path": path,
            "format": look.format,
            "split": split_setting(look.split),
            **({"text_field": look.text_field} if look.text_field else {}),
            **({"extract": DEFAULT_EXTRACTOR} if look.extract else {}),
        }
    )


def _of_run(session: Session, source: str) -> Sample:
    folder = session.committed(INGEST)
    assert folder is not None
    inputs, last = {INGEST: folder.data}, folder
    for name, node in session.plan.items():
        made = session.committed(name) if node.stage.judges else None
        if node.stage.judges and made is None:
            break  # what comes behind a step that has not run saw other documents
        if made is not None:
            inputs[name], last = made.data, made
    steps = annotation_stages(inputs)
    own = [
        shard
        for shard in shard_names(folder.data)
        if read_table(folder.data / shard, ["source"])["source"][0].as_py() == source
    ]
    behind = f", as {steps[-1]} left them" if steps else ""
    kept = last.manifest()["summary"]["counts"]["sources"].get(source, {}).get("kept", 0)
    return Sample(inputs, own, (source,), kept, True, f"source {source!r} of the run{behind}")


def _of_files(name: str, source: Source, documents: int, most_bytes: float, folder: Path) -> Sample:
    """Documents of evenly spaced files, written as shards: of PARTS files, and of more where these are soon read."""
    files = find_files(name, source.model_dump()).files
    section, reading = Ingest(), replace(reading_of(source), by_kernel=False)
    writer = ShardWriter(folder, "00000", name, section.shard_bytes, section.max_document_bytes)
    limits = Limits(section.extract_seconds, section.extract_memory_bytes)
    failures: list[tuple[str, Rejected]] = []
    taken_of: dict[SourceFile, tuple[int, float]] = {}
    whole: dict[SourceFile, int] = {}
    with contextlib.ExitStack() as stack:
        guard = stack.enter_context(
            Guard(reading.extract or DEFAULT_EXTRACTOR, source.extract_options.model_dump(), limits)
        )
        tables = stack.enter_context(TableReader())
        own = None if source.read is None else stack.enter_context(OwnProcess(source.read))

        def take(chosen: Sequence[SourceFile]) -> None:
            """Read these files, each up to its share of what is left to be read."""
            kept, taken = writer.kept, writer.bytes_taken
            for number, file in enumerate(chosen, start=1):
                records: Iterator[Read] = (
                    read_file(file, reading, tables) if own is None else own_records(own, file, reading)
                )
                before, bytes_before, share = writer.kept, writer.bytes_taken, number / len(chosen)
                writer.limit = max(kept + int((documents - kept) * share), before + 1)
                for record in extract_pages(records, guard, reading):
                    failures.extend([(file.name, record)] if isinstance(record, Rejected) else [])
                    writer.add(file.name, record)
                    if writer.is_full or writer.bytes_taken >= taken + (most_bytes - taken) * share:
                        break
                else:
                    whole[file] = writer.kept - before
                taken_of[file] = writer.kept - before, writer.bytes_taken - bytes_before

        chosen = _evenly(files, PARTS)
        take(chosen)
        others = [file for file in files if file not in set(chosen)]
        room = min(
            (documents - writer.kept) / max(writer.kept, 1),
            (most_bytes - writer.bytes_taken) / max(writer.bytes_taken, 1),
        )
        if len(whole) == len(chosen) and others and is_local(as_path(files[0].location)) and room > 0:
            more = _evenly(others, max(int(room * len(chosen)), 1)) if math.isfinite(room) else others
            chosen = [*chosen, *more]
            take(more)
    writer.close()
    if not writer.kept:
        why = f": {failures[0][1].error}" if failures else ""
        called = "" if name == FILE else f"source {name!r}: "
        raise SourceError(f"{called}no document comes out of {source.path}{why}")
    return Sample(
        {INGEST: folder},
        shard_names(folder),
        None,
        _whole(files, whole, taken_of, source),
        False,
        source.path if len(files) == 1 else f"{len(chosen)} of {len(files)} files of {source.path}",
        failures,
    )


def _evenly(files: Sequence[SourceFile], number: int) -> list[SourceFile]:
    return [files[place] for place in sorted({int(place) for place in np.linspace(0, len(files) - 1, number)})]


def _whole(
    files: Sequence[SourceFile],
    read: Mapping[SourceFile, int],
    taken: Mapping[SourceFile, tuple[int, float]],
    source: Source,
) -> int | None:
    """How many documents all files have, format by format: of files that were read to their end, by their bytes where
    they have several each, else by a guess of how much text they hold.

    Args:
        files: all of them.
        read: documents of those that were read to their end.
        taken: documents and bytes of text that were taken of each that was read from.
        source: which has them.
    """
    from gristmill.flows.authoring.look_at_data import files_by_format, text_bytes_of

    documents, text = (sum(numbers) for numbers in zip(*taken.values(), strict=True))
    whole = 0
    for together in files_by_format(files).values():
        ended = {file: read[file] for file in together if file in read}
        stored, found = sum(file.size for file in ended), sum(ended.values())
        if stored and found:
            one_each = set(ended.values()) == {1}
            whole += len(together) if one_each else round(found * sum(file.size for file in together) / stored)
        elif source.read is not None or source.list is not None or is_python_source(source.path):
            return None
        else:
            own = [taken[file] for file in together if file in taken and taken[file][0]]
            mean = sum(size for _, size in own) / sum(number for number, _ in own) if own else text / documents
            whole += round(text_bytes_of(source.path, together) / mean)
    return max(whole, 1)


@dataclass
class Trial:
    """What a function did to the documents of a sample.

    Attributes:
        locators, texts: of the documents.
        errors: per document, None where it did not raise.
        reasons: per document why it would be dropped, or None.
        columns: of an annotator: per document what it measured.
        edits: of an editor: per document its edits.
        seconds: that the calls took.
        differs: what two calls gave where that was not the same.
    """

    locators: list[str]
    texts: list[str]
    errors: list[str | None]
    reasons: list[str | None]
    columns: dict[str, list[Any]]
    edits: list[list[tuple[int, int, str]]]
    seconds: float = 0.0
    differs: str | None = None


def try_step(step: OwnAnnotate | Edit, sample: Sample, documents: int) -> dict[str, Any]:
    """What an annotator or editor does to some documents.

    Returns:
        `on`, `documents`, `errors` and `dropped` (each `total` and the first ones `shown`; `dropped` also `by_reason`),
        `columns` (of an annotator), `edits` (of an editor), `differs`, `seconds`, `whole` (`documents` of all, whether
        that `is_exact`, and the `seconds` that they would take one process).

    Raises:
        gristmill.mixtures.user_code.OwnCodeError: the function cannot be called, or returns something else than it may.
    """
    trial = Trial([], [], [], [], {}, [])
    function = load_document_function(step, known_columns(sample.inputs))
    with TimeLimit(step.time_limit_seconds) as limit, contextlib.redirect_stdout(sys.stderr):
        for read in _some(function, sample, documents):
            if isinstance(step, OwnAnnotate):
                _annotate(trial, function, step, read, limit)
            else:
                _edit(trial, function, read, limit)
            trial.locators += read.given["locator"].to_pylist()
            trial.texts += read.documents["text"].take(pa.array(read.judged)).to_pylist()
    number = len(trial.texts)
    dropped = [row for row, reason in enumerate(trial.reasons) if reason is not None]
    raised = [row for row, error in enumerate(trial.errors) if error is not None]
    return {
        "on": sample.described,
        "documents": number,
        "errors": {
            "total": len(raised),
            "shown": [{"locator": trial.locators[row], "error": trial.errors[row]} for row in raised[:SHOWN]],
        },
        "dropped": {
            "total": len(dropped),
            "by_reason": dict(Counter(trial.reasons[row] for row in dropped).most_common()),
            "shown": [
                {
                    "locator": trial.locators[row],
                    "reason": trial.reasons[row],
                    "text": trial.texts[row],
                    "values": {name: values[row] for name, values in trial.columns.items()},
                }
                for row in dropped[:SHOWN]
            ],
        },
        **(
            {"columns": {name: describe_column(values) for name, values in trial.columns.items()}}
            if isinstance(step, OwnAnnotate)
            else {"edits": _described_edits(trial)}
        ),
        "unreadable": [{"record": one.number, "error": one.error} for _, one in sample.failures[:SHOWN]],
        "differs": trial.differs,
        "seconds": trial.seconds,
        "whole": {
            "documents": sample.whole,
            "is_exact": sample.is_exact,
            "seconds": (None if sample.whole is None or not number else sample.whole * trial.seconds / number),
        },
    }


def _some(function: DocumentFunction, sample: Sample, documents: int) -> Iterator[JudgedColumns]:
    """Documents of evenly spaced shards, and of all others where these have too few."""
    order = sorted({int(place) for place in np.linspace(0, len(sample.shards) - 1, PARTS)}) if sample.shards else []
    others = [place for place in range(len(sample.shards)) if place not in order]
    left = documents
    for number, place in enumerate([*order, *others]):
        if not left:
            return
        read = read_judged_columns(sample.inputs, sample.shards[place], sample.sources, [*function.reads, "locator"])
        wanted = min(left, -(-left // max(len(order) - number, 1)), len(read.judged))
        left -= wanted
        if wanted:
            yield replace(read, judged=read.judged[:wanted], given=read.given.slice(0, wanted))


def _annotate(
    trial: Trial, function: DocumentFunction, step: OwnAnnotate, read: JudgedColumns, limit: TimeLimit
) -> None:
    started = time.perf_counter()
    measured = annotate.measure(function, step, read.given, limit)
    trial.seconds += time.perf_counter() - started
    trial.differs = trial.differs or annotate.compare_calls(function, step, read, measured, limit)
    numbers = {
        name: annotate.as_numbers(values)
        for name, values in measured.columns.items()
        if annotate.is_number(values.type)
    }
    reasons, _ = annotate.judge(step, measured, numbers)
    trial.reasons += spread(pa.array(reasons, pa.string()), measured.errors).to_pylist()
    trial.errors += measured.errors
    for name, values in measured.columns.items():
        trial.columns.setdefault(name, []).extend(spread(values, measured.errors).to_pylist())


def _edit(trial: Trial, function: DocumentFunction, read: JudgedColumns, limit: TimeLimit) -> None:
    started = time.perf_counter()
    made, errors = edit.edit_texts(function, read.given, limit)
    edits, errors = edit.compare_texts(read.documents["text"].take(pa.array(read.judged)), made, errors)
    trial.seconds += time.perf_counter() - started
    trial.differs = trial.differs or edit.compare_calls(function, read, made, limit)
    trial.reasons += [edit.EMPTY if text is not None and not text.strip() else None for text in made]
    trial.errors += errors
    trial.edits += edits


def describe_column(values: Sequence[Any]) -> dict[str, Any]:
    """What a column holds: `missing`, and of numbers `min`, `median`, `max` and `bars`; of texts and truth values the
    most frequent with how often (`values`) and how many `others`.
    """
    present = [value for value in values if value is not None]
    missing = len(values) - len(present)
    if not present or isinstance(present[0], bool | str):
        counted = Counter(present).most_common()
        return {
            "missing": missing,
            "values": {str(value): number for value, number in counted[:SHOWN]},
            "others": sum(number for _, number in counted[SHOWN:]),
        }
    numbers = np.array(present, np.float64)
    counts, _ = np.histogram(numbers, bins=len(BARS))
    return {
        "missing": missing,
        "min": min(present),
        "median": float(np.median(numbers)),
        "max": max(present),
        "bars": "".join(BARS[-(-int(count) * (len(BARS) - 1) // int(counts.max()))] for count in counts),
    }


def _described_edits(trial: Trial) -> dict[str, Any]:
    changed = [row for row, edits in enumerate(trial.edits) if edits]
    return {
        "changed": len(changed),
        "times": sum(len(trial.edits[row]) for row in changed),
        "bytes_removed": sum(end - begin for row in changed for begin, end, _ in trial.edits[row]),
        "bytes_added": sum(len(text.encode()) for row in changed for _, _, text in trial.edits[row]),
        "shown": [
            {
                "locator": trial.locators[row],
                "differences": [_difference(trial.texts[row].encode(), *one) for one in trial.edits[row][:SHOWN]],
            }
            for row in changed[:SHOWN]
        ],
    }


def _difference(text: bytes, begin: int, end: int, after: str) -> dict[str, str]:
    """`before` and `after` of one edit, and the bytes to the `left` and `right` of it, as far as they are whole."""
    return {
        "left": text[max(begin - AROUND_BYTES, 0) : begin].decode(errors="ignore"),
        "before": text[begin:end].decode(),
        "after": after,
        "right": text[end : end + AROUND_BYTES].decode(errors="ignore"),
    }


def try_reader(own: OwnReader, path: str, documents: int) -> dict[str, Any]:
    """What a reader makes of a file, or of the first of several.

    Returns:
        `records` (read), `documents`, `empty`, `quarantined` (the first ones, with their errors), `shown` (the first
        documents), `seconds`, `differs` (a sentence where a second call gives something else), `whole` (records of all
        files by their bytes, and seconds).

    Raises:
        SourceError, gristmill.mixtures.user_code.OwnCodeError: there is no file, or the function cannot be called.
    """
    source = Source.model_validate({"path": path, "read": own})
    files, reading = find_files(FILE, source.model_dump()).files, reading_of(source)
    file = files[0]
    with OwnProcess(own) as process:
        process.start()  # so that loading the code is not in the time
        started = time.perf_counter()
        first = list(islice(own_records(process, file, reading), documents))
        seconds = time.perf_counter() - started
    with OwnProcess(own) as process:
        again = list(islice(own_records(process, file, reading), documents))
    kept = [one for one in first if isinstance(one, Record)]
    records = [one for one in first if isinstance(one, Record | Page | Rejected | Dropped)]
    ended = next((one for one in first if isinstance(one, Ended)), None)
    total = sum(one.size for one in files)
    whole = round(len(records) * total / file.size) if ended is not None and file.size else None
    return {
        "on": f"{file.name}, the first of {len(files):,} files" if len(files) > 1 else file.name,
        "records": len(records),
        "documents": len(kept),
        "empty": sum(isinstance(one, Dropped) for one in first),
        "quarantined": [{"record": one.number, "error": one.error} for one in first if isinstance(one, Rejected)],
        "shown": [{"locator": one.locator, "text": one.text, "metadata": one.metadata} for one in kept[:SHOWN]],
        "seconds": seconds,
        "differs": "a second call gives other records" if first != again else None,
        "whole": {
            "documents": whole,
            "is_exact": False,
            "seconds": None if whole is None else whole * seconds / max(len(records), 1),
        },
    }
