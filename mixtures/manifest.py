"""What a manifest may say: the schema that every run is validated against before any work.

One YAML file names the sources, how they are prepared and mixed, and what is trained on them. Each section
below is one stage's own configuration: nothing else of the manifest reaches that stage, so that changing a key
changes that stage and those behind it, and nothing more. A section that is absent switches its stage off.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"

PREPARE_STAGES = ("filter", "dedup", "langid", "quality")
"""The stages that annotate documents, by the names that `prepare:` uses."""


class Section(BaseModel):
    """A part of the manifest: unknown keys are errors, values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Source(Section):
    """One named source of documents."""

    path: str
    """A file, a glob, a folder, an fsspec URL, `python-docs://` or `python-stdlib://`."""
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    """`auto` decides by file extension."""
    text_field: str = "text"
    """Column or JSON key that holds the text (JSONL and Parquet)."""
    id_field: str | None = None
    """Column or key kept as the document's locator; otherwise path and record number."""
    metadata_fields: tuple[str, ...] | None = None
    """Keys kept as metadata; all scalar ones if absent."""
    limit: Positive | None = None
    """Read at most this many documents."""
    licence: str | None = None
    """A note kept with the run; nothing is derived from it."""
    weight: Annotated[float, Field(ge=0.0)] = 1.0
    """Share of the mixture's tokens, relative to the other weights."""
    max_epochs: PositiveFloat = 1.0
    """How often a document may be repeated in the mixture."""
    where: str | None = None
    """SQL condition over the measured columns, evaluated when mixing: `"quality >= 0.6"`."""


class Ingest(Section):
    """How sources are cut into document shards."""

    shard_bytes: Positive = 16_000_000
    """Text bytes per document shard (UTF-8)."""
    max_quarantined: Fraction = 0.05
    """Share of records that may be unreadable before the stage fails."""


class GopherQuality(Section):
    """Thresholds of the Gopher quality rules (Rae et al. 2021, appendix A1.1)."""

    min_words: int = 50
    max_words: int = 100_000
    min_mean_word_length: float = 3.0
    max_mean_word_length: float = 10.0
    max_symbol_word_ratio: float = 0.1
    max_bullet_line_ratio: float = 0.9
    max_ellipsis_line_ratio: float = 0.3
    min_alpha_word_ratio: float = 0.8
    min_stop_words: int = 2


class GopherRepetition(Section):
    """Thresholds of the Gopher repetition rules (Rae et al. 2021, table A1)."""

    max_duplicate_line_ratio: float = 0.30
    max_duplicate_paragraph_ratio: float = 0.30
    max_duplicate_line_char_ratio: float = 0.20
    max_duplicate_paragraph_char_ratio: float = 0.20
    max_top_2gram_char_ratio: float = 0.20
    max_top_3gram_char_ratio: float = 0.18
    max_top_4gram_char_ratio: float = 0.16
    max_duplicate_5gram_char_ratio: float = 0.15
    max_duplicate_6gram_char_ratio: float = 0.14
    max_duplicate_7gram_char_ratio: float = 0.13
    max_duplicate_8gram_char_ratio: float = 0.12
    max_duplicate_9gram_char_ratio: float = 0.11
    max_duplicate_10gram_char_ratio: float = 0.10


class Rules(Section):
    """Which rule sets judge a document; absent ones do not."""

    gopher_quality: GopherQuality | None = None
    gopher_repetition: GopherRepetition | None = None


class Judging(Section):
    """What every preparing stage has in common."""

    sources: tuple[str, ...] | None = None
    """Judge only these sources; documents of the others pass unjudged."""
    max_quarantined: Fraction = 0.05
    """Share of documents that may raise an error before the stage fails."""


class Filter(Judging):
    """Heuristic quality rules."""

    rules: Rules = Rules(gopher_quality=GopherQuality(), gopher_repetition=GopherRepetition())

    @field_validator("rules", mode="before")
    @classmethod
    def _rules_as_list(cls, value: Any) -> Any:
        """Accept `[gopher_quality, {gopher_repetition: {...}}]` beside the plain mapping."""
        if not isinstance(value, list):
            return value
        rules: dict[str, Any] = {}
        for item in value:
            pairs = {item: {}} if isinstance(item, str) else item
            if not isinstance(pairs, dict):
                raise ValueError(f"a rule is a name or a mapping of one name to its thresholds, not {item!r}")
            for name, thresholds in pairs.items():
                rules[name] = {} if thresholds is None else thresholds
        return rules


