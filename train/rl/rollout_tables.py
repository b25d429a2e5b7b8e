"""Tables of the answers of reinforcement learning, which `trace` reads without
torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.core.files import atomic_write
from gristmill.dataprep.documents import open_parquet, write_table

ANSWERS = "answers.parquet"
"""File of all batches, in the stage's output."""
TOKEN_COLUMNS = ("prompt_ids", "answer_ids", "logps", "reference_logps", "advantages")
"""Columns of lists, which are read only on request."""
DRAWN = "drawn"
"""Another such column, with tools."""
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
"""Folder of batches so far, beside the checkpoints."""


class TokenColumns(TypedDict, total=False):
    """Inputs to recompute the losses of an answer from.

    Attributes:
        prompt_ids, answer_ids: tokens; with tools the answer covers all turns and the
            text between them.
        logps: of the answer's tokens under the sampling policy, at the sampling
            temperature.
        reference_logps: likewise under the reference; None without one.
        advantages: of the answer's tokens.
        drawn: with tools, True for sampled tokens; the values of others are 0.
    """

    prompt_ids: list[int]
    answer_ids: list[int]
    logps: list[float]
    reference_logps: list[float] | None
    advantages: list[float]
    drawn: list[bool]


class AnswerRow(TokenColumns):
    """A sampled answer with its rewards.

    Attributes:
        id: of the prompt.
        prompt: its last turn.
        answer: its last turn.
        right: the prompt's right answer; None if it has none.
        ended: False if it was truncated.
        tokens: number of sampled tokens, including the stop token.
        reward: weighted sum of the rewards.
        rewards: each without its weight.
        advantage: mean of its tokens'; absent if it was not trained on.
        turns: with tools, number of turns.
        used: with tools, the calls with their answers (`tool_call.Used`).
    """

    id: str
    prompt: str
    answer: str
    right: str | None
    ended: bool
    tokens: int
    reward: float
    rewards: dict[str, float]
    advantage: NotRequired[float]
    turns: NotRequired[int]
    used: NotRequired[list[dict[str, Any]]]


def keep_batch(folder: Path, batch: int, answers: Sequence[AnswerRow]) -> None:
    """Write a batch's answers, whose keys are those of the first one; a training that
    samples it again writes the same.
    """
    more: dict[str, pa.DataType] = {}
    if "used" in answers[0]:
        more = {"turns": pa.int32(), "used": USED, DRAWN: pa.list_(pa.bool_())}
    rewards = pa.struct([(name, pa.float32()) for name in answers[0]["rewards"]])
    write_table(
        folder / batch_name(batch),
        pa.Table.from_pylist(
            list(answers),
            pa.schema(
                {
                    "id": pa.string(),
                    "prompt": pa.string(),
                    "answer": pa.string(),
                    "right": pa.string(),
                    "ended": pa.bool_(),
                    "tokens": pa.int32(),
                    "reward": pa.float32(),
                    "rewards": rewards,
                    "advantage": pa.float32(),
                    **{
                        name: pa.list_(
                            pa.int32() if name.endswith("ids") else pa.float32()
                        )
                        for name in TOKEN_COLUMNS
                    },
                    **more,
                }
            ),
        ),
    )


def gather_batches(folder: Path, batches: int, out: Path) -> None:
    """Concatenate all batches in one table."""
    with atomic_write(out) as sink:
        writer: pq.ParquetWriter | None = None
        for batch in range(batches):
            with open_parquet(folder / batch_name(batch)) as file:
                table = file.read(use_threads=False)
            writer = writer or pq.ParquetWriter(sink, table.schema, compression="zstd")
            writer.write_table(table, row_group_size=max(1, len(table)))
        if writer is not None:
            writer.close()


def read_batch(
    folders: Iterable[Path], batch: int, with_tokens: bool = False
) -> list[AnswerRow] | None:
    """Read a batch's answers from the first folder that has it: of a finished or of an
    unfinished stage.

    Args:
        folders: folders to search.
        batch: number of the batch, from 0.
        with_tokens: True to read TOKEN_COLUMNS too.
    """
    for folder in folders:
        if (folder / ANSWERS).exists():
            with open_parquet(folder / ANSWERS) as file:
                return _rows(file.read_row_group(batch, use_threads=False), with_tokens)
        if (folder / BATCHES / batch_name(batch)).exists():
            with open_parquet(folder / BATCHES / batch_name(batch)) as file:
                return _rows(file.read(use_threads=False), with_tokens)
    return None


def _rows(table: pa.Table, with_tokens: bool) -> list[AnswerRow]:
    left_out = set() if with_tokens else {*TOKEN_COLUMNS, DRAWN}
    return table.select(
        [name for name in table.column_names if name not in left_out]
    ).to_pylist()


def batch_name(batch: int) -> str:
    """File name of a batch."""
    return f"batch-{batch:08d}.parquet"
