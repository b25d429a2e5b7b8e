"""A run and a store as objects. A run is read from its record and from the outputs that the record names.

So it can be asked long after its manifest or its sources have changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import gristmill.flows.stages.registry  # noqa: F401 - lets the steps of `prepare` stand in manifests
from gristmill.core import store as outputs
from gristmill.core.files import atomic_write, read_json
from gristmill.core.secrets import mask_known
from gristmill.core.stage_context import input_fingerprints
from gristmill.flows.python.manifest_builder import Manifest, overrides_of
from gristmill.flows.python.notebook import framed, html_table
from gristmill.flows.python.result_objects import (
    DocumentTrace,
    Explanation,
    SearchHits,
    StepTrace,
    TextTrace,
    Threshold,
    WhatIf,
    answer,
    explanation,
    replayed,
    thresholds_of,
)
from gristmill.flows.questions.compare import find_run, stages_of
from gristmill.flows.questions.status import duration, run_state
from gristmill.flows.running.output_identities import settle_node
from gristmill.flows.running.session import Session
from gristmill.flows.stages.plan import Node, Plan, UnknownStageError, add_later_stages
from gristmill.flows.stages.registry import PRETRAIN, STAGES, TOKENIZE
from gristmill.mixtures import manifest as schema
from gristmill.mixtures.load import check_manifest
from gristmill.mixtures.yaml_text import did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa

    from gristmill.flows.python.document_frames import Documents


@dataclass(frozen=True)
class StageOutput:
    """What a run has of a stage.

    Attributes:
        name: of the stage.
        state: `committed`, `unfinished`, `missing` or `corrupt`.
        how: `Completed`, `Resumed`, `Cached` (its output was there), or empty where the run did not come so far.
        fingerprint: the first 16 digits of what names its output.
        folder: its files.
        seconds: how long it took when it was made; None where it is not committed.
        bytes: of its files; None where it is not committed.
        counts: of its documents: `read`, `kept`, `quarantined`, and `dropped` by rule; None where it reads none.
    """

    name: str
    state: str
    how: str
    fingerprint: str
    folder: Path
    seconds: float | None = None
    bytes: int | None = None
    counts: dict[str, Any] | None = None


class Report:
    """The report of a run: one HTML file, which loads and runs nothing. A notebook shows it in a frame of its own."""

    page: str
    """The file's content."""

    def __init__(self, page: str) -> None:
        self.page = page

    def save(self, path: str | Path) -> Path:
        """Write it to a file, and return that."""
        with atomic_write(Path(path)) as sink:
            sink.write(self.page.encode())
        return Path(path)

    def _repr_html_(self) -> str:
        return framed(self.page)