class MinHash(Section):
    """Near-duplicate detection (Broder 1997; banding as in Leskovec et al., chapter 3)."""

    ngram: Positive = 5
    """Words per shingle."""
    bands: Positive = 14
    rows: Positive = 8
    """Permutations per band; bands x rows permutations in all."""
    threshold: Fraction = 0.75
    """Least true Jaccard similarity of a pair that shares a band (used when `verify`)."""
    verify: bool = True
    """Compute the true Jaccard similarity of every candidate pair."""
    seed: int = 1
    """Seed of datasketch's permutations."""


class Dedup(Judging):
    """Exact and near duplicates; one document of each cluster survives."""

    exact: bool = True
    minhash: MinHash | None = MinHash()
    keep: tuple[str, ...] = ("length desc", "source", "id")
    """Which member survives: columns in order, each with an optional `desc`."""


class LanguageId(Judging):
    """fastText lid.176 at document level."""

    keep: tuple[str, ...] = ("en",)
    threshold: Fraction = 0.65
    """Least score of the top language (FineWeb, CCNet: 0.65)."""
    max_characters: Positive = 2000
    """Only the first so many characters are looked at."""
    model: str | None = None
    """Path of lid.176.ftz; otherwise environment, cache, publisher, PyPI wheel, in that order."""


class Classifier(Section):
    """A fastText classifier trained in the stage."""

    positive: tuple[str, ...]
    negative: tuple[str, ...]
    epochs: Positive = 5
    word_ngrams: Positive = 2
    dimensions: Positive = 32
    buckets: Positive = 100_000
    learning_rate: PositiveFloat = 0.2
    max_characters: Positive = 2000
    holdout: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """Share of labelled documents, chosen by hash, that only measure the AUC."""
    max_documents: Positive = 50_000
    """At most so many documents per class are trained on, chosen by hash."""


class Quality(Judging):
    """Quality scores for every document."""

    classifier: Classifier
    threshold: Fraction | None = None
    """Drop documents that score lower; nothing is dropped if absent."""
    seed: int | None = None


PREPARE_SECTIONS: dict[str, type[Judging]] = {
    "filter": Filter,
    "dedup": Dedup,
    "langid": LanguageId,
    "quality": Quality,
}


class Step(Section):
    """One entry of `prepare:`: a mapping of one stage name to its configuration."""

    filter: Filter | None = None
    dedup: Dedup | None = None
    langid: LanguageId | None = None
    quality: Quality | None = None

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {value: {}}
        if isinstance(value, dict):
            return {key: ({} if item is None else item) for key, item in value.items()}
        return value

    @model_validator(mode="after")
    def _exactly_one(self) -> Step:
        if len(self.model_fields_set) != 1:
            raise ValueError(f"one stage per entry, one of {', '.join(PREPARE_STAGES)}")
        return self

    @property
    def stage(self) -> str:
        """The stage's name."""
        return next(iter(self.model_fields_set))

    @property
    def config(self) -> Judging:
        """The stage's configuration."""
        config: Judging = getattr(self, self.stage)
        return config


class Tokenizer(Section):
    """A byte-level BPE trained here, or any tokenizer.json."""

    path: str | None = None
    vocab_size: Annotated[int, Field(ge=264)] = 8192
    """256 bytes, the special tokens and the merges together."""
    sample_bytes: Positive = 50_000_000
    """Text that the merges are learnt from."""
    weights: dict[str, Annotated[float, Field(ge=0.0)]] | None = None
    """Shares of the sample per source; equal shares if absent (so that a new mixture keeps the tokenizer)."""
    seed: int | None = None


class Mix(Section):
    """The packed training set."""

    tokens: Positive
    """Tokens of the training set, rounded down to whole rows."""
    sequence_length: Annotated[int, Field(ge=8)] = 512
    packing: Literal["stream"] = "stream"
    validation: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.005
    """Share of duplicate clusters held out of training, chosen by hash."""
    max_validation_rows: Positive = 1024
    """Rows per source of the validation set at the most."""
    shard_rows: Positive | None = None
    """Rows per shard; about 64 MB a shard if absent."""
    seed: int | None = None


class Model(Section):
    """A Llama-style decoder."""

    layers: Positive = 4
    width: Positive = 128
    heads: Positive = 4
    kv_heads: Positive | None = None
    """Key and value heads (grouped-query attention); as many as `heads` if absent."""
    ffn_width: Positive | None = None
    """Width of the SwiGLU layer; 8/3 of `width`, rounded up to a multiple of 64, if absent."""
    rope_theta: PositiveFloat = 10_000.0
    norm_eps: PositiveFloat = 1e-5
    tied_embeddings: bool = True

    @model_validator(mode="after")
    def _divisible(self) -> Model:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(f"width {self.width} must be an even multiple of heads {self.heads}")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        return self


