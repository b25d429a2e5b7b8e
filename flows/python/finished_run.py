"""Runs and stores as objects.

A run is read from its record and from the outputs that the record names, so it can be
queried long after its manifest or its sources have changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import gristmill.flows.stages.registry  # noqa: F401 - registers the steps of `prepare` for manifests
from gristmill.core import store as outputs
from gristmill.core.files import read_json, write_text
from gristmill.core.secrets import mask_known
from gristmill.core.stage_context import input_fingerprints
from gristmill.flows.pages.page_html import environment
from gristmill.flows.python.manifest_builder import Manifest, overrides_of
from gristmill.flows.questions.compare import find_run, stages_of
from gristmill.flows.questions.status import duration, run_state
from gristmill.flows.running.output_identities import settle_node
from gristmill.flows.running.session import Session
from gristmill.flows.stages.plan import Node, Plan, UnknownStageError, add_later_stages
from gristmill.flows.stages.registry import PRETRAIN, STAGES, TOKENIZE
from gristmill.mixtures import manifest as schema
from gristmill.mixtures.base import flat_items
from gristmill.mixtures.loader import check_manifest
from gristmill.mixtures.yaml_text import unknown_name

if TYPE_CHECKING:
    import pyarrow as pa

    from gristmill.flows.python.document_frames import Documents
    from gristmill.flows.questions.explain import Explanation
    from gristmill.flows.questions.search import SearchHits
    from gristmill.flows.questions.trace_tables import (
        DocumentTrace,
        StepTrace,
        TextTrace,
    )
    from gristmill.flows.questions.whatif import Threshold, WhatIf

FRAME_PIXELS = 640


@dataclass(frozen=True)
class StageOutput:
    """Output of a stage in a run.

    Attributes:
        name: name of the stage.
        state: `committed`, `unfinished`, `missing` or `corrupt`.
        how: `Completed`, `Resumed`, `Cached` (the output existed), or empty if the run
            did not reach the stage.
        fingerprint: first 16 digits of the fingerprint of the output.
        folder: folder of its files.
        seconds: time that it took to make; None if it is not committed.
        bytes: size of its files; None if it is not committed.
        counts: documents `read`, `kept`, `quarantined`, and `dropped` by rule; None if
            it does not read documents.
    """

    name: str
    state: str
    how: str
    fingerprint: str
    folder: Path
    seconds: float | None = None
    bytes: int | None = None
    counts: dict[str, Any] | None = None


@cache
def _notebook_html() -> Any:
    """Macros of what notebooks show; every value is escaped, and a page lies in a
    sandboxed frame: scripts do not run, and styles stay inside.
    """
    templates = environment(Path(__file__).parent / "templates")
    return templates.get_template("notebook.html.jinja").module


class Report:
    """Report of a run: one self-contained HTML file without scripts, shown in a frame
    by notebooks.
    """

    page: str
    """Content of the file."""

    def __init__(self, page: str) -> None:
        self.page = page

    def save(self, path: str | Path) -> Path:
        """Write the report to a file, and return its path."""
        write_text(Path(path), self.page)
        return Path(path)

    def _repr_html_(self) -> str:
        return str(_notebook_html().frame(self.page, FRAME_PIXELS)).strip()


class Run:
    """A run: its outputs and measurements, and answers to questions about it."""

    def __init__(
        self,
        store: outputs.Store,
        record: Mapping[str, Any],
        session: Session | None = None,
    ) -> None:
        """Open a run; called by `gristmill.run` and `Store.run`."""
        self._store, self._record, self._opened = store, dict(record), session

    @property
    def name(self) -> str:
        """Name in the store: start time and manifest name."""
        return str(self._record["run"])

    @property
    def state(self) -> str:
        """`completed`, `failed`, `interrupted`, `running`, or `killed` if its process
        ended without recording an end.
        """
        return run_state(self._record)

    @property
    def path(self) -> Path:
        """Folder with `run.json` and `report.html`."""
        return self._store.runs / self.name

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest as it ran, including overridden settings."""
        return Manifest(self._settings, folder=Path(self._session.manifest_file).parent)

    @cached_property
    def stages(self) -> dict[str, StageOutput]:
        """Stages by name, in execution order."""
        stages = {}
        for name in stages_of(self._record):
            entry, folder = self._record["stages"][name], self._folder(name)
            output = stage_output(
                name, folder, entry["fingerprint"][:16], entry.get("how", "")
            )
            if output.state == "committed":
                counts = folder.manifest()["summary"].get("counts") or {}
                if "read" in counts:
                    output = replace(output, counts=counts)
            stages[name] = output
        return stages

    @property
    def summaries(self) -> dict[str, dict[str, Any]]:
        """Stage -> JSON summary of its output, for committed stages."""
        return {
            name: self._folder(name).manifest()["summary"]
            for name, stage in self.stages.items()
            if stage.state == "committed"
        }

    def folder(self, stage: str) -> Path:
        """Return the folder of a stage's output files.

        Raises:
            UnknownStageError: the run has no such stage.
        """
        if stage not in self._record["stages"]:
            raise UnknownStageError(
                f"{self.name} has no stage {unknown_name(stage, self.stages, 'it has')}"
            )
        return self._folder(stage).data

    def metrics(self, stage: str | None = None) -> pa.Table:
        """Return the logged metrics of trainings: a row per logged step, a column per
        metric, nested ones as `a/b`.

        Args:
            stage: restrict to this training.
        """
        import pyarrow as pa

        from gristmill.flows.report.facts import training

        rows = [
            {"stage": name, **dict(flat_items(line, "/"))}
            for name, node in self._session.plan.items()
            if node.stage.training is not None
            and stage in (None, name)
            and self._session.committed(name)
            for line in training(self._folder(name))
        ]
        columns = list(dict.fromkeys(key for row in rows for key in row))
        return pa.table(
            {
                key: pa.array([row.get(key) for row in rows], from_pandas=False)
                for key in columns
            }
        )

    def documents(
        self,
        kept: bool | None = True,
        columns: Sequence[str] | None = None,
        where: str | None = None,
    ) -> Documents:
        """Return the documents with all their measurements and verdicts, as a lazily
        read pyarrow dataset.

        Args:
            kept: True for documents that every step kept, False for dropped ones, None
                for all.
            columns: columns in this order; None means all.
            where: an SQL condition over the columns, such as `"words > 100 AND source =
                'web'"`; an invalid one raises ExpressionError when documents are read.

        Raises:
            NothingIngestedError: no documents are committed yet.
            UnknownColumnError: a column does not exist.
        """
        from gristmill.flows.python.document_frames import Documents
        from gristmill.flows.questions.find_documents import committed_corpus

        corpus = committed_corpus(self._session)
        corpus.check(columns)
        return Documents.of(corpus, columns, kept, where)

    def report(self) -> Report:
        """Render the report: the funnel, drop reasons, mixture, losses, time and
        cost.
        """
        from gristmill.flows.report.report import render_report

        return Report(mask_known(render_report(self._session, self._record)))

    def explain(self, document: str, text: bool = False) -> Explanation:
        """Return a document's history: verdicts of all stages, and the training steps
        that read it.

        Args:
            document: id (32 hexadecimal digits, or the first few) or locator.
            text: include the whole text with its edits marked.

        Raises:
            DocumentNotFoundError: no document matches, or several do.
        """
        from gristmill.flows.questions.explain import history

        return history(self._planned_session, document, text)

    def trace(self, step: int, stage: str = PRETRAIN) -> StepTrace:
        """Return the rows and documents of a training step.

        Args:
            step: counted from 1.
            stage: the training.

        Raises:
            TraceError: the training or step does not exist.
        """
        from gristmill.flows.questions.trace import trace_step

        return trace_step(self._planned_session, step, stage)

    def trace_document(self, document: str) -> DocumentTrace:
        """Return the training steps that read a document, or an example of fine-tuning.

        Args:
            document: id, first digits of the id, or locator.

        Raises:
            DocumentNotFoundError: no document matches, or several do.
        """
        from gristmill.flows.questions.trace import trace_document

        return trace_document(self._planned_session, document)

    def trace_text(self, text: str) -> TextTrace:
        """Find passages of a text that occur verbatim in the training rows, with
        documents and training steps.

        Args:
            text: any text, such as the output of a model.

        Raises:
            TraceError: the rows are not indexed; add the section `text_index`.
        """
        from gristmill.flows.questions.trace_text import trace_text

        return trace_text(self._planned_session, text)

    def search(
        self, text: str, by: Literal["meaning", "words"] | None = None, limit: int = 10
    ) -> SearchHits:
        """Search for documents about a text, kept or not: the nearest in meaning, and
        those with its words.

        Args:
            text: words or sentences; quoted phrases are matched exactly.
            by: a single method; None means both, or words alone if no step stored
                vectors.
            limit: maximum number of documents.

        Raises:
            NothingIngestedError: no documents are committed yet.
            SearchError: the text is empty, or `by` is `meaning` and there are no
                vectors.
        """
        from gristmill.flows.questions.search import search

        return search(self._session, text, by, limit)

    def whatif(self, set: Mapping[str, Any], samples: int = 20) -> WhatIf:
        """Replay other thresholds on stored measurements; nothing is run.

        Args:
            set: thresholds by key, such as `{"filter.gopher_quality.min_words": 40}`.
            samples: number of documents on either side of a threshold.

        Raises:
            NotReplayableError: a key other than a threshold would change, or nothing is
                measured yet.
            ManifestError: a setting does not exist, or its value is invalid.
        """
        from gristmill.flows.questions.whatif import compare, replay

        before, overrides = self._session, overrides_of(set)
        manifest, _ = check_manifest(
            self._settings,
            before.manifest_file,
            Path(before.manifest_file).parent,
            overrides,
        )
        after = replace(
            before, manifest=manifest, overrides=[*before.overrides, *overrides]
        )
        tokens = before.committed(TOKENIZE)
        return replay(
            compare(before, after), samples, None if tokens is None else tokens.data
        )

    def thresholds(self) -> list[Threshold]:
        """Return the documents that every threshold drops, and that its neighbours
        would drop.
        """
        from gristmill.flows.questions.whatif import thresholds

        return thresholds(self._session)

    @property
    def _settings(self) -> dict[str, Any]:
        """The manifest without defaults."""
        return self._session.manifest.model_dump(mode="json", exclude_unset=True)

    @cached_property
    def _session(self) -> Session:
        return self._opened or session_of_record(self._store, self._record)

    @cached_property
    def _planned_session(self) -> Session:
        """Session that also plans stages after the last one of the run, since a
        training's reads are known before it runs.
        """
        session = self._session
        settle = partial(settle_node, store=session.store, name=session.manifest.name)
        return replace(
            session, plan=add_later_stages(session.plan, session.manifest, settle)
        )

    def _folder(self, stage: str) -> outputs.StageFolder:
        return self._store.folder(
            stage, self._record["name"], self._record["stages"][stage]["fingerprint"]
        )

    def __repr__(self) -> str:
        done = sum(stage.state == "committed" for stage in self.stages.values())
        return (
            f"Run({self.name!r}: {self.state}, {done} of {len(self.stages)} "
            "stages committed)"
        )

    def _repr_html_(self) -> str:
        rows = []
        for stage in self.stages.values():
            took = "" if stage.seconds is None else duration(stage.seconds)
            counts = stage.counts
            kept = "" if counts is None else f"{counts['kept']:,} of {counts['read']:,}"
            rows.append(
                (
                    stage.name,
                    stage.state,
                    stage.how.lower(),
                    took,
                    kept,
                    stage.fingerprint[:8],
                )
            )
        header = ("stage", "state", "how", "took", "kept of read", "fingerprint")
        table = str(_notebook_html().table(header, rows)).strip()
        return f"<b>{escape(self.name)}</b>: {self.state}{table}"


