"""SQL expressions over the columns of one document: a subset of DuckDB's SQL, checked
on DuckDB's parse tree.

The text of an expression enters the fingerprint of a mixture or an export, so an
expression must be a pure function of the document's columns: no clock, randomness,
other rows or files. Only what is listed here is allowed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.dataprep.readers.records import field_of
from gristmill.mixtures.schema.prepare import column_prefix
from gristmill.mixtures.yaml_text import did_you_mean

MIXING_COLUMNS = ("tokens", "bytes", "draw")
"""Columns that mixing adds: sizes from the tokenizer, and `draw`, a hash of the
document's id in [0, 1).
"""
OWN_COLUMNS = tuple(
    "id source locator url licence text metadata kept dropped_by reason error "
    "original_text".split()
)
"""Columns of a document before any step (`corpus.Corpus`)."""
METADATA = "metadata"
"""Column with a record's metadata, a JSON object: `metadata.n` is its key `n`."""
CONFINED = {
    "threads": 1,
    "enable_external_access": False,
    "python_enable_replacements": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
}
"""Settings of a database without access to files, network, extensions and Python
variables; once locked, no expression can change them
(https://duckdb.org/docs/stable/operations_manual/securing_duckdb/overview).
"""


Node = dict[str, Any]
"""Node of DuckDB's parse tree."""
StepColumns = dict[str, tuple[str, str]]
"""Name of a column -> the step that measured it, and its name there."""


class ExpressionError(ValueError):
    """An expression cannot be evaluated; the message has its text and the available
    columns.
    """


class NotAllowedError(ExpressionError):
    """An expression is not SQL, or is outside the allowed grammar; the message names
    the construct.
    """


def all_names(measured: Mapping[str, Collection[str]]) -> list[str]:
    """Names of all columns for expressions; see `names_of`."""
    return [
        name for columns in names_of(measured).values() for name in columns.values()
    ]


def names_of(measured: Mapping[str, Collection[str]]) -> dict[str, dict[str, str]]:
    """Name the columns for expressions: a column measured by several steps is
    `<step>_<column>` in each.

    The same holds for a column named like a document's own (MIXING_COLUMNS, OWN_COLUMNS).

    Args:
        measured: name of a step -> its columns.

    Returns:
        step -> column -> name.
    """
    uses = Counter(
        [
            *MIXING_COLUMNS,
            *OWN_COLUMNS,
            *(column for columns in measured.values() for column in columns),
        ]
    )
    return {
        step: {
            column: column if uses[column] == 1 else f"{column_prefix(step)}_{column}"
            for column in columns
        }
        for step, columns in measured.items()
    }


def evaluate(
    expression: str, kind: str, columns: pa.Table
) -> tuple[np.ndarray, np.ndarray]:
    """Evaluate an expression on every row, without access to files or network.

    Args:
        expression: SQL over the columns, within GRAMMAR.
        kind: SQL type that the values are cast to.
        columns: one row per document.

    Returns:
        bool per row, True if it has a value; and the values.

    Raises:
        NotAllowedError: the expression is outside the grammar, or names an unknown
            column.
        ExpressionError: its value cannot be cast to the type.
    """
    import duckdb

    with duckdb.connect(config=CONFINED) as connection:
        for name, function in (("min", "least"), ("max", "greatest")):
            # DuckDB's min and max are aggregates, and its least() and greatest() ignore
            # NULL.
            connection.execute(
                f"CREATE MACRO {name}(a, b) AS CASE WHEN a IS NULL OR b IS NULL THEN "
                f"NULL ELSE {function}(a, b) END"
            )
        connection.execute("SET lock_configuration = true")
        names = _column_paths(connection, expression, columns.column_names)
        keys = [
            path[1:]
            for path in dict.fromkeys(names)
            if len(path) > 1 and path[0].lower() == METADATA
        ]
        if keys:
            place = columns.column_names.index(METADATA)
            try:
                values = _metadata_values(columns[METADATA], keys)
            except ExpressionError as error:
                raise ExpressionError(f"{expression!r}: {error}") from error
            columns = columns.set_column(place, METADATA, values)
        rows = pa.array(np.arange(len(columns)))
        connection.register("documents", columns.append_column("gristmill_row", rows))
        try:
            # The line break ends a comment in the expression before the closing
            # parenthesis.
            result_columns = connection.execute(
                f"SELECT gristmill_row, CAST((\n{expression}\n) AS {kind}) FROM "
                "documents"
            ).fetchnumpy()
        except duckdb.Error as error:
            raise ExpressionError(
                _error_message(
                    expression, str(error).splitlines()[0], columns.column_names
                )
            ) from error
    numbers, values = result_columns.values()
    order = np.argsort(np.asarray(numbers), kind="stable")
    is_valid = ~np.ma.getmaskarray(values)[order]
    return is_valid, np.asarray(np.ma.getdata(values))[order]


