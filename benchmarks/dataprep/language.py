"""Accuracy of language identification on labelled text: translations of the Universal
Declaration of Human Rights.

One file per translation, named by ISO 639-3 code, in NLTK's `udhr2`; whatlang's example
sentences, one per language; both in `checkout.data_folder`. Languages without a label
of lid.176 are left out, close relatives (Bosnian and Croatian, Asturian and Spanish)
are not, and cause most of the errors.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from benchmarks.checkout import data_folder
from benchmarks.measuring import Row, row
from benchmarks.public_data import language_model, read_archive
from gristmill.dataprep.fasttext.fasttext_models import MODEL_NAME, MODEL_SHA256
from gristmill.dataprep.fasttext.fasttext_predict import load_model
from gristmill.dataprep.langid.langid import measure
from gristmill.dataprep.langid.language_codes import parse_label, short_code
from gristmill.mixtures.steps.langid import LanguageId

LIKE_THE_MODEL = {"nob": "no", "als": "sq", "nds": "nds"}
"""Codes for which lid.176, trained on Wikipedia, has another name: its `als` is
Alemannic, `no` is Bokmål.
"""
WEAK = {
    "so": "Somali",
    "yo": "Yoruba",
    "bs": "Bosnian",
    "rm": "Romansh",
    "sc": "Sardinian",
    "su": "Sundanese",
    "gn": "Guarani",
    "wa": "Walloon",
}
"""Languages most of whose lines lid.176.ftz assigns to others."""


class Sample(NamedTuple):
    """A text and its language."""

    language: str
    text: str


def rows() -> Iterator[Row]:
    """Measure shares of texts."""
    folder = data_folder() / "langid"
    path = language_model()
    if path is None or not (folder / "udhr2.zip").exists():
        yield row(
            "language identification",
            None,
            None,
            "",
            f"{folder} has no labelled text, or there is no model",
        )
        return
    model = load_model(path, MODEL_SHA256)
    known = {parse_label(label).code for label in model.labels}
    documents = [
        sample
        for sample in read_declarations(folder / "udhr2.zip")
        if sample.language in known
    ]
    lines = [
        Sample(language, line)
        for language, text in documents
        for line in text.split("\n")
        if line.strip()
    ]
    sentences = [
        sample
        for sample in read_sentences(folder / "whatlang_examples.json")
        if sample.language in known
    ]
    section = LanguageId()
    yield from document_rows(model, documents, section)
    yield from line_rows(model, "line", lines)
    yield from line_rows(model, "sentence", sentences)
    yield from weakest_rows(model, lines)


def weakest_rows(model: Any, lines: Sequence[Sample]) -> Iterator[Row]:
    """Measure recall of single lines in languages that a small model knows little of,
    beside English lines.
    """
    recalls = {}
    for language in ("en", *WEAK):
        texts = [text for code, text in lines if code == language]
        recalls[language] = (
            accuracy(_identify(model, texts)[0], [language] * len(texts))
            if texts
            else None
        )
    for language, name in WEAK.items():
        ours, english = recalls[language], recalls["en"]
        if ours is not None and english is not None:
            yield row(
                f"line language recall, {name}",
                ours,
                english,
                "share",
                f"{MODEL_NAME}, lines; peer: English lines",
            )


def document_rows(
    model: Any, documents: Sequence[Sample], section: LanguageId
) -> Iterator[Row]:
    """Measure whole documents."""
    truth = [sample.language for sample in documents]
    texts = [text for _, text in documents]
    predicted, scores = _identify(model, texts)
    fused, _ = _identify(model, texts, newlines="delete")
    note = (
        f"{len(set(truth))} languages, {len(documents)} documents; peer: newlines "
        "deleted, as DCLM does"
    )
    yield row(
        "document language accuracy",
        accuracy(predicted, truth),
        accuracy(fused, truth),
        "share",
        note,
    )
    yield row(
        "document language macro F1",
        macro_f1(predicted, truth),
        macro_f1(fused, truth),
        "share",
        note,
    )
    is_sure = scores >= section.threshold
    yield row(
        f"document language precision at {section.threshold}",
        accuracy(_pick(predicted, is_sure), _pick(truth, is_sure)),
        accuracy(predicted, truth),
        "share",
        f"{is_sure.mean():.0%} of the documents reach the threshold; peer: no threshold",
    )


def line_rows(model: Any, unit: str, samples: Sequence[Sample]) -> Iterator[Row]:
    """Measure single lines or sentences."""
    truth = [sample.language for sample in samples]
    predicted, _ = _identify(model, [text for _, text in samples])
    note = f"{len(set(truth))} languages, {len(samples)} {unit}s"
    for name, agreement in (("accuracy", accuracy), ("macro F1", macro_f1)):
        value = agreement(predicted, truth)
        yield row(f"{unit} language {name}", value, None, "share", note)


def accuracy(predicted: Sequence[str], truth: Sequence[str]) -> float:
    """Return the share of n texts whose language is right."""
    return float(np.mean(np.array(predicted) == np.array(truth)))


def macro_f1(predicted: Sequence[str], truth: Sequence[str]) -> float:
    """Return the mean over the true languages of the harmonic mean of precision and
    recall.
    """
    predictions, labels = Counter(predicted), Counter(truth)
    right = Counter(
        label
        for label, prediction in zip(truth, predicted, strict=True)
        if label == prediction
    )
    return float(
        np.mean(
            [
                2 * right[label] / (predictions[label] + labels[label])
                for label in labels
            ]
        )
    )


def read_declarations(path: Path) -> list[Sample]:
    """Read the translations in NLTK's udhr2.zip (`spa.txt`, `por_BR.txt`), without
    indentation.
    """
    samples = []
    for name, text in read_archive(path).items():
        lines = [line.strip() for line in text.split("\n")]
        samples.append(Sample(_code(Path(name).stem.split("_")[0]), "\n".join(lines)))
    return samples


def read_sentences(path: Path) -> list[Sample]:
    """Read whatlang's examples: a mapping of ISO 639-3 codes to sentences."""
    return [
        Sample(_code(code), text)
        for code, text in json.loads(path.read_text(encoding="utf-8")).items()
    ]


def _code(iso_639_3: str) -> str:
    return LIKE_THE_MODEL.get(iso_639_3) or short_code(iso_639_3)


def _identify(
    model: Any, texts: Sequence[str], **settings: Any
) -> tuple[list[str], np.ndarray]:
    section = LanguageId.model_validate(settings)
    columns = measure(model, section, pa.array(texts, pa.large_string()))
    return columns["language"].tolist(), columns["language_score"]


def _pick(values: Sequence[str], mask: np.ndarray) -> list[str]:
    return [
        value for value, picked in zip(values, mask.tolist(), strict=True) if picked
    ]
