"""The sections `evaluate` and `export`: what is measured and handed on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from gristmill.mixtures.own_code import NAME_TAG, OWN_TAG, OwnCall, own_or_name
from gristmill.mixtures.section import NAME_PATTERN, OutsidePath, Positive, Section, Seeded

GENERATION_METRICS = ("exact_match", "contains", "f1", "bleu", "chrf", "rouge1", "rouge2", "rougeL")
GenerationMetric = Literal["exact_match", "contains", "f1", "bleu", "chrf", "rouge1", "rouge2", "rougeL"]


class OwnMetric(OwnCall):
    """A metric of your own: a function of `predictions` and `references` that gives a number, or one for each item.
    Examples are in docs/own-training.md."""

    takes: ClassVar[tuple[str, ...] | None] = ("predictions", "references")

    name: Annotated[str, Field(pattern=NAME_PATTERN)] | None = None
    """What the results call it; its function's name if absent."""

    @property
    def called(self) -> str:
        """What the results call it."""
        return self.name or self.use.called


Metric = Annotated[Annotated[GenerationMetric, Tag(NAME_TAG)] | Annotated[OwnMetric, Tag(OWN_TAG)],
                   Discriminator(own_or_name)]


class Task(Section):
    """Questions with known answers, from a local file.

    Scores are those of lm-evaluation-harness for the same texts (its `multiple_choice`, `loglikelihood`,
    `loglikelihood_rolling` and `generate_until`). `prompt`, `choices` and `answer` are Jinja templates over the fields
    of an item, or the bare name of a field.
    """

    renamed: ClassVar[Mapping[str, str]] = {
        "delimiter": "target_delimiter", "shots": "num_fewshot", "shots_path": "fewshot_path",
        "shot_delimiter": "fewshot_delimiter"}

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    """What the results are called by."""
    path: OutsidePath
    """JSONL, JSON, CSV, TSV, Parquet or text, compressed or not; a glob is all its files in order."""
    kind: Literal["multiple_choice", "cloze", "rolling", "generate"]
    """`multiple_choice`: the likeliest of some answers; `cloze`: the likelihood of the one answer; `rolling`: that of
    a whole text; `generate`: the generated text, compared with one or more references."""
    prompt: str = "prompt"
    """What stands before the answer; the whole text for `rolling`."""
    choices: str | tuple[str, ...] = "choices"
    """The answers to choose from: a field that is a list (or an object with the list `text`), or texts, fields or
    templates, one for each."""
    answer: str = "answer"
    """The right one: for `multiple_choice` its place from 0, its letter or its text; a text for `cloze`, which stands
    directly behind the prompt, so that it usually begins with a blank (`" {{answer}}"`); a text or a list of texts for
    `generate`."""
    target_delimiter: str = " "
    """Between the prompt and the choices of `multiple_choice`, and between prompt and answer of solved items."""
    chat_template: bool = False
    """Ask through the chat template: the prompt is the user's turn, solved items are turns before it, and the answer is
    the assistant's, without delimiter (lm-evaluation-harness: --apply_chat_template)."""
    num_fewshot: Annotated[int, Field(ge=0)] = 0
    """Solved items before each prompt: the first ones of `fewshot_path`, or of `path`, which are then not asked."""
    fewshot_path: OutsidePath | None = None
    """Another file to take them from."""
    fewshot_delimiter: str = "\n\n"
    """Between solved items."""
    metrics: tuple[Metric, ...] = ("exact_match",)
    """For `generate`: `bleu` and `chrf` by sacrebleu over the corpus, `rouge*` by rouge-score, `f1` over words, and
    functions of your own, `{use: ./metrics.py:mine}`."""
    stop: tuple[str, ...] = ("\n",)
    """For `generate`: texts that end what the model writes."""
    max_new_tokens: Positive = 64
    """For `generate`: longest answer."""
    limit: Positive | None = None
    """Ask at most this many items, the first ones."""

    @property
    def own_metrics(self) -> tuple[OwnMetric, ...]:
        """Those of the metrics that are functions of the user's."""
        return tuple(one for one in self.metrics if isinstance(one, OwnMetric))

    @property
    def built_in_metrics(self) -> tuple[GenerationMetric, ...]:
        """The others."""
        return tuple(one for one in self.metrics if not isinstance(one, OwnMetric))

    @model_validator(mode="after")
    def _own_metrics_are_asked(self) -> Task:
        names = [*self.built_in_metrics, *(one.called for one in self.own_metrics)]
        if self.own_metrics and self.kind != "generate":
            raise ValueError(f"metrics: {self.own_metrics[0].called} compares texts that a model writes, but the task "
                             f"is of kind {self.kind}; make it one of kind generate")
        if self.own_metrics and (twice := sorted({name for name in names if names.count(name) > 1})):
            raise ValueError(f"metrics: two are called {twice[0]}; give one of them a `name` of its own")
        return self

    @model_validator(mode="after")
    def _fits_the_kind(self) -> Task:
        if self.kind == "rolling" and self.num_fewshot:
            raise ValueError("a task of kind rolling has no prompts, so no solved items before them; remove "
                             "num_fewshot")
        if self.kind == "rolling" and self.chat_template:
            raise ValueError("a task of kind rolling has no prompts to ask through the chat template; remove "
                             "chat_template")
        return self


