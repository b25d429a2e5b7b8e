"""A run as the pages see it: its committed stages, and their files, opened once for
many requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gristmill.core.store import StageFolder
from gristmill.dataprep.corpus import Corpus
from gristmill.dataprep.examples.kept_examples import prepared_inputs
from gristmill.flows.pages.addresses import DOCUMENTS
from gristmill.flows.pages.page_elements import ByName
from gristmill.flows.questions.find_documents import committed_corpus, nothing_read
from gristmill.flows.report.stage_summaries import StepSummary, read_as
from gristmill.flows.running.session import Session
from gristmill.flows.stages.registry import TOKENIZER
from gristmill.mixtures.schema.sources import IMPORTED, INGEST
from gristmill.tokenize.importing.token_sources import corpora
from gristmill.tokenize.loss_masks import LossMasks, mask_name
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_files import MANIFEST

if TYPE_CHECKING:
    from gristmill.tokenize.encoding.tokenizer import TextTokenizer

MOST_CACHED = 200
Value = TypeVar("Value")
Inputs = ByName[Path]
"""Folders that documents are read from: `ingest`, and the steps that judged them, in
their order.
"""


class NotThereError(LookupError):
    """The run does not have the requested output, or has not made it yet.

    Args:
        text: beginning of the message; `there_are` is appended as a list.
        there_are: names of all that there are.
    """

    def __init__(self, text: str, there_are: Iterable[str] | None = None) -> None:
        if there_are is not None:
            text += f" {', '.join(there_are) or 'none'}"
        super().__init__(text)


class BrowsedRun:
    """A manifest's run, finished or not, asked by several threads.

    Only committed stages are seen. Whatever was opened is forgotten when a stage is
    committed, also for the second time.

    Args:
        session: the opened manifest.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._lock = threading.Lock()
        self._commit_marks: dict[str, str] = {}
        self._cache: dict[Hashable, Any] = {}

    @property
    def name(self) -> str:
        """Name of the manifest."""
        return self.session.manifest.name

    def committed(self) -> dict[str, StageFolder]:
        """The folders of the stages that are committed now, in the order of the
        plan.
        """
        folders: dict[str, StageFolder] = {}
        with self._lock:
            for stage in self.session.plan:
                folder = self.session.folder(stage)
                try:
                    mark = (folder.path / "_SUCCESS").read_text()
                except OSError:
                    continue
                if self._commit_marks.get(stage) != mark:
                    self._cache.clear()
                    if folder.state() != "committed":
                        continue
                    self._commit_marks[stage] = mark
                folders[stage] = folder
        return folders

    def inputs(self) -> dict[str, Path]:
        """Committed stage -> folder of its files."""
        return {stage: folder.data for stage, folder in self.committed().items()}

    def cached(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The result of `make`, made once until another stage is committed."""
        with self._lock:
            if key in self._cache:
                value: Value = self._cache[key]
                return value
        value = make()
        with self._lock:
            if len(self._cache) >= MOST_CACHED:
                self._cache.clear()
            self._cache[key] = value
        return value

    def folder(self, stage: str) -> StageFolder:
        """The folder of a committed stage.

        Raises:
            NotThereError: there is no such stage, or it is not committed yet.
        """
        folders = self.committed()
        if stage in folders:
            return folders[stage]
        if stage not in self.session.plan:
            raise NotThereError(
                f"there is no stage {stage!r}; this run has", self.session.plan
            )
        raise NotThereError(
            f"{stage} is not committed yet; run: "
            f"{self.session.command('run', '--until', stage)}"
        )

    def summaries(self) -> dict[str, ByName[object]]:
        """Committed stage -> its summary as JSON."""
        return {
            stage: self.cached(("summary", stage), folder.manifest)["summary"]
            for stage, folder in self.committed().items()
        }

    def step(self, name: str) -> StepSummary:
        """The summary of a committed step that reads or judges documents."""
        self.folder(name)
        summary = self.summaries()[name]
        return self.cached(("step", name), lambda: read_as(StepSummary, summary))

    def corpora(self) -> dict[str, Inputs]:
        """Corpora by name: documents of the sources, imported ones, and prepared
        examples.
        """
        inputs = self.inputs()
        by_name: dict[str, Inputs] = {}
        if INGEST in inputs:
            by_name[DOCUMENTS] = self._documents().inputs
        if IMPORTED in inputs:
            by_name[IMPORTED] = corpora(inputs)[-1]
        for stage, folder in inputs.items():
            if self.session.plan[stage].stage.output == "examples":
                by_name[stage] = prepared_inputs(folder)
        return by_name

    def _documents(self) -> Corpus:
        return self.cached(DOCUMENTS, lambda: committed_corpus(self.session))

    def corpus(self, name: str) -> Inputs:
        """The folders of one corpus.

        Raises:
            NotThereError: there is no such corpus, or no documents are read yet.
        """
        by_name = self.corpora()
        if name in by_name:
            return by_name[name]
        if name == DOCUMENTS:
            raise NotThereError(nothing_read(self.session))
        raise NotThereError(f"there is no corpus {name!r}; this run has", by_name)

    def columns(self, name: str) -> Corpus:
        """One corpus with the columns of its documents.

        Raises:
            NotThereError: as of `corpus`.
        """
        inputs = self.corpus(name)
        if name == DOCUMENTS:
            return self._documents()
        return self.cached(("corpus", name), lambda: Corpus(inputs))

    def packed_sets(self) -> list[str]:
        """The committed stages whose output is a packed set."""
        return [
            stage
            for stage, folder in self.inputs().items()
            if (folder / MANIFEST).exists()
        ]

    def packed(self, stage: str) -> PackedSet:
        """The packed set of a stage.

        Raises:
            NotThereError: it has none, or is not committed.
            gristmill.tokenize.packed_files.PackedSetError: this version cannot read it.
        """
        folder = self.folder(stage).data
        if not (folder / MANIFEST).exists():
            raise NotThereError(
                f"{stage} makes no rows; those that do are", self.packed_sets()
            )
        return self.cached(("packed", stage), lambda: PackedSet(folder))

    def masks(self, stage: str) -> LossMasks | None:
        """The loss masks of a stage's packed set; None if all tokens are trained."""
        packed = self.packed(stage)
        for shard in packed.manifest["train"]["shards"]:
            if mask_name(shard["file"]) in shard.get("beside", {}):
                return self.cached(("masks", stage), lambda: LossMasks(packed))
        return None

    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the run.

        Raises:
            NotThereError: it is not made yet.
        """
        from gristmill.tokenize.encoding.tokenizer import load

        folder = self.folder(TOKENIZER).data
        return self.cached(TOKENIZER, lambda: load(folder))
