"""The section `quality`: how documents are scored, and which scores are too bad."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gristmill.mixtures.base import Fraction, Judging, OutsidePath, Positive, PositiveFloat, Section, Seeded
from gristmill.mixtures.encoder_settings import ReadingModel
from gristmill.mixtures.steps.asked_model import AskedModel
from gristmill.mixtures.steps.judge import Question
from gristmill.mixtures.yaml_text import did_you_mean

Share = Annotated[float, Field(gt=0.0, le=1.0)]
Score = Literal["quality", "perplexity", "model_perplexity", "bits_per_byte", "heuristic_score"]


class Classifier(Section):
    """A fastText classifier: trained in the stage to tell two classes of documents apart, or a given one."""

    positive: tuple[str, ...] = ()
    """Sources whose documents are good. With a given `model` the classes only measure how well it tells them apart."""
    negative: tuple[str, ...] = ()
    """Sources whose documents are not."""
    positive_files: tuple[OutsidePath, ...] = ()
    """Good texts from files beside the sources: JSON lines or Parquet (field `text`), or plain lines, from which
    fastText's labels are taken off."""
    negative_files: tuple[OutsidePath, ...] = ()
    """Texts that are not good, likewise."""
    model: OutsidePath | None = None
    """A fastText model (.bin, .ftz) to use instead of training one, for instance DCLM's."""
    label: str = "__label__positive"
    """The given model's label of good text; DCLM's is `__label__hq`."""
    lower: bool | None = None
    """Whether texts are put in lower case first: true where the classifier is trained here, false for a given model,
    which must see text as it was trained on it."""
    max_characters: Positive | None = None
    """Characters of a text that are looked at: 2,000 where the classifier is trained here, all for a given model."""
    epochs: Positive | None = None
    """Passes over the training documents. If absent as many as read 40,000 documents, from 5 to 50: 50 up to 800
    documents, 5 from 8,000 on. On 50 to 24,000 judged web pages, film reviews and headlines five passes cost up to 0.19
    of AUC on held-out ones, and twice as many gained 0.03 at most, mostly nothing."""
    word_ngrams: Positive = 2
    """Longest word sequences that are features."""
    dimensions: Positive = 32
    """Width of the word vectors."""
    buckets: Positive = 100_000
    """Hash buckets of the word sequences."""
    learning_rate: PositiveFloat = 0.5
    """fastText's first learning rate. On the same texts 0.5 was up to 0.13 of AUC better than 0.2, and nowhere
    more than 0.01 worse."""
    holdout: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """Share of labelled documents, chosen by hash, that only measure."""
    max_documents: Positive = 50_000
    """At most this many documents per class are trained on, chosen by hash."""

    @property
    def has_classes(self) -> bool:
        """Whether there are examples of both classes."""
        return bool((self.positive or self.positive_files) and (self.negative or self.negative_files))

    @model_validator(mode="after")
    def _can_work(self) -> Classifier:
        both = sorted({*self.positive, *self.positive_files} & {*self.negative, *self.negative_files})
        if both:
            raise ValueError(f"{', '.join(both)} is both positive and negative; leave it in one class")
        if self.model is None and not self.has_classes:
            raise ValueError(
                "a classifier is trained on both classes: name sources as `positive` and `negative` (or "
                "files as `positive_files` and `negative_files`), or give a `model`"
            )
        return self


class NgramModel(Section):
    """An n-gram model that is trained in the stage: interpolated modified Kneser-Ney smoothing, on words.

    Two are trained, each on half of the documents, and every document is scored by the one that has not seen it.
    """

    sources: tuple[str, ...]
    """Whose kept documents it is trained on: text of the kind that is wanted (CCNet: Wikipedia)."""
    order: Annotated[int, Field(ge=2, le=6)] = 5
    """Words in the longest sequences (CCNet: 5)."""
    max_bytes: Positive = 20_000_000
    """So much text is trained on, in documents chosen by hash; at order 5 training takes 20 times as much memory."""