def columns_in(expression: str, names: Collection[str]) -> list[str]:
    """Columns that an expression names, in the order of `names`.

    Other errors than those below depend on the values.

    Raises:
        NotAllowedError: the expression is outside the grammar, or names an unknown
            column.
    """
    import duckdb

    with duckdb.connect(config=CONFINED) as connection:
        paths = _column_paths(connection, expression, names)
    used_columns = {path[0].lower() for path in paths}
    return [name for name in names if name.lower() in used_columns]


def _metadata_values(
    metadata: pa.ChunkedArray, keys: Sequence[tuple[str, ...]]
) -> pa.Array:
    """Metadata keys as the columns of a struct; null if an object lacks the key.

    Raises:
        ExpressionError: a key has values of several types, so that its column's type
            would depend on other rows.
    """
    objects = [
        json.loads(value) if isinstance(value, str) else {}
        for value in metadata.to_pylist()
    ]
    tree: dict[str, Any] = {}
    for path in keys:
        name = ".".join(path)
        values = [field_of(value, name) for value in objects]
        kinds: set[pa.DataType] = set()
        for value in values:
            if isinstance(value, bool):
                kinds.add(pa.bool_())
            elif isinstance(value, int | float):
                kinds.add(pa.float64())
            elif value is not None:
                kinds.add(pa.string())
        if len(kinds) > 1:
            raise ExpressionError(
                f"{METADATA}.{name} is of several types: "
                f"{', '.join(sorted(map(str, kinds)))}; give all records the same one"
            )
        kind = kinds.pop() if kinds else pa.null()
        if kind == pa.float64():
            values = [None if value is None else float(value) for value in values]
        elif kind == pa.string():
            # a list or an object becomes its JSON text
            values = [
                value if value is None or isinstance(value, str) else json.dumps(value)
                for value in values
            ]
        level = tree
        for part in path[:-1]:
            level = level.setdefault(part, {})
        level[path[-1]] = pa.array(values, kind)
    return _as_struct(tree)


def _as_struct(tree: Mapping[str, object]) -> pa.Array:
    fields = [
        _as_struct(value) if isinstance(value, Mapping) else value
        for value in tree.values()
    ]
    return pa.StructArray.from_arrays(fields, names=list(tree))


def _error_message(expression: str, reason: str, columns: Collection[str]) -> str:
    return f"{expression!r}: {reason} (columns: {', '.join(sorted(columns))})"


OPERATORS = tuple(
    "+ - * / // % ** ^ || ~~ !~~ ~~* !~~* ~~~ like_escape not_like_escape ilike_escape "
    "not_ilike_escape".split()
)
"""Arithmetic, concatenation, LIKE, ILIKE and GLOB by their names in DuckDB."""
FUNCTIONS = {
    "numbers": (
        "abs ceil ceiling exp floor greatest isfinite isinf isnan least ln log log10 "
        "log2 max min pow power round sign sqrt trunc".split()
    ),
    "texts": (
        "concat contains ends_with hex left length lower ltrim position prefix "
        "regexp_full_match regexp_matches replace right rtrim starts_with strlen strpos "
        "substr substring suffix trim upper".split()
    ),
    "either": "if ifnull nullif".split(),
}
"""Pure functions of a row (https://duckdb.org/docs/stable/sql/functions/overview)."""
FUNCTION_NAMES = sorted(chain.from_iterable(FUNCTIONS.values()))
ALLOWED_FUNCTIONS = frozenset([*OPERATORS, *FUNCTION_NAMES])
OF_TWO = ("min", "max")
"""Aggregates over rows if called with one argument."""
ALLOWED_CLASSES = frozenset(
    "COLUMN_REF CONSTANT COMPARISON CONJUNCTION BETWEEN CASE CAST TYPE FUNCTION "
    "OPERATOR".split()
)
ALLOWED_OPERATORS = frozenset(
    "OPERATOR_NOT OPERATOR_IS_NULL OPERATOR_IS_NOT_NULL OPERATOR_COALESCE COMPARE_IN "
    "COMPARE_NOT_IN".split()
)
ALLOWED_TYPES = frozenset(
    "BOOLEAN TINYINT SMALLINT INTEGER BIGINT HUGEINT UTINYINT USMALLINT UINTEGER UBIGINT "
    "FLOAT DOUBLE VARCHAR".split()
)
"""Types allowed in casts; times depend on a time zone."""
NAMES_OF_CLASSES = {
    "SUBQUERY": "a sub-query",
    "WINDOW": "a window function",
    "STAR": "*",
    "LAMBDA": "a lambda",
    "PARAMETER": "a parameter",
    "POSITIONAL_REFERENCE": "a column's number",
    "DEFAULT": "DEFAULT",
    "COLLATE": "COLLATE",
}
ALIASES = {
    "INT": "INTEGER",
    "REAL": "FLOAT",
    "TEXT": "VARCHAR",
    "STRING": "VARCHAR",
    "BOOL": "BOOLEAN",
    "LONG": "BIGINT",
    "FLOAT4": "FLOAT",
    "FLOAT8": "DOUBLE",
    "INT4": "INTEGER",
    "INT8": "BIGINT",
}
GRAMMAR = (
    "columns, constants, comparison, arithmetic, AND, OR, NOT, IN, BETWEEN, LIKE, "
    "CASE, IS NULL, COALESCE, CAST to a number, text or truth value, and the functions "
    + ", ".join(FUNCTION_NAMES)
)
"""Description of the grammar for error messages."""


