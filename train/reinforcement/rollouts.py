"""A batch of answers with all that updates learn from them, as tensors that lie in checkpoints.

A training that is killed between two updates of one batch goes on with the very answers that it had: the model that
gave them is gone by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from gristmill.dataprep.documents import open_parquet, write_table
from gristmill.dataprep.files import atomic_write, read_json
from gristmill.mixtures.reinforcement import Rl
from gristmill.train.data.conversation_tokens import PAD_MULTIPLE
from gristmill.train.loop.checkpoints import MARKER, PREFIX, is_complete

NO_BATCH = -1
"""In place of a batch's number, before the first."""
ANSWERS = "answers.parquet"
"""Of all batches, in the stage's output."""
TOKEN_COLUMNS = ("prompt_ids", "answer_ids", "logps", "reference_logps", "advantages")
"""Lists, which are not read with the rest."""
BATCHES = "answers"
"""The folder of the batches so far, beside the checkpoints."""


@dataclass(frozen=True)
class Generated:
    """An answer as it was drawn.

    Attributes:
        tokens: its ids, with the one that ends it.
        ended: whether it has one, else it was cut.
    """

    tokens: list[int]
    ended: bool


@dataclass(frozen=True)
class Part:
    """Some answers, padded; n rows, t tokens of prompt and answer, r of the longest answer.

    Attributes:
        ids: (n, t) prompt and answer, padded on the right.
        columns: (n, r) where the hidden state is that predicts each token of the answer.
        mask: (n, r) bool, which are tokens.
        tokens: (n, r) the answer.
    """

    ids: Tensor
    columns: Tensor
    mask: Tensor
    tokens: Tensor

    def to(self, device: torch.device) -> Part:
        """The same on a device."""
        return Part(*(part.to(device, non_blocking=True) for part in (self.ids, self.columns, self.mask, self.tokens)))


