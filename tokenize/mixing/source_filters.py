"""Expressions of a source: `where` selects its documents, `epochs` sets their repeats.

`dataprep/where_sql.py` defines the grammar.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pyarrow as pa

from gristmill.dataprep.documents import (
    JUDGEMENT_COLUMNS,
    Inputs,
    annotation_stages,
    read_annotations,
    read_documents,
)
from gristmill.dataprep.where_sql import (
    METADATA,
    MIXING_COLUMNS,
    ExpressionError,
    NotAllowedError,
    columns_in,
    evaluate,
    names_of,
)
from gristmill.tokenize.document_sampling import draw, id_words, word_ids
from gristmill.tokenize.mixing.quotas import MixError
from gristmill.tokenize.shuffle import order_key

VALIDATION_KEY = order_key(0, "validation")
"""Key of the validation split and of the column `draw`: a seed of the mixture never
moves documents between training and validation.
"""
MET, NOT_MET, UNKNOWN = 1, 0, -1
MAX_REPEATS = 1000
"""Guard against mistakes: after 40 repetitions nothing is learned (Muennighoff et al.
2023, section 5).
"""


def measured_columns(
    inputs: Inputs, shard: str, docs: pa.Table, with_metadata: bool = False
) -> pa.Table:
    """Measured columns of a shard's tokenised documents, one row per document.

    Args:
        inputs: `ingest` and the annotating stages.
        shard: name of the document shard.
        docs: its table from the stage `tokenize`.
        with_metadata: also the JSON objects of the records' metadata, as `metadata`.

    Returns:
        the columns of MIXING_COLUMNS and every column of an annotating stage, under the
        names of `names_of`.
    """
    documents = read_documents(
        inputs, shard, ["id", METADATA] if with_metadata else ["id"]
    )
    rows = docs["row"]
    ids = documents["id"]
    measured = {}
    for step in annotation_stages(inputs):
        table = read_annotations(inputs, shard, step, ids=ids).take(rows)
        measured[step] = {
            name: table[name]
            for name in table.column_names
            if name not in JUDGEMENT_COLUMNS
        }
    draws = draw(id_words(docs["id"]), VALIDATION_KEY) / 2.0**64
    values = (docs["tokens"], docs["bytes"], pa.array(draws))
    columns = dict(zip(MIXING_COLUMNS, values, strict=True))
    if with_metadata:
        columns[METADATA] = documents[METADATA].take(rows)
    for step, names in names_of(measured).items():
        columns.update({name: measured[step][column] for column, name in names.items()})
    return pa.table(columns)


def judge(source: str, condition: str, measured: pa.Table) -> np.ndarray:
    """Evaluate a source's condition.

    Args:
        source: its name, for the error.
        condition: SQL over the columns of `measured`, within `where_sql.GRAMMAR`.
        measured: see `measured_columns`.

    Returns:
        int8 per row: MET, NOT_MET, or UNKNOWN for NULL, from values that were not
        measured.

    Raises:
        MixError: the condition is outside the grammar, is not boolean, or names an
            unknown column.
    """
    is_known, values = _evaluate(
        f"sources.{source}.where", condition, "BOOLEAN", measured
    )
    verdicts = np.full(len(measured), UNKNOWN, np.int8)
    verdicts[is_known] = np.where(values[is_known].astype(bool), MET, NOT_MET)
    return verdicts


def repeat(
    source: str, expression: str, measured: pa.Table, words: np.ndarray, key: int
) -> np.ndarray:
    """Evaluate the repeats of each document of a source in one pass.

    A fraction is a probability: with 1.5, documents whose draw is below a half are
    repeated twice.

    Args:
        source: its name, for the error.
        expression: SQL over the columns of `measured`, within `where_sql.GRAMMAR`.
        measured: see `measured_columns`.
        words: (n, 2) id words of the same documents (`document_sampling.id_words`).
        key: 64 bits of the draws.

    Returns:
        int64 per row: repeats, or UNKNOWN for NULL, from values that were not measured.

    Raises:
        MixError: the expression is outside the grammar, names an unknown column, or
            gives a number that is negative, infinite or above MAX_REPEATS.
    """
    is_known, values = _evaluate(
        f"sources.{source}.epochs", expression, "DOUBLE", measured
    )
    numbers = np.where(is_known, values, 0.0).astype(np.float64)
    wrong = np.flatnonzero(~((numbers >= 0) & (numbers <= MAX_REPEATS)))
    if len(wrong):
        raise MixError(
            f"sources.{source}.epochs: {expression!r} is {numbers[wrong[0]]:g} for "
            f"document {word_ids(words[wrong[:1]])[0].as_py().hex()}; it must be "
            f"between 0 and {MAX_REPEATS}"
        )
    whole_repeats = np.floor(numbers)
    chance = ((numbers - whole_repeats) * 2.0**64).astype(np.uint64)
    repeats = whole_repeats.astype(np.int64) + (draw(words, key) < chance)
    return np.where(is_known, repeats, UNKNOWN)


def check_names(key: str, expression: str, names: Collection[str]) -> None:
    """Check that an expression is within the grammar and names only columns of `names`.

    `judge` and `repeat` report errors that depend on the values.

    Raises:
        MixError: it is not.
    """
    try:
        columns_in(expression, names)
    except NotAllowedError as error:
        raise MixError(f"{key}: {error}") from error


def _evaluate(
    key: str, expression: str, kind: str, measured: pa.Table
) -> tuple[np.ndarray, np.ndarray]:
    try:
        return evaluate(expression, kind, measured)
    except ExpressionError as error:
        raise MixError(f"{key}: {error}") from error
