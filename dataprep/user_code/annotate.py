"""Stage `annotate`: measure documents with a user's function, and drop documents by
thresholds.

If the step has a model instead, `dataprep/encoders/score_documents.py` measures.

A function of one document returns a dictionary (a TypedDict, a NamedTuple, a dataclass)
of numbers, booleans and texts, or a single such value for the column with the
function's name; a bare False drops the document. A function of a batch returns columns
with a value per document: a RecordBatch, a Table, a dictionary of arrays, or one array.
None, null and NaN are missing values, which pass every threshold.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.stage_context import Context
from gristmill.dataprep.documents import (
    Inputs,
    Remarks,
    as_numbers,
    read_table,
    write_table,
)
from gristmill.dataprep.runners.tasks import (
    Done,
    ShardTask,
    Task,
    run_tasks,
    shard_tasks,
)
from gristmill.dataprep.thresholds import (
    Columns,
    MeasuredShard,
    MeasuredSummary,
    bounds_of,
    failures,
    first_failures,
    measured_shard,
    summarize,
)
from gristmill.dataprep.user_code.own_documents import (
    BATCH_ROWS,
    DocumentFunction,
    JudgedColumns,
    OwnShard,
    call_on,
    described,
    known_columns,
    load_document_function,
    read_judged_columns,
    warn_of_difference,
)
from gristmill.dataprep.user_code.time_limits import TimeLimit
from gristmill.dataprep.user_functions import wrong
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.steps.own_steps import Annotate, OwnAnnotate
from gristmill.mixtures.yaml_text import did_you_mean

if TYPE_CHECKING:
    from gristmill.dataprep.encoders.score_documents import ScoreSummary

PLAIN = (bool, int, float, str, np.generic)
"""Types of a value of a document, besides None."""
TYPES: Mapping[pa.DataType, Callable[[pa.DataType], bool]] = {
    pa.bool_(): pa.types.is_boolean,
    pa.int64(): pa.types.is_integer,
    pa.float64(): pa.types.is_floating,
    pa.string(): lambda kind: (
        pa.types.is_string(kind) or pa.types.is_large_string(kind)
    ),
    pa.null(): pa.types.is_null,
}
"""Types of columns, each with a test of the types that are cast to it."""
MOST_TEXT_BYTES = 100_000
"""Maximum size of a value: a column describes a document and is not a second text."""
Returned = Mapping[str, Any]
"""Result of a function: a value or an array by column."""
LIKE = 1e-6
"""Relative tolerance between two calls: sums over batches of different sizes are
rounded differently.
"""


@dataclasses.dataclass(frozen=True)
class AnnotateSummary(MeasuredSummary):
    """Summary of a user's measurements.

    Attributes:
        code: description of the code.
        differs: different results of two calls, if any.
    """

    code: str
    differs: str | None = None


class AnnotatedShard(OwnShard, MeasuredShard):
    """Result of measuring a shard."""

    types: dict[str, str]
    """Arrow type by column."""


def run(
    inputs: Inputs, config: Recipe, out: Path, context: Context
) -> AnnotateSummary | ScoreSummary:
    """Measure every kept document with the user's function, and drop documents by
    thresholds or a bare False.

    Writes one annotation table per document shard, with every column that the function
    may return, `OwnAnnotate.measured`.

    Args:
        inputs: `ingest`, and the earlier annotating stages.
        config: the manifest's `annotate` section (`mixtures.steps.own_steps.Annotate`),
            with the code by value.

    Raises:
        OwnCodeError: the function cannot be called, or returned an invalid value.
        ConservationError, QuarantineError: see `counts`.
    """
    settings = Annotate.model_validate(config)
    if settings.model is not None:
        from gristmill.dataprep.encoders import score_documents

        return score_documents.run(inputs, settings, out, context)
    section = settings.function
    columns = known_columns(inputs)
    load_document_function(section, columns)  # fail before any work
    tasks = shard_tasks(inputs["ingest"])
    # Use processes for large inputs: Python code holds the GIL, and functions of
    # batches often run Python code too.
    results = run_tasks(
        "annotate",
        tasks,
        partial(annotate_shard, inputs=inputs, section=section, out=out, known=columns),
        context,
        holds_gil=True,
    )
    # One type for each column, such as float64 if one of many shards has integers.
    final_types = {}
    for name in section.measured:
        kinds = [_type(result["types"][name]) for result in results]
        kind = common_type(section, name, kinds)
        final_types[name] = str(pa.float64() if pa.types.is_null(kind) else kind)
    outdated_tasks = [
        task
        for task, result in zip(tasks, results, strict=True)
        if result["types"] != final_types
    ]
    run_tasks(
        "types",
        outdated_tasks,
        partial(cast_shard, types=final_types, out=out),
        context,
    )
    measured = summarize(results, section.max_quarantined, context.stage, out)
    return AnnotateSummary(
        **vars(measured),
        code=section.use.describe(),
        differs=warn_of_difference(section, results, context),
    )


def annotate_shard(
    task: ShardTask,
    inputs: Inputs,
    section: OwnAnnotate,
    out: Path,
    known: Sequence[str],
) -> Done[AnnotatedShard]:
    """Measure one document shard and write its annotations."""
    function = load_document_function(section, known)
    judged_columns = read_judged_columns(
        inputs, task.name, section.sources, function.reads
    )
    with TimeLimit(section.time_limit_seconds) as limit:
        measured = measure(function, section, judged_columns.given, limit)
        differs = compare_calls(function, section, judged_columns, measured, limit)
    numbers = {
        name: as_numbers(values)
        for name, values in measured.columns.items()
        if is_number(values.type)
    }
    reasons, failed = judge(section, measured, numbers)
    counts = judged_columns.write_measured(
        out / task.name, reasons, measured.columns, measured.errors
    )
    return Done(
        [out / task.name],
        {
            **measured_shard(counts, failed, numbers),
            "differs": differs,
            "types": {
                name: str(values.type) for name, values in measured.columns.items()
            },
        },
    )


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measurements of n documents.

    Attributes:
        columns: all columns that the step announces; a value per document that did not
            raise.
        errors: error per document, or None.
        decides: the function returned bare booleans, of which False drops the document.
    """

    columns: Mapping[str, pa.Array]
    errors: Remarks
    decides: bool = False


