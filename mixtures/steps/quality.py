"""The section `quality`: scores of documents, and thresholds on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from gristmill.mixtures.base import (
    Fraction,
    InnerFraction,
    Judging,
    OutsidePath,
    Positive,
    PositiveFloat,
    Section,
    Seeded,
    Share,
)
from gristmill.mixtures.schema.encoder_settings import ReadingModel
from gristmill.mixtures.steps.asked_model import AskedModel
from gristmill.mixtures.steps.judge import Question
from gristmill.mixtures.yaml_text import unknown_name

Score = Literal["quality", "perplexity", "model_perplexity", "bits_per_byte"]


class Classifier(Section):
    """A fastText classifier: trained in the stage to separate two classes of documents,
    or an existing one.
    """

    positive: tuple[str, ...] = ()
    """Sources of good documents. With an existing `model` the classes only measure how
    well it separates them.
    """
    negative: tuple[str, ...] = ()
    """Sources of documents that are not good."""
    positive_files: tuple[OutsidePath, ...] = ()
    """Files of good texts besides the sources: JSON lines or Parquet (field `text`), or
    plain lines, from which fastText's labels are removed.
    """
    negative_files: tuple[OutsidePath, ...] = ()
    """Files of texts that are not good, in the same formats."""
    model: OutsidePath | None = None
    """A fastText model (.bin, .ftz) to use instead of training one, for instance
    DCLM's.
    """
    label: str = "__label__positive"
    """Label of good text in an existing model; DCLM's is `__label__hq`."""
    lower: bool | None = None
    """Convert texts to lower case first; if absent, true for a classifier trained here,
    and false for an existing model, which must see text as in its training.
    """
    max_characters: Positive | None = None
    """Characters of a text that are read: 2,000 for a classifier trained here, all for
    an existing model.
    """
    epochs: Positive | None = None
    """Passes over the training documents. If absent, as many as read 40,000 documents,
    from 5 to 50: 50 up to 800 documents, 5 from 8,000 on. On 50 to 24,000 judged web
    pages, film reviews and headlines, five passes cost up to 0.19 of AUC on held-out
    ones, and twice as many gained 0.03 at most, mostly nothing.
    """
    word_ngrams: Positive = 2
    """Longest word sequences that are features."""
    dimensions: Positive = 32
    """Width of the word vectors."""
    buckets: Positive = 100_000
    """Hash buckets of the word sequences."""
    learning_rate: PositiveFloat = 0.5
    """fastText's initial learning rate. On the same texts 0.5 was up to 0.13 of AUC
    better than 0.2, and nowhere more than 0.01 worse.
    """
    holdout: InnerFraction = 0.1
    """Share of labelled documents, chosen by hash, that are used only for
    measurement.
    """
    max_documents: Positive = 50_000
    """Largest number of training documents per class, chosen by hash."""

    @property
    def has_classes(self) -> bool:
        """True if there are examples of both classes."""
        return bool(
            (self.positive or self.positive_files)
            and (self.negative or self.negative_files)
        )

    def _problems(self) -> Iterator[str]:
        in_both_classes = sorted(
            {*self.positive, *self.positive_files}
            & {*self.negative, *self.negative_files}
        )
        if in_both_classes:
            yield (
                f"{', '.join(in_both_classes)} is both positive and "
                "negative; leave it in one class"
            )
        if self.model is None and not self.has_classes:
            yield (
                "a classifier needs both classes: name sources as `positive` and "
                "`negative` (or "
                "files as `positive_files` and `negative_files`), or give a `model`"
            )


class Perplexity(Section):
    """Perplexity of a document under a language model: low for text like its training
    text.
    """

    kenlm: OutsidePath | None = None
    """An n-gram model: an ARPA file, which KenLM's program `lmplz` trains on texts, or
    a KenLM binary, a local file of order 6 at most. The package kenlm reads it and
    scores with it (install `gristmill[kenlm]`); measures `perplexity`.
    """
    model: OutsidePath | None = None
    """A language model trained by gristmill: the folder that the stage `export` writes
    (config.json, model.safetensors, tokenizer.json); measures `model_perplexity` (per
    token) and `bits_per_byte`, which is comparable between models with different
    tokenizers. Needs torch on the workers, and a local folder.
    """
    max_tokens: Positive = 1024
    """Largest number of tokens of a document that `model` scores."""
    normalise: Literal["ccnet", "lower", "none"] = "ccnet"
    """Normalisation of texts: as in CCNet (lower case, no accents, digits as 0,
    punctuation in ASCII), only lower case, or none. A model needs the one with which it
    was trained.
    """
    max_characters: Positive | None = None
    """Characters of a document that are read; all if absent."""
    buckets: tuple[Share, Share] | None = None
    """Shares for the column `perplexity_bucket`: `head` for the first share of the
    documents, those of the lowest perplexity, `middle` up to the second share, `tail`
    for the others. CCNet's code has 0.3 and 0.6, on its own reference text.
    """

    def _problems(self) -> Iterator[str]:
        if self.kenlm is None and self.model is None:
            yield "perplexity needs a model: `kenlm` or `model`"
        if self.buckets is not None and self.kenlm is None:
            yield "buckets need an n-gram model's perplexity; add `kenlm`"
        if self.buckets is not None and self.buckets[0] > self.buckets[1]:
            yield "buckets must be two shares in ascending order, such as [0.3, 0.6]"


