"""What a model says of documents, as columns: probabilities of classes, a regression's number, likeness to texts.

Numbers are rounded to thousandths. Batches of other sizes, other workers and other processors change what a model
computes in float32 by less than BOUND, so that a column, and what a threshold makes of it, stays the same but where
the number lies within BOUND of the middle between two thousandths.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.dataprep.files import as_path
from gristmill.dataprep.judges.classifier import LABEL_PREFIX
from gristmill.dataprep.judges.fasttext.fasttext_files import read_labels
from gristmill.dataprep.judges.fasttext.one_line import one_line_each
from gristmill.dataprep.judges.predictors import load_model
from gristmill.dataprep.models.embeddings import load_embedder
from gristmill.dataprep.models.model_folders import ModelFolderError, class_names, model_folder, read_config
from gristmill.dataprep.models.networks import load_network
from gristmill.dataprep.models.read_texts import TextReader
from gristmill.dataprep.models.token_windows import WindowTokenizer
from gristmill.mixtures.columns import check_column
from gristmill.mixtures.reading_model import ReadingModel, ScoringModel
from gristmill.mixtures.yaml_text import did_you_mean

BOUND = 1e-4
"""How far two computations of a number in float32 may be apart; on one machine some 1e-6 were seen."""
DECIMALS = 3
FASTTEXT_SUFFIXES = (".bin", ".ftz")
SCORE, CLASS = "score", "class"
"""What columns are called that have no name."""


@dataclass(frozen=True)
class Announced:
    """What a model measures, known without loading it.

    Attributes:
        numbers: columns of numbers, and the outputs that they are of, in their order.
        likeliest: column of the name of the likeliest class, where a document has one.
    """

    numbers: Mapping[str, int]
    likeliest: str | None = None

    @property
    def columns(self) -> list[str]:
        """All columns."""
        return [*([] if self.likeliest is None else [self.likeliest]), *self.numbers]


def is_fasttext(section: ScoringModel) -> bool:
    """Whether the model is a file of fastText's."""
    return section.path.endswith(FASTTEXT_SUFFIXES)


def outputs_of(section: ScoringModel) -> tuple[str, ...]:
    """The names of a classifier's outputs.

    Raises:
        ModelFolderError: there is no such model.
    """
    if not is_fasttext(section):
        return class_names(model_folder(section.path))
    if not as_path(section.path).is_file():
        raise ModelFolderError(f"{section.path}: there is no such file")
    labels = read_labels(section.path)
    if labels is None:
        raise ModelFolderError(f"{section.path} is no model of fastText with labels")
    return tuple(label.removeprefix(LABEL_PREFIX) for label in labels)


def announce(section: ScoringModel) -> Announced:
    """The columns of a model.

    Raises:
        ModelFolderError: there is no such model, it has no such class, or two columns would be called alike.
    """
    if section.like:
        model_folder(section.path)
        return Announced({name: number for number, name in enumerate(section.like)})
    _check_classifies(section)
    outputs = outputs_of(section)
    if len(outputs) == 1:
        return Announced({section.name or _column(outputs[0]): 0})
    chosen = outputs if section.classes is None else section.classes
    unknown = next((name for name in chosen if name not in outputs), None)
    if unknown is not None:
        raise ModelFolderError(
            f"{section.path} has no class {unknown!r}{did_you_mean(unknown, outputs)}; it has {', '.join(outputs)}"
        )
    prefix = "" if section.name is None else f"{section.name}_"
    numbers = {_column(f"{prefix}{name}"): outputs.index(name) for name in chosen}
    likeliest = None if _has_several(section) else section.name or CLASS
    if len(numbers) < len(chosen) or likeliest in numbers:
        raise ModelFolderError(
            f"{section.path}: two of its columns would be called alike: {', '.join(chosen)}; name "
            "some of them as `classes`"
        )
    return Announced(numbers, likeliest)


def _check_classifies(section: ScoringModel) -> None:
    if is_fasttext(section):
        return
    architectures = read_config(model_folder(section.path)).get("architectures") or []
    if not any(str(name).endswith("ForSequenceClassification") for name in architectures):
        raise ModelFolderError(
            f"{section.path} is {' and '.join(map(str, architectures)) or 'no known model'}, and no "
            "classifier of texts; one of sentence embeddings scores by `like`: {column: text}"
        )


def _column(name: str) -> str:
    """A class's name as that of a column."""
    plain = re.sub(r"\W+", "_", name).strip("_")
    try:
        return check_column(plain)
    except ValueError as error:
        raise ModelFolderError(f"the class {name!r}: {error}; give the columns a `name`") from error


def _has_several(section: ScoringModel) -> bool:
    """Whether a document may have several classes at once."""
    return (
        not is_fasttext(section)
        and read_config(model_folder(section.path)).get("problem_type") == "multi_label_classification"
    )