def measure(
    function: DocumentFunction, section: OwnAnnotate, given: pa.Table, limit: TimeLimit
) -> Measured:
    """Call a function on n documents.

    Raises:
        OwnCodeError: the function returned an invalid value.
    """
    announced = section.measured
    parts: list[Mapping[str, pa.Array]] = []
    errors: list[str | None] = []
    decides = False
    for start in range(0, len(given), BATCH_ROWS):
        rows: list[Returned] = []
        for returned in call_on(function, given.slice(start, BATCH_ROWS), limit):
            errors.extend([returned.error] * returned.rows)
            if returned.error is not None:
                continue
            values, is_decision = _named(function, returned.value)
            unknown = next(
                (str(name) for name in values if name not in announced), None
            )
            if unknown is not None:
                raise function.wrong(
                    f"returned a column {unknown!r} that nothing "
                    f"announces{did_you_mean(unknown, announced)}; write `measures: "
                    f"[{', '.join(map(str, values))}]` in the step, or give the "
                    "function a return type with the names (a TypedDict)"
                )
            decides |= is_decision
            if function.batch is None:
                # Arrow takes NumPy's scalars only if all have one type.
                rows.append(
                    {
                        name: value.item() if isinstance(value, np.generic) else value
                        for name, value in values.items()
                    }
                )
            else:
                parts.append(
                    {
                        name: _array(function, name, values[name], returned.rows)
                        if name in values
                        else pa.nulls(returned.rows)
                        for name in announced
                    }
                )
        if function.batch is None:
            parts.append(
                {
                    name: _array(
                        function, name, [row.get(name) for row in rows], len(rows)
                    )
                    for name in announced
                }
            )
    columns: dict[str, pa.Array] = {}
    for name in announced:
        arrays = [part[name] for part in parts]
        kind = common_type(section, name, [array.type for array in arrays])
        columns[name] = (
            pa.concat_arrays([array.cast(kind) for array in arrays])
            if arrays
            else pa.nulls(0)
        )
    return Measured(columns, errors, decides)


def _named(function: DocumentFunction, value: Any) -> tuple[Returned, bool]:
    """Returned values by column name, and True if the function returned a bare
    decision.
    """
    function_name = function.step.use.name
    if isinstance(value, pa.RecordBatch | pa.Table):
        return {
            name: value[name]
            for name in value.schema.names
            if name not in function.reads
        }, False
    if isinstance(value, Mapping):
        return value, False
    if hasattr(value, "_asdict"):
        return value._asdict(), False
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
        }, False
    if function.batch is None and isinstance(value, PLAIN):
        return {function_name: value}, isinstance(value, bool | np.bool_)
    if function.batch is not None and isinstance(
        value, pa.Array | pa.ChunkedArray | np.ndarray
    ):
        is_boolean = (
            value.dtype == bool
            if isinstance(value, np.ndarray)
            else pa.types.is_boolean(value.type)
        )
        return {function_name: value}, is_boolean
    allowed = (
        "a dictionary, a number, a text, True or False"
        if function.batch is None
        else "a RecordBatch, a Table, a dictionary of arrays, or an array"
    )
    raise function.wrong(f"returned {described(value)}; return {allowed}")


