"""Calls a user's function on documents: what it is given, one document or a batch at a time, and what it raises.

What it raises on a document is that document's error. What is wrong with the function itself (it cannot be called, it
returns something else than it may) is an OwnCodeError, which ends the stage with one sentence.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.dataprep.context import Context
from gristmill.dataprep.corpus import DERIVED, Corpus, hex_ids, url_of
from gristmill.dataprep.documents import judged_rows, read_shard
from gristmill.dataprep.own.time_limits import TimeLimit, TimeLimitError
from gristmill.dataprep.own_functions import blame, load_function, load_own
from gristmill.dataprep.secrets import mask_text
from gristmill.mixtures.own_code import OwnCodeError
from gristmill.mixtures.own_signatures import batch_type, signature_of
from gristmill.mixtures.steps.own_steps import OwnStep
from gristmill.mixtures.yaml_text import did_you_mean

BATCH_ROWS = 1000
SAMPLE_ROWS = 16
"""Documents of each shard that a function is called on twice, to see whether both calls give the same."""
DOCUMENT_COLUMNS = ("text", "source", "url", "metadata", "locator", "id")
"""What a function may ask for of every document; beside it, all that steps before have measured."""
MOST_SHOWN_CHARACTERS = 60
SHOWN_DIGITS = 16
"""Of a document's id in messages."""


@dataclass(frozen=True)
class DocumentFunction:
    """A user's function, ready to be called on documents.

    Attributes:
        step: the settings.
        call: takes the values of `reads` by place, or a batch with these columns.
        reads: names of columns.
        batch: `RecordBatch` or `Table` where it takes many documents at a time.
    """

    step: OwnStep
    call: Callable[..., Any]
    reads: tuple[str, ...]
    batch: str | None = None

    def wrong(self, what: str) -> OwnCodeError:
        """The error that it does something else than it may, such as "returned nothing"."""
        return wrong(self.step, what)


def wrong(step: OwnStep, what: str) -> OwnCodeError:
    """`steps.py, line 3: count_word returned nothing`."""
    return OwnCodeError(f"{step.use.place}: {step.use.name} {what}")


def described(value: Any) -> str:
    """A returned value in words: `int 3`, or its type alone where it is long."""
    if value is None:
        return "nothing (None)"
    shown = repr(value)
    return type(value).__name__ + (f" {shown}" if len(shown) <= MOST_SHOWN_CHARACTERS else "")


def describe_run(step: OwnStep, results: Sequence[Mapping[str, Any]], context: Context) -> dict[str, str]:
    """For a summary: `code`, what ran; `differs`, what two calls gave where that was not the same, which is warned of.

    Args:
        step: the settings.
        results: of the shards, each with `differs`.
        context: where to warn.
    """
    differs = next((result["differs"] for result in results if result["differs"]), None)
    if differs is None:
        return {"code": step.use.describe()}
    said = f"{step.use.place}: {step.use.name} is not deterministic: {differs}"
    context.warn(f"{said}; another run may come to other results")
    return {"code": step.use.describe(), "differs": said}


def load_document_function(step: OwnStep, known: Collection[str]) -> DocumentFunction:
    """Load the function of a step.

    Args:
        step: the settings.
        known: the columns that there are.

    Raises:
        OwnCodeError: it cannot be loaded, cannot be called so, or asks for a column that there is not.
    """
    with TimeLimit(step.time_limit_seconds) as limit:
        try:
            function = limit.call(load_function, step.use)
        except TimeLimitError as error:
            raise OwnCodeError(f"{step.use.file} cannot be loaded: {blame(step.use, error)}") from error
    _check_kind(step, function)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of a built-in one nothing is known
        return DocumentFunction(step, load_own(step, "text"), ("text",))
    batch = batch_type(_written(parameters[0].annotation)) if parameters else None
    if batch is not None:
        reads = step.columns or ("text",)
        _check_known(step, reads, known, True)
        return DocumentFunction(step, load_own(step, parameters[0].name), reads, batch)
    if step.columns:
        raise wrong(
            step,
            "takes one document at a time, and has a parameter for each column; `columns` is for "
            "functions whose first parameter is a pa.RecordBatch or pa.Table: remove it",
        )
    return _load_for_one(step, parameters, known)


