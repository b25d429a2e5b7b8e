"""States of a manifest's stages, damage of outputs, runs and logs, read from the store
alone.
"""

from __future__ import annotations

import codecs
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from gristmill.core.files import read_json, sha256_file
from gristmill.core.lease import highest, is_gone, running_owner
from gristmill.core.progress import (
    Progress,
    describe_progress,
    read_progress,
    seconds_left,
)
from gristmill.core.store import StageFolder
from gristmill.flows.planning.derived_settings import in_a_sentence
from gristmill.flows.report.report_facts import top_reasons
from gristmill.flows.running.session import Session
from gristmill.flows.running.terminal import plain_console
from gristmill.mixtures.yaml_text import did_you_mean

STYLES = {
    "committed": "green",
    "unfinished": "yellow",
    "running": "cyan",
    "missing": "dim",
    "corrupt": "red",
}
ACTIONS = {
    "committed": "reuse",
    "unfinished": "resume",
    "running": "wait for",
    "missing": "make",
    "corrupt": "repair",
}
MINUTE, HOUR = 60, 3600
"""Seconds."""


def stage_states(session: Session) -> list[dict[str, Any]]:
    """Return one row per stage: state (committed, unfinished, running, missing,
    corrupt), fingerprint, folder, details.
    """
    rows = []
    for stage, node in session.plan.items():
        folder = session.folder(stage)
        state: str = folder.state()
        owner = running_owner(folder.path / "lease") if state == "unfinished" else None
        row: dict[str, Any] = {
            "stage": stage,
            "state": "running" if owner else state,
            "fingerprint": node.fingerprint[:16],
            "folder": str(folder.path),
        }
        if node.kept_version is not None:
            row["kept_version"] = node.kept_version
        if state == "committed":
            manifest = folder.manifest()
            row["seconds"] = manifest["seconds"]
            row["bytes"] = sum(entry["bytes"] for entry in manifest["files"].values())
            if "read" in (counts := manifest["summary"].get("counts") or {}):
                row["documents"] = {
                    key: counts.get(key, 0) for key in ("read", "kept", "quarantined")
                }
                row["documents"]["dropped"] = dict(counts.get("dropped", {}))
        elif owner:
            row["owner"] = f"process {owner['pid']} on {owner['host']}"
            row["progress"] = read_progress(
                folder.path / "lease", highest(folder.path / "lease")
            )
        elif state == "unfinished":
            row["details"] = _describe_interruption(folder)
        elif state == "corrupt":
            row["details"] = next(folder.damage(), "")
        rows.append(row)
    return rows


def _describe_interruption(folder: StageFolder) -> str:
    error = folder.work / "error.json"
    if error.exists():
        return f"failed: {read_json(error)['message'].splitlines()[0]}"
    reached = describe_progress(
        read_progress(folder.path / "lease", highest(folder.path / "lease"))
    )
    if reached:
        return f"interrupted at {reached}"
    files = (
        sum(1 for file in folder.data.rglob("*") if file.is_file())
        if folder.data.exists()
        else 0
    )
    return f"interrupted with {files} files written"


def describe_running(row: Mapping[str, Any], now: float) -> str:
    """Describe a row whose stage runs: `2 m 10 s: 120/400 steps, loss 3.21, about 5 m
    left (process 7 on host)`.
    """
    progress: Progress = row["progress"]
    if not progress:
        return str(row["owner"])
    # A job with the name of its stage would appear twice on the line.
    job = progress.get("job", "")
    if job == row.get("stage"):
        job = ""
    parts = [describe_progress({**progress, "job": job})]
    remaining = seconds_left(progress)
    if remaining is not None:
        # Relative to now: a stage without recent progress is not almost done.
        remaining = max(0.0, remaining - (now - progress["at"]))
        parts.append(f"about {duration(remaining)} left")
    details = ", ".join(part for part in parts if part)
    separator = ": " if details else ""
    return (
        f"for {duration(now - progress['started'])}{separator}{details} "
        f"({row['owner']})"
    )


def duration(seconds: float) -> str:
    """Format seconds as `45 s`, `2 m 10 s` or `3 h 5 m`."""
    total = round(seconds)
    if total < MINUTE:
        return f"{total} s"
    if total < HOUR:
        return f"{total // MINUTE} m {total % MINUTE} s"
    return f"{total // HOUR} h {total % HOUR // MINUTE} m"


def print_status(session: Session, rows: list[dict[str, Any]]) -> None:
    """Print the states of the stages as a table that fits the terminal."""
    console = plain_console()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("stage", "state", "fingerprint"):
        table.add_column(column, no_wrap=True)
    table.add_column("seconds", justify="right", min_width=7)
    table.add_column("MB", justify="right", min_width=6)
    for row in rows:
        table.add_row(
            row["stage"],
            Text(row["state"], style=STYLES[row["state"]]),
            row["fingerprint"][:8],
            f"{row['seconds']:.1f}" if "seconds" in row else "",
            f"{row['bytes'] / 1e6:.1f}" if "bytes" in row else "",
        )
    console.print(table)

    stage_with_log = None
    for row in rows:
        documents = row.get("documents", {})
        if documents and documents["kept"] < documents["read"] / 2:
            reasons = ", ".join(
                f"{rule} {number:,}"
                for rule, number in top_reasons(
                    documents["dropped"], documents["quarantined"]
                )
            )
            losses = (
                f"kept {documents['kept']:,} of {documents['read']:,} "
                f"documents; dropped most by {reasons}"
            )
            console.print(Text(f"{row['stage']}: {losses}", style="yellow"))
        if "details" in row or "owner" in row:
            details = (
                row["details"]
                if "details" in row
                else describe_running(row, time.time())
            )
            console.print(
                Text(f"{row['stage']}: {details}", style=STYLES[row["state"]])
            )
            stage_with_log = stage_with_log or row["stage"]
    console.print(Text(f"store: {session.store.root}", style="dim"), soft_wrap=True)
    if stage_with_log is not None:
        console.print(
            Text(f"log:   {session.command('logs', stage_with_log)}", style="dim"),
            soft_wrap=True,
        )


