"""Experiment trackers: Weights & Biases, MLflow and trackio, by their clients.

All attempts of a training share one run, identified by a hash of the training's working
folder. Steps are those of the training: after a resume or rewind, steps are logged
again.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from gristmill.mixtures.engine import Mlflow, Trackers, Trackio, Wandb

STEP_AXIS = "training_step"
WORK_TAG = "gristmill.work"
"""Tag of an MLflow run with the hash of the training's folder."""
METRICS_PER_REQUEST = 1000
"""Limit of MLflow (REST API, `log-batch`)."""


class Tracker(Protocol):
    """Interface to a run of a tracker."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step."""

    def finish(self) -> None:
        """End the run."""


def open_trackers(asked: Trackers, work: Path) -> list[Tracker]:
    """Open the configured trackers.

    Args:
        asked: sections of `engine`.
        work: the training's working folder.

    Raises:
        ModuleNotFoundError: a client is not installed; the message names its extra.
    """
    name = hashlib.blake2b(str(work.resolve()).encode(), digest_size=8).hexdigest()
    trackers: list[Tracker] = []
    if asked.wandb is not None:
        trackers.append(_open_wandb(asked.wandb, work, name))
    if asked.mlflow is not None:
        trackers.append(_open_mlflow(asked.mlflow, name))
    if asked.trackio is not None:
        trackers.append(_open_trackio(asked.trackio, name))
    return trackers


def _client(key: str, module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"engine.{key} is set, but {key} is not installed; install it with: "
            f"pip install 'gristmill[{key}]', or remove engine.{key}"
        ) from error


@dataclass(frozen=True)
class _Wandb:
    run: Any

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log({STEP_AXIS: step, **numbers})

    def finish(self) -> None:
        self.run.finish()


def _open_wandb(section: Wandb, work: Path, name: str) -> Tracker:
    """Open a run with the training's step as its axis, as wandb drops steps logged
    again by its own count.
    """
    run = _client("wandb", "wandb").init(
        project=section.project,
        name=section.name,
        mode=section.mode,
        dir=str(work),
        id=name,
        resume="allow",
    )
    run.define_metric(STEP_AXIS)
    run.define_metric("*", step_metric=STEP_AXIS)
    return _Wandb(run)


@dataclass(frozen=True)
class _Mlflow:
    client: Any
    run: str
    metric: Any

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [
            self.metric(name, float(value), now, step)
            for name, value in numbers.items()
            if math.isfinite(value)
        ]
        for start in range(0, len(metrics), METRICS_PER_REQUEST):
            self.client.log_batch(
                self.run, metrics=metrics[start : start + METRICS_PER_REQUEST]
            )

    def finish(self) -> None:
        self.client.set_terminated(self.run)


def _open_mlflow(section: Mlflow, name: str) -> Tracker:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    entities = _client("mlflow", "mlflow.entities")
    client = _client("mlflow", "mlflow.tracking").MlflowClient(section.tracking_uri)
    experiment = client.get_experiment_by_name(section.experiment)
    number = (
        client.create_experiment(section.experiment)
        if experiment is None
        else experiment.experiment_id
    )
    runs = client.search_runs([number], filter_string=f"tags.`{WORK_TAG}` = '{name}'")
    if runs:
        client.update_run(runs[0].info.run_id, status="RUNNING")
        return _Mlflow(client, runs[0].info.run_id, entities.Metric)
    run = client.create_run(number, run_name=section.name, tags={WORK_TAG: name})
    return _Mlflow(client, run.info.run_id, entities.Metric)


@dataclass(frozen=True)
class _Trackio:
    run: Any

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log(dict(numbers), step=step)

    def finish(self) -> None:
        self.run.finish()


def _open_trackio(section: Trackio, name: str) -> Tracker:
    return _Trackio(
        _client("trackio", "trackio").init(
            section.project,
            name=section.name or name,
            server_url=section.server_url,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
    )
