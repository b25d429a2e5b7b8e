"""The run that nothing disturbed: what every other run is compared with, and what it borrows its inputs from."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import pyarrow.parquet as pq

from benchmarks.chaos import warm
from benchmarks.chaos.fuse import Fuse, Role, burn_at
from benchmarks.chaos.project import write_given, write_project
from gristmill.core.store import StageFolder
from gristmill.flows.running.fork_server import Forked
from gristmill.flows.running.session import Session, open_session
from gristmill.train.loop.metrics_log import TIMINGS

FREE_FOLDERS = ("lease", "logs", "work/tensorboard")
"""What a stage keeps of its attempts, which tells how it went and not what it made."""
RUN_SECONDS = 900
"""After so long a run of one stage hangs, also on a machine that others keep busy."""
WHOLE_RUN_SECONDS = 3600
"""The same of a run of all stages, each process of which imports everything itself."""


@dataclass(frozen=True)
class Undisturbed:
    """A finished run of a manifest in a store of its own, and the log of the changes that it made there.

    Attributes:
        manifest: the manifest's file.
        store: the clean store.
        log: of the fuse that counted the changes.
        until: the last stage that counts; the manifest's last one if None.
    """

    manifest: Path
    store: Path
    log: Path
    until: str | None = None

    @classmethod
    def make(cls, folder: Path, until: str | None = None) -> Undisturbed:
        """Make the run of the tiny project below a folder, or find it there as it was made before.

        Raises:
            RuntimeError: it failed.
        """
        run = cls(folder / "project" / "chaos.yaml", folder / "clean", folder / "changes", until)
        if not run.manifest.exists():
            write_project(folder / "project")
        run.finish()
        return run

    @classmethod
    def make_given(cls, folder: Path, whole: Undisturbed) -> Undisturbed:
        """The same of the project that begins with given tokens, and with the model that the whole run exported."""
        run = cls(folder / "given" / "given.yaml", folder / "clean-given", folder / "changes-given")
        if not run.manifest.exists():
            write_given(folder / "given", whole.session.folder("export").data)
        run.finish()
        return run

    def finish(self, settings: Sequence[str] = ()) -> None:
        """Make what is not there yet.

        Args:
            settings: more arguments; such as change no result.
        """
        if all(self.session.folder(stage).state() == "committed" for stage in self.stages):
            return
        shutil.rmtree(self.store, ignore_errors=True)
        self.log.unlink(missing_ok=True)
        fuse = Fuse(str(self.store), str(self.log))
        arguments = self.arguments(self.store, self.until, *settings)
        done = finish(start(arguments, burn_at(fuse), warmed=False), WHOLE_RUN_SECONDS)
        if done.returncode:
            raise RuntimeError(f"the run that nothing disturbs failed with code {done.returncode}:\n{done.stderr}")

    @cached_property
    def session(self) -> Session:
        """The manifest, planned in the clean store."""
        return open_session(str(self.manifest), [], str(self.store), until=self.until)

    @property
    def stages(self) -> list[str]:
        """The stages in the order in which they run."""
        return list(self.session.plan)

    def changes(self, role: Role = "any") -> dict[str, int]:
        """Stage -> how many changes it made in its folder, or how many of them a process of that role would make.

        The undisturbed run has Beam's work done by threads of the stage: what workers of their own would write is taken
        to be the shards.
        """
        lines = [line.split(maxsplit=2) for line in Fuse("", str(self.log)).changes()]
        counted = Counter(
            path.partition("/")[0]
            for who, _, path in (line for line in lines if len(line) == 3)
            if role in ("any", who) or (role == "worker" and who == "stage" and "/part-" in path)
        )
        return {stage: counted[stage] for stage in self.stages}

    def arguments(self, store: Path | str, until: str | None = None, *more: str) -> list[str]:
        """The command line of a run of the manifest."""
        last = [] if until is None else ["--until", until]
        return ["run", str(self.manifest), "--store", str(store), "--no-ui", *last, *more]

    def lend(self, store: Path, until: str) -> None:
        """Make a store that has the outputs of all stages before one, as links: nobody may write into them."""
        for stage in self.stages[: self.stages.index(until)]:
            folder = self.session.folder(stage).path
            (store / stage).mkdir(parents=True, exist_ok=True)
            (store / stage / folder.name).symlink_to(folder)

    def folder_in(self, store: Path, stage: str) -> StageFolder:
        """The folder of a stage in another store."""
        return StageFolder(store / stage / self.session.folder(stage).path.name)

    def differences(self, store: Path, stages: Sequence[str]) -> list[str]:
        """A sentence for everything in which a store's outputs differ from the undisturbed ones.

        Every committed file is compared byte by byte (metrics line by line, without timings), the summaries' counts,
        the documents of every table by their ids, and the names of all files in the stage's folder, so that neither a
        half-written file nor an attempt's work stays behind.
        """
        found = []
        for stage in stages:
            clean, other = self.session.folder(stage), self.folder_in(store, stage)
            if other.state() != "committed":
                found.append(f"{stage} is {other.state()}")
                continue
            found += [
                f"{stage}: {sentence}"
                for sentence in (
                    *other.damage(deep=True),
                    *_different_files(clean, other),
                    *_different_counts(clean, other),
                    *_lost_or_double(clean, other),
                    *_left_behind(clean, other),
                )
            ]
        return found


@dataclass(frozen=True)
class Started:
    """A command that was started, and where its output goes."""

    arguments: Sequence[str]
    sink: IO[str]
    process: subprocess.Popen[bytes] | Forked


def gristmill(
    arguments: Sequence[str], environment: dict[str, str] | None = None, warmed: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a command of gristmill to its end, in a session of its own; both outputs are kept.

    They go to files, since a pipe would be kept open by any process that the run leaves behind.
    """
    return finish(start(arguments, environment, warmed))


