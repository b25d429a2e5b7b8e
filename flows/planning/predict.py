"""`gristmill plan --predict`: time, memory and disk of every stage, measured on samples
or taken from past runs.

Each preparing stage is run on a sample and on a larger one. The model is: time = fixed
+ slope x text, memory = fixed + slope x shard size (a stage holds a few shards at a
time, never the corpus), disk proportional to text. A stage is assumed to drop the same
share of the whole as of the sample. Stages that a sample of documents cannot measure
(training) are taken from the newest output of the same manifest in the store; without
one, the prediction says so.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from gristmill.core.files import is_local
from gristmill.core.store import OutputManifest, Store
from gristmill.dataprep.readers.pythondocs import is_python_source
from gristmill.flows.pages.page_elements import Note, table
from gristmill.flows.pages.terminal_pages import print_parts
from gristmill.flows.planning.quantities import duration, size
from gristmill.flows.planning.sampled_sources import take_sample
from gristmill.flows.running.memory_advice import available_memory
from gristmill.flows.running.run import Runner, StageFailedError
from gristmill.flows.running.session import Session
from gristmill.flows.stages.plan import make_plan
from gristmill.mixtures.schema.sources import INGEST

LARGER = 4
"""Size of the second sample as a multiple of the first."""
MOST_GROWTH = 3
"""Maximum number of times that a sample too small for a source's first document is made
LARGER.
"""
SHARDS_PER_WORKER = 4
BUDGET_SECONDS = 30.0
"""Default time limit of both samples together."""
WORK_KEYS = ("steps", "epochs", "global_batch_size")
"""Keys that a training's time is proportional to, for the same model."""
OF_SAMPLES = "not measurable on a sample; an earlier run in this store is needed"


@dataclass(frozen=True)
class Measured:
    """Cost of a stage on one sample: seconds, peak memory in bytes, bytes written."""

    seconds: float
    memory_bytes: int
    disk_bytes: int


class OutOfTimeError(Exception):
    """The samples have reached their time limit."""


@dataclass(frozen=True)
class PredictedStage:
    """Predicted cost of a stage, and the origin of the figures (the key `from` in
    JSON).
    """

    stage: str
    seconds: float
    memory_bytes: int
    disk_bytes: int
    from_: str


@dataclass(frozen=True)
class UnpredictedStage:
    """A stage whose cost is unknown, and the reason."""

    stage: str
    error: str


@dataclass(frozen=True)
class Totals:
    """Time and disk of all predicted stages, and the memory of the largest."""

    seconds: float
    memory_bytes: int
    disk_bytes: int


@dataclass(frozen=True)
class Available:
    """Free memory of this machine (0 if unknown), and free disk of the store (None for
    a remote one).
    """

    memory_bytes: int
    disk_bytes: int | None


@dataclass(frozen=True)
class Prediction:
    """Predicted cost of a run.

    Attributes:
        text_bytes: text of the whole.
        text_at_least: True if it may be more.
        sample_text_bytes: text of the larger sample.
        took_seconds: time of the samples.
        stages: every stage, in order.
        totals: of the predicted stages.
        available: resources of this machine.
        refusals: sentences about requirements that do not fit.
    """

    text_bytes: float
    text_at_least: bool
    sample_text_bytes: float
    took_seconds: float
    stages: list[PredictedStage | UnpredictedStage]
    totals: Totals
    available: Available
    refusals: list[str]


def predict(
    session: Session, sample_bytes: int, budget_seconds: float = BUDGET_SECONDS
) -> Prediction:
    """Run the preparing stages on two samples and extrapolate.

    Args:
        sample_bytes: size of the larger sample, in bytes of the sources' files.
        budget_seconds: time limit of the samples; the cost of stages not measured by
            then is unknown.
    """
    started = time.monotonic()
    small, large = _run_samples(session, sample_bytes, started + budget_seconds)
    whole_bytes = large.whole_text or small.whole_text
    shard_bytes = session.manifest.ingest.shard_bytes
    sampled = _measurable_stages(session)
    stages = [
        from_samples(name, small, large, whole_bytes, shard_bytes)
        if name in sampled
        else _of_past(session, name)
        for name in session.plan
    ]
    predicted = [row for row in stages if isinstance(row, PredictedStage)]
    totals = Totals(
        sum(row.seconds for row in predicted),
        max((row.memory_bytes for row in predicted), default=0),
        sum(row.disk_bytes for row in predicted),
    )
    root = session.store.root
    free_disk = None
    if is_local(root):
        existing = next(folder for folder in (root, *root.parents) if folder.exists())
        free_disk = shutil.disk_usage(existing).free
    available = Available(available_memory(), free_disk)
    # The small sample truncates sources without files, whose total size is unknown.
    text_at_least = not large.text and any(
        is_python_source(source.path)
        for source in session.manifest.document_sources.values()
    )
    return Prediction(
        whole_bytes,
        text_at_least,
        large.text or small.text,
        time.monotonic() - started,
        stages,
        totals,
        available,
        refusals(totals, available),
    )