class Run:
    """A run: what it made, what it measured, and answers to questions about it."""

    def __init__(self, store: outputs.Store, record: Mapping[str, Any], session: Session | None = None) -> None:
        """Open a run; `gristmill.run` and `Store.run` do that."""
        self._store, self._record, self._given = store, dict(record), session

    @property
    def name(self) -> str:
        """Its name in the store: the time at which it was started, and the manifest's name."""
        return str(self._record["run"])

    @property
    def state(self) -> str:
        """`completed`, `failed`, `interrupted`, `running`, or `killed`: its process is gone without a word."""
        return run_state(self._record)

    @property
    def path(self) -> Path:
        """Its folder, with `run.json` and `report.html`."""
        return self._store.runs / self.name

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest as it ran, with the settings that replaced some of it."""
        return Manifest(self._settings, folder=Path(self._session.manifest_file).parent)

    @cached_property
    def stages(self) -> dict[str, StageOutput]:
        """Its stages by their names, in the order in which they run."""
        return {name: self._output(name) for name in stages_of(self._record)}

    @property
    def summaries(self) -> dict[str, dict[str, Any]]:
        """Stage -> what it says of its output, as JSON; of what is committed."""
        return {
            name: self._folder(name).manifest()["summary"]
            for name, stage in self.stages.items()
            if stage.state == "committed"
        }

    def folder(self, stage: str) -> Path:
        """The files of a stage's output.

        Raises:
            UnknownStageError: the run has no such stage.
        """
        if stage not in self._record["stages"]:
            known = list(self.stages)
            raise UnknownStageError(
                f"{self.name} has no stage {stage!r}{did_you_mean(stage, known) or ';'} it has {', '.join(known)}"
            )
        return self._folder(stage).data

    def metrics(self, stage: str | None = None) -> pa.Table:
        """What the trainings logged: a row for each logged step, a column for each measure, nested ones as `a/b`.

        Args:
            stage: only that training.
        """
        import pyarrow as pa

        from gristmill.flows.report.report_facts import training

        rows = [
            {"stage": name, **_flat(line)}
            for name, node in self._session.plan.items()
            if node.stage.trained is not None and stage in (None, name) and self._session.committed(name)
            for line in training(self._folder(name))
        ]
        columns = list(dict.fromkeys(key for row in rows for key in row))
        return pa.table({key: pa.array([row.get(key) for row in rows], from_pandas=False) for key in columns})

    def documents(
        self, kept: bool | None = True, columns: Sequence[str] | None = None, where: str | None = None
    ) -> Documents:
        """The documents with everything that was said of them: a pyarrow dataset that is read lazily.

        Args:
            kept: those that every step kept, those that one dropped (False), or all (None).
            columns: which, in this order; all if absent.
            where: an SQL condition over the columns, such as `"words > 100 AND source = 'web'"`; one that is none
                raises ExpressionError when documents are read.

        Raises:
            NothingIngestedError: there are none.
            UnknownColumnError: there is no such column.
        """
        from gristmill.flows.python.document_frames import Documents
        from gristmill.flows.questions.find_documents import committed_corpus

        corpus = committed_corpus(self._session)
        corpus.check(columns)
        return Documents.of(corpus, columns, kept, where)

    def report(self) -> Report:
        """Its report: the funnel, the reasons, the mixture, the losses, time and cost."""
        from gristmill.flows.report.page import render_report

        return Report(mask_known(render_report(self._session, self._record)))

    def explain(self, document: str, text: bool = False) -> Explanation:
        """A document's history: why it was kept or dropped, and which training steps read it.

        Args:
            document: its id (32 hexadecimal digits, or the first few) or its locator.
            text: with the whole text, the edits marked.

        Raises:
            DocumentNotFoundError: none fits, or several do.
        """
        from gristmill.flows.questions.explain import history

        return explanation(history(self._whole, document, text))

    def trace(self, step: int, stage: str = PRETRAIN, rank: int | None = None) -> StepTrace:
        """What a training step read.

        Args:
            step: counted from 1.
            stage: the training.
            rank: only what this process read, of `engine.ranks`.

        Raises:
            TraceError: there is no such training, step or rank.
        """
        from gristmill.flows.questions.trace import trace_step

        return answer(StepTrace, trace_step(self._whole, step, stage, rank))

    def trace_document(self, document: str) -> DocumentTrace:
        """Which training steps read a document, or an example of a tuning.

        Args:
            document: its id, the first digits of that, or its locator.

        Raises:
            DocumentNotFoundError: none fits, or several do.
        """
        from gristmill.flows.questions.trace import trace_document

        return answer(DocumentTrace, trace_document(self._whole, document))

    def trace_text(self, text: str) -> TextTrace:
        """Which passages of a text stand word for word in the training rows, from which documents, and who read them.

        Args:
            text: as a model wrote it, say.

        Raises:
            TraceError: there is no index of the rows: the section `text_index` makes one.
        """
        from gristmill.flows.questions.trace_text import trace_text

        return answer(TextTrace, trace_text(self._whole, text))

    def search(self, text: str, by: Literal["meaning", "words"] | None = None, limit: int = 10) -> SearchHits:
        """The documents that a text is about, kept or not: the nearest in meaning, and those with its words.

        Args:
            text: words or sentences; what stands between quotes is looked for as it is.
            by: one way alone; both if absent, and words alone where no step has left vectors.
            limit: documents.

        Raises:
            NothingIngestedError: there are none.
            SearchError: there is nothing to look for, or no vectors although `by` is `meaning`.
        """
        from gristmill.flows.questions.search import search

        return answer(SearchHits, search(self._session, text, by, limit))

    def whatif(self, set: Mapping[str, Any], samples: int = 20) -> WhatIf:
        """What other thresholds would keep, from stored measurements: nothing is run.

        Args:
            set: thresholds by their keys, such as `{"filter.gopher_quality.min_words": 40}`.
            samples: documents on either side of a cut.

        Raises:
            NotReplayableError: something that is not a threshold would change, or nothing is measured yet.
            ManifestError: there is no such setting, or it cannot have this value.
        """
        from gristmill.flows.questions.whatif import compare, replay

        before, overrides = self._session, overrides_of(set)
        manifest, _ = check_manifest(self._settings, before.manifest_file, Path(before.manifest_file).parent, overrides)
        after = replace(before, manifest=manifest, overrides=[*before.overrides, *overrides])
        tokens = before.committed(TOKENIZE)
        return replayed(replay(compare(before, after), samples, None if tokens is None else tokens.data))

    def thresholds(self) -> list[Threshold]:
        """What every threshold drops, and what its neighbours would."""
        from gristmill.flows.questions.whatif import thresholds

        return thresholds_of(thresholds(self._session))

    @property
    def _settings(self) -> dict[str, Any]:
        """What the manifest says, without defaults."""
        return self._session.manifest.model_dump(mode="json", exclude_unset=True)

    @cached_property
    def _session(self) -> Session:
        return self._given or session_of_record(self._store, self._record)

    @cached_property
    def _whole(self) -> Session:
        """With the stages behind the last one of the run: what a training reads is known before it is trained."""
        session = self._session
        settle = partial(settle_node, store=session.store, name=session.manifest.name)
        return replace(session, plan=add_later_stages(session.plan, session.manifest, settle))

    def _folder(self, stage: str) -> outputs.StageFolder:
        return self._store.folder(stage, self._record["name"], self._record["stages"][stage]["fingerprint"])

    def _output(self, name: str) -> StageOutput:
        entry, folder = self._record["stages"][name], self._folder(name)
        found = StageOutput(name, folder.state(), entry.get("how", ""), entry["fingerprint"][:16], folder.data)
        if found.state != "committed":
            return found
        manifest = folder.manifest()
        counts = manifest["summary"].get("counts") or {}
        return replace(
            found,
            seconds=manifest["seconds"],
            counts=counts if "read" in counts else None,
            bytes=sum(entry["bytes"] for entry in manifest["files"].values()),
        )

    def __repr__(self) -> str:
        done = sum(stage.state == "committed" for stage in self.stages.values())
        return f"Run({self.name!r}: {self.state}, {done} of {len(self.stages)} stages committed)"

    def _repr_html_(self) -> str:
        rows = [
            (
                stage.name,
                stage.state,
                stage.how.lower(),
                "" if stage.seconds is None else duration(stage.seconds),
                _kept(stage.counts),
                stage.fingerprint[:8],
            )
            for stage in self.stages.values()
        ]
        return f"<b>{escape(self.name)}</b>: {self.state}" + html_table(
            ("stage", "state", "how", "took", "kept of read", "fingerprint"), rows
        )


class Store:
    """A folder or URL that holds the outputs and the records of runs."""

    def __init__(self, path: str | Path | None = None) -> None:
        """Name a store; it need not exist yet.

        Args:
            path: a folder or an fsspec URL; if absent $GRISTMILL_STORE, else ./gristmill-store.

        Raises:
            StoreLocationError: there can be no store at that place.
        """
        self._store = outputs.store_at(None if path is None else str(path))

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._store.root

    @property
    def runs(self) -> list[Run]:
        """Its runs, oldest first."""
        return [Run(self._store, record) for _, record in outputs.read_runs(self._store)]

    def run(self, name: str = "last") -> Run:
        """A run by its name, a part of it that no other has, `last`, or `last-1` (the one before).

        Raises:
            UnknownRunError: there is none, or several.
        """
        return Run(self._store, find_run(self._store, name))

    @property
    def stages(self) -> list[StageOutput]:
        """Every output that it holds, of all runs."""
        found = []
        for name, folder in self._store.outputs():
            state = folder.state()
            fingerprint = folder.path.name.rpartition("--")[2]
            output = StageOutput(name, state, "", fingerprint, folder.data)
            if state == "committed":
                manifest = folder.manifest()
                output = replace(
                    output,
                    seconds=manifest["seconds"],
                    bytes=sum(entry["bytes"] for entry in manifest["files"].values()),
                )
            found.append(output)
        return found

    def __repr__(self) -> str:
        return f"Store({str(self.path)!r})"


def session_of_record(store: outputs.Store, record: Mapping[str, Any]) -> Session:
    """A run opened for questions: the manifest that it had, and what its stages were described with.

    Neither the manifest's file nor its sources are looked at. Stages that the run never came to are not in its plan.
    """
    settings = record.get("settings") or record["manifest"]
    manifest = schema.Manifest.model_validate(settings)
    plan: Plan = {}
    for name in stages_of(record):
        step = manifest.steps.get(name)
        stage = STAGES.get(name if step is None else step.stage)
        folder = store.folder(name, record["name"], record["stages"][name]["fingerprint"])
        if stage is None or not (folder.path / "stage.json").exists():
            continue
        told = read_json(folder.path / "stage.json")
        plan[name] = Node(
            stage,
            record["stages"][name]["fingerprint"],
            told["recipe"],
            told["config"],
            input_fingerprints(told),
            tuple(told.get("edits", ())),
            name if name != stage.name else "",
            None if step is None else step.config,
            record["stages"][name].get("identity", ""),
            record["stages"][name].get("kept", {}).get("version"),
        )
    return Session(manifest, record["manifest_file"], list(record["overrides"]), store, str(store.root), plan)


def _flat(line: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """A record with the values of nested ones beside its own: `sources/web/loss`."""
    found: dict[str, Any] = {}
    for key, value in line.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{at}{key}/")
        else:
            found[at + key] = value
    return found


def _kept(counts: Mapping[str, Any] | None) -> str:
    return "" if counts is None else f"{counts['kept']:,} of {counts['read']:,}"