def start(
    arguments: Sequence[str],
    environment: dict[str, str] | None = None,
    warmed: bool = True,
    within: Sequence[str] = (),
) -> Started:
    """Start a command of gristmill: from an interpreter that has imported all if `warmed`, else from a new one, which
    the command `within` starts.
    """
    sink = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `finish` reads and closes it
    environment = dict(os.environ) if environment is None else environment
    if warmed:
        return Started(arguments, sink, warm.start(arguments, environment, sink.fileno()))
    return Started(
        arguments,
        sink,
        subprocess.Popen(
            [*within, sys.executable, "-m", "gristmill.flows.cli.main", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        ),
    )


def finish(started: Started, seconds: float = RUN_SECONDS) -> subprocess.CompletedProcess[str]:
    """Wait for a command, and read what it printed.

    Raises:
        subprocess.TimeoutExpired: it hangs.
    """
    with started.sink as sink:
        try:
            code = started.process.wait(seconds)
        except TimeoutError as error:
            raise subprocess.TimeoutExpired(list(started.arguments), seconds) from error
        sink.seek(0)
        text = sink.read()
    return subprocess.CompletedProcess(list(started.arguments), code, text, text)


def _different_files(clean: StageFolder, other: StageFolder) -> list[str]:
    ours, theirs = (folder.manifest()["files"] for folder in (other, clean))
    return [
        f"data/{name} differs"
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
        and not (
            name in ours
            and name in theirs
            and name.endswith("metrics.jsonl")
            and _metrics(other.data / name) == _metrics(clean.data / name)
        )
    ]


def _metrics(path: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, path.read_text().splitlines())
    return [{name: value for name, value in line.items() if name not in TIMINGS} for line in lines]


def _different_counts(clean: StageFolder, other: StageFolder) -> list[str]:
    ours, theirs = (_without_asked(folder.manifest()["summary"]) for folder in (other, clean))
    return [
        f"its summary has another {name}"
        for name in sorted({*ours, *theirs})
        if name not in TIMINGS and ours.get(name) != theirs.get(name)
    ]


def _without_asked(value: Any) -> Any:
    """A summary without what asking came to in the attempt that ended well, which depends on those before."""
    if isinstance(value, list):
        return [_without_asked(one) for one in value]
    return (
        {key: _without_asked(one) for key, one in value.items() if key != "asked"} if isinstance(value, dict) else value
    )


def _lost_or_double(clean: StageFolder, other: StageFolder) -> list[str]:
    ours, theirs = _documents(other), _documents(clean)
    double = sum(count - theirs[key] for key, count in ours.items() if count > theirs[key])
    lost = sum(count - ours[key] for key, count in theirs.items() if count > ours[key])
    return [f"{count} documents are {what}" for count, what in ((lost, "lost"), (double, "double")) if count]


def _documents(folder: StageFolder) -> Counter[bytes]:
    """How often every document's id is in the tables of an output."""
    found: Counter[bytes] = Counter()
    for path in sorted(folder.data.rglob("part-*.parquet")):
        if "id" in pq.read_schema(path).names:
            found.update(pq.read_table(path, columns=["id"])["id"].to_pylist())
    return found


def _left_behind(clean: StageFolder, other: StageFolder) -> list[str]:
    ours, theirs = _names(other), _names(clean)
    return [
        *(f"{name} was left behind" for name in sorted(ours - theirs)),
        *(f"{name} is missing" for name in sorted(theirs - ours)),
    ]


def _names(folder: StageFolder) -> set[str]:
    """The names of all files that lie in a folder, but for what attempts may keep."""
    names = (path.relative_to(folder.path).as_posix() for path in folder.path.rglob("*") if path.is_file())
    return {name for name in names if not name.startswith((*FREE_FOLDERS, "_CORRUPT"))}
