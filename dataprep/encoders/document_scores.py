"""Model scores of documents as columns: probabilities of classes, output of a
regression, similarity to texts.

Scores are rounded to thousandths. Batch sizes, workers and processors change a float32
output by less than BOUND, so a column and the decision of a threshold change only if
the number is within BOUND of the midpoint between two thousandths.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypedDict

import numpy as np
import pyarrow as pa

from gristmill.core.files import as_path
from gristmill.dataprep.conservation import add_counts
from gristmill.dataprep.encoders.batched_inference import TextReader
from gristmill.dataprep.encoders.embeddings import load_embedder
from gristmill.dataprep.encoders.forward_backends import load_network
from gristmill.dataprep.encoders.model_folders import (
    ModelFolderError,
    class_names,
    has_first_token_head,
    model_folder,
    read_config,
)
from gristmill.dataprep.encoders.token_windows import WindowTokenizer
from gristmill.dataprep.fasttext.fasttext_files import read_labels
from gristmill.dataprep.fasttext.fasttext_predict import load_model
from gristmill.dataprep.fasttext.normalise_lines import one_line_each
from gristmill.dataprep.quality.classifier import LABEL_PREFIX
from gristmill.mixtures.columns import check_column
from gristmill.mixtures.schema.encoder_settings import ReadingModel, ScoringModel
from gristmill.mixtures.yaml_text import unknown_name

BOUND = 1e-4
"""Maximum difference between two float32 computations of a score; about 1e-6 was
measured on one machine.
"""
DECIMALS = 3
FASTTEXT_SUFFIXES = (".bin", ".ftz")
CLASS = "class"
"""Default name of the column of the likeliest class."""


@dataclass(frozen=True)
class Announced:
    """Columns that a model will write, determined without loading it.

    Attributes:
        numbers: numeric columns in order, each with the index of its output.
        likeliest: column with the name of the likeliest class, for a classifier with
            exclusive classes.
    """

    numbers: Mapping[str, int]
    likeliest: str | None = None

    @property
    def columns(self) -> list[str]:
        """All columns."""
        return [*([] if self.likeliest is None else [self.likeliest]), *self.numbers]


def is_fasttext(section: ScoringModel) -> bool:
    """Test if the model is a fastText file."""
    return section.path.endswith(FASTTEXT_SUFFIXES)


def outputs_of(section: ScoringModel) -> tuple[str, ...]:
    """Names of a classifier's outputs.

    Raises:
        ModelFolderError: the model does not exist.
    """
    if not is_fasttext(section):
        return class_names(model_folder(section.path))
    if not as_path(section.path).is_file():
        raise ModelFolderError(f"{section.path}: there is no such file")
    labels = read_labels(section.path)
    if labels is None:
        raise ModelFolderError(f"{section.path} is not a fastText model with labels")
    return tuple(label.removeprefix(LABEL_PREFIX) for label in labels)


def announce(section: ScoringModel) -> Announced:
    """Determine the columns of a model.

    Raises:
        ModelFolderError: the model or a class does not exist, or two columns would have
            the same name.
    """
    if section.like:
        model_folder(section.path)
        return Announced({name: number for number, name in enumerate(section.like)})
    if not is_fasttext(section):
        config = read_config(model_folder(section.path))
        kinds = [str(name) for name in config.get("architectures") or []]
        if not has_first_token_head(config) and not any(
            name.endswith("ForSequenceClassification") for name in kinds
        ):
            raise ModelFolderError(
                f"{section.path} is {' and '.join(kinds) or 'no known model'}, and no "
                "classifier of texts; one of sentence embeddings scores by `like`: "
                "{column: text}"
            )
    outputs = outputs_of(section)
    if len(outputs) == 1:
        return Announced({section.name or _column(outputs[0]): 0})
    chosen = outputs if section.classes is None else section.classes
    unknown = next((name for name in chosen if name not in outputs), None)
    if unknown is not None:
        raise ModelFolderError(
            f"{section.path} has no class {unknown_name(unknown, outputs, 'it has')}"
        )
    prefix = "" if section.name is None else f"{section.name}_"
    numbers = {_column(f"{prefix}{name}"): outputs.index(name) for name in chosen}
    likeliest = None if _has_several(section) else section.name or CLASS
    if len(numbers) < len(chosen) or likeliest in numbers:
        raise ModelFolderError(
            f"{section.path}: two of its columns would be called alike: "
            f"{', '.join(chosen)}; name some of them as `classes`"
        )
    return Announced(numbers, likeliest)


def _column(name: str) -> str:
    """Column name for a class."""
    plain = re.sub(r"\W+", "_", name).strip("_")
    try:
        return check_column(plain)
    except ValueError as error:
        raise ModelFolderError(
            f"the class {name!r}: {error}; give the columns a `name`"
        ) from error


def _has_several(section: ScoringModel) -> bool:
    """Test if a document may have several classes."""
    return (
        not is_fasttext(section)
        and read_config(model_folder(section.path)).get("problem_type")
        == "multi_label_classification"
    )


@dataclass(frozen=True)
class Scored:
    """Scores of n texts.

    Attributes:
        numbers: float64 of shape (n, columns), rounded.
        counts: int64, int64 and bool of shape (n,): numbers of tokens and windows read,
            and True if the text was read to its end.
        likeliest: name of the likeliest class of each text, None for a text without
            one; empty if the model has no classes.
    """

    numbers: np.ndarray
    counts: Sequence[np.ndarray]
    likeliest: Sequence[str | None] = ()


Score = Callable[[pa.Array], Scored]
"""Function that scores n texts, n > 0."""


def load_scorer(section: ScoringModel, sha256: str) -> Score:
    """Load a model, once per process.

    Args:
        section: settings of the model.
        sha256: hash of its files (`model_folders.folder_sha256`).

    Raises:
        ModelFolderError: a file or a package is missing, or they do not match.
    """
    return _load(section.model_dump_json(), sha256)


@lru_cache(maxsize=2)
def _load(settings: str, sha256: str) -> Score:
    section = ScoringModel.model_validate_json(settings)
    announced = announce(section)
    if section.like:
        return _by_likeness(section, sha256)
    if is_fasttext(section):
        return _by_fasttext(section, announced, sha256)
    return _by_classes(section, announced)


def _by_classes(section: ScoringModel, announced: Announced) -> Score:
    folder = model_folder(section.path)
    outputs = outputs_of(section)
    kind = section.values or ("logits" if len(outputs) == 1 else "probabilities")
    is_exclusive = len(outputs) > 1 and not _has_several(section)

    def activation(rows: np.ndarray) -> np.ndarray:
        if kind == "logits":
            return rows
        wide = rows.astype(np.float64)
        if not is_exclusive:
            return (1 / (1 + np.exp(-wide))).astype(np.float32)
        exponentials = np.exp(wide - rows.max(1, keepdims=True))
        return (exponentials / exponentials.sum(1, keepdims=True)).astype(np.float32)

    reader = TextReader(
        WindowTokenizer(folder, section),
        load_network(folder, section, "classes"),
        section.pool,
        activation,
    )
    places = list(announced.numbers.values())

    def score(texts: pa.Array) -> Scored:
        raw, *counts = reader.read(texts.to_pylist())
        rows = rounded(raw)
        return Scored(rows[:, places], counts, [outputs[i] for i in rows.argmax(1)])

    return score


def _by_fasttext(section: ScoringModel, announced: Announced, sha256: str) -> Score:
    model = load_model(section.path, sha256)
    labels = read_labels(section.path) or []
    names = outputs_of(section)

    def score(texts: pa.Array) -> Scored:
        lines, _ = one_line_each(texts, None, False, marks=True)
        n = len(texts)
        numbers = np.empty((n, len(announced.numbers)))
        for column, place in enumerate(announced.numbers.values()):
            numbers[:, column] = rounded(model.shares(lines, labels[place]))
        tops, _ = model.tops(lines)
        likeliest = [
            None if top < 0 else names[labels.index(model.labels[top])]
            for top in tops.tolist()
        ]
        counts = np.zeros(n, np.int64), np.ones(n, np.int64), np.ones(n, bool)
        return Scored(np.clip(numbers, 0.0, 1.0), counts, likeliest)

    return score


def _by_likeness(section: ScoringModel, sha256: str) -> Score:
    reading_model = ReadingModel.model_validate(
        {name: getattr(section, name) for name in ReadingModel.model_fields}
    )
    embedder = load_embedder(reading_model, sha256)
    targets = [
        embedder.embed([text] if isinstance(text, str) else list(text))
        for text in section.like.values()
    ]

    def score(texts: pa.Array) -> Scored:
        rows, *counts = embedder.read(texts.to_pylist())
        cosines = [(rows @ target.T).max(1) for target in targets]
        return Scored(rounded(np.stack(cosines, axis=1)), counts)

    return score


def rounded(values: np.ndarray) -> np.ndarray:
    """Round values for columns: float64, to thousandths, without negative zero."""
    return np.round(values.astype(np.float64), DECIMALS) + 0.0


class ReadCounts(TypedDict, total=False):
    """Counts of documents, tokens and windows that a model read; a missing key is 0."""

    documents: int
    tokens: int
    windows: int
    cut: int
    """Documents that were not read to their end."""


def count_read(
    tokens: np.ndarray, windows: np.ndarray, is_whole: np.ndarray
) -> ReadCounts:
    """Count the texts of n documents that a model read.

    Args:
        tokens, windows: int64 of shape (n,).
        is_whole: bool of shape (n,), True if it was read to its end.
    """
    return ReadCounts(
        documents=len(is_whole),
        tokens=int(tokens.sum()),
        windows=int(windows.sum()),
        cut=int((~is_whole).sum()),
    )


@dataclass(frozen=True)
class Reader:
    """A model, and the amount of text that it read.

    Attributes:
        model: name of its folder or file.
        sha256: of its files.
        pool: pooling of token vectors.
        documents, tokens, windows: numbers of each that it read.
        cut: documents that were not read to their end.
    """

    model: str
    sha256: str
    pool: str
    documents: int = 0
    tokens: int = 0
    windows: int = 0
    cut: int = 0


def describe_reader(
    section: ReadingModel, sha256: str, read: Sequence[ReadCounts]
) -> Reader:
    """Describe a model and the texts that it read, shard by shard, for the summary."""
    return Reader(Path(section.path).name, sha256, section.pool, **add_counts(read))
