"""How often the language is right, on labelled text: translations of the Universal Declaration of Human Rights.

One file per translation, named by ISO 639-3 code, in NLTK's `udhr2`; whatlang's example sentences, one per language.
They lie in a folder beside the repository, or in the one that GRISTMILL_BENCH_DATA names. Languages that lid.176 has
no label for are left out, close relatives (Bosnian and Croatian, Asturian and Spanish) are not: accuracy below 1 is
mostly theirs.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.checkout import data_folder
from benchmarks.measuring import Row, row
from gristmill.dataprep.fasttext.fasttext_backend import load_model
from gristmill.dataprep.fasttext.fasttext_models import MODEL_NAME, MODEL_SHA256, find_model
from gristmill.dataprep.langid.langid import identify, view
from gristmill.dataprep.langid.language_codes import parse_label, short_code
from gristmill.mixtures.steps.langid import LanguageId

LIKE_THE_MODEL = {"nob": "no", "als": "sq", "nds": "nds"}
"""Codes for which lid.176, trained on Wikipedia, has a name of its own: its `als` is Alemannic, `no` is Bokmål."""


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
"""Languages whose lines lid.176.ftz mostly takes for others."""


class Sample(NamedTuple):
    """A text and its language."""

    language: str
    text: str


def rows() -> Iterator[Row]:
    """Measure, in shares of texts; the peer takes the top label of every text, however short and unsure."""
    folder = data_folder() / "langid"
    if not (folder / "udhr2.zip").exists():
        yield row("language identification", None, None, "", f"{folder} has no labelled text")
        return
    model = load_model(str(find_model(_local_model(folder))), MODEL_SHA256)
    known = {parse_label(label).code for label in model.labels}
    documents = [sample for sample in read_declarations(folder / "udhr2.zip") if sample.language in known]
    lines = [Sample(language, line) for language, text in documents for line in text.split("\n") if line.strip()]
    sentences = [sample for sample in read_sentences(folder / "whatlang_examples.json") if sample.language in known]
    section = LanguageId()
    yield from _document_rows(model, documents, section)
    yield from _line_rows(model, "line", lines, section)
    yield from _line_rows(model, "sentence", sentences, section)
    yield from _weakest_rows(model, lines)


def _weakest_rows(model: Any, lines: Sequence[Sample]) -> Iterator[Row]:
    """Recall of single lines in languages that a small model has little of, beside that of English lines."""
    recalls = {}
    for language in ("en", *WEAK):
        texts = [text for code, text in lines if code == language]
        recalls[language] = accuracy(_identify(model, texts)[0], [language] * len(texts)) if texts else None
    for language, name in WEAK.items():
        ours, english = recalls[language], recalls["en"]
        if ours is not None and english is not None:
            yield row(
                f"line language recall, {name}", ours, english, "share", f"{MODEL_NAME}, lines; peer: English lines"
            )


def _document_rows(model: Any, documents: Sequence[Sample], section: LanguageId) -> Iterator[Row]:
    truth = [sample.language for sample in documents]
    found, scores = _identify(model, [view(text, section.max_characters) for _, text in documents])
    fused, _ = _identify(model, [view(text, section.max_characters, newlines="delete") for _, text in documents])
    note = f"{len(set(truth))} languages, {len(documents)} documents; peer: newlines deleted, as DCLM does"
    yield row("document language accuracy", accuracy(found, truth), accuracy(fused, truth), "share", note)
    yield row("document language macro F1", macro_f1(found, truth), macro_f1(fused, truth), "share", note)
    sure = scores >= section.threshold
    yield row(
        f"document language precision at {section.threshold}",
        accuracy(_pick(found, sure), _pick(truth, sure)),
        accuracy(found, truth),
        "share",
        f"{sure.mean():.0%} of the documents reach the threshold; peer: no threshold",
    )


def _line_rows(model: Any, unit: str, samples: Sequence[Sample], section: LanguageId) -> Iterator[Row]:
    truth = [sample.language for sample in samples]
    found, scores = _identify(model, [view(text, section.max_characters) for _, text in samples])
    long = np.array([len(text.strip()) >= section.min_line_characters for _, text in samples])
    known = long & (scores >= section.line_threshold)
    note = f"{len(set(truth))} languages, {len(samples)} {unit}s, {known.mean():.0%} of them known; peer: all of them"
    picked = _pick(found, known), _pick(truth, known)
    yield row(f"{unit} language accuracy", accuracy(*picked), accuracy(found, truth), "share", note)
    yield row(f"{unit} language macro F1", macro_f1(*picked), macro_f1(found, truth), "share", note)


def accuracy(found: Sequence[str], truth: Sequence[str]) -> float:
    """Share of n texts whose language is right."""
    return float(np.mean([a == b for a, b in zip(found, truth, strict=True)]))


def macro_f1(found: Sequence[str], truth: Sequence[str]) -> float:
    """The mean over the true languages of the harmonic mean of precision and recall."""
    scores = []
    for language in set(truth):
        right = sum(a == b == language for a, b in zip(found, truth, strict=True))
        scores.append(2 * right / (sum(a == language for a in found) + sum(b == language for b in truth)))
    return float(np.mean(scores))


def read_declarations(path: Path) -> list[Sample]:
    """The translations in NLTK's udhr2.zip (`spa.txt`, `por_BR.txt`), their lines not indented."""
    with zipfile.ZipFile(path) as archive:
        names = [name for name in sorted(archive.namelist()) if name.endswith(".txt")]
        texts = {name: archive.read(name).decode("utf-8").split("\n") for name in names}
    return [
        Sample(_code(Path(name).stem.split("_")[0]), "\n".join(line.strip() for line in lines))
        for name, lines in texts.items()
    ]


def read_sentences(path: Path) -> list[Sample]:
    """whatlang's examples: a mapping of ISO 639-3 codes to sentences."""
    return [Sample(_code(code), text) for code, text in json.loads(path.read_text(encoding="utf-8")).items()]


def _code(iso_639_3: str) -> str:
    return LIKE_THE_MODEL.get(iso_639_3) or short_code(iso_639_3)


def _local_model(folder: Path) -> str | None:
    path = folder / "lid176" / "lid.176.ftz"
    return str(path) if path.exists() else None


def _identify(model: Any, texts: Sequence[str]) -> tuple[list[str], np.ndarray]:
    languages, scores = identify(model, texts)
    return [language.code for language in languages], scores


def _pick(values: Sequence[str], mask: np.ndarray) -> list[str]:
    return [value for value, picked in zip(values, mask.tolist(), strict=True) if picked]
