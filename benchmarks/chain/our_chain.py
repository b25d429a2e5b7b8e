"""The chain as gristmill runs it: a manifest, the command `gristmill run`, and what that took, seen from outside."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.chain.pages import Corpus, Pages, kind_of
from benchmarks.dataprep.jobs import language_model
from benchmarks.measuring import process_tree
from gristmill.flows.running.session import Session, open_session

WORKERS = 2
VOCABULARY = 32_000
TRAINING_PAGES = 4000
"""Pages that the tokenizer, and the classifier, are trained on before anything is measured."""
END_OF_TEXT = "<|endoftext|>"
MIN_QUALITY = 0.02
TOKENS_PER_BYTE = 0.02
"""Of raw text, that the mixture takes: of 60 pages the steps leave 0.027, for rules drop most pages of source."""
SAMPLE_SECONDS = 0.25
DATATROVE = {"dialect": "datatrove", "words": "exact"}
ENGLISH: Mapping[str, Any] = {"keep": ["en"], "threshold": 0.65}
GOOD: Mapping[str, Any] = {"min_quality": MIN_QUALITY}
CANDIDATES: Mapping[str, Any] = {"exact": False, "clusters": "connected", "minhash": {"verify": False}, "index": False}
"""Of `dedup`: every candidate pair of MinHash is a duplicate, and one of each chain of them is kept."""
VERDICTS: Mapping[str, Any] = {
    "filter": {
        "rules": {
            "gopher_repetition": DATATROVE,
            "gopher_quality": DATATROVE,
            "c4": {"constants": "paper", "max_document_characters": None},
            "fineweb": {"constants": "datatrove"},
        }
    },
    "dedup": CANDIDATES,
    "langid": ENGLISH,
    "quality": GOOD,
}
"""The steps with the settings under which our verdicts are datatrove's: its dialect and words."""
OWN: Mapping[str, Any] = {
    "filter": {"rules": ["gopher_repetition", "gopher_quality", {"c4": {"constants": "paper"}}, "fineweb"]},
    "dedup": {"index": False},
    "langid": ENGLISH,
    "quality": GOOD,
}
"""The same rules with the settings that gristmill has of its own: pairs are verified, equal texts go too."""


@dataclass(frozen=True)
class Models:
    """What all sides load.

    Attributes:
        tokenizer: a tokenizer.json.
        classifier: a fastText model with the labels positive and negative.
        language: lid.176.
    """

    tokenizer: Path
    classifier: Path
    language: Path


@dataclass(frozen=True)
class Run:
    """What a run took.

    Attributes:
        seconds: from the command's start to its end.
        cpu_seconds: of it and all that it started.
        peak_bytes: of memory, of all its processes together (Pss of smaps_rollup, mapped files included); 0 where
            nobody looked.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Chain:
    """A manifest, and the folder that its store and Prefect's database are in."""

    manifest: Path
    folder: Path

    @property
    def store(self) -> Path:
        """Where its outputs lie."""
        return self.folder / "store"

    def run(self, *options: str, command: Sequence[str] = (sys.executable,), look: bool = False) -> Run:
        """`gristmill run`, to its end.

        Args:
            options: of the command.
            command: what runs it.
            look: at its memory, which takes some hundredths of its time.

        Raises:
            RuntimeError: it failed.
        """
        arguments = [
            *command,
            "-m",
            "gristmill.flows.cli.main",
            "run",
            str(self.manifest),
            "--store",
            str(self.store),
            *options,
        ]
        environment = {**os.environ, "PREFECT_HOME": str(self.folder / "prefect"), "COLUMNS": "120"}
        with open(self.folder / "log", "wb") as log:
            begun, before = time.perf_counter(), _children_seconds()
            process = subprocess.Popen(arguments, stdout=log, stderr=log, env=environment)
            with Sampler(process.pid) if look else nullcontext() as sampler:
                code = process.wait()
            seconds, cpu = time.perf_counter() - begun, _children_seconds() - before
        if code != 0:
            raise RuntimeError(f"{' '.join(arguments)} ended with {code}: {(self.folder / 'log').read_text()[-2000:]}")
        return Run(seconds, cpu, sampler.peak if sampler else 0)

    def session(self) -> Session:
        """The manifest, opened."""
        return open_session(str(self.manifest), [], str(self.store))

    def kept(self) -> int:
        """Documents that came through all steps."""
        session = self.session()
        steps = [stage for stage, node in session.plan.items() if node.stage.judges]
        kept: int = session.folder(steps[-1]).manifest()["summary"]["counts"]["kept"]
        return kept

    def stage_seconds(self) -> dict[str, float]:
        """What each stage's record says that it took."""
        session = self.session()
        return {stage: session.folder(stage).manifest()["seconds"] for stage in session.plan}

    def files(self) -> tuple[int, int]:
        """How many files the outputs have, and their bytes."""
        sizes = [
            entry["bytes"]
            for _, folder in self.session().store.outputs()
            for entry in folder.manifest()["files"].values()
        ]
        return len(sizes), sum(sizes)


