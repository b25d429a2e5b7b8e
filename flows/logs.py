"""What the attempts of a stage printed, as a whole, in its last lines, or while it is being written."""

from __future__ import annotations

import codecs
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from gristmill.flows.lease import highest, running_owner
from gristmill.flows.session import Session
from gristmill.flows.status import stage_states
from gristmill.mixtures.yaml_text import did_you_mean

FOLLOW_SECONDS = 0.5
BLOCK_BYTES = 1 << 16


class NoLogError(LookupError):
    """There is no log to show; the message says what there is."""


def find_log(session: Session, stage: str | None, attempt: int | None) -> Path:
    """The log of a stage's attempt.

    Args:
        session: the opened manifest.
        stage: its name; absent: the stage that runs, else one that stopped half-way, else the last that was made.
        attempt: its number, from 1; absent: the newest that has a log.

    Raises:
        NoLogError: there is no such stage or attempt, or nothing has run yet.
    """
    chosen = stage or _interesting(session)
    if chosen not in session.plan:
        raise NoLogError(f"no such stage: {chosen!r}{did_you_mean(chosen, session.plan) or ';'} "
                         f"{session.manifest_file} has {', '.join(session.plan)}")
    folder = session.folder(chosen).logs
    attempts = sorted(int(path.stem) for path in folder.glob("*.log")) if folder.exists() else []
    if not attempts:
        raise NoLogError(f"{chosen} has no log here, since nothing has been run of it; run it with: "
                         f"{session.command('run', '--until', chosen)}")
    if attempt is not None and attempt not in attempts:
        raise NoLogError(f"{chosen} has no attempt {attempt}; its attempts are {', '.join(map(str, attempts))}")
    return folder / f"{attempts[-1] if attempt is None else attempt}.log"


def _interesting(session: Session) -> str:
    rows = stage_states(session)
    for states in (("running",), ("unfinished", "corrupt"), ("committed",)):
        found = [row["stage"] for row in rows if row["state"] in states]
        if found:
            return str(found[-1])
    raise NoLogError(f"nothing of {session.manifest_file} has been run in {session.store.root}; run it with: "
                     f"{session.command('run')}")


def read_log(log: Path, lines: int | None, follow: bool) -> Iterator[str]:
    """Text of a log, piece by piece.

    Args:
        log: the file of an attempt.
        lines: begin with the last so many lines; with all if None.
        follow: go on with what is written from now on, until the attempt has ended.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with log.open("rb") as stream:
        kept: Iterable[bytes] = stream if lines is None else deque(stream, maxlen=lines)
        for line in kept:
            yield decoder.decode(line)
        while follow:
            # Asked before reading, so that what was written just before the end is still seen.
            follow = is_written(log)
            while block := stream.read(BLOCK_BYTES):
                yield decoder.decode(block)
            if follow:
                time.sleep(FOLLOW_SECONDS)


def is_written(log: Path) -> bool:
    """Whether the attempt that a log belongs to still runs."""
    lease = log.parent.parent / "lease"
    return highest(lease) == int(log.stem) and running_owner(lease) is not None
