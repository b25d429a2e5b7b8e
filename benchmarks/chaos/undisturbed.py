"""The undisturbed run, with which every disturbed run is compared, and from which it
borrows its inputs.
"""

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
"""Files of a stage about its attempts, which are not part of its output."""
RUN_SECONDS = 900
"""A longer run of one stage hangs, even on a busy machine."""
WHOLE_RUN_SECONDS = 3600
"""The same for a run of all stages, each process of which imports all modules
itself.
"""


@dataclass(frozen=True)
class Undisturbed:
    """Finished run of a manifest in a store of its own, and the log of its changes
    there.

    Attributes:
        manifest: the manifest's file.
        store: the clean store.
        log: of the fuse that counted the changes.
        until: last stage; the manifest's last one if None.
    """

    manifest: Path
    store: Path
    log: Path
    until: str | None = None

    @classmethod
    def make(cls, folder: Path, until: str | None = None) -> Undisturbed:
        """Run the tiny project below a folder, unless its run is there already.

        Raises:
            RuntimeError: it failed.
        """
        run = cls(
            folder / "project" / "chaos.yaml",
            folder / "clean",
            folder / "changes",
            until,
        )
        if not run.manifest.exists():
            write_project(folder / "project")
        run.finish()
        return run

    @classmethod
    def make_given(cls, folder: Path, whole: Undisturbed) -> Undisturbed:
        """Run the project that begins with given tokens, and with the model that the
        whole run exported.
        """
        run = cls(
            folder / "given" / "given.yaml",
            folder / "clean-given",
            folder / "changes-given",
        )
        if not run.manifest.exists():
            write_given(folder / "given", whole.session.folder("export").data)
        run.finish()
        return run

    def finish(self, settings: Sequence[str] = ()) -> None:
        """Run the manifest, unless all stages are committed.

        Args:
            settings: more arguments, which change no result.

        Raises:
            RuntimeError: it failed.
        """
        if all(
            self.session.folder(stage).state() == "committed" for stage in self.stages
        ):
            return
        shutil.rmtree(self.store, ignore_errors=True)
        self.log.unlink(missing_ok=True)
        fuse = Fuse(str(self.store), str(self.log))
        arguments = self.arguments(self.store, self.until, *settings)
        done = finish(start(arguments, burn_at(fuse), warmed=False), WHOLE_RUN_SECONDS)
        if done.returncode:
            raise RuntimeError(
                "the undisturbed run failed with code "
                f"{done.returncode}:\n{done.stderr}"
            )

    @cached_property
    def session(self) -> Session:
        """Manifest, planned in the clean store."""
        return open_session(str(self.manifest), [], str(self.store), until=self.until)

    @property
    def stages(self) -> list[str]:
        """Stages in the order of their runs."""
        return list(self.session.plan)

    def changes(self, role: Role = "any") -> dict[str, int]:
        """Count the changes of each stage in its folder, or those that a process of a
        role would make.

        In the undisturbed run threads of the stage do Beam's work: the shards are taken
        to be the changes of workers.
        """
        lines = [line.split(maxsplit=2) for line in Fuse("", str(self.log)).changes()]
        counts = Counter[str]()
        for line in lines:
            if len(line) != 3:
                continue
            line_role, _, path = line
            is_worker = role == "worker" and line_role == "stage" and "/part-" in path
            if role in ("any", line_role) or is_worker:
                counts[path.partition("/")[0]] += 1
        return {stage: counts[stage] for stage in self.stages}

    def arguments(
        self, store: Path | str, until: str | None = None, *more: str
    ) -> list[str]:
        """Return the command line of a run of the manifest."""
        last = [] if until is None else ["--until", until]
        return [
            "run",
            str(self.manifest),
            "--store",
            str(store),
            "--no-ui",
            *last,
            *more,
        ]

    def lend(self, store: Path, until: str) -> None:
        """Make a store with the outputs of all stages before one, as links, which must
        not be written into.
        """
        for stage in self.stages[: self.stages.index(until)]:
            folder = self.session.folder(stage).path
            (store / stage).mkdir(parents=True, exist_ok=True)
            (store / stage / folder.name).symlink_to(folder)

    def folder_in(self, store: Path, stage: str) -> StageFolder:
        """Return the folder of a stage in another store."""
        return StageFolder(store / stage / self.session.folder(stage).path.name)

    def differences(self, store: Path, stages: Sequence[str]) -> list[str]:
        """Return a sentence for each difference of a store's outputs from the
        undisturbed ones.

        Compared are every committed file byte by byte (metrics line by line, without
        timings), the summaries' counts, the documents of every table by their ids, and
        the names of all files in the stage's folder: no half-written file and no work
        of an attempt may remain.
        """
        sentences = []
        for stage in stages:
            clean, other = self.session.folder(stage), self.folder_in(store, stage)
            if other.state() != "committed":
                sentences.append(f"{stage} is {other.state()}")
                continue
            differences = [
                *other.damage(deep=True),
                *_different_files(clean, other),
                *_different_counts(clean, other),
                *_lost_or_double(clean, other),
                *_left_behind(clean, other),
            ]
            sentences += [f"{stage}: {difference}" for difference in differences]
        return sentences


