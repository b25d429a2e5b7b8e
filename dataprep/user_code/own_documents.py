"""Calls of a user's function on documents, one document or a batch at a time.

An exception on a document is that document's error. A fault of the function itself (it
cannot be called, or returns an invalid value) is an OwnCodeError, which ends the stage
with one sentence.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from gristmill.core.arrays import Column, admit_pandas, hex_ids
from gristmill.core.secrets import mask_text
from gristmill.core.stage_context import Context
from gristmill.dataprep.conservation import Counted
from gristmill.dataprep.corpus import DERIVED, Corpus, urls_of
from gristmill.dataprep.documents import Inputs, Remarks, Shard, read_shard
from gristmill.dataprep.user_code.time_limits import Function, TimeLimit, TimeLimitError
from gristmill.dataprep.user_functions import (
    blame,
    call_signature,
    load_function,
    load_own,
    wrong,
)
from gristmill.mixtures.own_signatures import batch_type, signature_of
from gristmill.mixtures.steps.own_steps import OwnStep
from gristmill.mixtures.user_code import OwnCodeError
from gristmill.mixtures.yaml_text import unknown_name

BATCH_ROWS = 1000
SAMPLE_ROWS = 16
"""Documents per shard on which a function is called twice, to detect nondeterminism."""
DOCUMENT_COLUMNS = ("text", "source", "url", "metadata", "locator", "id")
"""Columns of every document that a function may read, besides those of earlier
steps.
"""
MOST_SHOWN_CHARACTERS = 60
SHOWN_DIGITS = 16
"""Digits of a document's id in messages."""


@dataclass(frozen=True)
class DocumentFunction:
    """User's function of documents.

    Attributes:
        step: the settings.
        call: takes the values of `reads` by position, or a batch with these columns.
        reads: names of columns.
        batch: `RecordBatch` or `Table` for a function of batches, else None.
    """

    step: OwnStep
    call: Function
    reads: tuple[str, ...]
    batch: str | None = None

    def wrong(self, what: str) -> OwnCodeError:
        """Make the error of a faulty function, such as "returned nothing"."""
        return wrong(self.step, what)


def described(value: Any) -> str:
    """Describe a returned value: `int 3`, or only its type if it is long."""
    if value is None:
        return "nothing (None)"
    text = repr(value)
    return type(value).__name__ + (
        f" {text}" if len(text) <= MOST_SHOWN_CHARACTERS else ""
    )


class OwnShard(Counted):
    """Result of a user's function on a shard."""

    differs: str | None
    """Different results of two calls, in words."""


def warn_of_difference(
    step: OwnStep, results: Sequence[OwnShard], context: Context
) -> str | None:
    """Describe the first different results of two calls, and warn of them; None if
    there are none.
    """
    differs = next((result["differs"] for result in results if result["differs"]), None)
    if differs is None:
        return None
    message = str(wrong(step, f"is not deterministic: {differs}"))
    context.warn(f"{message}; another run may come to other results")
    return message