def _run_samples(
    session: Session, sample_bytes: int, deadline: float
) -> tuple[SampleRun, SampleRun]:
    """Measure two samples; larger ones if a source's first document does not fit into
    its part.
    """
    for growth in range(MOST_GROWTH + 1):
        larger_bytes = sample_bytes * LARGER**growth
        with tempfile.TemporaryDirectory(prefix="gristmill-predict-") as folder:
            small_folder, large_folder = Path(folder) / "small", Path(folder) / "large"
            small = _run_sample(
                session, small_folder, larger_bytes // LARGER, deadline, False
            )
            may_grow = growth < MOST_GROWTH and time.monotonic() < deadline
            if INGEST in small.errors and may_grow:
                continue
            large = _run_sample(session, large_folder, larger_bytes, deadline, True)
            return small, large
    raise AssertionError("the last round always returns")


@dataclass(frozen=True)
class SampleRun:
    """Measurements of a run over a sample, and the size of the whole."""

    text: float
    whole_text: float
    shard_bytes: int
    stages: dict[str, Measured]
    errors: dict[str, str]


def _measurable_stages(session: Session) -> list[str]:
    """Return the stages that a sample of documents can measure."""
    stages: list[str] = []
    for name, node in session.plan.items():
        is_of_documents = bool(node.inputs) and set(node.inputs) <= set(stages)
        if name == INGEST or (
            is_of_documents and node.stage.no_estimate_reason is None
        ):
            stages.append(name)
    return stages