class Perplexity(Section):
    """How surprised a language model is by a document: low is like what the model was trained on."""

    ngram: NgramModel | None = None
    """Train an n-gram model; measures `perplexity`."""
    kenlm: OutsidePath | None = None
    """A given n-gram model instead: an ARPA file or a binary of KenLM's, a local file of order 6 at most. The package
    kenlm reads it and scores by it (install `gristmill[kenlm]`); measures `perplexity`."""
    model: OutsidePath | None = None
    """A language model trained by gristmill: the folder that the stage `export` writes (config.json,
    model.safetensors, tokenizer.json); measures `model_perplexity` (per token) and `bits_per_byte`, which compares
    models with different tokenizers. Takes torch on the workers, and a local folder."""
    max_tokens: Positive = 1024
    """Most tokens of a document that `model` scores."""
    normalise: Literal["ccnet", "lower", "none"] = "ccnet"
    """What is done to texts first, in training too: as CCNet does (lower case, no accents, digits as 0, marks in
    ASCII), lower case alone, or nothing. A given model needs what it was trained with."""
    max_characters: Positive | None = None
    """Characters of a document that are looked at; all if absent."""
    buckets: tuple[Share, Share] | None = None
    """Column `perplexity_bucket`: `head` for this share of the documents, those of the lowest perplexity, `middle` up
    to the second share, `tail` for the others. CCNet's code has 0.3 and 0.6, counted on its own reference text."""

    @property
    def has_ngrams(self) -> bool:
        """Whether there is an n-gram model."""
        return self.ngram is not None or self.kenlm is not None

    @model_validator(mode="after")
    def _can_work(self) -> Perplexity:
        if self.ngram is not None and self.kenlm is not None:
            raise ValueError("perplexity has one n-gram model: either `ngram`, to train one, or `kenlm`")
        if not (self.has_ngrams or self.model):
            raise ValueError("perplexity needs a model: `ngram` to train one, or `kenlm`, or `model`")
        if self.buckets is not None and not self.has_ngrams:
            raise ValueError("buckets are of an n-gram model's perplexity; add `ngram` or `kenlm`")
        if self.buckets is not None and self.buckets[0] > self.buckets[1]:
            raise ValueError("buckets are two shares in ascending order, such as [0.3, 0.6]")
        return self


class Judge(Question):
    """Who scores the documents that a classifier learns from, and which scores are good."""

    added = ("model", "second", "score", *Question.model_fields)
    column: str | None = None
    """A column that a step before has measured: of a model, of a function, of a judge that is asked. Documents without
    a value are not learnt from."""
    metadata: str | None = None
    """A key of the documents' metadata in its place, such as a score that came with them."""
    model: AskedModel | None = None
    """A language model in its place, which is asked about the documents of the sample alone. Those without a usable
    answer are not learnt from. See docs/judges.md."""
    second: AskedModel | None = None
    """Another model that is asked about the same documents: the summary says how far both agree. What is learnt is what
    the first one says."""
    score: str | None = None
    """The property of the answers that counts; the first that is a number, or true and false, if absent."""
    at_least: float
    """Documents with this score or more are good, all others are not (FineWeb-Edu: 3 of 5)."""

    @model_validator(mode="after")
    def _one_place(self) -> Judge:
        if sum(one is not None for one in (self.column, self.metadata, self.model)) != 1:
            raise ValueError(
                "a judge's scores are a `column`, a key of the `metadata`, or what a `model` answers: give one of them"
            )
        if self.model is None:
            defaults = {name: of.get_default(call_default_factory=True) for name, of in type(self).model_fields.items()}
            idle = [name for name in self.added if getattr(self, name) != defaults[name]]
            if idle:
                raise ValueError(f"{', '.join(idle)}: what a `model` is asked; give one, or remove this")
        elif self.score_name not in self.scores:
            raise ValueError(
                f"score: {self.score_name!r} is no number, nor true or false, of the answers"
                f"{did_you_mean(self.score_name, self.scores)}; there are "
                f"{', '.join(self.scores) or 'none'}"
            )
        return self

    @property
    def score_name(self) -> str:
        """The property of the answers that counts."""
        return self.score or next(iter(self.scores), "score")

    @property
    def models(self) -> list[AskedModel]:
        """Those that are asked, the one that is learnt from first."""
        return [model for model in (self.model, self.second) if model is not None]


class QualityThresholds(Section):
    """Bounds on scores; the bound itself passes, and so does a document that has no such score."""

    min_quality: Fraction | None = None
    """Least probability of the classifier's good class; `threshold` is another name for it."""
    min_perplexity: PositiveFloat | None = None
    """Text of the very lowest perplexity repeats itself."""
    max_perplexity: PositiveFloat | None = None
    """Largest perplexity under the n-gram model (Data-Juicer: 1500)."""
    max_model_perplexity: PositiveFloat | None = None
    """Largest perplexity per token under the given language model."""
    max_bits_per_byte: PositiveFloat | None = None
    """Largest number of bits per byte under the given language model."""
    min_heuristic_score: Fraction | None = None
    """Least score of plain statistics."""