def load_document_function(step: OwnStep, known: Collection[str]) -> DocumentFunction:
    """Load the function of a step.

    Args:
        step: the settings.
        known: the available columns.

    Raises:
        OwnCodeError: the function cannot be loaded or called, or reads an unknown
            column.
    """
    admit_pandas()  # its import is not a part of the user's time
    with TimeLimit(step.time_limit_seconds) as limit:
        try:
            function = limit.call(load_function, step.use)
        except TimeLimitError as error:
            raise OwnCodeError(
                f"{step.use.file} cannot be loaded: {blame(step.use, error)}"
            ) from error
    for kind, is_kind in _KIND_TESTS:
        if is_kind(function):
            raise wrong(step, KINDS[kind])
    signature = call_signature(function)
    if signature is None:
        return DocumentFunction(step, load_own(step, "text"), ("text",))
    parameters = list(signature.parameters.values())
    hint: Any = parameters[0].annotation if parameters else None
    batch = batch_type(
        hint if isinstance(hint, str) else getattr(hint, "__name__", None)
    )
    if batch is not None:
        reads = step.columns or ("text",)
        _check_known(step, reads, known, True)
        return DocumentFunction(step, load_own(step, parameters[0].name), reads, batch)
    if step.columns:
        raise wrong(
            step,
            "takes one document at a time, and has a parameter for each column; "
            "`columns` is for functions whose first parameter is a pa.RecordBatch or "
            "pa.Table: remove it",
        )
    columns = [
        column
        for column in parameters
        if column.name not in step.options
        and column.kind not in (column.VAR_POSITIONAL, column.VAR_KEYWORD)
        and (column.default is column.empty or column.name in known)
    ]
    _check_known(step, [column.name for column in columns], known, False)
    positional_names = [
        column.name
        for column, parameter in zip(columns, parameters, strict=False)
        if column is parameter and column.kind != column.KEYWORD_ONLY
    ]
    keyword_names = [column.name for column in columns[len(positional_names) :]]
    return DocumentFunction(
        step,
        load_own(step, *positional_names, by_name=keyword_names),
        (*positional_names, *keyword_names),
    )


KINDS = {
    "class": "is a class; name a function",
    "async function": "is an async function, which nobody would wait for; write it "
    "with `def`",
    "generator": "yields values; return one",
}
"""Unsupported kinds of functions, with messages."""


_KIND_TESTS = (
    ("class", inspect.isclass),
    ("async function", inspect.iscoroutinefunction),
    ("async function", inspect.isasyncgenfunction),
    ("generator", inspect.isgeneratorfunction),
)


def _check_known(
    step: OwnStep, names: Collection[str], available: Collection[str], is_batch: bool
) -> None:
    unknown = next((name for name in names if name not in available), None)
    if unknown is None:
        return
    raise wrong(
        step,
        f"{'is given the column' if is_batch else 'has the parameter'} "
        f"{unknown_name(unknown, available, 'documents have')}; correct "
        f"{'`columns`' if is_batch else 'it, or give it in `with`'}",
    )


def check_source(step: OwnStep, known: Collection[str]) -> None:
    """Check a function by its source, without running it.

    Args:
        step: the settings.
        known: the columns that will be available.

    Raises:
        OwnCodeError: the function cannot be called, or reads an unknown column.
    """
    signature = signature_of(step.use)
    if signature is None:
        return
    if signature.kind in KINDS:
        raise wrong(step, KINDS[signature.kind])
    if signature.batch is not None:
        _check_known(step, step.columns, known, True)
        return
    _check_known(
        step,
        [name for name in signature.required if name not in step.options],
        known,
        False,
    )
    parameters = [*signature.required, *signature.optional]
    unknown = next((name for name in step.options if name not in parameters), None)
    if unknown is not None and not signature.takes_any_name:
        raise wrong(
            step,
            f"has no parameter {unknown_name(unknown, parameters, 'it has')}; correct "
            "`with`",
        )


def known_columns(inputs: Inputs) -> list[str]:
    """Columns that a function may read: those of documents, and those of the stages
    among the inputs.
    """
    corpus = Corpus(inputs)
    return [*DOCUMENT_COLUMNS, *(corpus.measured if corpus.shards else ())]


@dataclass(frozen=True)
class JudgedColumns(Shard):
    """A shard with `id`, `source` and `text`, and its columns for a user's function.

    Attributes:
        given: table of the judged rows with the columns that the function reads.
    """

    given: pa.Table

    def shown(self, row: int) -> str:
        """Abbreviated id of a judged document, as `gristmill explain` accepts it."""
        name: str = self.documents["id"][int(self.judged[row])].as_py().hex()
        return name[:SHOWN_DIGITS]

    def sample(self, errors: Remarks) -> tuple[list[int], pa.Table]:
        """First documents that did not raise: positions among the judged, and rows."""
        good = [row for row, error in enumerate(errors) if error is None][:SAMPLE_ROWS]
        return good, self.given.take(pa.array(good, pa.int64()))

    def raised_again(self, rows: Sequence[int], errors: Remarks) -> str | None:
        """First error of second calls with some documents, in words."""
        for row, error in zip(rows, errors, strict=True):
            if error is not None:
                return (
                    f"of two calls with document {self.shown(row)} the second one "
                    f"raised {error}"
                )
        return None