class Memorisation(Section):
    """Whether the model has memorised training documents (Carlini et al. 2022)."""

    documents: Positive = 200
    """Documents to test per number of copies, chosen by hash among those that pre-training has read. As many held-out
    ones are the control."""
    prefix_tokens: Positive = 32
    """Tokens of a document that the model is given."""
    suffix_tokens: Positive = 32
    """Tokens that greedy decoding must reproduce for the document to count as memorised."""


class Contamination(Section):
    """Whether items of the tasks are in the training text, and how much better the model does on those."""

    ngram: Positive = 13
    """Words of a passage that item and training set share (Brown et al. 2020, appendix C)."""
    min_coverage: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Smallest share of its words in shared passages that makes an item contaminated."""
    rows: Positive = 20_000
    """Most rows that are searched, chosen by hash among those that pre-training has read."""


class Evaluate(Seeded):
    """Measurements on held-out data, on tasks, and samples."""

    renamed: ClassVar[Mapping[str, str]] = {"resamples": "bootstrap_samples"}

    prompts: tuple[str, ...] = ("The", "def", "Return")
    """Continued by the pre-trained model, and asked of the tuned ones."""
    max_new_tokens: Positive = 48
    """Longest continuation."""
    temperature: Annotated[float, Field(ge=0.0)] = 0.8
    """Temperature of sampling; 0 takes the likeliest token."""
    tasks: tuple[Task, ...] = ()
    """Questions with known answers."""
    bootstrap_samples: Positive = 1000
    """Samples of the bootstrap that every confidence interval comes from."""
    memorisation: Memorisation | None = None
    """Absent: not measured."""
    contamination: Contamination | None = None
    """Absent: not measured."""
    seed: int | None = None
    """Seed of sampling and of the bootstrap; the manifest's if absent."""

    @model_validator(mode="after")
    def _distinct(self) -> Evaluate:
        names = [task.name for task in self.tasks]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two tasks are called {min(twice)!r}; give each its own name")
        return self


class Export(Section):
    """The folder that transformers loads."""

    dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of the exported weights."""
    int8: bool = False
    """Round the layers' matrices to 8 bits with a scale per row: about a quarter of fp32's size, half of bf16's.
    transformers loads the folder where torchao is installed; the summary says what it costs in perplexity on the
    mixture's held-out rows. Not for a mixture of experts."""
    max_shard_bytes: Positive = 5_000_000_000
    """Most bytes of a file of weights; a larger model is several, with `model.safetensors.index.json` (transformers:
    max_shard_size, 5 GB)."""
    weights: Literal["raw", "average"] = "raw"
    """`raw`: the trained weights; `average`: their running mean, which the last training's `average` keeps."""


class Documents(Section):
    """The documents as files that everybody reads, as `gristmill export-documents` writes them."""

    format: Literal["parquet", "jsonl", "hf"] = "parquet"
    """`parquet`: Parquet with zstd. `jsonl`: JSON lines, compressed by zstd. `hf`: a folder that
    `datasets.load_dataset` loads, with a dataset card and Croissant metadata."""
    columns: tuple[str, ...] | None = None
    """Columns, in this order; all if absent, but for `original_text`, the text before all edits."""
    where: str | None = None
    """SQL condition over the columns, of the same kind as that of a source; documents that it is not true of are left
    out."""
    dropped: bool = False
    """Write the documents that a step dropped, each with its reason, in place of those that all kept."""
    shard_bytes: Positive = 256_000_000
    """Text bytes (UTF-8) per file at most, unless one document alone has more."""

    @model_validator(mode="after")
    def _columns_once(self) -> Documents:
        twice = [name for name in self.columns or () if (self.columns or ()).count(name) > 1]
        if twice:
            raise ValueError(f"columns: {twice[0]!r} is given twice; keep one")
        if self.columns == ():
            raise ValueError("columns: none are given; name some, or leave the key out for all")
        return self
