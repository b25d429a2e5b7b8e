"""Experiment trackers: Weights & Biases and MLflow, by their clients.

All attempts of a training share one run, identified by a hash of the training's working
folder. Steps are those of the training: after a resume, the steps since the checkpoint
are logged again.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from gristmill.mixtures.schema.engine import Mlflow, Trackers, Wandb

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
        trackers.append(_Wandb(asked.wandb, work, name))
    if asked.mlflow is not None:
        trackers.append(_Mlflow(asked.mlflow, name))
    return trackers


def _client(key: str, module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"engine.{key} is set, but {key} is not installed; install it with: "
            f"pip install 'gristmill[{key}]', or remove engine.{key}"
        ) from error


class _Wandb:
    """Run with the training's step as its axis, as wandb drops steps logged again by
    its own count.
    """

    def __init__(self, section: Wandb, work: Path, name: str) -> None:
        self.run = _client("wandb", "wandb").init(
            project=section.project,
            name=section.name,
            mode=section.mode,
            dir=str(work),
            id=name,
            resume="allow",
        )
        self.run.define_metric(STEP_AXIS)
        self.run.define_metric("*", step_metric=STEP_AXIS)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log({STEP_AXIS: step, **numbers})

    def finish(self) -> None:
        self.run.finish()


class _Mlflow:
    def __init__(self, section: Mlflow, name: str) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self.metric = _client("mlflow", "mlflow.entities").Metric
        tracking = _client("mlflow", "mlflow.tracking")
        self.client = tracking.MlflowClient(section.tracking_uri)
        experiment = self.client.get_experiment_by_name(section.experiment)
        number = (
            self.client.create_experiment(section.experiment)
            if experiment is None
            else experiment.experiment_id
        )
        tag = f"tags.`{WORK_TAG}` = '{name}'"
        runs = self.client.search_runs([number], filter_string=tag)
        if runs:
            self.client.update_run(runs[0].info.run_id, status="RUNNING")
        else:
            tags = {WORK_TAG: name}
            runs = [self.client.create_run(number, run_name=section.name, tags=tags)]
        self.run = runs[0].info.run_id

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
