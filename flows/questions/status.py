"""States of a manifest's stages, damage of outputs, runs and logs, read from the store
alone.
"""

from __future__ import annotations

import codecs
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gristmill.core.files import find_json, read_json, sha256_file
from gristmill.core.lease import highest, is_gone, running_owner
from gristmill.core.progress import (
    Progress,
    describe_progress,
    read_progress,
    seconds_left,
)
from gristmill.core.store import Store
from gristmill.dataprep.conservation import top_reasons
from gristmill.flows.pages.page_elements import (
    ByName,
    Link,
    Mark,
    Note,
    Parts,
    Span,
    table,
)
from gristmill.flows.pages.terminal_pages import print_parts
from gristmill.flows.running.run_records import RunContent
from gristmill.flows.running.session import Session

STATE_MARKS: dict[str, Mark] = {
    "committed": "good",
    "unfinished": "hit",
    "running": "strong",
    "missing": "masked",
    "corrupt": "bad",
}
MINUTE, HOUR = 60, 3600
"""Seconds."""
NEWEST_RUNS = 50
"""Runs among which the newest one of a manifest is searched for."""
COUNTED = ("read", "kept", "quarantined")
EXIT_CODES = {"completed": 0, "failed": 1, "interrupted": 130}
"""State of a run -> exit code of its command."""
Record = Mapping[str, Any]
"""Content of a run's `run.json`, see `flows/running/run_records.py`."""
BEYOND_TARGET = ("quota", "validation_rest")
"""Reasons of `mix` for documents beyond the tokens that the manifest asks for."""


@dataclass(frozen=True)
class DocumentCounts:
    """Documents that a stage read, kept, quarantined, and dropped by rule."""

    read: int
    kept: int
    quarantined: int
    dropped: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class StageState:
    """State of a stage's output.

    Attributes:
        stage: name of the stage.
        state: `committed`, `unfinished`, `running`, `missing` or `corrupt`.
        fingerprint: first 16 digits of the fingerprint of the output.
        folder: existing or future folder of the output.
        kept_version: earlier version of the stage that made a kept output.
        seconds: time that a committed output took to make.
        bytes: size of the files of a committed output.
        documents: documents of a committed output, if the stage reads documents.
        owner: process that makes the output.
        progress: of that process.
        details: why the output is unfinished or corrupt.
    """

    stage: str
    state: str
    fingerprint: str
    folder: str
    kept_version: int | None = None
    seconds: float | None = None
    bytes: int | None = None
    documents: DocumentCounts | None = None
    owner: str | None = None
    progress: Progress | None = None
    details: str | None = None


@dataclass(frozen=True)
class LastRun:
    """Newest run of a manifest's name.

    Attributes:
        run: its name.
        state: `running`, `completed`, `failed`, `interrupted` or `killed`.
        exit_code: of its command; None while it runs, and if it was killed.
        message: why it failed or was interrupted.
        report: path of its report, written at its end.
    """

    run: str
    state: str
    exit_code: int | None
    message: str | None
    report: Path


def last_run(session: Session) -> LastRun | None:
    """Return the newest run of a manifest's name, or None if there is none."""
    record = newest_runs(session.store).get(session.manifest.name)
    if record is None:
        return None
    name, state = record["run"], run_state(record)
    report = session.store.runs / name / "report.html"
    message = record.get("message")
    return LastRun(name, state, EXIT_CODES.get(state), message, report)


def newest_runs(store: Store) -> dict[str, RunContent]:
    """Record of the newest run by manifest name, among the newest runs of a store."""
    if not store.runs.exists():
        return {}
    runs: dict[str, RunContent] = {}
    for folder in sorted(store.runs.iterdir(), reverse=True)[:NEWEST_RUNS]:
        record: RunContent | None = find_json(folder / "run.json")
        if record is not None:
            runs.setdefault(record["name"], record)
    return runs


