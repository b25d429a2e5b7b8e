"""The condition of a source: which of its documents the mixture may take, by what the preparing stages measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.dataprep.documents import annotation_stages, read_annotations
from gristmill.tokenize.mixing.quotas import MixError

JUDGEMENT_COLUMNS = ("id", "keep", "reason", "error")
MET, NOT_MET, UNKNOWN = 1, 0, -1


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
        condition: SQL over the columns of `measured`, as DuckDB reads it.
        measured: see `measured_columns`.

    Returns:
        int8 per row: MET, NOT_MET, or UNKNOWN where SQL says NULL because a value was not measured.

    Raises:
        MixError: the condition does not parse, is no condition, or names a column that there is not.
    """
    import duckdb

    with duckdb.connect(config={"threads": 1, "enable_external_access": False}) as connection:
        rows = pa.array(range(len(measured)), pa.int64())
        connection.register("documents", measured.append_column("gristmill_row", rows))
        try:
            # The line break ends a comment in the condition before the bracket is closed.
            found = connection.execute(
                f"SELECT gristmill_row, CAST((\n{condition}\n) AS BOOLEAN) FROM documents"
            ).fetchnumpy()
        except duckdb.Error as error:
            raise MixError(f"sources.{source}.where: {condition!r}: {str(error).splitlines()[0]} (columns: "
                           f"{', '.join(sorted(measured.column_names))})") from error
    return _as_verdicts(*found.values())


def _as_verdicts(rows: Any, values: Any) -> np.ndarray:
    verdicts = np.full(len(rows), UNKNOWN, dtype=np.int8)
    known = ~np.ma.getmaskarray(values)
    verdicts[np.asarray(rows)[known]] = np.where(np.ma.getdata(values)[known].astype(bool), MET, NOT_MET)
    return verdicts