class Optimizer(Section):
    """AdamW (Loshchilov & Hutter 2019); weight decay on matrices only."""

    learning_rate: PositiveFloat = 1e-3
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    clip_norm: PositiveFloat = 1.0


class Schedule(Section):
    """Learning rate as a function of the step."""

    kind: Literal["wsd", "cosine", "linear", "constant"] = "wsd"
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    decay_fraction: Fraction = 0.3
    """Share of the steps in which WSD decays (Hu et al. 2024)."""
    final_fraction: Fraction = 0.0
    """Learning rate at the end, as a share of the peak."""


class Training(Section):
    """What the three training stages have in common."""

    steps: Positive
    global_batch_size: Positive = 16
    """Rows (or pairs) per optimizer step, over all ranks and micro-batches."""
    micro_batch_size: Positive = 16
    """Rows (or pairs) per forward pass on one rank at the most."""
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Compute dtype; `auto` is bf16 on a GPU and fp32 on a CPU."""
    log_every: Positive = 10
    spike_sigma: PositiveFloat = 6.0
    """A step whose loss lies so many deviations over the running mean is skipped (OLMo-core: 6)."""
    seed: int | None = None


class Pretrain(Training):
    """Next-token training on the packed set."""

    model: Model = Model()
    validate_every: Positive = 100
    """Steps between validations."""


class Examples(Section):
    """One set of instructions or preferences."""

    path: str
    """A JSONL file or glob, or `python-docs://`."""
    limit: Positive | None = None


class Sft(Training):
    """Supervised fine-tuning on conversations; loss on the assistant's turns."""

    data: Annotated[tuple[Examples, ...], Field(min_length=1)]
    sequence_length: Annotated[int, Field(ge=8)] | None = None
    """The mixture's if absent."""
    optimizer: Optimizer = Optimizer(learning_rate=3e-4, weight_decay=0.0)


class Dpo(Training):
    """Direct preference optimisation (Rafailov et al. 2023)."""

    data: Annotated[tuple[Examples, ...], Field(min_length=1)]
    beta: PositiveFloat = 0.1
    sequence_length: Annotated[int, Field(ge=8)] | None = None
    holdout: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """Share of pairs, chosen by hash of the prompt, that only measure the reward accuracy."""
    optimizer: Optimizer = Optimizer(learning_rate=5e-5, weight_decay=0.0)


class Evaluate(Section):
    """Measurements on held-out data, and samples."""

    prompts: tuple[str, ...] = ("The", "def", "Return")
    """Continued by the pre-trained model, and asked of the tuned ones."""
    max_new_tokens: Positive = 48
    temperature: Annotated[float, Field(ge=0.0)] = 0.8
    seed: int | None = None


class Export(Section):
    """The folder that transformers loads."""

    dtype: Literal["fp32", "bf16"] = "fp32"


class Engine(Section):
    """How the work is done; never enters a fingerprint, never changes a result."""

    runner: str = "local"
    """`local`, or the name of any Beam runner."""
    options: dict[str, Any] = {}
    """Beam pipeline options for a runner other than `local`."""
    workers: Positive = 2
    """Parallel Beam workers."""
    ranks: Positive = 1
    """Training processes (torchrun's --nproc-per-node)."""
    checkpoint_every: Positive = 100
    """Training steps between checkpoints."""
    keep_checkpoints: Annotated[int, Field(ge=2)] = 2


class Manifest(Section):
    """A whole run."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    seed: int = 0
    sources: Annotated[dict[str, Source], Field(min_length=1)]
    ingest: Ingest = Ingest()
    prepare: tuple[Step, ...] = ()
    tokenizer: Tokenizer | None = None
    mix: Mix | None = None
    pretrain: Pretrain | None = None
    sft: Sft | None = None
    dpo: Dpo | None = None
    evaluate: Evaluate | None = None
    export: Export | None = None
    engine: Engine = Engine()

    @model_validator(mode="before")
    @classmethod
    def _empty_sections(cls, value: Any) -> Any:
        """`evaluate:` with nothing behind it asks for the defaults, not for switching the stage off."""
        if not isinstance(value, dict):
            return value
        return {key: ({} if item is None and key in ("tokenizer", "evaluate", "export") else item)
                for key, item in value.items()}