def stage_states(session: Session) -> list[StageState]:
    """Return the state of every stage."""
    rows = []
    for stage, node in session.plan.items():
        folder = session.folder(stage)
        lease = folder.path / "lease"
        row = StageState(
            stage=stage,
            state=folder.state(),
            fingerprint=node.fingerprint[:16],
            folder=str(folder.path),
            kept_version=node.kept_version,
        )
        if row.state == "committed":
            manifest = folder.manifest()
            counts = manifest["summary"].get("counts") or {}
            documents = None
            if "read" in counts:
                read, kept, quarantined = (counts.get(name, 0) for name in COUNTED)
                dropped = counts.get("dropped", {})
                documents = DocumentCounts(read, kept, quarantined, dropped)
            num_bytes = sum(entry["bytes"] for entry in manifest["files"].values())
            seconds = manifest["seconds"]
            row = replace(row, seconds=seconds, bytes=num_bytes, documents=documents)
        elif row.state == "unfinished":
            owner, error = running_owner(lease), folder.work / "error.json"
            if owner is not None:
                row = replace(
                    row,
                    state="running",
                    owner=f"process {owner['pid']} on {owner['host']}",
                    progress=read_progress(lease, highest(lease)),
                )
            elif error.exists():
                message = read_json(error)["message"].splitlines()[0]
                row = replace(row, details=f"failed: {message}")
            else:
                reached = describe_progress(read_progress(lease, highest(lease)))
                details = f"interrupted at {reached}"
                if not reached:
                    files = sum(file.is_file() for file in folder.data.rglob("*"))
                    details = f"interrupted with {files} files written"
                row = replace(row, details=details)
        elif row.state == "corrupt":
            row = replace(row, details=next(folder.damage(), ""))
        rows.append(row)
    return rows


def describe_running(row: StageState, now: float) -> str:
    """Describe a running stage: `2 m 10 s: 120/400 steps, loss 3.21, about 5 m left
    (process 7 on host)`.
    """
    progress = row.progress
    if not progress:
        return str(row.owner)
    details = describe_job(progress, row.stage, now)
    took = duration(now - progress["started"])
    return f"for {took}{': ' if details else ''}{details} ({row.owner})"


def describe_job(progress: Progress, stage: str, now: float) -> str:
    """Describe the progress of a stage's job: `120/400 steps, loss 3.21, about 5 m
    left`; empty before the first event.
    """
    # A job with the name of its stage would appear twice on the line.
    job = "" if progress.get("job") == stage else progress.get("job", "")
    parts = [describe_progress({**progress, "job": job})]
    remaining = seconds_left(progress)
    if remaining:  # nothing is left at the end
        # Relative to now: a stage without recent progress is not almost done.
        remaining = max(0.0, remaining - (now - progress["at"]))
        parts.append(f"about {duration(remaining)} left")
    return ", ".join(filter(None, parts))


def duration(seconds: float) -> str:
    """Format seconds as `45 s`, `2 m 10 s` or `3 h 5 m`."""
    total = round(seconds)
    if total < MINUTE:
        return f"{total} s"
    if total < HOUR:
        return f"{total // MINUTE} m {total % MINUTE} s"
    return f"{total // HOUR} h {total % HOUR // MINUTE} m"


def stage_parts(
    rows: Sequence[StageState], links: ByName[str] = MappingProxyType({})
) -> list[Parts]:
    """Return the states of the stages as parts of a page: a table, and notes.

    Args:
        rows: the stages.
        links: stage -> address of its page.
    """
    lines = []
    notes: list[Note] = []
    for row in rows:
        stage = row.stage
        title = Link(stage, links[stage]) if stage in links else stage
        state = Span(row.state, STATE_MARKS[row.state])
        megabytes = None if row.bytes is None else row.bytes / 1e6
        lines.append([title, state, row.fingerprint[:8], row.seconds, megabytes])
        documents = row.documents
        if documents is not None and documents.kept < documents.read / 2:
            reasons = top_reasons(documents.dropped, documents.quarantined)
            causes = ", ".join(f"{rule} {number:,}" for rule, number in reasons)
            beyond_target = sum(
                documents.dropped.get(rule, 0) for rule in BEYOND_TARGET
            )
            is_loss = documents.kept + beyond_target < documents.read / 2
            notes.append(
                Note(
                    [
                        f"{stage}: kept {documents.kept:,} of {documents.read:,} "
                        f"documents; dropped most by {causes}"
                    ],
                    "warning" if is_loss else "note",
                )
            )
        if row.owner is not None:
            description = f"{stage}: {describe_running(row, time.time())}"
            notes.append(Note([description], "warning"))
        elif row.details is not None:
            notes.append(Note([f"{stage}: {row.details}"], "warning"))
    columns = {"stage": "", "state": "", "fingerprint": "", "seconds": ",.1f"}
    states = table({**columns, "MB": ",.2f"}, lines, {"MB": "of its output"})
    return [states, notes]