class Rollouts:
    """The answers that are learned from now, on the CPU and the same on every rank; N answers of at most R tokens.

    Args:
        section: how many, and how long.
        length: most tokens of prompt and answer.
        pad: the padding id.

    Attributes:
        batch: () int64, which batch of prompts they answer, from 0; NO_BATCH before the first.
        prompts: (N,) int64, numbers of the prompts that are trained on.
        rewards: (N, k) float32 of each reward, without its weight.
        totals: (N,) float32, all of them, weighted.
        old, reference, values: (N, R) float32, log-probabilities of the tokens under the policy that drew them and
            under the reference, and what the critic expected before each.
        advantages, returns: (N, R) float32.
        weights: (N, R) float32, see surrogate.token_weights.
        flat: (N,) bool, whose group got one and the same reward.
    """

    def __init__(self, section: Rl, length: int, pad: int) -> None:
        count, most = section.rollouts_per_batch, section.max_new_tokens
        self._pad = pad
        self.batch = torch.tensor(NO_BATCH)
        self.prompts, self.sizes, self.lengths = (torch.zeros(count, dtype=torch.int64) for _ in range(3))
        self.ids = torch.full((count, length), pad, dtype=torch.int32)
        self.ended, self.flat = (torch.zeros(count, dtype=torch.bool) for _ in range(2))
        self.rewards, self.totals = torch.zeros(count, len(section.rewards)), torch.zeros(count)
        self.old, self.reference, self.values, self.advantages, self.returns, self.weights = (
            torch.zeros(count, most) for _ in range(6))

    def tensors(self) -> dict[str, Tensor]:
        """All of it, for a checkpoint; filled in place when one is loaded."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def put(self, prompts: np.ndarray, prompt_ids: Sequence[Sequence[int]], answers: Sequence[Generated]) -> None:
        """Take the answers of a new batch; what is known about the last one is forgotten.

        Args:
            prompts: (N,) their numbers.
            prompt_ids: the tokens of each.
            answers: one for each.
        """
        for name, value in self.tensors().items():
            value.fill_(self._pad if name == "ids" else 0)
        self.prompts.copy_(torch.from_numpy(prompts))
        for row, (prompt, answer) in enumerate(zip(prompt_ids, answers, strict=True)):
            self.sizes[row], self.lengths[row] = len(prompt), len(answer.tokens)
            self.ids[row, : len(prompt) + len(answer.tokens)] = torch.tensor([*prompt, *answer.tokens])
            self.ended[row] = answer.ended

    def tokens_of_answers(self, has_reference: bool) -> Iterator[dict[str, list[float] | None]]:
        """What kept.TOKEN_COLUMNS name, of each answer."""
        for row, (size, length) in enumerate(zip(self.sizes.tolist(), self.lengths.tolist(), strict=True)):
            yield {"prompt_ids": self.ids[row, :size].tolist(),
                   "answer_ids": self.ids[row, size : size + length].tolist(),
                   "logps": self.old[row, :length].tolist(),
                   "reference_logps": self.reference[row, :length].tolist() if has_reference else None,
                   "advantages": self.advantages[row, :length].tolist()}

    @property
    def mask(self) -> Tensor:
        """(N, R) bool, which are tokens of answers."""
        return torch.arange(self.old.shape[1]) < self.lengths[:, None]

    def part(self, rows: np.ndarray) -> Part:
        """Some of the answers, padded to the longest of them."""
        chosen = torch.from_numpy(rows)
        sizes, lengths = self.sizes[chosen], self.lengths[chosen]
        longest = int((sizes + lengths).max())
        t = min(self.ids.shape[1], -(-longest // PAD_MULTIPLE) * PAD_MULTIPLE)
        places = torch.arange(int(lengths.max()))
        mask = places < lengths[:, None]
        # Logits at a position are of the token behind it.
        columns = torch.where(mask, sizes[:, None] - 1 + places, 0)
        ids = self.ids[chosen, :t].long()
        tokens = torch.where(mask, ids.gather(1, columns + 1), 0)
        return Part(ids, columns, mask, tokens)

    def of(self, rows: np.ndarray, width: int, device: torch.device, *names: str) -> list[Tensor]:
        """Columns of some answers, (n, width) each, on a device."""
        chosen = torch.from_numpy(rows)
        return [getattr(self, name)[chosen, :width].to(device, non_blocking=True) for name in names]


def schema_of(names: Sequence[str]) -> pa.Schema:
    """The columns, in the order of a batch's answers, those to one prompt side by side.

    `id` of the prompt, `prompt` (its last turn), `answer`, `right` (null where no reward asks for it), `ended`,
    `tokens` (with the one that ends it), `reward` (all, weighted), `rewards` (each without its weight), `advantage`
    (the mean of its tokens').

    And what losses are recomputed from (TOKEN_COLUMNS): `prompt_ids`, `answer_ids`, and of each of the answer's tokens
    `logps` under the policy that drew it and `reference_logps` (null without a tie to a reference), both at the
    temperature of the drawing, and `advantages`.
    """
    return pa.schema({
        "id": pa.string(), "prompt": pa.string(), "answer": pa.string(), "right": pa.string(), "ended": pa.bool_(),
        "tokens": pa.int32(), "reward": pa.float32(),
        "rewards": pa.struct([(name, pa.float32()) for name in names]), "advantage": pa.float32(),
        **{name: pa.list_(pa.int32() if name.endswith("ids") else pa.float32()) for name in TOKEN_COLUMNS}})


def keep_batch(folder: Path, batch: int, answers: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Write a batch's answers; a training that draws it again writes the same."""
    write_table(folder / _name(batch), pa.Table.from_pylist(list(answers), schema_of(names)))


def gather_batches(folder: Path, batches: int, out: Path) -> None:
    """Write all batches into one table."""
    with atomic_write(out) as sink:
        writer: pq.ParquetWriter | None = None
        for batch in range(batches):
            with open_parquet(folder / _name(batch)) as file:
                table = file.read(use_threads=False)
            writer = writer or pq.ParquetWriter(sink, table.schema, compression="zstd")
            writer.write_table(table, row_group_size=max(1, len(table)))
        if writer is not None:
            writer.close()


def take_earlier_batches(folder: Path, checkpoint: Path, updates_per_batch: int) -> None:
    """Copy the batches that the training of a checkpoint has learned from up to it, unless they are there.

    Raises:
        FileNotFoundError: they are not in the stage's folder that the checkpoint lies in.
    """
    if not checkpoint.name.startswith(PREFIX) or not is_complete(checkpoint):
        return  # The loop refuses it with the reason.
    stage = checkpoint.parents[2]
    for batch in range(-(-int(read_json(checkpoint / MARKER)["step"]) // updates_per_batch)):
        if (folder / _name(batch)).exists():
            continue
        answers = read_batch([stage / "data", stage / "work"], batch, with_tokens=True)
        if answers is None:
            raise FileNotFoundError(f"rl.continue_from: the answers that the training of {checkpoint} learned from are "
                                    f"not in {stage}; name the checkpoint where that training has saved it")
        keep_batch(folder, batch, answers, list(answers[0]["rewards"]))


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
        if (folder / BATCHES / _name(batch)).exists():
            with open_parquet(folder / BATCHES / _name(batch)) as file:
                return _rows(file.read(use_threads=False), with_tokens)
    return None


def _rows(table: pa.Table, with_tokens: bool) -> list[dict[str, Any]]:
    left_out = set() if with_tokens else {*TOKEN_COLUMNS}
    rows: list[dict[str, Any]] = table.select([name for name in table.column_names if name not in left_out]).to_pylist()
    return rows


def _name(batch: int) -> str:
    return f"batch-{batch:08d}.parquet"