def _column_paths(
    connection: Any, expression: str, columns: Collection[str]
) -> list[tuple[str, ...]]:
    """Names of the columns in an expression: one part, or several for a metadata key.
    Raises NotAllowedError unless it is a function of a row's columns.

    Args:
        connection: to DuckDB, used only for parsing.
        expression: SQL.
        columns: names of the available columns.
    """
    column_names = {name.lower() for name in columns}
    try:
        statement = _parse(connection, expression)
        selected = statement.pop("select_list")
        empty_statement = _parse(connection, "1")
        del empty_statement["select_list"]
        if len(selected) != 1 or statement != empty_statement:
            raise NotAllowedError(
                "it is more than one expression; allowed is one condition or one number"
            )
        nodes = list(_expressions(selected))
        for node in nodes:
            _check_node(node, column_names)
        paths: list[tuple[str, ...]] = [
            tuple(node["column_names"])
            for node in nodes
            if node["class"] == "COLUMN_REF"
        ]
        keys = {path[1:] for path in paths}
        for key in keys:
            for length in range(1, len(key)):
                if key[:length] in keys:
                    outer, inner = ".".join(key[:length]), ".".join(key)
                    raise NotAllowedError(
                        f"{METADATA}.{outer} and {METADATA}.{inner} cannot be read "
                        "together; name one of them"
                    )
    except NotAllowedError as error:
        message = _error_message(expression, str(error), columns)
        raise NotAllowedError(message) from error
    return paths


def _parse(connection: Any, expression: str) -> Node:
    """Parse `SELECT (expression)` with DuckDB, and drop the positions in its text."""

    def without_locations(pairs: Sequence[tuple[str, Any]]) -> Node:
        return {
            key: value for key, value in pairs if not key.startswith("query_location")
        }

    # The line break ends a comment in the expression before the closing parenthesis.
    rows = connection.execute(
        "SELECT json_serialize_sql(?)", [f"SELECT (\n{expression}\n)"]
    ).fetchall()
    tree = json.loads(rows[0][0], object_pairs_hook=without_locations)
    if tree.get("error"):
        raise NotAllowedError(str(tree["error_message"]).splitlines()[0])
    if len(tree["statements"]) != 1:
        raise NotAllowedError(
            "it is more than one statement; allowed is one condition or one number"
        )
    return tree["statements"][0]["node"]


def _expressions(value: Any) -> Iterator[Node]:
    """Yield all expressions below a node of the parse tree, outer ones first."""
    if isinstance(value, dict):
        if "class" in value:
            yield value
        for inner in value.values():
            yield from _expressions(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _expressions(inner)


def _check_node(node: Node, columns: Collection[str]) -> None:
    kind = node["class"]
    node_type = node["type"]
    if kind == "FUNCTION":
        name = node["function_name"].lower()
        if name not in ALLOWED_FUNCTIONS or node.get("schema") or node.get("catalog"):
            raise NotAllowedError(
                f"the function {name} is not allowed; an expression looks at one "
                f"document alone; allowed are {GRAMMAR}"
            )
        if (
            node.get("distinct")
            or node.get("filter")
            or (node.get("order_bys") or {}).get("orders")
        ):
            raise NotAllowedError(
                f"{name} has DISTINCT, FILTER or ORDER BY, which are for several "
                "documents"
            )
        arguments = node.get("arguments") or node.get("children") or []
        if name in OF_TWO and len(arguments) != len(OF_TWO):
            raise NotAllowedError(
                f"{name} takes two values of one document, and has {len(arguments)}"
            )
    elif kind == "COLUMN_REF":
        path = node["column_names"]
        name = ".".join(path)
        is_key = len(path) > 1 and path[0].lower() == METADATA and METADATA in columns
        if name.lower() not in columns and not is_key:
            hint = did_you_mean(name.lower(), columns)
            raise NotAllowedError(f"there is no column {name!r}{hint}")
    elif kind == "CAST":
        # the type's name is stored differently in DuckDB 1 and 2
        type_name = (
            (node.get("type_expr") or {}).get("type_name")
            or (node.get("cast_type") or {}).get("id")
            or "?"
        ).upper()
        name = ALIASES.get(type_name, type_name)
        if name not in ALLOWED_TYPES:
            allowed = ", ".join(sorted(ALLOWED_TYPES))
            raise NotAllowedError(
                f"a cast to {name} is not allowed; allowed are {allowed}"
            )
    elif kind not in ALLOWED_CLASSES or (
        kind == "OPERATOR" and node_type not in ALLOWED_OPERATORS
    ):
        construct = NAMES_OF_CLASSES.get(kind, node_type.lower())
        function = node.get("function_name")
        detail = f" ({function})" if function else ""
        raise NotAllowedError(
            f"{construct} is not allowed{detail}; an expression looks at one "
            f"document alone; allowed are {GRAMMAR}"
        )