def print_status(session: Session, rows: Sequence[StageState]) -> None:
    """Print the states of the stages, and the command that shows a log."""
    logged = [row.stage for row in rows if row.owner or row.details]
    log = session.command("logs", logged[0]) if logged else ""
    print_parts(
        stage_parts(rows),
        f"store: `{session.store.root}`",
        f"log: `{log}`" if log else None,
    )


def print_runs(records: Sequence[Record]) -> None:
    """Print the runs of a store, newest last."""
    rows = []
    for record in records:
        ways = Counter(stage.get("how") for stage in record["stages"].values())
        state = run_state(record)
        end = record.get("finished", time.time() if state == "running" else None)
        seconds = None if end is None else end - record["started"]
        built = ways["Completed"] + ways["Resumed"]
        stage_counts = f"{built} / {ways['Cached']}"
        rows.append((record["run"], state, seconds, stage_counts))
    columns = {"run": "", "state": "", "seconds": ".0f", "made / reused": ">"}
    nothing = "this store has no runs yet; start one with: `gristmill run MANIFEST`"
    print_parts(table(columns, rows), None if rows else nothing)


def run_state(record: Record) -> str:
    """Return the state of a run: `killed` if its process ended without recording an
    end.
    """
    if record["state"] == "running" and is_gone(record["owner"]):
        return "killed"
    return str(record["state"])


def find_damage(session: Session) -> dict[str, list[str]]:
    """Return stage -> one sentence per committed file that is missing or has another
    checksum.
    """
    folders = {stage: session.folder(stage) for stage in session.plan}
    damage = {
        stage: list(folder.damage(deep=True))
        for stage, folder in folders.items()
        if folder.state() in ("committed", "corrupt")
    }
    return {stage: sentences for stage, sentences in damage.items() if sentences}


def repair_damage(session: Session, damage: Mapping[str, list[str]]) -> None:
    """Withdraw damaged commits and delete the damaged files, so that the next run makes
    them again.
    """
    for stage in damage:
        folder = session.folder(stage)
        try:
            files = folder.manifest()["files"]
        except (OSError, ValueError, RuntimeError):
            files = {}
        for name, entry in files.items():
            file = folder.data / name
            if file.exists() and sha256_file(file) != entry["sha256"]:
                file.unlink()
        number = len(list(folder.path.glob("_CORRUPT.*")))
        (folder.path / "_SUCCESS").rename(folder.path / f"_CORRUPT.{number}")


FOLLOW_SECONDS = 0.5
LOG_ORDER = ("running", "unfinished", "corrupt", "committed", "missing")
"""States of stages in the order in which their logs are chosen."""
BLOCK_BYTES = 1 << 16


class NoLogError(LookupError):
    """No log to show; the message lists what exists."""


def find_log(session: Session, stage: str | None) -> Path:
    """Return the log of a stage's newest attempt.

    Args:
        session: the opened manifest.
        stage: name; None means the stage that runs, else an unfinished one, else the
            last committed one.

    Raises:
        NoLogError: nothing has run yet.
        UnknownStageError: the manifest has no such stage.
    """
    if stage is None:
        rows = reversed(stage_states(session))
        row = min(rows, key=lambda row: LOG_ORDER.index(row.state))
        if row.state == "missing":
            raise NoLogError(
                f"nothing of {session.manifest_file} has been run in "
                f"{session.store.root}; run it with: {session.command('run')}"
            )
        stage = row.stage
    folder = session.folder(stage).logs
    attempts = sorted(int(path.stem) for path in folder.glob("*.log"))
    if not attempts:
        raise NoLogError(
            f"{stage} has no log here, since it has not been run; run it with: "
            f"{session.command('run', '--until', stage)}"
        )
    return folder / f"{attempts[-1]}.log"


def read_log(log: Path, lines: int | None, follow: bool) -> Iterator[str]:
    """Yield the text of a log piece by piece.

    Args:
        log: log file of an attempt.
        lines: number of last lines to start with; None means all.
        follow: continue with new text until the attempt ends.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with log.open("rb") as stream:
        kept: Iterable[bytes] = stream if lines is None else deque(stream, maxlen=lines)
        for line in kept:
            yield decoder.decode(line)
        while follow:
            # Checked before reading, so that text written just before the end is still
            # read.
            follow = is_written(log)
            while block := stream.read(BLOCK_BYTES):
                yield decoder.decode(block)
            if follow:
                time.sleep(FOLLOW_SECONDS)


def is_written(log: Path) -> bool:
    """Return True while the attempt that writes a log runs."""
    lease = log.parent.parent / "lease"
    return highest(lease) == int(log.stem) and running_owner(lease) is not None
