"""The expressions of a source: which of its documents the mixture may take, and how often, by what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.dataprep.documents import annotation_stages, read_annotations
from gristmill.tokenize.mixing.draws import draw, word_ids
from gristmill.tokenize.mixing.grammar import NotAllowedError, check_grammar
from gristmill.tokenize.mixing.shares import MixError

JUDGEMENT_COLUMNS = ("id", "keep", "reason", "error")
MET, NOT_MET, UNKNOWN = 1, 0, -1
CONFINED = {"threads": 1, "enable_external_access": False, "python_enable_replacements": False,
            "autoinstall_known_extensions": False, "autoload_known_extensions": False}
"""A database that reaches no file, no network, no extension and no variable of this program; once it is locked, no
expression can change that (https://duckdb.org/docs/stable/operations_manual/securing_duckdb/overview)."""
MAX_REPEATS = 1000
"""Far more than is of use (Muennighoff et al. 2023, section 5: after 40 repetitions nothing is learned): a mistake."""


def measured_columns(inputs: Mapping[str, Path], shard: str, docs: pa.Table) -> pa.Table:
    """What was measured of a shard's tokenised documents, one row for each.

    Args:
        inputs: `ingest` and the annotating stages.
        shard: name of the document shard.
        docs: its table from the stage `tokenize`.

    Returns:
        `tokens`, `bytes` and every column that an annotating stage measured. A name that several stages use is
        given as `<stage>_<name>` for each of them.
    """
    rows = docs["row"]
    measured = {}
    for stage in annotation_stages(inputs):
        table = read_annotations(inputs, shard, stage).take(rows)
        measured[stage] = {name: table[name] for name in table.column_names if name not in JUDGEMENT_COLUMNS}
    uses = Counter(name for columns in measured.values() for name in columns)
    uses.update(("tokens", "bytes"))
    columns = {"tokens": docs["tokens"], "bytes": docs["bytes"]}
    for stage, found in measured.items():
        columns.update({name if uses[name] == 1 else f"{stage}_{name}": column for name, column in found.items()})
    return pa.table(columns)


def judge(source: str, condition: str, measured: pa.Table) -> np.ndarray:
    """Evaluate a source's condition.

    Args:
        source: its name, for the error.
        condition: SQL over the columns of `measured`, of the part that `grammar.py` has.
        measured: see `measured_columns`.

    Returns:
        int8 per row: MET, NOT_MET, or UNKNOWN where SQL says NULL because a value was not measured.

    Raises:
        MixError: the condition is not of the grammar, is no condition, or names a column that there is not.
    """
    known, values = _evaluate(f"sources.{source}.where", condition, "BOOLEAN", measured)
    verdicts = np.full(len(measured), UNKNOWN, dtype=np.int8)
    verdicts[known] = np.where(values[known].astype(bool), MET, NOT_MET)
    return verdicts


def repeat(source: str, expression: str, measured: pa.Table, words: np.ndarray, key: int) -> np.ndarray:
    """Evaluate how often each document of a source is in one pass.

    A part of one is a chance: of documents with 1.5, those whose draw is below a half are there twice.

    Args:
        source: its name, for the error.
        expression: SQL over the columns of `measured`, of the part that `grammar.py` has.
        measured: see `measured_columns`.
        words: (n, 2) id words of the same documents (`draws.id_words`).
        key: 64 bits of the draws.

    Returns:
        int64 per row: a number of times, or UNKNOWN where SQL says NULL because a value was not measured.

    Raises:
        MixError: the expression is not of the grammar, names a column that there is not, or gives a number that is
            negative, infinite or above MAX_REPEATS.
    """
    known, values = _evaluate(f"sources.{source}.epochs", expression, "DOUBLE", measured)
    numbers = np.where(known, values, 0.0).astype(np.float64)
    wrong = np.flatnonzero(~((numbers >= 0) & (numbers <= MAX_REPEATS)))
    if len(wrong):
        raise MixError(f"sources.{source}.epochs: {expression!r} is {numbers[wrong[0]]:g} for document "
                       f"{word_ids(words[wrong[:1]])[0].as_py().hex()}; it must be between 0 and {MAX_REPEATS}")
    whole = np.floor(numbers)
    chance = ((numbers - whole) * 2.0**64).astype(np.uint64)
    repeats = whole.astype(np.int64) + (draw(words, key) < chance)
    return np.where(known, repeats, UNKNOWN)


def check_names(key: str, expression: str, names: Collection[str]) -> None:
    """Raise MixError where an expression is not of the grammar, or names a column that is not among `names`.

    What else may be wrong with it depends on the values and is left to `judge` and `repeat`.
    """
    nothing = pa.table({name: pa.nulls(0, pa.float64()) for name in names})
    try:
        _evaluate(key, expression, "VARCHAR", nothing)
    except MixError as error:
        if isinstance(error.__cause__, NotAllowedError):
            raise


def _evaluate(key: str, expression: str, kind: str, measured: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Which rows have a value (bool), and the values, of an SQL type; no file and no network can be reached."""
    import duckdb

    with duckdb.connect(config=CONFINED) as connection:
        for name, function in (("min", "least"), ("max", "greatest")):
            # DuckDB's own are aggregates; its least() passes over NULL, which would make up a value.
            connection.execute(f"CREATE MACRO {name}(a, b) AS CASE WHEN a IS NULL OR b IS NULL THEN NULL "
                               f"ELSE {function}(a, b) END")
        connection.execute("SET lock_configuration = true")
        try:
            check_grammar(connection, expression, measured.column_names)
        except NotAllowedError as error:
            raise _wrong(key, expression, str(error), measured) from error
        rows = pa.array(np.arange(len(measured)))
        connection.register("documents", measured.append_column("gristmill_row", rows))
        try:
            # The line break ends a comment in the expression before the bracket is closed.
            found = connection.execute(
                f"SELECT gristmill_row, CAST((\n{expression}\n) AS {kind}) FROM documents"
            ).fetchnumpy()
        except duckdb.Error as error:
            raise _wrong(key, expression, str(error).splitlines()[0], measured) from error
    return _in_order(*found.values())


def _wrong(key: str, expression: str, reason: str, measured: pa.Table) -> MixError:
    return MixError(f"{key}: {expression!r}: {reason} (columns: {', '.join(sorted(measured.column_names))})")


def _in_order(rows: Any, values: Any) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(np.asarray(rows), kind="stable")
    return ~np.ma.getmaskarray(values)[order], np.asarray(np.ma.getdata(values))[order]
