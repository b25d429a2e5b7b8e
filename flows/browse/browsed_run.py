"""A run as the pages see it: what is committed by now, and what is opened of it once for many requests."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gristmill.core.store import StageFolder
from gristmill.dataprep.corpus import Corpus
from gristmill.dataprep.examples.kept_examples import prepared_inputs
from gristmill.flows.browse.addresses import DOCUMENTS
from gristmill.flows.questions.find_documents import committed_corpus
from gristmill.flows.running.session import Session
from gristmill.flows.stages.registry import TOKENIZER
from gristmill.mixtures.sources import IMPORTED, INGEST
from gristmill.tokenize.importing.token_sources import corpora
from gristmill.tokenize.loss_masks import LossMasks, mask_name
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_files import MANIFEST

if TYPE_CHECKING:
    from gristmill.tokenize.encoding.tokenizer import TextTokenizer

MOST_KEPT = 200
Value = TypeVar("Value")
Inputs = Mapping[str, Path]
"""What documents are read by: `ingest`, and the steps that judged them, in their order."""


class NotThereError(LookupError):
    """A run does not have what was asked for, or has not made it yet."""


class BrowsedRun:
    """A manifest's run, finished or not, asked by several threads.

    Nothing is seen of a stage that is not committed. What was opened is forgotten when a stage is committed, also for
    the second time.

    Args:
        session: the opened manifest.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._lock = threading.Lock()
        self._marks: dict[str, str] = {}
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()

    @property
    def name(self) -> str:
        """Of the manifest."""
        return self.session.manifest.name

    def committed(self) -> dict[str, StageFolder]:
        """The folders of the stages that are committed now, in the order of the plan."""
        found: dict[str, StageFolder] = {}
        with self._lock:
            for stage in self.session.plan:
                folder = self.session.folder(stage)
                mark = _mark(folder)
                if mark is not None and self._marks.get(stage) != mark:
                    self._kept.clear()
                    if folder.state() != "committed":
                        continue
                    self._marks[stage] = mark
                if mark is not None:
                    found[stage] = folder
        return found

    def inputs(self) -> dict[str, Path]:
        """Stage -> folder of its files, of the committed ones."""
        return {stage: folder.data for stage, folder in self.committed().items()}

    def once(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """What `make` gives, made once for as long as nothing is committed."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                value: Value = self._kept[key]
                return value
        value = make()
        with self._lock:
            self._kept[key] = value
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return value

    def folder(self, stage: str) -> StageFolder:
        """The folder of a committed stage.

        Raises:
            NotThereError: there is no such stage, or it is not committed yet.
        """
        found = self.committed()
        if stage in found:
            return found[stage]
        if stage not in self.session.plan:
            raise NotThereError(f"there is no stage {stage!r}; this run has {', '.join(self.session.plan)}")
        raise NotThereError(f"{stage} is not committed yet; run: {self.session.command('run', '--until', stage)}")

    def summary(self, stage: str) -> dict[str, Any]:
        """What a committed stage has counted."""
        folder = self.folder(stage)
        return self.once(("summary", stage), lambda: dict(folder.manifest()["summary"]))

    def corpora(self) -> dict[str, Inputs]:
        """What documents there are: those of the sources, imported ones, and the examples that were prepared."""
        inputs = self.inputs()
        found = {DOCUMENTS: self._documents().inputs} if INGEST in inputs else {}
        if IMPORTED in inputs:
            found[IMPORTED] = corpora(inputs)[-1]
        return found | {
            stage: prepared_inputs(folder)
            for stage, folder in inputs.items()
            if self.session.plan[stage].stage.of_examples
        }

    def _documents(self) -> Corpus:
        return self.once(DOCUMENTS, lambda: committed_corpus(self.session))

    def corpus(self, name: str) -> Inputs:
        """What one of the corpora is read by.

        Raises:
            NotThereError: there is no such one, or nothing is read yet.
        """
        found = self.corpora()
        if name in found:
            return found[name]
        if name == DOCUMENTS:
            first = INGEST if INGEST in self.session.plan or IMPORTED not in self.session.plan else IMPORTED
            raise NotThereError(f"no documents are read yet; run: {self.session.command('run', '--until', first)}")
        raise NotThereError(f"there is no corpus {name!r}; this run has {', '.join(found) or 'none yet'}")

    def columns(self, name: str) -> Corpus:
        """One of the corpora, with the columns of its documents.

        Raises:
            NotThereError: as of `corpus`.
        """
        inputs = self.corpus(name)
        return self._documents() if name == DOCUMENTS else self.once(("corpus", name), lambda: Corpus(inputs))

    def packed_sets(self) -> list[str]:
        """The committed stages whose output is a packed set."""
        return [stage for stage, folder in self.inputs().items() if (folder / MANIFEST).exists()]

    def packed(self, stage: str) -> PackedSet:
        """The packed set of a stage.

        Raises:
            NotThereError: it has none, or is not committed.
            gristmill.tokenize.packed_files.PackedSetError: this version cannot read it.
        """
        folder = self.folder(stage).data
        if not (folder / MANIFEST).exists():
            raise NotThereError(f"{stage} makes no rows; those that do are {', '.join(self.packed_sets()) or 'none'}")
        return self.once(("packed", stage), lambda: PackedSet(folder))

    def masks(self, stage: str) -> LossMasks | None:
        """The loss masks of a stage's packed set; None where all tokens are trained."""
        packed = self.packed(stage)
        shards = packed.manifest["train"]["shards"]
        if not any(mask_name(shard["file"]) in shard.get("beside", {}) for shard in shards):
            return None
        return self.once(("masks", stage), lambda: LossMasks(packed))

    def tokenizer(self) -> TextTokenizer:
        """What turns tokens into text.

        Raises:
            NotThereError: it is not made yet.
        """
        from gristmill.tokenize.encoding.tokenizer import load

        folder = self.folder(TOKENIZER).data
        return self.once(TOKENIZER, lambda: load(folder))


def _mark(folder: StageFolder) -> str | None:
    """What tells one commit of an output from another; None where there is none."""
    try:
        return (folder.path / "_SUCCESS").read_text()
    except OSError:
        return None