class Store:
    """A folder or URL that holds the outputs and the records of runs."""

    def __init__(self, path: str | Path | None = None) -> None:
        """Refer to a store, which need not exist yet.

        Args:
            path: a folder or an fsspec URL; None means $GRISTMILL_STORE, else
                ./gristmill-store.

        Raises:
            StoreLocationError: the location cannot hold a store.
        """
        self._store = outputs.store_at(None if path is None else str(path))

    @property
    def path(self) -> Path:
        """Location of the store."""
        return self._store.root

    @property
    def runs(self) -> list[Run]:
        """Runs, oldest first."""
        return [
            Run(self._store, record) for _, record in outputs.read_runs(self._store)
        ]

    def run(self, name: str = "last") -> Run:
        """Return a run by its name, a unique part of the name, `last`, or `last-1` (the
        one before).

        Raises:
            UnknownRunError: no run matches, or several do.
        """
        return Run(self._store, find_run(self._store, name))

    @property
    def stages(self) -> list[StageOutput]:
        """All outputs of all runs."""
        return [
            stage_output(name, folder, folder.path.name.rpartition("--")[2])
            for name, folder in self._store.outputs()
        ]

    def __repr__(self) -> str:
        return f"Store({str(self.path)!r})"


def stage_output(
    name: str, folder: outputs.StageFolder, fingerprint: str, how: str = ""
) -> StageOutput:
    """Return the output in a folder, with time and size if it is committed."""
    output = StageOutput(name, folder.state(), how, fingerprint, folder.data)
    if output.state != "committed":
        return output
    manifest = folder.manifest()
    num_bytes = sum(entry["bytes"] for entry in manifest["files"].values())
    return replace(output, seconds=manifest["seconds"], bytes=num_bytes)


def session_of_record(store: outputs.Store, record: Mapping[str, Any]) -> Session:
    """Open a run for questions, with its recorded manifest and the recorded settings of
    its stages.

    Neither the manifest file nor the sources are read. Stages that the run did not
    reach are not in the plan.
    """
    manifest = schema.Manifest.model_validate(
        record.get("settings") or record["manifest"]
    )
    plan: Plan = {}
    for name in stages_of(record):
        entry = record["stages"][name]
        step = manifest.steps.get(name)
        stage = STAGES.get(name if step is None else step.stage)
        description = (
            store.folder(name, record["name"], entry["fingerprint"]).path / "stage.json"
        )
        if stage is None or not description.exists():
            continue
        metadata = read_json(description)
        plan[name] = Node(
            stage,
            entry["fingerprint"],
            metadata["recipe"],
            metadata["config"],
            input_fingerprints(metadata.get("input_fingerprints", ())),
            tuple(metadata.get("edits", ())),
            name if name != stage.name else "",
            None if step is None else step.config,
            entry.get("identity", ""),
            entry.get("kept", {}).get("version"),
        )
    return Session(
        manifest,
        record["manifest_file"],
        list(record["overrides"]),
        store,
        str(store.root),
        plan,
    )
