"""Prometheus metrics of a store's runs: states, durations, rows, tokens per second.

They are read from the store on request, so they include all runs. Only the newest run
of each manifest name is shown.
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from gristmill.core.lease import highest
from gristmill.core.progress import read_progress
from gristmill.core.store import Store
from gristmill.flows.questions.status import newest_runs, run_state
from gristmill.flows.running.run_records import ROWS, StageEntry

RUN_STATES = ("running", "completed", "failed", "interrupted", "killed")
STAGE_STATES = (
    "waiting",
    "running",
    "completed",
    "resumed",
    "cached",
    "failed",
    "killed",
)


METRICS = (
    ("run_state", "1 for the state of the newest run.", ["name", "state"]),
    ("run_started_timestamp_seconds", "Start of the newest run.", ["name"]),
    ("run_seconds", "Duration of the newest run so far.", ["name"]),
    ("stage_state", "1 for the state of a stage.", ["name", "stage", "state"]),
    ("stage_seconds", "Duration of a stage in this run.", ["name", "stage"]),
    ("stage_rows", "Documents by outcome.", ["name", "stage", "kind"]),
    ("stage_progress", "Share of a stage's current job.", ["name", "stage"]),
    ("tokens_per_second", "Throughput of a training.", ["name", "stage"]),
)
"""Name after `gristmill_`, description and labels of each metric."""


def metrics_text(store: Store) -> bytes:
    """All metrics of a store in Prometheus' text format."""
    registry = CollectorRegistry()
    gauges = {
        name: Gauge(f"gristmill_{name}", about, labels, registry=registry)
        for name, about, labels in METRICS
    }
    for name, record in newest_runs(store).items():
        current = run_state(record)
        for state in RUN_STATES:
            gauges["run_state"].labels(name, state).set(state == current)
        gauges["run_started_timestamp_seconds"].labels(name).set(record["started"])
        # The end of a killed run is unknown.
        end = record.get("finished", time.time() if current == "running" else None)
        if end is not None:
            gauges["run_seconds"].labels(name).set(end - record["started"])
        for stage, entry in record["stages"].items():
            labels = [name, stage]
            stage_is = stage_state(entry, current == "running")
            for state in STAGE_STATES:
                gauges["stage_state"].labels(*labels, state).set(state == stage_is)
            for kind in ROWS:
                if kind in entry.get("rows", {}):
                    gauges["stage_rows"].labels(*labels, kind).set(entry["rows"][kind])
            if "seconds" in entry:
                gauges["stage_seconds"].labels(*labels).set(entry["seconds"])
            if stage_is != "running":
                continue
            gauges["stage_seconds"].labels(*labels).set(time.time() - entry["started"])
            folder = store.folder(stage, name, entry["fingerprint"])
            lease = folder.path / "lease"
            progress = read_progress(lease, highest(lease))
            if progress.get("total"):
                share = progress["done"] / progress["total"]
                gauges["stage_progress"].labels(*labels).set(share)
            speed = progress.get("tokens_per_second")
            if speed is not None:
                gauges["tokens_per_second"].labels(*labels).set(speed)
    return generate_latest(registry)


def stage_state(entry: StageEntry, is_running: bool) -> str:
    """State of a stage of a run, by its entry in the record.

    Args:
        entry: the stage's entry in `run.json`.
        is_running: True while the run is running.
    """
    if "how" in entry:
        return str(entry["how"]).lower()
    if "error" in entry:
        return "failed"
    if "started" not in entry:
        return "waiting"
    return "running" if is_running else "killed"
