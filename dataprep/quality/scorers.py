"""Scores of the stage `quality`, and the function that measures the configured ones."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.dataprep.encoders.distil_classifier import (
    DISTILLED,
    ModelFile,
    load_distilled,
)
from gristmill.dataprep.fasttext.fasttext_predict import load_model
from gristmill.dataprep.quality.classifier import score_texts
from gristmill.dataprep.quality.perplexity import (
    load_scores,
    normalise,
    perplexities,
)
from gristmill.mixtures.steps.quality import Quality

Measure = Callable[[pa.Array], dict[str, np.ndarray]]
"""A function from n texts to columns of n values."""
ModelFiles = Mapping[str, ModelFile]
"""Model by name of its scorer."""


@dataclass(frozen=True)
class Score:
    """Ranking score of documents.

    Attributes:
        higher_is_better: False for perplexities.
        edges: bin edges of its histogram.
    """

    higher_is_better: bool
    edges: tuple[float, ...]


SHARES = tuple(round(step / 20, 2) for step in range(21))
PERPLEXITIES = tuple(float(round(10 ** (step / 4), 1)) for step in range(21))
"""Four bins per decade, from 1 to 100,000."""
BITS = tuple(round(step / 4, 2) for step in range(33))
LANGUAGE_MODEL = "gristmill.train.eval.document_scorer:load_scorer"
"""Loader of the scorer of a language model. It is a name, imported only if a manifest
asks for this score: data preparation runs without torch and does not import the layers
above it.
"""
SCORES: Mapping[str, Score] = {
    "quality": Score(True, SHARES),
    "perplexity": Score(False, PERPLEXITIES),
    "model_perplexity": Score(False, PERPLEXITIES),
    "bits_per_byte": Score(False, BITS),
}
"""Column -> score, in the order in which scores are tried."""


def make_measure(section: Quality, models: ModelFiles) -> Measure:
    """Function that measures the configured scores; models are loaded once per
    process.
    """
    scorers: list[Measure] = []
    if section.classifier is not None:
        classifier = load_model(
            models["classifier"]["path"], models["classifier"]["sha256"]
        )
        score_quality = partial(score_texts, classifier, section=section.classifier)
        scorers.append(lambda texts: {"quality": score_quality(texts)})
    if DISTILLED in models:
        distilled = load_distilled(section, models)
        scorers.append(lambda texts: {"quality": distilled(texts)})
    if section.perplexity is not None and "kenlm" in models:
        log_scores = load_scores(**models["kenlm"])
        perplexity = section.perplexity

        def measure_perplexity(texts: pa.Array) -> dict[str, np.ndarray]:
            normalised = normalise(
                texts.to_pylist(), perplexity.normalise, perplexity.max_characters
            )
            column = pa.array(normalised, pa.large_string())
            return {"perplexity": perplexities(log_scores, column)}

        scorers.append(measure_perplexity)
    if section.perplexity is not None and "language_model" in models:
        model = models["language_model"]
        score = load_language_model(
            model["path"], model["sha256"], section.perplexity.max_tokens
        )
        scorers.append(lambda texts: score(texts.to_pylist()))
    return lambda texts: {
        name: values for scorer in scorers for name, values in scorer(texts).items()
    }


def load_language_model(path: str, sha256: str, max_tokens: int) -> Any:
    """Scoring function from LANGUAGE_MODEL for a model folder."""
    module, _, name = LANGUAGE_MODEL.partition(":")
    return getattr(importlib.import_module(module), name)(path, sha256, max_tokens)
