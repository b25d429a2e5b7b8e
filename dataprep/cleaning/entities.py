"""Names and places that a spaCy pipeline recognises in texts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING

import pyarrow as pa

from gristmill.core.files import as_path
from gristmill.dataprep.words.spacy_words import import_spacy
from gristmill.mixtures.steps.clean import Entities

if TYPE_CHECKING:
    from spacy.language import Language

OTHER_COMPONENTS = (
    "tagger",
    "parser",
    "senter",
    "sentencizer",
    "morphologizer",
    "attribute_ruler",
    "lemmatizer",
    "trainable_lemmatizer",
    "textcat",
    "textcat_multilabel",
    "spancat",
    "spancat_singlelabel",
    "entity_linker",
)
"""Components of published pipelines that recognise no entities
(spacy.io/usage/processing-pipelines).
"""
TEXTS_AT_A_TIME = 64


class NoPipelineError(ValueError):
    """A folder is not a spaCy pipeline, or does not have a label."""


@lru_cache(maxsize=1)
def load_pipeline(path: str) -> Language:
    """Load the part of a pipeline that recognises entities, once per process.

    Raises:
        NoPipelineError: the folder has no pipeline.
    """
    try:
        return import_spacy().load(as_path(path), exclude=OTHER_COMPONENTS)
    except (OSError, ValueError) as error:
        raise NoPipelineError(f"{path} is not a spaCy pipeline: {error}") from error


def check_labels(section: Entities) -> None:
    """Check that a pipeline knows the labels.

    Raises:
        NoPipelineError: it does not, or the folder has no pipeline.
    """
    pipeline = load_pipeline(section.path)
    known = sorted({*chain(*pipeline.pipe_labels.values())})
    for label in section.labels:
        if label not in known:
            raise NoPipelineError(
                f"{section.path} has no label {label}; it has "
                f"{', '.join(known) or 'none'}"
            )


def find_entities(
    texts: pa.Array, section: Entities
) -> list[Sequence[tuple[int, int, str]]]:
    """Entities of n texts: byte ranges with their labels in lower case, ascending and
    disjoint.
    """
    pipeline = load_pipeline(section.path)
    return [
        [
            (
                len(doc.text[: entity.start_char].encode()),
                len(doc.text[: entity.end_char].encode()),
                entity.label_.lower(),
            )
            for entity in doc.ents
            if entity.label_ in section.labels
        ]
        for doc in pipeline.pipe(texts.to_pylist(), batch_size=TEXTS_AT_A_TIME)
    ]
