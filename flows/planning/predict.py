"""`gristmill plan --predict`: time, memory and disk of every stage, from samples that are run, or from past runs.

Each preparing stage is run on a sample and, where the time allows, on a larger one. Time is taken to be fixed + slope x
text, memory fixed + slope x shard size (a stage holds some shards at a time, never the corpus), disk proportional to
text. Where there is one sample, the slope is the pace at which its shards were done. What a stage drops is taken to be
dropped in the same share of the whole. What no sample of documents tells (a training's pace) is read from the newest
output of the same manifest in the store; where there is none, the answer says so.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gristmill.core.store import StageFolder, Store
from gristmill.dataprep.reading.pythondocs import is_python_source
from gristmill.flows.planning.sampled_sources import Sample, take_sample
from gristmill.flows.running.memory_advice import available_memory
from gristmill.flows.running.process import Event
from gristmill.flows.running.run import Outcome, StageFailedError
from gristmill.flows.running.session import Session
from gristmill.flows.running.terminal import plain_console
from gristmill.flows.stages.plan import Node, make_plan
from gristmill.mixtures.sources import INGEST
from gristmill.mixtures.steps.dedup import Dedup, MinHash

LARGER = 4
"""The second sample is so many times the first."""
MOST_GROWTH = 3
"""A sample that is too small for a source's first document is made LARGER so many times at the most."""
SHARDS_PER_WORKER = 4
BUDGET_SECONDS = 30.0
"""What the samples may take together, unless more is asked for."""
WORK_KEYS = ("steps", "epochs", "global_batch_size")
"""What a training's time is proportional to, besides its model."""
OF_SAMPLES = "not measurable on a sample; an earlier run in this store is needed"
SIMILARITIES = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)


@dataclass(frozen=True)
class Measured:
    """What a stage cost on one sample: seconds, bytes of memory at the peak, bytes written.

    `work_seconds` is the part of the time in which its shards were done.
    """

    seconds: float
    memory_bytes: int
    disk_bytes: int
    work_seconds: float = 0.0


class OutOfTimeError(Exception):
    """The samples have used up what they may take."""


class ShardClock:
    """Shows nothing of the samples' stages, and notes when their shards were done."""

    def __init__(self) -> None:
        self._done: dict[str, list[tuple[float, float]]] = {}

    def work_seconds(self) -> float:
        """How long the stage's jobs took from shard to shard, their first ones in proportion."""
        spans = [
            (times[-1][0] - times[0][0]) * times[-1][1] / (times[-1][1] - times[0][1])
            for times in self._done.values()
            if times[-1][1] > times[0][1]
        ]
        return sum(spans)

    def stage_started(self, node: Node, resuming: bool, folder: StageFolder) -> None:
        """See Observer."""
        self._done = {}

    def stage_waits(self, node: Node, owner: Mapping[str, Any]) -> None:
        """See Observer."""

    def stage_event(self, node: Node, event: Event) -> None:
        """See Observer."""
        if event["event"] == "progress" and event["done"]:
            self._done.setdefault(event.get("job") or "", []).append((time.monotonic(), event["done"]))

    def stage_finished(self, node: Node, outcome: Outcome) -> None:
        """See Observer."""

    def stage_failed(self, node: Node, message: str) -> None:
        """See Observer."""