class Sampler:
    """Looks at the memory of a process and of all that it has started, every SAMPLE_SECONDS.

    Attributes:
        peak: bytes.
    """

    def __init__(self, pid: int) -> None:
        self.peak = 0
        self._pid, self._ended = pid, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, sum(map(resident_bytes, process_tree(self._pid))))


def resident_bytes(pid: int) -> int:
    """Memory of a process, of what it has in common with others its share; 0 where it has ended."""
    try:
        usage = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in usage.splitlines() if line.startswith("Pss:")), 0)


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def write_chain(
    folder: Path, corpus: Corpus, models: Models, settings: Mapping[str, Any], packed: bool = True
) -> Chain:
    """Write the manifest of the chain over a corpus.

    Args:
        folder: receives it, its store and Prefect's database.
        corpus: raw JSONL.
        models: what judges and encodes.
        settings: the steps in their order, each with its section; what they load is added.
        packed: whether it ends with packed shards; else with the documents that are kept, as JSON lines.
    """
    folder.mkdir(parents=True, exist_ok=True)
    loads: dict[str, Any] = {
        "langid": {"model": str(models.language)},
        "quality": {"classifier": {"model": str(models.classifier)}},
    }
    ends: dict[str, Any] = (
        {
            "tokenizer": {"path": str(models.tokenizer)},
            "mix": {"tokens": int(corpus.text_bytes * TOKENS_PER_BYTE), "sequence_length": 1024},
        }
        if packed
        else {"documents": {"format": "jsonl"}}
    )
    manifest = {
        "name": "chain",
        "seed": 1,
        "sources": {"web": {"path": str(corpus.folder / "*.jsonl"), "metadata_fields": [], "max_epochs": 4}},
        "prepare": [{step: {**section, **loads.get(step, {})}} for step, section in settings.items()],
        "engine": {"workers": WORKERS},
        **ends,
    }
    path = folder / "chain.yaml"
    path.write_text(yaml.safe_dump(manifest, sort_keys=False))
    return Chain(path, folder)


def make_models(folder: Path) -> Models | None:
    """Train a tokenizer and a classifier, unless they are there; None without a language model."""
    from gristmill.dataprep.quality.classifier import as_line, train
    from gristmill.mixtures.steps.quality import Classifier

    language = language_model()
    if language is None:
        return None
    models = Models(folder / "tokenizer.json", folder / "classifier.bin", Path(language))
    if not models.classifier.exists():
        folder.mkdir(parents=True, exist_ok=True)
        pages = Pages(TRAINING_PAGES)
        texts = [pages.text(number) for number in range(TRAINING_PAGES)]
        train_tokenizer(texts, models.tokenizer)
        section = Classifier(positive=("good",), negative=("bad",))
        lines = (
            (kind_of(number) in ("prose", "near copy", "copy"), as_line(text, section))
            for number, text in enumerate(texts)
        )
        models.classifier.write_bytes(train(lines, section, 1, None))
    return models


def train_tokenizer(texts: Iterable[str], path: Path) -> None:
    """A byte-level BPE with GPT-2's pattern."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[END_OF_TEXT],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    made.save(str(path))
