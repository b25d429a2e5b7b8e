"""The answers of a training by reinforcement as tables: what `trace` shows of a step, read without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.dataprep.documents import open_parquet, write_table
from gristmill.dataprep.files import atomic_write

ANSWERS = "answers.parquet"
"""Of all batches, in the stage's output."""
TOKEN_COLUMNS = ("prompt_ids", "answer_ids", "logps", "reference_logps", "advantages")
"""Lists, which are not read with the rest."""
DRAWN = "drawn"
"""One more of them, where tools were called."""
USED = pa.list_(
    pa.struct(
        [
            ("turn", pa.int32()),
            ("name", pa.string()),
            ("arguments", pa.string()),
            ("answer", pa.string()),
            ("failed", pa.bool_()),
        ]
    )
)
BATCHES = "answers"
"""The folder of the batches so far, beside the checkpoints."""


def schema_of(names: Sequence[str], tools: bool = False) -> pa.Schema:
    """The columns, in the order of a batch's answers, those to one prompt side by side.

    `id` of the prompt, `prompt` (its last turn), `answer`, `right` (null where no reward asks for it), `ended`,
    `tokens` (with the one that ends it), `reward` (all, weighted), `rewards` (each without its weight), `advantage`
    (the mean of its tokens').

    And what losses are recomputed from (TOKEN_COLUMNS): `prompt_ids`, `answer_ids`, and of each of the answer's tokens
    `logps` under the policy that drew it and `reference_logps` (null without a tie to a reference), both at the
    temperature of the drawing, and `advantages`.

    With tools `answer` is the last turn, `tokens` are those that the policy has drawn, `turns` their number, and `used`
    the calls with what was answered. `answer_ids` is then all of the turns with what stands between them; `drawn` says
    which of it the policy has drawn, and the other tokens' values are 0.
    """
    more: dict[str, pa.DataType] = {"turns": pa.int32(), "used": USED, DRAWN: pa.list_(pa.bool_())} if tools else {}
    return pa.schema(
        {
            "id": pa.string(),
            "prompt": pa.string(),
            "answer": pa.string(),
            "right": pa.string(),
            "ended": pa.bool_(),
            "tokens": pa.int32(),
            "reward": pa.float32(),
            "rewards": pa.struct([(name, pa.float32()) for name in names]),
            "advantage": pa.float32(),
            **{name: pa.list_(pa.int32() if name.endswith("ids") else pa.float32()) for name in TOKEN_COLUMNS},
            **more,
        }
    )


def keep_batch(
    folder: Path, batch: int, answers: Sequence[Mapping[str, Any]], names: Sequence[str], tools: bool = False
) -> None:
    """Write a batch's answers; a training that draws it again writes the same."""
    write_table(folder / batch_name(batch), pa.Table.from_pylist(list(answers), schema_of(names, tools)))


def gather_batches(folder: Path, batches: int, out: Path) -> None:
    """Write all batches into one table."""
    with atomic_write(out) as sink:
        writer: pq.ParquetWriter | None = None
        for batch in range(batches):
            with open_parquet(folder / batch_name(batch)) as file:
                table = file.read(use_threads=False)
            writer = writer or pq.ParquetWriter(sink, table.schema, compression="zstd")
            writer.write_table(table, row_group_size=max(1, len(table)))
        if writer is not None:
            writer.close()


def read_batch(folders: Iterable[Path], batch: int, with_tokens: bool = False) -> list[dict[str, Any]] | None:
    """A batch's answers from the first of some folders that knows it, a finished stage's or an unfinished one's.

    Args:
        folders: to look in.
        batch: its number, from 0.
        with_tokens: whether TOKEN_COLUMNS are wanted too.
    """
    for folder in folders:
        if (folder / ANSWERS).exists():
            with open_parquet(folder / ANSWERS) as file:
                return _rows(file.read_row_group(batch, use_threads=False), with_tokens)
        if (folder / BATCHES / batch_name(batch)).exists():
            with open_parquet(folder / BATCHES / batch_name(batch)) as file:
                return _rows(file.read(use_threads=False), with_tokens)
    return None


def _rows(table: pa.Table, with_tokens: bool) -> list[dict[str, Any]]:
    left_out = set() if with_tokens else {*TOKEN_COLUMNS, DRAWN}
    rows: list[dict[str, Any]] = table.select([name for name in table.column_names if name not in left_out]).to_pylist()
    return rows


def batch_name(batch: int) -> str:
    """The file of a batch, beside the checkpoints."""
    return f"batch-{batch:08d}.parquet"
