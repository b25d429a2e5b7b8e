"""The sections `evaluate`, `export` and `documents`: measurements of models, and
exported models and documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import field_validator, model_validator

from gristmill.mixtures.base import (
    Count,
    Name,
    NotNegative,
    Omissible,
    OutsidePath,
    Positive,
    Section,
    Seeded,
    Share,
    repeated,
)
from gristmill.mixtures.user_code import OwnCall

GgufKind = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]


class OwnMetric(OwnCall):
    """A metric of your own: a function of `predictions` and `references` that returns a
    number, or one for each item. Examples are in docs/own-training.md.
    """

    takes: ClassVar[tuple[str, ...] | None] = ("predictions", "references")

    name: Name | None = None
    """Name of the metric in the results; the function's name if absent."""

    @property
    def called(self) -> str:
        """Name of the metric in the results."""
        return self.name or self.use.called


PUBLISHED_TASK_KEYS = {"name", "path", "num_fewshot", "limit", "chat_template"}
"""Keys of a task of lm-evaluation-harness."""


class Task(Section):
    """Questions with known answers: a task of lm-evaluation-harness on a local copy of
    its data set, or, if `kind` is given, one in files of your own.

    lm-evaluation-harness (gristmill[eval]) builds the prompts and computes the metrics
    of both, as for published numbers. `prompt`, `choices` and `answer` are Jinja
    templates over the fields of an item, or the bare name of a field.
    """

    name: Name
    """Without `kind`, a task, group or tag of lm-evaluation-harness, such as
    `hellaswag` or `mmlu`; with it, a name for the results.
    """
    path: OutsidePath
    """Without `kind`, the folder of the data set as the Hugging Face Hub has it
    (Parquet, JSONL or CSV, and the README.md that names its configurations), or
    `hf://datasets/NAME@COMMIT`, which is downloaded. With it, JSONL, JSON, CSV, TSV,
    Parquet or text, compressed or not; a glob stands for all its files in order.
    """
    kind: Literal["multiple_choice", "cloze", "rolling", "generate"] | None = None
    """`multiple_choice`: the most likely of several answers; `cloze`: the likelihood of
    the one answer; `rolling`: the likelihood of a whole text; `generate`: a generated
    text, compared with one or more references.
    """
    prompt: str = "prompt"
    """Text before the answer; for `rolling` the whole text."""
    choices: str | tuple[str, ...] = "choices"
    """The answers to choose from: a field that is a list, or texts, fields or
    templates, one for each.
    """
    answer: str = "answer"
    """The right answer. For `multiple_choice` its index from 0, its letter or its text;
    for `cloze` a text, which directly follows the prompt and therefore usually begins
    with a blank (`" {{answer}}"`); for `generate` a text or a list of texts.
    """
    target_delimiter: str = " "
    """Text between the prompt and the choices of `multiple_choice`, and between prompt
    and answer of solved items.
    """
    chat_template: bool = False
    """Ask through the chat template: the prompt is the user's turn, solved items are
    turns before it, and the answer is the assistant's turn, without delimiter
    (lm-evaluation-harness: --apply_chat_template).
    """
    num_fewshot: Count | None = None
    """Number of solved items before each prompt; if absent, as many as
    lm-evaluation-harness has for the task, and none for files of your own. Of these
    they are the first ones of `fewshot_path`, or of `path`, which are then not asked.
    """
    fewshot_path: OutsidePath | None = None
    """Another file from which solved items are taken."""
    fewshot_delimiter: str = "\n\n"
    """Text between solved items."""
    metrics: tuple[OwnMetric, ...] = ()
    """For `generate`: functions of your own beside `exact_match`, such as
    `{use: ./metrics.py:mine}`.
    """
    stop: tuple[str, ...] = ("\n",)
    """For `generate`: texts that end generation."""
    max_new_tokens: Positive = 64
    """For `generate`: longest answer in tokens."""
    limit: Positive | None = None
    """Largest number of items to ask; the first ones are taken, of every task of a
    group.
    """

    @model_validator(mode="before")
    @classmethod
    def _has_data(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError(
                f"nothing is downloaded by name: write {{name: {value}, path: FOLDER}}, "
                "or hf://datasets/NAME@COMMIT as the path"
            )
        return value

    def _problems(self) -> Iterator[str]:
        changed = self.model_dump(exclude_defaults=True)
        own_keys = sorted(changed.keys() - PUBLISHED_TASK_KEYS)
        if self.kind is None and own_keys:
            yield (
                f"{', '.join(own_keys)}: only for files of your own; give their "
                "`kind`, or remove the keys"
            )
        elif self.metrics and self.kind != "generate":
            yield (
                f"metrics: {self.metrics[0].called} compares texts that a model "
                "writes, but the task "
                f"is of kind {self.kind}; make it one of kind generate"
            )
        names = ["exact_match", *(metric.called for metric in self.metrics)]
        if twice := repeated(names):
            yield (
                f"metrics: two are called {twice}; give one of them a `name` of its own"
            )
        for key in ("num_fewshot", "chat_template"):
            if self.kind == "rolling" and getattr(self, key):
                yield f"{key}: a task of kind rolling has no prompts; remove it"


class Suite(Section):
    """A named set of tasks over local files, asked and scored as published numbers
    were; see docs/suites.md.
    """

    suite: Literal["core22", "small"]
    """`core22`: CORE, DCLM's 22 tasks as nanochat asks them; `small`: seven of these,
    without solved items.
    """
    path: OutsidePath
    """The folder with the files, such as `eval_bundle/eval_data`."""
    limit: Positive | None = None
    """Largest number of items to ask of each task, drawn with a fixed seed. The score
    is then less certain, and its confidence interval shows by how much.
    """


class Contamination(Section):
    """A search for items of the tasks in the training text, and a comparison of scores
    with and without them.
    """

    ngram: Positive = 13
    """Words of a passage that item and training set share (Brown et al. 2020, appendix
    C).
    """
    min_coverage: Share = 0.5
    """Smallest share of an item's words in shared passages at which the item counts as
    contaminated.
    """
    rows: Positive = 20_000
    """Largest number of rows to search, chosen by hash from those that pre-training has
    read.
    """


class CanaryTest(Section):
    """Exposure and extraction of the secrets that the step `canaries` inserted."""

    references: Positive = 255
    """Random secrets that each one is compared with; the largest exposure is
    log2(references + 1).
    """


class Evaluate(Seeded):
    """Measurements on held-out data and on tasks, and generated samples."""

    prompts: tuple[str, ...] = ("The", "def", "Return")
    """Texts that the pre-trained model continues, and that the tuned models are
    asked.
    """
    max_new_tokens: Positive = 48
    """Longest continuation in tokens."""
    temperature: NotNegative = 0.8
    """Sampling temperature; 0 takes the most likely token."""
    tasks: tuple[Task, ...] = ()
    """Questions with known answers."""
    suites: Omissible[tuple[Suite, ...]] = ()
    """Suites of tasks by name, with scores centred between chance and 1, and published
    scores of other models.
    """
    bootstrap_samples: Positive = 1000
    """Bootstrap samples for every confidence interval."""
    contamination: Contamination | None = None
    """Search for tasks in the training text; not run if absent."""
    canaries: Omissible[CanaryTest | None] = None
    """Memorisation of the secrets of the step `canaries`; not measured if absent."""
    seed: int | None = None
    """Seed of sampling and of the bootstrap; the manifest's if absent."""

    def _problems(self) -> Iterator[str]:
        names = [
            *(task.name for task in self.tasks),
            *(suite.suite for suite in self.suites),
        ]
        if twice := repeated(names):
            yield f"two tasks or suites are called {twice!r}; give each its own name"


class Export(Section):
    """The exported folder, which transformers loads."""

    dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of the exported weights."""
    max_shard_bytes: Positive = 5_000_000_000
    """Largest file of weights in bytes; a larger model becomes several files with
    `model.safetensors.index.json` (transformers: max_shard_size, 5 GB).
    """
    weights: Literal["raw", "average"] = "raw"
    """`raw`: the trained weights; `average`: their running mean, which `average` of the
    last training keeps.
    """
    gguf: Omissible[tuple[GgufKind, ...]] = ()
    """Additional GGUF files: a file `model-KIND.gguf` of each of these kinds, which
    llama.cpp runs, and a Modelfile for Ollama of the first. Needs gristmill[gguf] and a
    byte-level BPE tokenizer; see docs/exports.md.
    """

    @field_validator("gguf")
    @classmethod
    def _kinds_once(cls, kinds: tuple[GgufKind, ...]) -> tuple[GgufKind, ...]:
        if twice := repeated(kinds):
            raise ValueError(f"{twice} is given twice; keep one")
        return kinds


class Documents(Section):
    """The documents in widely readable files, as `gristmill export-documents` writes
    them.
    """

    format: Literal["parquet", "jsonl", "hf"] = "parquet"
    """`parquet`: Parquet with zstd. `jsonl`: JSON lines, compressed by zstd. `hf`: a
    folder that `datasets.load_dataset` loads, with a dataset card and Croissant
    metadata.
    """
    columns: tuple[str, ...] | None = None
    """Columns in this order; if absent, all but `original_text`, the text before all
    edits.
    """
    where: str | None = None
    """SQL condition over the columns, as in `where` of a source; documents that do not
    fulfil it are left out.
    """
    dropped: bool = False
    """Write the documents that a step dropped, each with its reason, instead of the
    kept ones.
    """
    shard_bytes: Positive = 256_000_000
    """Largest number of text bytes (UTF-8) per file, unless a single document has
    more.
    """

    def _problems(self) -> Iterator[str]:
        if twice := repeated(self.columns or ()):
            yield f"columns: {twice!r} is given twice; keep one"
        if self.columns == ():
            yield (
                "columns: the list is empty; name some, or leave the key out for all"
            )