class Judge(Question):
    """Origin of the scores from which a classifier learns, and the limit of good
    scores.
    """

    added = ("model", "score", *Question.model_fields)
    column: str | None = None
    """A column that an earlier step has measured: with a model, a function, or a
    language model as judge. The classifier does not learn from documents without a
    value.
    """
    metadata: str | None = None
    """A key of the documents' metadata instead, such as a score that came with them."""
    model: AskedModel | None = None
    """A language model instead, which judges only the documents of the sample. The
    classifier does not learn from documents without a usable answer. See
    docs/judges.md.
    """
    score: str | None = None
    """Property of the answers that is the score; if absent, the first that is a number
    or a boolean.
    """
    at_least: float
    """Smallest score of good documents; all others are not good (FineWeb-Edu: 3 of
    5).
    """

    def _problems(self) -> Iterator[str]:
        if [self.column, self.metadata, self.model].count(None) != 2:
            yield (
                "a judge's scores are a `column`, a key of the `metadata`, or the "
                "answers of a `model`: give one of them"
            )
        if self.model is None:
            changed = self.changed_keys()
            if unused := [name for name in self.added if name in changed]:
                yield (
                    f"{', '.join(unused)}: only for a `model`; give one, or remove this"
                )
        elif self.score_name not in self.scores:
            yield (
                "score: no number or boolean of the answers is called "
                f"{unknown_name(self.score_name, self.scores)}"
            )

    @property
    def score_name(self) -> str:
        """Property of the answers that is the score."""
        return self.score or next(iter(self.scores), "score")


class QualityThresholds(Section):
    """Bounds on scores; the bound itself passes, as does a document without the
    score.
    """

    min_quality: Fraction | None = None
    """Smallest probability of the classifier's good class."""
    min_perplexity: PositiveFloat | None = None
    """Smallest perplexity under the n-gram model; text of very low perplexity repeats
    itself.
    """
    max_perplexity: PositiveFloat | None = None
    """Largest perplexity under the n-gram model (Data-Juicer: 1500)."""
    max_model_perplexity: PositiveFloat | None = None
    """Largest perplexity per token under the given language model."""
    max_bits_per_byte: PositiveFloat | None = None
    """Largest number of bits per byte under the given language model."""


THRESHOLDS = tuple(QualityThresholds.model_fields)
SCORE_OF_THRESHOLD = {name: name.partition("_")[2] for name in THRESHOLDS}


class Quality(QualityThresholds, Judging, Seeded):
    """Quality scores for every document. Nothing is dropped unless a threshold or
    `keep_top` is set.
    """

    added = ("judge", "sample", "distil", "embedding")
    classifier: Classifier | None = None
    """Classifier that measures `quality`."""
    judge: Judge | None = None
    """Scores of a sample from which `distil` learns."""
    sample: Positive = 20_000
    """Number of documents for learning and measurement, chosen by hash from those that
    the judge has scored; with `judge.model`, those that it judges.
    """
    distil: Literal["embedding+linear", "fasttext"] | None = None
    """Train a small classifier on the judge's scores and measure `quality` with it, the
    probability that the judge finds a document good: scikit-learn's logistic regression
    on sentence embeddings, or fastText. See docs/annotators.md.
    """
    embedding: ReadingModel | None = None
    """Folder of the sentence embedding model for `embedding+linear`."""
    perplexity: Perplexity | None = None
    """Language models that measure `perplexity`, or `model_perplexity` and
    `bits_per_byte`.
    """
    keep_top: Share | None = None
    """Share of the judged documents to keep, the best by one score: ceil(share *
    documents) of them; documents with the same score are ordered by a hash of their
    ids. DCLM keeps the best 0.1. Thresholds apply as well; a document without the score
    (no words, for a perplexity) is not ranked and passes.
    """
    keep_top_by: Score | None = None
    """The score for `keep_top`; the first configured one if absent."""
    per_source: bool = False
    """Apply `keep_top` and `buckets` to every source separately, instead of to all
    documents together.
    """
    seed: int | None = None
    """Seed of the hashes that choose documents, and of fastText; the manifest's if
    absent.
    """

    @property
    def scores(self) -> tuple[str, ...]:
        """Columns by which documents can be ranked."""
        ngrams = self.perplexity is not None and self.perplexity.kenlm is not None
        model = self.perplexity is not None and self.perplexity.model is not None
        is_measured = {
            "quality": self.classifier is not None or self.distil is not None,
            "perplexity": ngrams,
            "model_perplexity": model,
            "bits_per_byte": model,
        }
        return tuple(name for name, measured in is_measured.items() if measured)

    @property
    def ranked_by(self) -> str:
        """The score that `keep_top` uses."""
        return self.keep_top_by or self.scores[0]

    def _problems(self) -> Iterator[str]:
        if (self.judge is None) != (self.distil is None):
            yield (
                "`judge` gives the scores from which `distil` learns: "
                "set both, or neither"
            )
        if self.distil is not None and self.classifier is not None:
            yield "`classifier` and `distil` both measure `quality`; keep one of them"
        if (self.distil == "embedding+linear") != (self.embedding is not None):
            yield (
                "`embedding` is the model of `distil: "
                "embedding+linear`: set both, or neither"
            )
        if not self.scores:
            yield (
                "nothing to measure: set at least one of classifier, distil, perplexity"
            )
        used = {
            name: SCORE_OF_THRESHOLD[name]
            for name in THRESHOLDS
            if getattr(self, name) is not None
        }
        if self.keep_top_by is not None:
            used["keep_top_by"] = self.keep_top_by
        for name, score in used.items():
            if score not in self.scores:
                yield (
                    f"{name} needs the score {score}, which is not measured; "
                    f"measured: {', '.join(self.scores)}"
                )
        if self.keep_top is None and self.keep_top_by is not None:
            yield "keep_top_by chooses the score of keep_top; set keep_top too"
        buckets = self.perplexity is not None and self.perplexity.buckets is not None
        if self.per_source and self.keep_top is None and not buckets:
            yield (
                "per_source changes how keep_top and buckets choose; "
                "set one of them too"
            )
