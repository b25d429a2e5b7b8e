"""Prometheus metrics of a store's runs: states, durations, rows, tokens per second.

They are read from the store on request, so they include all runs. Only the newest run
of each manifest name is shown.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gristmill.core.files import read_json
from gristmill.core.lease import highest
from gristmill.core.progress import read_progress
from gristmill.core.store import Store
from gristmill.flows.questions.status import run_state
from gristmill.flows.running.run_records import ROWS, RunContent, StageEntry

NEWEST_RUNS = 50
"""Runs whose records are read per request."""
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


def metrics_text(store: Store) -> bytes:
    """All metrics of a store in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(RunCollector(store))
    return generate_latest(registry)


class RunCollector(Collector):
    """Metrics of the newest run of each manifest name."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def describe(self) -> list[GaugeMetricFamily]:
        """Empty, so that registration reads nothing."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See Collector."""
        runs = newest_runs(self._store)
        yield from self._run_metrics(runs)
        yield from self._stage_metrics(runs)

    def _run_metrics(
        self, runs: Mapping[str, RunContent]
    ) -> Iterator[GaugeMetricFamily]:
        state = GaugeMetricFamily(
            "gristmill_run_state",
            "1 for the state of the newest run.",
            labels=["name", "state"],
        )
        started = GaugeMetricFamily(
            "gristmill_run_started_timestamp_seconds",
            "Start of the newest run.",
            labels=["name"],
        )
        seconds = GaugeMetricFamily(
            "gristmill_run_seconds",
            "Duration of the newest run so far.",
            labels=["name"],
        )
        for name, record in runs.items():
            current = run_state(record)
            for state_name in RUN_STATES:
                state.add_metric([name, state_name], float(state_name == current))
            started.add_metric([name], record["started"])
            # The end of a killed run is unknown.
            end = record.get("finished", time.time() if current == "running" else None)
            if end is not None:
                seconds.add_metric([name], end - record["started"])
        yield from (state, started, seconds)

    def _stage_metrics(
        self, runs: Mapping[str, RunContent]
    ) -> Iterator[GaugeMetricFamily]:
        labels = ["name", "stage"]
        state = GaugeMetricFamily(
            "gristmill_stage_state",
            "1 for the state of a stage.",
            labels=[*labels, "state"],
        )
        seconds = GaugeMetricFamily(
            "gristmill_stage_seconds", "Duration of a stage in this run.", labels=labels
        )
        rows = GaugeMetricFamily(
            "gristmill_stage_rows", "Documents by outcome.", labels=[*labels, "kind"]
        )
        share = GaugeMetricFamily(
            "gristmill_stage_progress",
            "Completed share of a stage's current job.",
            labels=labels,
        )
        speed = GaugeMetricFamily(
            "gristmill_tokens_per_second", "Throughput of a training.", labels=labels
        )
        for name, record in runs.items():
            is_running = run_state(record) == "running"
            for stage, entry in record["stages"].items():
                current = stage_state(entry, is_running)
                for state_name in STAGE_STATES:
                    state.add_metric(
                        [name, stage, state_name], float(state_name == current)
                    )
                for kind in ROWS:
                    if kind in entry.get("rows", {}):
                        rows.add_metric([name, stage, kind], entry["rows"][kind])
                if "seconds" in entry:
                    seconds.add_metric([name, stage], entry["seconds"])
                if current != "running":
                    continue
                seconds.add_metric([name, stage], time.time() - entry["started"])
                lease = (
                    self._store.folder(stage, name, entry["fingerprint"]).path / "lease"
                )
                progress = read_progress(lease, highest(lease))
                if progress.get("total"):
                    share.add_metric(
                        [name, stage], progress["done"] / progress["total"]
                    )
                if isinstance(progress.get("tokens_per_second"), int | float):
                    speed.add_metric([name, stage], progress["tokens_per_second"])
        yield from (state, seconds, rows, share, speed)


def newest_runs(store: Store) -> dict[str, RunContent]:
    """Record of the newest run by manifest name, among the newest runs of a store."""
    if not store.runs.exists():
        return {}
    runs: dict[str, RunContent] = {}
    for folder in sorted(store.runs.iterdir(), reverse=True)[:NEWEST_RUNS]:
        if (folder / "run.json").exists():
            record: RunContent = read_json(folder / "run.json")
            runs.setdefault(record["name"], record)
    return runs


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
