"""Record of a training: files of JSON lines that survive a kill and are truncated to
the step to resume from.

While a stage runs, its record is in its working folder; `publish` copies it to the
stage's output.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal, Required, TypedDict

from gristmill.core.files import atomic_write, copy_file, read_json_lines
from gristmill.mixtures.schema.engine import Trackers
from gristmill.train.loop.objective import GroupedMetrics, Metrics, Numbers
from gristmill.train.loop.spike_report import AUTOPSIES, forget_after
from gristmill.train.trackers import open_trackers

METRICS = "metrics.jsonl"
SKIPPED = "skipped_steps.jsonl"
NOWHERE = Trackers()
TIMINGS = (
    "tokens_per_second",
    "mfu",
    "mfu_causal",
    "data_wait_seconds",
    "data_wait_share",
    "checkpoint_seconds",
    "peak_memory_bytes",
    "rollout_tokens_per_second",
)
"""Metrics that may differ between two runs of one training; all other metrics are
reproducible.
"""


class MetricsLine(TypedDict, total=False):
    """Line of `metrics.jsonl`: keys that trainings read again; objectives have others.

    Attributes:
        step: counted from 1.
        loss: of the steps since the last logged one.
        grad_norm: of the step, before clipping; None for NaN and Inf.
        tokens_per_second, mfu, mfu_causal, data_wait_share, checkpoint_seconds: speed
            since the last logged step; see throughput.
        validation, validation_average: metrics of held-out rows by source, of the model
            and of its running mean.
        held_out: metrics of held-out conversations.
    """

    step: Required[int]
    loss: float
    grad_norm: float | None
    tokens_per_second: float
    mfu: float | Literal["unknown"]
    mfu_causal: float | Literal["unknown"]
    data_wait_share: float
    checkpoint_seconds: float
    validation: GroupedMetrics
    validation_average: GroupedMetrics
    held_out: Metrics


class Record:
    """Writer of `metrics.jsonl`, `skipped_steps.jsonl`, TensorBoard event files and
    experiment trackers.

    Only the first rank creates one.

    Args:
        work: the stage's working folder.
        resumed_step: lines of later steps are removed; 0 starts over.
        trackers: experiment trackers that also receive the metrics.

    Raises:
        ModuleNotFoundError: the client of a tracker is not installed.
    """

    def __init__(
        self,
        work: Path,
        resumed_step: int,
        trackers: Trackers = NOWHERE,
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._work = work
        cut_after(work / METRICS, resumed_step)
        cut_after(work / SKIPPED, resumed_step)
        forget_after(work / AUTOPSIES, resumed_step)
        if resumed_step == 0:
            shutil.rmtree(work / "tensorboard", ignore_errors=True)
        self._board = SummaryWriter(
            str(work / "tensorboard"),
            purge_step=resumed_step + 1 if resumed_step else None,
        )
        self._trackers = open_trackers(trackers, work)

    def metrics(self, step: int, metrics: Metrics) -> None:
        """Append a line, print it, and send its numbers to TensorBoard and the
        trackers.
        """
        append_line(self._work / METRICS, {"step": step, **metrics})
        numbers = flatten(metrics)
        text = ", ".join(
            f"{name} {value:.4g}"
            for name, value in numbers.items()
            if not isinstance(value, bool)
        )
        print(
            f"step {step}: {text or json.dumps({'step': step, **metrics})}", flush=True
        )
        for name, value in numbers.items():
            self._board.add_scalar(name, value, step)
        for tracker in self._trackers:
            tracker.log(step, numbers)

    def skipped(self, line: Metrics) -> None:
        """Append a skipped step and the data that it read."""
        append_line(self._work / SKIPPED, line)

    def close(self) -> None:
        """Flush TensorBoard's files, and finish the runs of the trackers."""
        self._board.close()
        for tracker in self._trackers:
            tracker.finish()

    def publish(self, out: Path) -> None:
        """Copy the record to the stage's output."""
        for name in (METRICS, SKIPPED):
            copy_file(self._work / name, out / name)
        for path in sorted((self._work / AUTOPSIES).glob("*")):
            copy_file(path, out / AUTOPSIES / path.name)

    def lines(self) -> list[MetricsLine]:
        """All metrics so far."""
        return read_lines(self._work / METRICS)


def append_line(path: Path, line: Metrics) -> None:
    """Append a JSON object as a line."""
    with open(path, "a", encoding="utf-8") as sink:
        sink.write(json.dumps(line, allow_nan=False) + "\n")


def read_lines(path: Path) -> list[Any]:
    """JSON of all lines of a file; an empty list if it does not exist."""
    return read_json_lines(path) if path.exists() else []


def cut_after(path: Path, step: int) -> None:
    """Keep complete lines of steps up to `step`; creates a missing file."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    with atomic_write(path) as sink:
        for line in lines:
            if not line.endswith(b"\n"):  # torn by a kill
                continue
            if json.loads(line)["step"] <= step:
                sink.write(line)


def flatten(line: Metrics, prefix: str = "") -> Numbers:
    """Numbers of a nested mapping by path: {"sources": {"a": {"loss": 1}}} ->
    {"sources/a/loss": 1}.
    """
    numbers = {}
    for name, value in line.items():
        if isinstance(value, dict):
            numbers.update(flatten(value, f"{prefix}{name}/"))
        elif isinstance(value, int | float) and name != "step":
            numbers[f"{prefix}{name}"] = value
    return numbers