def _array(function: DocumentFunction, name: str, value: Any, rows: int) -> pa.Array:
    """Convert values to a column of `rows` values with one of TYPES."""
    try:
        array = (
            value
            if isinstance(value, pa.Array | pa.ChunkedArray)
            else pa.array(value, from_pandas=True)
        )
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise function.wrong(
            f"returned values as {name!r} that make no column: {error}"
        ) from error
    if len(array) != rows:
        raise function.wrong(
            f"returned {len(array):,} values as {name!r} for "
            f"{rows:,} documents; return one for each"
        )
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = next((kind for kind, is_kind in TYPES.items() if is_kind(array.type)), None)
    if kind is None:
        raise function.wrong(
            f"returned {array.type} as {name!r}; a column has "
            "numbers, texts, True or False"
        )
    try:
        column = array.cast(kind)
    except pa.ArrowInvalid as error:
        raise function.wrong(
            f"returned {array.type} as {name!r}, which does not fit {kind}: {error}"
        ) from error
    if kind == pa.float64():
        return pc.if_else(pc.is_nan(column), pa.scalar(None, kind), column)
    longest = pc.max(pc.binary_length(column)).as_py() if kind == pa.string() else None
    if longest is not None and longest > MOST_TEXT_BYTES:
        raise function.wrong(
            f"returned a text of {longest:,} bytes as {name!r}, which may have "
            f"{MOST_TEXT_BYTES:,}; a "
            "column says something of a document; a step `edit` changes its text"
        )
    return column


def common_type(
    section: OwnAnnotate, name: str, types: Iterable[pa.DataType]
) -> pa.DataType:
    """Common type of a column's parts: integers and floats make floats, and null
    matches any type.

    Raises:
        OwnCodeError: the types are incompatible.
    """
    kinds = {kind for kind in types if not pa.types.is_null(kind)}
    if len(kinds) > 1 and kinds != {pa.int64(), pa.float64()}:
        raise wrong(
            section,
            f"returned {' and '.join(sorted(map(str, kinds)))} as {name!r}; "
            "a column has one kind of value",
        )
    return pa.float64() if len(kinds) > 1 else next(iter(kinds), pa.null())


def is_number(kind: pa.DataType) -> bool:
    """Test if columns of a type have thresholds and histograms; True is 1."""
    return not pa.types.is_string(kind)


def judge(
    section: OwnAnnotate, measured: Measured, numbers: Columns
) -> tuple[list[str | None], Columns]:
    """Reason to drop each document that did not raise, or None; and masks of failing
    documents by threshold.

    Raises:
        OwnCodeError: a threshold bounds a column of texts.
    """
    for bound in bounds_of(section):
        if bound.statistic not in numbers:
            raise wrong(
                section,
                f"returns texts as {bound.statistic!r}, which {bound.key} cannot "
                "bound; remove it, or return a number",
            )
    good = measured.errors.count(None)
    failed = failures(numbers, {"annotate": section})
    reasons = first_failures(failed, good)
    if measured.decides:
        column = section.use.name
        for row in np.flatnonzero(numbers[column] == 0):
            reasons[row] = reasons[row] or f"annotate/{column}"
    return reasons, failed


def compare_calls(
    function: DocumentFunction,
    section: OwnAnnotate,
    read: JudgedColumns,
    measured: Measured,
    limit: TimeLimit,
) -> str | None:
    """Call a function again on the first documents that did not raise; returns the
    difference in words, or None.
    """
    good, sample = read.sample(measured.errors)
    again = measure(function, section, sample, limit)
    if (difference := read.raised_again(good, again.errors)) is not None:
        return difference
    for name, values in again.columns.items():
        for row, first_value, second_value in zip(
            good, measured.columns[name].to_pylist(), values.to_pylist(), strict=False
        ):
            is_equal = first_value == second_value
            if isinstance(first_value, float) and isinstance(second_value, float | int):
                is_equal = math.isclose(
                    first_value, second_value, rel_tol=LIKE, abs_tol=LIKE
                )
            if not is_equal:
                return (
                    f"two calls with document {read.shown(row)} gave {first_value!r} "
                    f"and {second_value!r} as {name!r}"
                )
    return None


def _type(name: str) -> pa.DataType:
    return next(kind for kind in TYPES if str(kind) == name)


def cast_shard(task: Task, types: Mapping[str, str], out: Path) -> Done:
    """Rewrite the annotations of a shard with columns of these types."""
    table = read_table(out / task.name)
    for name, kind in types.items():
        table = table.set_column(
            table.column_names.index(name), name, table[name].cast(_type(kind))
        )
    write_table(out / task.name, table)
    return Done([out / task.name])
