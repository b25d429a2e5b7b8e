"""The chain as gristmill runs it: a manifest, the command `gristmill run`, and its
cost, measured from outside.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.chain.pages import Corpus, Pages, kind_of
from benchmarks.measuring import MemorySampler, proportional_bytes
from benchmarks.public_data import language_model
from gristmill.flows.running.session import Session, open_session
from gristmill.mixtures.base import DumpedSection, Options, RawSection

WORKERS = 2
LOCAL: Options = {"workers": WORKERS}
"""Section `engine`: the local runner."""
VOCABULARY = 32_000
TRAINING_PAGES = 4000
"""Pages on which the tokenizer and the classifier are trained before any
measurement.
"""
END_OF_TEXT = "<|endoftext|>"
MIN_QUALITY = 0.02
TOKENS_PER_BYTE = 0.01
"""Tokens of the mixture per byte of raw text: fewer than the steps keep of 60 pages,
even with datatrove's verdicts.
"""
SAMPLE_SECONDS = 0.25
DATATROVE = {"dialect": "datatrove"}
ENGLISH: RawSection = {"keep": ["en"], "threshold": 0.65}
GOOD: RawSection = {"min_quality": MIN_QUALITY}
CANDIDATES: RawSection = {
    "exact": False,
    "clusters": "connected",
    "minhash": {"verify": False},
    "index": False,
}
"""Settings of `dedup`: every candidate pair of MinHash is a duplicate, and one of each
chain of them is kept.
"""
VERDICTS: RawSection = {
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
"""Steps with datatrove's verdicts: its dialect."""
OWN: RawSection = {
    "filter": {
        "rules": [
            "gopher_repetition",
            "gopher_quality",
            {"c4": {"constants": "paper"}},
            "fineweb",
        ]
    },
    "dedup": {"index": False},
    "langid": ENGLISH,
    "quality": GOOD,
}
"""The same rules with gristmill's own settings: pairs are verified, and equal texts are
dropped.
"""


@dataclass(frozen=True)
class Models:
    """Models of all sides.

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
    """Cost of a run.

    Attributes:
        seconds: from the command's start to its end.
        cpu_seconds: of the command and its descendants.
        peak_bytes: of memory, of all its processes together (Pss of smaps_rollup,
            mapped files included); 0 if it was not sampled.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Chain:
    """A manifest, and the folder of its store and Prefect's database."""

    manifest: Path
    folder: Path

    @property
    def store(self) -> Path:
        """Folder of its outputs."""
        return self.folder / "store"

    def run(
        self,
        *options: str,
        command: Sequence[str] = (sys.executable,),
        sample_memory: bool = False,
    ) -> Run:
        """Run `gristmill run` to its end.

        Args:
            options: of the command.
            command: interpreter, or a program that starts it.
            sample_memory: costs some percent of its time.

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
        environment = {
            **os.environ,
            "PREFECT_HOME": str(self.folder / "prefect"),
            "COLUMNS": "120",
        }
        # an installed package has byte code
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        with open(self.folder / "log", "wb") as log:
            start, cpu_before = time.perf_counter(), _children_seconds()
            process = subprocess.Popen(
                arguments, stdout=log, stderr=log, env=environment
            )
            sampler = MemorySampler(process.pid, proportional_bytes, SAMPLE_SECONDS)
            with sampler if sample_memory else nullcontext():
                code = process.wait()
            seconds, cpu_seconds = (
                time.perf_counter() - start,
                _children_seconds() - cpu_before,
            )
        if code != 0:
            raise RuntimeError(
                f"{' '.join(arguments)} ended with {code}: "
                f"{(self.folder / 'log').read_text()[-2000:]}"
            )
        return Run(seconds, cpu_seconds, sampler.peak)

    def session(self) -> Session:
        """Open the manifest."""
        return open_session(str(self.manifest), [], str(self.store))

    def kept(self) -> int:
        """Count documents that all steps kept."""
        session = self.session()
        steps = [stage for stage, node in session.plan.items() if node.stage.step]
        kept: int = session.folder(steps[-1]).manifest()["summary"]["counts"]["kept"]
        return kept

    def stage_seconds(self) -> dict[str, float]:
        """Return each stage's recorded seconds."""
        session = self.session()
        return {
            stage: session.folder(stage).manifest()["seconds"] for stage in session.plan
        }

    def committed_files(self) -> dict[str, object]:
        """Return the records of all output files, with checksums and sizes."""
        session = self.session()
        return {
            f"{stage}/{name}": entry
            for stage in session.plan
            for name, entry in session.folder(stage).manifest()["files"].items()
        }

    def files(self) -> tuple[int, int]:
        """Return the number of the outputs' files, and their bytes."""
        sizes = [
            entry["bytes"]
            for _, folder in self.session().store.outputs()
            for entry in folder.manifest()["files"].values()
        ]
        return len(sizes), sum(sizes)


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def write_chain(
    folder: Path,
    corpus: Corpus,
    models: Models,
    settings: RawSection,
    packed: bool = True,
    engine: Options = LOCAL,
) -> Chain:
    """Write the manifest of the chain over a corpus.

    Args:
        folder: receives it, its store and Prefect's database.
        corpus: raw JSONL, compressed or not, or web archives.
        models: of the steps.
        settings: the steps in their order, each with its section; models are added.
        packed: if true, it ends with packed shards; else with the kept documents, as
            JSON lines.
        engine: its section of the manifest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    models_of: dict[str, RawSection] = {
        "langid": {"model": str(models.language)},
        "quality": {"classifier": {"model": str(models.classifier)}},
    }
    manifest: DumpedSection = {
        "name": "chain",
        "seed": 1,
        "sources": {
            "web": {
                "path": str(corpus.folder / "*"),
                "metadata_fields": [],
                "max_epochs": 4,
            }
        },
        "prepare": [
            {step: {**section, **models_of.get(step, {})}}
            for step, section in settings.items()
        ],
        "engine": dict(engine),
    }
    if packed:
        manifest["tokenizer"] = {"path": str(models.tokenizer)}
        manifest["mix"] = {
            "tokens": int(corpus.text_bytes * TOKENS_PER_BYTE),
            "sequence_length": 1024,
        }
    else:
        manifest["documents"] = {"format": "jsonl"}
    path = folder / "chain.yaml"
    path.write_text(yaml.safe_dump(manifest, sort_keys=False))
    return Chain(path, folder)


def make_models(folder: Path) -> Models | None:
    """Train a tokenizer and a classifier, unless they exist; None without a language
    model.
    """
    from gristmill.dataprep.quality.classifier import as_line, train
    from gristmill.mixtures.steps.quality import Classifier

    language = language_model()
    if language is None:
        return None
    models = Models(
        folder / "tokenizer.json", folder / "classifier.bin", Path(language)
    )
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
    """Train a byte-level BPE with GPT-2's pattern."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[END_OF_TEXT],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer.save(str(path))