def predict(session: Session, sample_bytes: int, budget_seconds: float = BUDGET_SECONDS) -> dict[str, Any]:
    """Run the preparing stages on two samples and extrapolate.

    Args:
        sample_bytes: size of the larger sample, in bytes of the sources' files.
        budget_seconds: what the samples may take; then what is not measured is said to be so.

    Returns:
        `text_bytes` of the whole (`text_at_least`: or more); `stages`: per stage `seconds`, `memory_bytes`,
        `disk_bytes` and what they are `from`, or `error`; `totals`;
        `took_seconds`; `available`: memory and disk of this machine; `refusals`: sentences about what does not fit;
        `lsh`: the share of pairs that become candidates by their similarity.
    """
    started = time.monotonic()
    small, large = _measure_both(session, sample_bytes, started + budget_seconds)
    whole_bytes = large.whole_text or small.whole_text
    shard_bytes = session.manifest.ingest.shard_bytes
    sampled = _stages(session)
    stages = [
        from_samples(name, small, large, whole_bytes, shard_bytes) if name in sampled else _of_past(session, name)
        for name in session.plan
    ]
    known: list[dict[str, Any]] = [row for row in stages if "error" not in row]
    totals = {
        "seconds": sum(row["seconds"] for row in known),
        "memory_bytes": max((row["memory_bytes"] for row in known), default=0),
        "disk_bytes": sum(row["disk_bytes"] for row in known),
    }
    available = {"memory_bytes": available_memory(), "disk_bytes": _free_disk(session.store.root)}
    return {
        "text_bytes": whole_bytes,
        # The small sample ends sources without files early, and nothing says how much more they have.
        "text_at_least": not large.text and any(map(is_python_source, _paths(session))),
        "sample_text_bytes": large.text or small.text,
        "took_seconds": time.monotonic() - started,
        "budget_seconds": budget_seconds,
        "stages": stages,
        "totals": totals,
        "available": available,
        "refusals": refusals(totals, available),
        "lsh": lsh_curve(_minhash(session)),
    }


def _paths(session: Session) -> list[str]:
    return [source.path for source in session.manifest.document_sources.values()]