def _load_for_one(step: OwnStep, parameters: Sequence[inspect.Parameter], known: Collection[str]) -> DocumentFunction:
    columns = [
        one
        for one in parameters
        if one.name not in step.options
        and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        and (one.default is one.empty or one.name in known)
    ]
    _check_known(step, [one.name for one in columns], known, False)
    placed = [
        one.name
        for one, parameter in zip(columns, parameters, strict=False)
        if one is parameter and one.kind != one.KEYWORD_ONLY
    ]
    named = [one.name for one in columns[len(placed) :]]
    return DocumentFunction(step, load_own(step, *placed, by_name=named), (*placed, *named))


KINDS = {
    "class": "is a class; name a function",
    "async function": "is an async function, which nobody would wait for; write it with `def`",
    "generator": "yields values; return one",
}
"""What a function may not be."""


def _check_kind(step: OwnStep, function: Callable[..., Any]) -> None:
    kind = (
        "class"
        if inspect.isclass(function)
        else "async function"
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
        else "generator"
        if inspect.isgeneratorfunction(function)
        else None
    )
    if kind is not None:
        raise wrong(step, KINDS[kind])


def _check_known(step: OwnStep, names: Collection[str], known: Collection[str], is_batch: bool) -> None:
    unknown = next((name for name in names if name not in known), None)
    if unknown is None:
        return
    raise wrong(
        step,
        f"{'is given the column' if is_batch else 'has the parameter'} {unknown!r}, which is no column "
        f"of documents{did_you_mean(unknown, list(known))}; there are {', '.join(known)}; correct "
        f"{'`columns`' if is_batch else 'it, or give it in `with`'}",
    )


def check_source(step: OwnStep, known: Collection[str]) -> None:
    """See what the source of a function shows, without running it.

    Args:
        step: the settings.
        known: the columns that there will be.

    Raises:
        OwnCodeError: it cannot be called so, or asks for a column that there will not be.
    """
    found = signature_of(step.use)
    if found is None:
        return
    if found.kind in KINDS:
        raise wrong(step, KINDS[found.kind])
    if found.batch is not None:
        _check_known(step, step.columns, known, True)
        return
    _check_known(step, [name for name in found.required if name not in step.options], known, False)
    parameters = [*found.required, *found.optional]
    unknown = next((name for name in step.options if name not in parameters), None)
    if unknown is not None and not found.takes_any_name:
        raise wrong(step, f"has no parameter {unknown!r}{did_you_mean(unknown, parameters)}; correct `with`")


def _written(hint: Any) -> str | None:
    return hint if isinstance(hint, str) else getattr(hint, "__name__", None)


def known_columns(inputs: Mapping[str, Path]) -> list[str]:
    """The columns that a function may ask for: of documents, and measured by the stages among the inputs."""
    corpus = Corpus(inputs)
    return [*DOCUMENT_COLUMNS, *(corpus.measured if corpus.shards else ())]


@dataclass(frozen=True)
class JudgedColumns:
    """What a function is given of a shard.

    Attributes:
        documents: the shard with `id`, `source` and `text`.
        rows: int64, rows that earlier stages kept.
        judged: int64, those of them that the step judges.
        given: per judged row the columns that the function asks for; of no column where it asks for none.
    """

    documents: pa.Table
    rows: np.ndarray
    judged: np.ndarray
    given: pa.Table

    def shown(self, row: int) -> str:
        """The id of a judged document, as `gristmill explain` takes it."""
        name: str = self.documents["id"][int(self.judged[row])].as_py().hex()
        return name[:SHOWN_DIGITS]