THRESHOLDS = tuple(QualityThresholds.model_fields)
SCORE_OF_THRESHOLD = {name: name.partition("_")[2] for name in THRESHOLDS}


class Quality(QualityThresholds, Judging, Seeded):
    """Quality scores for every document. Nothing is dropped unless a threshold or `keep_top` is set."""

    added = ("judge", "sample", "distil", "embedding")
    classifier: Classifier | None = None
    """Measures `quality`."""
    judge: Judge | None = None
    """Whose scores of a sample are learnt from (`distil`)."""
    sample: Positive = 20_000
    """Documents that are learnt from and measured with, chosen by hash among those that the judge has scored; with
    `judge.model` those that it is asked about."""
    distil: Literal["embedding+linear", "fasttext"] | None = None
    """Train a small classifier on the judge's scores and let it measure `quality`, the probability that the judge finds
    a document good: scikit-learn's logistic regression on sentence embeddings, or fastText. See docs/annotators.md."""
    embedding: ReadingModel | None = None
    """The folder of a model of sentence embeddings, for `embedding+linear`."""
    perplexity: Perplexity | None = None
    """Measures `perplexity`, or `model_perplexity` and `bits_per_byte`."""
    heuristics: bool = False
    """Measure `heuristic_score`, a share in [0, 1] that no training is needed for
    (`dataprep/quality/heuristics.py`)."""
    keep_top: Share | None = None
    """Keep this share of the judged documents, the best by one score: ceil(share * documents) of them, documents of
    the same score in the order of a hash of their ids. DCLM keeps the best 0.1. Thresholds apply besides; a document
    that has no such score (no words, for a perplexity) is not ranked and passes."""
    keep_top_by: Score | None = None
    """Which score; the first configured one if absent."""
    per_source: bool = False
    """`keep_top` and `buckets` of every source by itself, instead of all documents together."""
    seed: int | None = None
    """Seed of the hashes that choose documents, and of fastText; the manifest's if absent."""

    @model_validator(mode="before")
    @classmethod
    def _threshold(cls, value: Any) -> Any:
        if not isinstance(value, dict) or "threshold" not in value:
            return value
        if value.get("min_quality") is not None:
            raise ValueError("threshold and min_quality are one setting; keep one of them")
        return {**{key: item for key, item in value.items() if key != "threshold"}, "min_quality": value["threshold"]}

    @property
    def scores(self) -> tuple[str, ...]:
        """The columns that documents can be ranked by."""
        ngrams = self.perplexity is not None and self.perplexity.has_ngrams
        model = self.perplexity is not None and self.perplexity.model is not None
        found = {
            "quality": self.classifier is not None or self.distil is not None,
            "perplexity": ngrams,
            "model_perplexity": model,
            "bits_per_byte": model,
            "heuristic_score": self.heuristics,
        }
        return tuple(name for name, wanted in found.items() if wanted)

    @property
    def ranked_by(self) -> str:
        """The score that `keep_top` looks at."""
        return self.keep_top_by or self.scores[0]

    @model_validator(mode="after")
    def _can_distil(self) -> Quality:
        if (self.judge is None) != (self.distil is None):
            raise ValueError("`judge` says what is learnt from and `distil` what learns: set both, or neither")
        if self.distil is not None and self.classifier is not None:
            raise ValueError("`classifier` and `distil` both measure `quality`; keep one of them")
        if (self.distil == "embedding+linear") != (self.embedding is not None):
            raise ValueError("`embedding` is the model of `distil: embedding+linear`: set both, or neither")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Quality:
        if not self.scores:
            raise ValueError(
                "nothing is to be measured: set at least one of classifier, distil, perplexity, heuristics"
            )
        used = {name: SCORE_OF_THRESHOLD[name] for name in THRESHOLDS if getattr(self, name) is not None}
        if self.keep_top_by is not None:
            used["keep_top_by"] = self.keep_top_by
        for name, score in used.items():
            if score not in self.scores:
                raise ValueError(
                    f"{name} needs the score {score}, which is not measured; measured: {', '.join(self.scores)}"
                )
        if self.keep_top is None and self.keep_top_by is not None:
            raise ValueError("keep_top_by says how keep_top chooses; set keep_top too")
        buckets = self.perplexity is not None and self.perplexity.buckets is not None
        if self.per_source and self.keep_top is None and not buckets:
            raise ValueError("per_source says how keep_top and buckets choose; set one of them too")
        return self
