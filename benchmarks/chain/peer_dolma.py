"""Taggers for Dolma's toolkit, which imports this file: its own taggers for fastText
name a model by an address, these by a file. Nothing of gristmill is imported.
"""

from __future__ import annotations

import os
from typing import Any

from dolma import add_tagger
from dolma.core.ft_tagger import BaseFastTextTagger, Prediction
from dolma.taggers.language import FastTextEnglishOnlyLanguageDocumentTagger

LANGUAGE_MODEL, CLASSIFIER = "BENCH_LANGUAGE_MODEL", "BENCH_CLASSIFIER"
"""Environment variables that name files."""


@add_tagger("english")
class English(FastTextEnglishOnlyLanguageDocumentTagger):
    """Dolma's tagger of English."""

    MODEL_PATH = os.environ.get(LANGUAGE_MODEL, "")


@add_tagger("classifier")
class Classifier(BaseFastTextTagger):
    """Tagger of all labels of the whole text, as Dolma's taggers of quality."""

    def __init__(self) -> None:
        super().__init__(
            model_path=os.environ[CLASSIFIER], model_mode=self.DOCUMENT_LEVEL_TAGGER
        )

    def predict_slice(self, text_slice: Any) -> list[Prediction]:
        """Return every label with its score."""
        labels, scores = self.classifier.predict(
            " ".join(text_slice.text.split()), k=-1
        )
        return [
            Prediction(label.removeprefix("__label__"), float(score))
            for label, score in zip(labels, scores, strict=True)
        ]