def read_judged_columns(
    inputs: Mapping[str, Path], shard: str, sources: Sequence[str] | None, reads: Sequence[str]
) -> JudgedColumns:
    """Read what a function asks for of the documents of a shard that were kept so far and belong to the sources."""
    own = [part for name in reads if name in DOCUMENT_COLUMNS for part in DERIVED.get(name, (name,))]
    read = read_shard(inputs, shard, list(dict.fromkeys(["id", "source", "text", *own])))
    judged = judged_rows(read.documents, read.rows, sources)
    taken = pa.array(judged)
    rows = read.documents.take(taken)
    measured = [name for name in reads if name not in DOCUMENT_COLUMNS]
    of_steps = Corpus(inputs).read(shard, measured, kept=None).take(taken) if measured else None
    # `keep` stands for a table's number of rows, which one of no columns would not have.
    given = {"keep": pa.nulls(len(rows))}
    for name in reads:
        given[name] = of_steps[name] if of_steps is not None and name in measured else _column(rows, name)
    return JudgedColumns(read.documents, read.rows, judged, pa.table(given))


def _column(rows: pa.Table, name: str) -> pa.Array | pa.ChunkedArray:
    """A column of the documents themselves, as a function is given it."""
    if name == "id":
        return hex_ids(rows[name])
    if name == "url":
        return pa.array(map(url_of, rows["locator"].to_pylist(), rows["metadata"].to_pylist()), pa.string())
    return rows[name].cast(pa.string()) if name == "source" else rows[name]


@dataclass(frozen=True)
class Returned:
    """What one call returned.

    Attributes:
        rows: so many documents it was given.
        value: what came of it.
        error: why it came to nothing, of a call with one document.
    """

    rows: int
    value: Any
    error: str | None = None


def call_on(function: DocumentFunction, given: pa.Table, limit: TimeLimit) -> Iterator[Returned]:
    """Call a function on documents, in their order.

    One that takes batches is called with each document alone where a batch raises.
    """
    if function.batch is None:
        for values in _values(function, given):
            yield _call(function, values, limit)
        return
    found = _call(function, [_batch(function, given)], limit, len(given))
    if found.error is None or len(given) == 1:
        yield found
        return
    for row in range(len(given)):
        yield _call(function, [_batch(function, given.slice(row, 1))], limit)


def _call(function: DocumentFunction, arguments: Sequence[Any], limit: TimeLimit, rows: int = 1) -> Returned:
    unreadable = next((one for one in arguments if isinstance(one, UnicodeDecodeError)), None)
    if unreadable is not None:
        return Returned(rows, None, f"{type(unreadable).__name__}: {unreadable}")
    try:
        return Returned(rows, limit.call(function.call, *arguments))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it is, SystemExit too, it goes to the quarantine
        return Returned(rows, None, mask_text(blame(function.step.use, error)))


def _batch(function: DocumentFunction, given: pa.Table) -> pa.RecordBatch | pa.Table:
    table = given.select(list(function.reads)).combine_chunks()
    if function.batch == "Table":
        return table
    columns = [column.combine_chunks() for column in table.columns]
    return pa.RecordBatch.from_arrays(columns, names=table.column_names)


def _values(function: DocumentFunction, given: pa.Table) -> Iterator[tuple[Any, ...]]:
    """Per document the values that a function takes; an error in place of a text that is not UTF-8."""
    columns = [
        map(_metadata, _texts(given[name])) if name == "metadata" else _texts(given[name]) for name in function.reads
    ]
    return zip(*columns, strict=True) if columns else iter([()] * len(given))


def _texts(column: pa.ChunkedArray) -> list[Any]:
    try:
        values: list[Any] = column.to_pylist()
        return values
    except UnicodeDecodeError:
        return [_value(one) for one in column]


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return error


def _metadata(text: Any) -> Any:
    return json.loads(text) if isinstance(text, str) else text