@dataclass(frozen=True)
class Started:
    """A running command, and the file of its output."""

    arguments: Sequence[str]
    sink: IO[str]
    process: subprocess.Popen[bytes] | Forked


def gristmill(
    arguments: Sequence[str],
    environment: dict[str, str] | None = None,
    warmed: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a command of gristmill to its end, in a session of its own, and keep its
    output.

    It goes to a file, since any process that outlives the run would keep a pipe open.
    """
    return finish(start(arguments, environment, warmed))


def start(
    arguments: Sequence[str],
    environment: dict[str, str] | None = None,
    warmed: bool = True,
    within: Sequence[str] = (),
) -> Started:
    """Start a command of gristmill: forked from an interpreter with all imports if
    `warmed`, else in a new one, which the command `within` starts.
    """
    sink = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `finish` reads and closes it
    environment = dict(os.environ) if environment is None else environment
    if warmed:
        return Started(
            arguments, sink, warm.start(arguments, environment, sink.fileno())
        )
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


def finish(
    started: Started, seconds: float = RUN_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Wait for a command, and read its output.

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


def wrong_code(done: subprocess.CompletedProcess[str], code: int = 0) -> list[str]:
    """Return a sentence if a command did not end with a code."""
    if done.returncode == code:
        return []
    return [
        f"ended with code {done.returncode} instead of {code}: {done.stdout[-300:]}"
    ]


def wrong_end(done: subprocess.CompletedProcess[str], code: int = 0) -> list[str]:
    """Return a sentence if a command did not end with a code, and one if it printed a
    traceback.
    """
    traceback = ["ended with a traceback"] if "Traceback" in done.stdout else []
    return [*wrong_code(done, code), *traceback]


def _different_files(clean: StageFolder, other: StageFolder) -> list[str]:
    ours, theirs = other.manifest()["files"], clean.manifest()["files"]
    different = [
        name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)
    ]
    return [
        f"data/{name} differs"
        for name in different
        if not (
            name in ours
            and name in theirs
            and _same_metrics(clean.data / name, other.data / name)
        )
    ]


def _same_metrics(first: Path, second: Path) -> bool:
    return first.name.endswith("metrics.jsonl") and _metrics(first) == _metrics(second)


def _metrics(path: Path) -> list[dict[str, object]]:
    lines = map(json.loads, path.read_text().splitlines())
    return [
        {name: value for name, value in line.items() if name not in TIMINGS}
        for line in lines
    ]


def _different_counts(clean: StageFolder, other: StageFolder) -> list[str]:
    ours, theirs = (
        _without_requests(other.manifest()["summary"]),
        _without_requests(clean.manifest()["summary"]),
    )
    return [
        f"its summary has another {name}"
        for name in sorted({*ours, *theirs})
        if name not in TIMINGS and ours.get(name) != theirs.get(name)
    ]


def _without_requests(value: Any) -> Any:
    """Return a summary without `asked`: the requests of the last attempt, which depend
    on earlier attempts.
    """
    if isinstance(value, list):
        return [_without_requests(entry) for entry in value]
    if isinstance(value, dict):
        return {
            key: _without_requests(entry)
            for key, entry in value.items()
            if key != "asked"
        }
    return value


def _lost_or_double(clean: StageFolder, other: StageFolder) -> list[str]:
    ours, theirs = _documents(other), _documents(clean)
    double, lost = (ours - theirs).total(), (theirs - ours).total()
    sentences = [f"{lost} documents are lost"] if lost else []
    return [*sentences, f"{double} documents are double"] if double else sentences


def _documents(folder: StageFolder) -> Counter[bytes]:
    """Count each document's id in the tables of an output."""
    ids: Counter[bytes] = Counter()
    for path in sorted(folder.data.rglob("part-*.parquet")):
        if "id" in pq.read_schema(path).names:
            ids.update(pq.read_table(path, columns=["id"])["id"].to_pylist())
    return ids


def _left_behind(clean: StageFolder, other: StageFolder) -> list[str]:
    ours, theirs = _names(other), _names(clean)
    return [
        *(f"{name} was left behind" for name in sorted(ours - theirs)),
        *(f"{name} is missing" for name in sorted(theirs - ours)),
    ]


def _names(folder: StageFolder) -> set[str]:
    """Return the names of all files in a folder, except FREE_FOLDERS."""
    names = (
        path.relative_to(folder.path).as_posix()
        for path in folder.path.rglob("*")
        if path.is_file()
    )
    return {name for name in names if not name.startswith((*FREE_FOLDERS, "_CORRUPT"))}