def print_plan(rows: list[dict[str, Any]]) -> None:
    """Print the action for every stage, and the number of stages that would run."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("stage", "action", "fingerprint"):
        table.add_column(column, no_wrap=True)
    table.add_column("why", overflow="fold")
    for row in rows:
        action = Text(row["action"], style=STYLES[row["state"]])
        table.add_row(row["stage"], action, row["fingerprint"][:8], row["reason"])
    console = plain_console()
    console.print(table)
    for row in rows:
        if "derived" in row:
            console.print(Text(in_a_sentence(row["derived"])), soft_wrap=True)
        if "warning" in row:
            console.print(Text(row["warning"], style="yellow"), soft_wrap=True)
        if checkpoint := row.get("continue_from"):
            console.print(
                Text(
                    f"{row['stage']} would start at step 1, but could continue from "
                    f"step {checkpoint['step']} of another training: --set "
                    f"{row['stage']}.continue_from={checkpoint['checkpoint']}",
                    style="yellow",
                ),
                soft_wrap=True,
            )
    for row in rows:
        for code in row.get("code", ()):
            console.print(
                Text(f"{row['stage']} runs code of your own: {code}", style="dim"),
                soft_wrap=True,
            )
    num_to_run = sum(row["action"] != "reuse" for row in rows)
    num_cut_offs = sum("cut_off_after" in row for row in rows)
    summary = f"{num_to_run} of {len(rows)} stages would run"
    if not num_to_run:
        summary = "nothing would run: all stages are committed"
    elif num_cut_offs:
        summary += (
            f"; {num_cut_offs} of them are reused if the stages before them "
            "give the same bytes"
        )
    console.print(Text(summary, style="dim"))


def print_runs(records: list[dict[str, Any]]) -> None:
    """Print the runs of a store, newest last."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("run", no_wrap=True, min_width=24)
    table.add_column("state", no_wrap=True)
    table.add_column("seconds", justify="right")
    table.add_column("made / reused", justify="right")
    for record in records:
        built = [
            stage
            for stage in record["stages"].values()
            if stage.get("how") in ("Completed", "Resumed")
        ]
        reused = [
            stage for stage in record["stages"].values() if stage.get("how") == "Cached"
        ]
        state = run_state(record)
        end = record.get("finished", time.time() if state == "running" else None)
        table.add_row(
            record["run"],
            state,
            "" if end is None else f"{end - record['started']:.0f}",
            f"{len(built)} / {len(reused)}",
        )
    console = plain_console()
    if not records:
        console.print(
            "this store has no runs yet; start one with: gristmill run MANIFEST",
            soft_wrap=True,
        )
        return
    console.print(table)


def run_state(record: Mapping[str, Any]) -> str:
    """Return the state of a run: `killed` if its process is gone without recording an
    end.
    """
    if record["state"] == "running" and is_gone(record["owner"]):
        return "killed"
    return str(record["state"])


def find_damage(session: Session) -> dict[str, list[str]]:
    """Return stage -> one sentence per committed file that is missing or has another
    checksum.
    """
    damage = {}
    for stage in session.plan:
        folder = session.folder(stage)
        if folder.state() in ("committed", "corrupt"):
            sentences = list(folder.damage(deep=True))
            if sentences:
                damage[stage] = sentences
    return damage


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
BLOCK_BYTES = 1 << 16


class NoLogError(LookupError):
    """No log to show; the message lists what exists."""


def find_log(session: Session, stage: str | None, attempt: int | None) -> Path:
    """Return the log of a stage's attempt.

    Args:
        session: the opened manifest.
        stage: name; None means the stage that runs, else an unfinished one, else the
            last committed one.
        attempt: number, from 1; None means the newest attempt with a log.

    Raises:
        NoLogError: no such stage or attempt exists, or nothing has run yet.
    """
    chosen = stage or _default_log_stage(session)
    if chosen not in session.plan:
        raise NoLogError(
            f"no such stage: {chosen!r}{did_you_mean(chosen, session.plan) or ';'} "
            f"{session.manifest_file} has {', '.join(session.plan)}"
        )
    folder = session.folder(chosen).logs
    attempts = (
        sorted(int(path.stem) for path in folder.glob("*.log"))
        if folder.exists()
        else []
    )
    if not attempts:
        raise NoLogError(
            f"{chosen} has no log here, since it has not been run; run it with: "
            f"{session.command('run', '--until', chosen)}"
        )
    if attempt is not None and attempt not in attempts:
        raise NoLogError(
            f"{chosen} has no attempt {attempt}; its attempts are "
            f"{', '.join(map(str, attempts))}"
        )
    return folder / f"{attempts[-1] if attempt is None else attempt}.log"


def _default_log_stage(session: Session) -> str:
    rows = stage_states(session)
    for states in (("running",), ("unfinished", "corrupt"), ("committed",)):
        stages = [row["stage"] for row in rows if row["state"] in states]
        if stages:
            return str(stages[-1])
    raise NoLogError(
        f"nothing of {session.manifest_file} has been run in {session.store.root}; run "
        f"it with: {session.command('run')}"
    )


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