def read_judged_columns(
    inputs: Inputs,
    shard: str,
    sources: Sequence[str] | None,
    reads: Sequence[str],
) -> JudgedColumns:
    """Read a function's columns of a shard's documents that were kept so far and belong
    to the sources.
    """
    source_columns = [
        part
        for name in reads
        if name in DOCUMENT_COLUMNS
        for part in DERIVED.get(name, (name,))
    ]
    names = list(dict.fromkeys(["id", "source", "text", *source_columns]))
    read = read_shard(inputs, shard, names, sources)
    rows = read.judged_documents
    # `keep` preserves the number of rows, which a table without columns would not have.
    columns: dict[str, Column] = {"keep": pa.nulls(len(rows))}
    measured = [name for name in reads if name not in DOCUMENT_COLUMNS]
    if measured:
        table = Corpus(inputs).read(shard, measured, kept=None)
        table = table.take(read.judged)
    for name in reads:
        if name in measured:
            columns[name] = table[name]
        elif name == "id":
            columns[name] = hex_ids(rows[name])
        elif name == "url":
            columns[name] = urls_of(rows)
        elif name == "source":
            columns[name] = rows[name].cast(pa.string())
        else:
            columns[name] = rows[name]
    return JudgedColumns(read.documents, read.rows, read.judged, pa.table(columns))


@dataclass(frozen=True)
class Returned:
    """Outcome of one call.

    Attributes:
        rows: number of documents of the call.
        value: the returned value.
        error: description of the exception, or None.
    """

    rows: int
    value: Any
    error: str | None = None


def call_on(
    function: DocumentFunction, given: pa.Table, limit: TimeLimit
) -> Iterator[Returned]:
    """Call a function on documents in order.

    If a batch raises, the function is called on each of its documents alone.
    """
    if function.batch is None:
        columns: list[Iterable[Any]] = []
        for name in function.reads:
            values = _python_values(given[name])
            if name == "metadata":
                # parsed one by one; an undecodable text is an error in its place
                columns.append(
                    json.loads(text) if isinstance(text, str) else text
                    for text in values
                )
            else:
                columns.append(values)
        rows = zip(*columns, strict=True) if columns else iter([()] * len(given))
        for arguments in rows:
            yield _call(function, arguments, limit)
        return
    result = _call(function, [_batch(function, given)], limit, len(given))
    if result.error is None or len(given) == 1:
        yield result
        return
    for row in range(len(given)):
        yield _call(function, [_batch(function, given.slice(row, 1))], limit)


def _call(
    function: DocumentFunction,
    arguments: Sequence[Any],
    limit: TimeLimit,
    rows: int = 1,
) -> Returned:
    for argument in arguments:
        if isinstance(argument, UnicodeDecodeError):
            return Returned(rows, None, f"{type(argument).__name__}: {argument}")
    try:
        return Returned(rows, limit.call(function.call, *arguments))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - any error, even SystemExit, quarantines the document
        return Returned(rows, None, mask_text(blame(function.step.use, error)))


def _batch(
    function: DocumentFunction, documents: pa.Table
) -> pa.RecordBatch | pa.Table:
    table = documents.select(function.reads).combine_chunks()
    if function.batch == "Table":
        return table
    columns = [column.combine_chunks() for column in table.columns]
    return pa.RecordBatch.from_arrays(columns, names=table.column_names)


def _python_values(column: pa.ChunkedArray) -> list[Any]:
    """Values of a column, with an error in place of a text that is not UTF-8."""
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        values = []
        for scalar in column:
            try:
                values.append(scalar.as_py())
            except UnicodeDecodeError as error:
                values.append(error)
    return values