@dataclass(frozen=True)
class Scored:
    """What a model says of n texts.

    Attributes:
        numbers: float64 of shape (n, columns), rounded.
        likeliest: names of classes where a document has one; empty of a text that has none.
        tokens, windows: int64 of shape (n,), what was read of each.
        whole: whether that was all of it.
    """

    numbers: np.ndarray
    likeliest: Sequence[str | None]
    tokens: np.ndarray
    windows: np.ndarray
    whole: np.ndarray


Score = Callable[[pa.Array], Scored]
"""A function of n texts, n > 0."""


def load_scorer(section: ScoringModel, sha256: str) -> Score:
    """Load a model, once per process.

    Args:
        section: its settings.
        sha256: what it holds (`model_folders.folder_sha256`).

    Raises:
        ModelFolderError: a file or a package is missing, or they do not fit.
    """
    return _load(section.model_dump_json(), sha256)


@lru_cache(maxsize=2)
def _load(settings: str, sha256: str) -> Score:
    section = ScoringModel.model_validate_json(settings)
    found = announce(section)
    if section.like:
        return _by_likeness(section, sha256)
    return _by_fasttext(section, found, sha256) if is_fasttext(section) else _by_classes(section, found)


def _by_classes(section: ScoringModel, found: Announced) -> Score:
    folder = model_folder(section.path)
    outputs = outputs_of(section)
    reader = TextReader(
        WindowTokenizer(folder, section),
        load_network(folder, section, "classes", False),
        section.pool,
        _activation(section, len(outputs)),
    )
    places = list(found.numbers.values())

    def score(texts: pa.Array) -> Scored:
        read = reader.read(texts.to_pylist())
        rows = rounded(read.rows)
        likeliest = [] if found.likeliest is None else [outputs[place] for place in rows.argmax(1)]
        return Scored(rows[:, places], likeliest, read.tokens, read.windows, read.whole)

    return score


def _activation(section: ScoringModel, outputs: int) -> Callable[[np.ndarray], np.ndarray]:
    """What makes the columns of a network's numbers, of each window by itself."""
    kind = section.values or ("logits" if outputs == 1 else "probabilities")
    if kind == "logits":
        return lambda rows: rows
    return _sigmoid if outputs == 1 or _has_several(section) else _softmax


def _sigmoid(rows: np.ndarray) -> np.ndarray:
    found: np.ndarray = (1 / (1 + np.exp(-rows.astype(np.float64)))).astype(np.float32)
    return found


def _softmax(rows: np.ndarray) -> np.ndarray:
    raised = np.exp(rows.astype(np.float64) - rows.max(1, keepdims=True))
    found: np.ndarray = (raised / raised.sum(1, keepdims=True)).astype(np.float32)
    return found


def _by_fasttext(section: ScoringModel, found: Announced, sha256: str) -> Score:
    model, labels = load_model(section.path, sha256), read_labels(section.path) or []
    names = outputs_of(section)

    def score(texts: pa.Array) -> Scored:
        lines, _ = one_line_each(texts, None, False, marks=True)
        shares = [rounded(model.shares(lines, labels[place])) for place in found.numbers.values()]
        tops, _ = model.tops(lines)
        n = len(texts)
        numbers = np.clip(np.stack(shares, axis=1), 0.0, 1.0) if shares else np.empty((n, 0))
        likeliest = (
            []
            if found.likeliest is None
            else [None if top < 0 else names[labels.index(model.labels[top])] for top in tops.tolist()]
        )
        return Scored(numbers, likeliest, np.zeros(n, np.int64), np.ones(n, np.int64), np.ones(n, bool))

    return score


def _by_likeness(section: ScoringModel, sha256: str) -> Score:
    reads = ReadingModel.model_validate({name: getattr(section, name) for name in ReadingModel.model_fields})
    embedder = load_embedder(reads, sha256)
    wanted = [embedder.embed([text] if isinstance(text, str) else list(text)) for text in section.like.values()]

    def score(texts: pa.Array) -> Scored:
        read = embedder.read(texts.to_pylist())
        cosines = [(read.rows @ of_one.T).max(1) for of_one in wanted]
        return Scored(rounded(np.stack(cosines, axis=1)), [], read.tokens, read.windows, read.whole)

    return score


def rounded(values: np.ndarray) -> np.ndarray:
    """Numbers as columns hold them: float64, to thousandths, and no negative zero."""
    found: np.ndarray = np.round(values.astype(np.float64), DECIMALS) + 0.0
    return found


def described(section: ReadingModel, sha256: str) -> dict[str, Any]:
    """What a summary says of a model: its name, what it holds, how it reads."""
    return {"model": Path(section.path).name, "sha256": sha256, "pool": section.pool}