def _measure_both(session: Session, sample_bytes: int, deadline: float) -> tuple[SampleRun, SampleRun]:
    """Measure two samples; larger ones where a source's first document does not fit into its part.

    The second is left empty where its time would not suffice.
    """
    for growth in range(MOST_GROWTH + 1):
        wanted = sample_bytes * LARGER**growth
        with tempfile.TemporaryDirectory(prefix="gristmill-predict-") as folder:
            began = time.monotonic()
            small = _measure(session, Path(folder) / "small", wanted // LARGER, deadline, whole_python=False)
            now = time.monotonic()
            if INGEST in small.errors and growth < MOST_GROWTH and now < deadline:
                continue
            work = sum(measured.work_seconds for measured in small.stages.values())
            if now - began + (LARGER - 1) * work > deadline - now:
                return small, SampleRun(0.0, 0.0, 0, {}, {})
            return small, _measure(session, Path(folder) / "large", wanted, deadline, whole_python=True)
    raise AssertionError("the last round always returns")


@dataclass(frozen=True)
class SampleRun:
    """What a run over a sample took, and how much larger the whole is."""

    text: float
    whole_text: float
    shard_bytes: int
    stages: dict[str, Measured]
    errors: dict[str, str]


def _stages(session: Session) -> list[str]:
    """The stages that a sample of documents is enough for."""
    found: list[str] = []
    for name, node in session.plan.items():
        is_of_documents = bool(node.inputs) and set(node.inputs) <= set(found)
        if name == INGEST or (is_of_documents and node.stage.pace is None):
            found.append(name)
    return found


def _measure(session: Session, folder: Path, sample_bytes: int, deadline: float, whole_python: bool) -> SampleRun:
    sample = take_sample(session.manifest, folder / "sources", sample_bytes, whole_python)
    shard_bytes = max(sample_bytes // (SHARDS_PER_WORKER * session.manifest.engine.workers), 1 << 16)
    ingest = sample.manifest.ingest.model_copy(update={"shard_bytes": shard_bytes})
    manifest = sample.manifest.model_copy(update={"ingest": ingest})
    opened = Session(manifest, session.manifest_file, [], Store.at(folder / "store"), None, make_plan(manifest))
    watch = ShardClock()
    runner = opened.runner(watch)
    found: dict[str, Measured] = {}
    errors: dict[str, str] = {}
    for stage in _stages(session):
        try:
            with interrupted_at(deadline):
                outcome = runner.run_stage(stage)
        except StageFailedError as error:
            errors[stage] = str(error).splitlines()[0]
            break
        except OutOfTimeError:
            errors[stage] = "the samples have used up their time: give more with --sample-seconds"
            break
        made = outcome.folder.manifest()
        disk = sum(file["bytes"] for file in made["files"].values())
        found[stage] = Measured(
            made["seconds"],
            made.get("cost", {}).get("peak_memory_bytes", 0),
            disk,
            min(watch.work_seconds(), made["seconds"]),
        )
    return SampleRun(*_text_bytes(opened, sample), shard_bytes, found, errors)


@contextmanager
def interrupted_at(deadline: float) -> Iterator[None]:
    """Raise OutOfTimeError in what is done inside when the time has come; off the main thread, before it begins."""
    if time.monotonic() >= deadline:
        raise OutOfTimeError
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTimeError

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(deadline - time.monotonic(), 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def from_samples(name: str, small: SampleRun, large: SampleRun, whole: float, shard_bytes: int) -> dict[str, Any]:
    """A preparing stage's figures, from both samples, or from one, or why there are none."""
    if name in small.stages and name in large.stages:
        return extrapolate(name, small, large, whole, shard_bytes)
    run = small if name in small.stages else large
    if name in run.stages:
        return from_one_sample(name, run, whole)
    told = {**small.errors, **large.errors}
    return {"stage": name, "error": told.get(name) or f"not reached: {next(iter(told.values()), 'the sample ended')}"}


def from_one_sample(name: str, run: SampleRun, whole: float) -> dict[str, Any]:
    """The figures from the pace at which one sample's shards were done; memory is what it took, or more."""
    measured, times = run.stages[name], whole / max(run.text, 1.0)
    return {
        "stage": name,
        "seconds": measured.seconds + measured.work_seconds * (times - 1),
        "memory_bytes": measured.memory_bytes,
        "disk_bytes": int(measured.disk_bytes * times),
        "from": "one sample",
    }


def _of_past(session: Session, name: str) -> dict[str, Any]:
    """A later stage's figures, from the newest output that the same manifest has of it, or why there are none."""
    made = [
        folder.manifest()
        for stage, folder in session.store.outputs()
        if stage == name and folder.path.name.startswith(f"{session.manifest.name}--") and folder.state() == "committed"
    ]
    if not made:
        return {"stage": name, "error": session.plan[name].stage.pace or OF_SAMPLES}
    newest = max(made, key=lambda manifest: manifest["started"])
    before, now = newest["recipe"], session.plan[name].recipe
    if before.get("model") != now.get("model"):
        return {"stage": name, "error": session.plan[name].stage.pace or OF_SAMPLES}
    times = 1.0
    for key in WORK_KEYS:
        times *= now[key] / before[key] if now.get(key) and before.get(key) else 1.0
    return {
        "stage": name,
        "seconds": newest["seconds"] * times,
        "memory_bytes": newest.get("cost", {}).get("peak_memory_bytes", 0),
        "disk_bytes": sum(file["bytes"] for file in newest["files"].values()),
        "from": "a run before",
    }


def _text_bytes(opened: Session, sample: Sample) -> tuple[float, float]:
    """Bytes of text in the sample, and in the whole."""
    folder = opened.committed(INGEST)
    if folder is None:
        return 0.0, 0.0
    read = {name: counts["bytes_kept"] for name, counts in folder.manifest()["summary"]["counts"]["sources"].items()}
    return float(sum(read.values())), sum(size * sample.factor(name) for name, size in read.items())


def extrapolate(name: str, small: SampleRun, large: SampleRun, whole: float, shard_bytes: int) -> dict[str, Any]:
    """The figures of two samples, drawn on to the whole: time by its text, memory by its shards, disk by its size."""
    first, second = small.stages[name], large.stages[name]
    slope = max(second.seconds - first.seconds, 0.0) / max(large.text - small.text, 1.0)
    fixed = max(second.seconds - slope * large.text, 0.0)
    growth = max(second.memory_bytes - first.memory_bytes, 0) / max(large.shard_bytes - small.shard_bytes, 1)
    return {
        "stage": name,
        "from": "two samples",
        "seconds": fixed + slope * whole,
        "memory_bytes": int(second.memory_bytes + growth * max(min(shard_bytes, whole) - large.shard_bytes, 0)),
        "disk_bytes": int(second.disk_bytes * whole / max(large.text, 1.0)),
    }


def _free_disk(root: Path) -> int | None:
    """Free bytes where a local store is, or will be; None for a remote one."""
    from gristmill.core.files import is_local

    if not is_local(root):
        return None
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    return shutil.disk_usage(existing).free


def refusals(totals: Mapping[str, Any], available: Mapping[str, Any]) -> list[str]:
    """A sentence for everything that will not fit, with both numbers."""
    found = []
    if available["memory_bytes"] and totals["memory_bytes"] > available["memory_bytes"]:
        found.append(
            f"memory: {_size(totals['memory_bytes'])} are needed and {_size(available['memory_bytes'])} are "
            "free; lower ingest.shard_bytes or engine.workers"
        )
    if available["disk_bytes"] is not None and totals["disk_bytes"] > available["disk_bytes"]:
        found.append(
            f"disk: {_size(totals['disk_bytes'])} are needed and {_size(available['disk_bytes'])} are free; "
            "give another --store, or run `gristmill gc`"
        )
    return found


def _minhash(session: Session) -> MinHash | None:
    return next((step.config.minhash for step in session.manifest.prepare if isinstance(step.config, Dedup)), None)


def lsh_curve(section: MinHash | None) -> list[dict[str, float]]:
    """The share of pairs of each Jaccard similarity that share a band: 1 - (1 - J^rows)^bands.

    Source: Leskovec, Rajaraman, Ullman, Mining of Massive Datasets, section 3.4.
    """
    if section is None:
        return []
    return [{"jaccard": j, "found": 1.0 - (1.0 - j**section.rows) ** section.bands} for j in SIMILARITIES]


def print_prediction(session: Session, found: Mapping[str, Any]) -> None:
    """Print what a run would cost."""
    console = plain_console()
    least = "at least " if found["text_at_least"] else ""
    console.print(
        Text(
            f"{least}{_size(found['text_bytes'])} of text, predicted from "
            f"{_size(found['sample_text_bytes'])} "
            f"with {session.manifest.engine.workers} workers on this machine, in "
            f"{found['took_seconds']:.0f} s",
            style="dim",
        )
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("stage", no_wrap=True)
    for name in ("time", "memory", "disk"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("from", no_wrap=True)
    for row in found["stages"]:
        if "error" in row:
            table.add_row(row["stage"], "?", "?", "?", "")
        else:
            table.add_row(
                row["stage"],
                _time(row["seconds"]),
                _size(row["memory_bytes"]),
                _size(row["disk_bytes"]),
                Text(row["from"], style="dim"),
            )
    totals = found["totals"]
    unknown: dict[str, list[str]] = {}
    for row in found["stages"]:
        if "error" in row:
            unknown.setdefault(row["error"], []).append(row["stage"])
    table.add_row(
        "of these" if unknown else "in all",
        _time(totals["seconds"]),
        _size(totals["memory_bytes"]),
        _size(totals["disk_bytes"]),
        style="bold",
    )
    console.print(table)
    for error, stages in unknown.items():
        console.print(Text(f"? {', '.join(stages)}: {error}", style="yellow"))
    for sentence in found["refusals"]:
        console.print(Text(sentence, style="red"))
    _print_curve(console, _minhash(session), found["lsh"])


def _print_curve(console: Console, section: MinHash | None, curve: list[dict[str, float]]) -> None:
    if section is None:
        return
    console.print()
    console.print(
        Text(
            f"Near-duplicate pairs that {section.bands} bands of {section.rows} rows find "
            f"(threshold {section.threshold:g}):"
        )
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("Jaccard", "found"):
        table.add_column(name, justify="right")
    table.add_column("")
    for point in curve:
        table.add_row(
            f"{point['jaccard']:.2f}",
            f"{point['found']:.1%}",
            "#" * round(24 * point["found"]),
            style="" if point["jaccard"] >= section.threshold else "dim",
        )
    console.print(table)


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _size(number: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number / 1e6:.1f} MB"
