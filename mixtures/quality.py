"""The section `quality`: how documents are scored."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gristmill.mixtures.section import Fraction, Judging, Positive, PositiveFloat, Section


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