def _run_sample(
    session: Session,
    folder: Path,
    sample_bytes: int,
    deadline: float,
    whole_python: bool,
) -> SampleRun:
    sample = take_sample(
        session.manifest, folder / "sources", sample_bytes, whole_python
    )
    workers = session.manifest.engine.workers
    shard_bytes = max(sample_bytes // (SHARDS_PER_WORKER * workers), 1 << 16)
    ingest = sample.manifest.ingest.model_copy(update={"shard_bytes": shard_bytes})
    manifest = sample.manifest.model_copy(update={"ingest": ingest})
    store = Store.at(folder / "store")
    plan = make_plan(manifest)
    opened = Session(manifest, session.manifest_file, [], store, None, plan)
    runner = Runner(opened, lambda event: None)
    stages: dict[str, Measured] = {}
    errors: dict[str, str] = {}
    in_sample = in_all = 0.0
    for stage in _measurable_stages(session):
        try:
            with interrupted_at(deadline):
                outcome = runner.run_stage(stage)
        except StageFailedError as error:
            errors[stage] = str(error).splitlines()[0]
            break
        except OutOfTimeError:
            errors[stage] = (
                "the samples have used up their time; allow more with --sample-seconds"
            )
            break
        measured = outcome.folder.manifest()
        stages[stage] = Measured(measured["seconds"], *_memory_and_disk(measured))
        if stage == INGEST:
            for name, counts in measured["summary"]["counts"]["sources"].items():
                in_sample += counts["bytes_kept"]
                in_all += counts["bytes_kept"] * sample.factor(name)
    return SampleRun(in_sample, in_all, shard_bytes, stages, errors)


def _memory_and_disk(manifest: OutputManifest) -> tuple[int, int]:
    """Return the peak of the memory and the bytes of a committed output."""
    memory = manifest.get("cost", {}).get("peak_memory_bytes", 0)
    return memory, sum(file["bytes"] for file in manifest["files"].values())


@contextmanager
def interrupted_at(deadline: float) -> Iterator[None]:
    """Raise OutOfTimeError inside the block at the deadline; in other threads, only
    before it starts.
    """
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


def from_samples(
    name: str, small: SampleRun, large: SampleRun, whole: float, shard_bytes: int
) -> PredictedStage | UnpredictedStage:
    """Return a preparing stage's figures from both samples, or the error."""
    if name in small.stages and name in large.stages:
        return extrapolate(name, small, large, whole, shard_bytes)
    errors = {**small.errors, **large.errors}
    first_error = next(iter(errors.values()), "the sample ended")
    return UnpredictedStage(name, errors.get(name) or f"not reached: {first_error}")


def _of_past(session: Session, name: str) -> PredictedStage | UnpredictedStage:
    """Return a later stage's figures from the newest output of the same manifest, or
    the error.
    """
    node = session.plan[name]
    unknown = UnpredictedStage(name, node.stage.no_estimate_reason or OF_SAMPLES)
    manifests = [
        folder.manifest()
        for folder in session.store.outputs_of(name)
        if folder.path.name.startswith(f"{session.manifest.name}--")
        and folder.state() == "committed"
    ]
    if not manifests:
        return unknown
    newest = max(manifests, key=lambda manifest: manifest["started"])
    old_recipe, recipe = newest["recipe"], node.recipe
    if old_recipe.get("model") != recipe.get("model"):
        return unknown
    factor = 1.0
    for key in WORK_KEYS:
        if recipe.get(key) and old_recipe.get(key):
            factor *= recipe[key] / old_recipe[key]
    return PredictedStage(
        name, newest["seconds"] * factor, *_memory_and_disk(newest), "a run before"
    )


def extrapolate(
    name: str, small: SampleRun, large: SampleRun, whole: float, shard_bytes: int
) -> PredictedStage:
    """Extrapolate two samples to the whole: time by text, memory by shard size, disk by
    text.
    """
    first, second = small.stages[name], large.stages[name]
    slope = max(second.seconds - first.seconds, 0.0) / max(large.text - small.text, 1.0)
    fixed = max(second.seconds - slope * large.text, 0.0)
    growth = max(second.memory_bytes - first.memory_bytes, 0) / max(
        large.shard_bytes - small.shard_bytes, 1
    )
    larger_shard = max(min(shard_bytes, whole) - large.shard_bytes, 0)
    return PredictedStage(
        name,
        fixed + slope * whole,
        int(second.memory_bytes + growth * larger_shard),
        int(second.disk_bytes * whole / max(large.text, 1.0)),
        "two samples",
    )


def refusals(totals: Totals, available: Available) -> list[str]:
    """Return a sentence with both numbers for each requirement that does not fit."""
    sentences = []
    for name, needed, free, advice in (
        (
            "memory",
            totals.memory_bytes,
            available.memory_bytes or None,
            "lower ingest.shard_bytes or engine.workers",
        ),
        (
            "disk",
            totals.disk_bytes,
            available.disk_bytes,
            "give another --store, or run `gristmill gc`",
        ),
    ):
        if free is not None and needed > free:
            sentences.append(
                f"{name}: {size(needed)} are needed, but {size(free)} are free; {advice}"
            )
    return sentences


def print_prediction(prediction: Prediction) -> None:
    """Print the predicted cost of a run."""
    least = "at least " if prediction.text_at_least else ""
    unknown: dict[str, list[str]] = {}
    rows = []
    for row in prediction.stages:
        if isinstance(row, UnpredictedStage):
            unknown.setdefault(row.error, []).append(row.stage)
            rows.append([row.stage, "?", "?", "?", ""])
        else:
            rows.append([row.stage, *_cells(row), row.from_])
    name = "of these" if unknown else "in all"
    rows.append([name, *_cells(prediction.totals), ""])
    columns = {"stage": "", "time": ">", "memory": ">", "disk": ">", "from": ""}
    warnings = [f"? {', '.join(stages)}: {error}" for error, stages in unknown.items()]
    warnings += prediction.refusals
    print_parts(
        f"{least}{size(prediction.text_bytes)} of text, predicted from "
        f"{size(prediction.sample_text_bytes)} in {prediction.took_seconds:.0f} s",
        table(columns, rows),
        [Note(warning, "warning") for warning in warnings],
    )


def _cells(cost: PredictedStage | Totals) -> list[str]:
    """Return time, memory and disk."""
    time_needed = duration(cost.seconds / 3600)
    return [time_needed, size(cost.memory_bytes), size(cost.disk_bytes)]
