"""OpenLineage events of a run and its stages (`engine.lineage`), by OpenLineage's own
client and configuration.

The job of a run is its manifest, that of a stage `MANIFEST.STAGE`. A dataset is the
folder of a stage's outputs without the fingerprint, which is the dataset's version.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from datetime import UTC, datetime
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from openlineage.client import OpenLineageClient
from openlineage.client.event_v2 import (
    InputDataset,
    Job,
    OutputDataset,
    Run,
    RunEvent,
    RunState,
)
from openlineage.client.facet_v2 import (
    RunFacet,
    dataset_version_dataset,
    error_message_run,
    parent_run,
)

from gristmill.core.secrets import mask_text
from gristmill.flows.running import events
from gristmill.flows.running.run_records import RunContent
from gristmill.flows.running.session import Session
from gristmill.mixtures.base import outside_paths
from gristmill.mixtures.schema.sources import IMPORTED, INGEST

STATES = {
    events.StageStarted: RunState.START,
    events.StageFinished: RunState.COMPLETE,
    events.StageFailed: RunState.FAIL,
    "completed": RunState.COMPLETE,
    "failed": RunState.FAIL,
    "interrupted": RunState.ABORT,
}
"""State by the class of a stage's event, or by the state in a run's record."""
SECTIONS = {INGEST: "document_sources", IMPORTED: "token_sources"}
"""Stage -> part of the manifest with its outside files, where that has another name."""
LAST_SECONDS = 5.0
"""Longest wait for the server at the end of a run."""
Kind = TypeVar("Kind", InputDataset, OutputDataset)
log = logging.getLogger("gristmill.lineage")


class LineageSender:
    """Subscriber to a run's events that sends them on a thread of its own, so that a
    slow or broken server delays no stage. Failures are warnings.

    Args:
        session: the run's.
        record: content of its record.
    """

    def __init__(self, session: Session, record: RunContent) -> None:
        self._session, self._record = session, record
        self._id = str(uuid.uuid4())
        self._open_ids = {"": self._id}  # "" is the run itself
        self._queue: SimpleQueue[partial[RunEvent] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()
        self._note("", RunState.START)

    def __call__(self, event: events.RunEvent) -> None:
        """Queue an event; wait for the server at the end of the run."""
        kind = type(event)
        if isinstance(event, events.StageEvent) and kind in STATES:
            stage = event.node.name
            if kind is events.StageStarted:
                self._open_ids[stage] = str(uuid.uuid4())
            self._note(stage, STATES[kind], getattr(event, "message", ""))
        if isinstance(event, events.RunRecorded):
            state = STATES[self._record["state"]]
            for stage in list(reversed(self._open_ids)):
                self._note(stage, state, self._record["message"])
            self._queue.put(None)
            self._thread.join(LAST_SECONDS)
            if self._thread.is_alive():
                log.warning("engine.lineage: the server is slow; events are lost")

    def _note(self, stage: str, state: RunState, message: str = "") -> None:
        if stage not in self._open_ids:  # its output is reused
            return
        now = datetime.now(UTC).isoformat()
        id_ = self._open_ids[stage]
        self._queue.put(partial(self._event, stage, id_, state, now, message))
        if state is not RunState.START:
            del self._open_ids[stage]

    def _send(self) -> None:
        level = logging.WARNING
        client = None
        for make_event in iter(self._queue.get, None):
            try:
                client = client or OpenLineageClient()
                client.emit(make_event())
            except Exception as error:  # noqa: BLE001 - events do not affect a run
                log.log(level, "engine.lineage: %s", mask_text(str(error)))
                level = logging.DEBUG
        if client is not None:
            client.close(LAST_SECONDS)

    def _event(
        self, stage: str, id_: str, state: RunState, at: str, message: str
    ) -> RunEvent:
        """Event of the run of a stage, or of the whole run ("")."""
        namespace = os.environ.get("OPENLINEAGE_NAMESPACE", "gristmill")
        name = self._session.manifest.name
        # in the form of Airflow's macro `lineage_parent_id`
        parent = os.environ.get("OPENLINEAGE_PARENT_ID", "")
        inputs, outputs = [], []
        facets: dict[str, RunFacet] = {}
        if stage:
            parent = f"{namespace}/{name}/{self._id}"
            name = f"{name}.{stage}"
            inputs = input_datasets(self._session, stage)
            if state is RunState.COMPLETE:
                outputs = [stored_dataset(OutputDataset, self._session, stage)]
        if parent:
            job_namespace, job, run = parent.rsplit("/", 2)
            facets["parent"] = parent_run.ParentRunFacet(
                parent_run.Run(run), parent_run.Job(job_namespace, job)
            )
        if message:
            facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(
                mask_text(message), "PYTHON"
            )
        return RunEvent(
            eventTime=at,
            eventType=state,
            run=Run(id_, facets),
            job=Job(namespace, name),
            inputs=inputs,
            outputs=outputs,
        )


def dataset_name(location: str) -> tuple[str, str]:
    """Namespace and name of a path or URL, by OpenLineage's conventions.

    >>> dataset_name("s3://bucket/letters/*.jsonl")
    ('s3://bucket', 'letters/*.jsonl')
    >>> dataset_name("/data/letters.jsonl")
    ('file', '/data/letters.jsonl')
    """
    scheme, is_url, rest = mask_text(location).partition("://")
    if not is_url:
        return "file", os.path.abspath(location)
    host, _, name = rest.partition("/")
    return f"{scheme}://{host}", name or "/"


def input_datasets(session: Session, stage: str) -> list[InputDataset]:
    """Outputs and outside files that a stage reads."""
    node = session.plan[stage]
    section = node.settings or getattr(
        session.part_of(stage), SECTIONS.get(stage, node.stage.name), None
    )
    return [
        *(stored_dataset(InputDataset, session, name) for name in node.inputs),
        *(InputDataset(*dataset_name(path)) for _, path in outside_paths(section)),
    ]


def stored_dataset(kind: type[Kind], session: Session, stage: str) -> Kind:
    """Output of a stage, with its version, as an input or an output."""
    folder = str(session.folder(stage).path)
    version = dataset_version_dataset.DatasetVersionDatasetFacet(
        session.plan[stage].identity
    )
    name = dataset_name(folder.rpartition("--")[0])
    return kind(*name, facets={"version": version})
