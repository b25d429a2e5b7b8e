"""A batch of answers with all that updates learn from them, as tensors that lie in checkpoints.

A training that is killed between two updates of one batch resumes with the same answers: the model that
gave them no longer exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gristmill.dataprep.files import read_json
from gristmill.mixtures.reinforcement import Rl
from gristmill.train.data.conversation_tokens import PAD_MULTIPLE
from gristmill.train.loop.checkpoints import MARKER, PREFIX, is_complete
from gristmill.train.reinforcement.kept_answers import batch_name, keep_batch, read_batch
from gristmill.train.reinforcement.tools.used import Used

NO_BATCH = -1
"""In place of a batch's number, before the first."""


@dataclass(frozen=True)
class Generated:
    """An answer as it was drawn.

    Attributes:
        tokens: its ids, with the one that ends it; of several turns with what stands between them.
        ended: whether it has one, else it was cut.
        drawn: which of its ids the policy has drawn; the others are answers of tools and what the template writes
            around them. All are drawn if absent.
        used: the calls of tools with their answers, in their order.
        logps: of the ids under what drew them, where that is another engine; 0 where they were not drawn.
    """

    tokens: list[int]
    ended: bool
    drawn: tuple[bool, ...] | None = None
    used: tuple[Used, ...] = ()
    logps: tuple[float, ...] | None = None

    @property
    def turns(self) -> list[list[int]]:
        """The ids of each turn of the assistant; between two of them there is always something that was not drawn."""
        if self.drawn is None:
            return [self.tokens]
        return [
            [token for token, _ in turn]
            for drawn, turn in groupby(zip(self.tokens, self.drawn, strict=True), key=lambda one: one[1])
            if drawn
        ]

    @property
    def num_drawn(self) -> int:
        """Tokens that the policy has drawn."""
        return len(self.tokens) if self.drawn is None else sum(self.drawn)


@dataclass(frozen=True)
class Part:
    """Some answers, padded; n rows, t tokens of prompt and answer, r of the longest answer.

    Attributes:
        ids: (n, t) prompt and answer, padded on the right.
        columns: (n, r) where the hidden state is that predicts each token of the answer.
        mask: (n, r) bool, which are tokens that the policy has drawn.
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
        drawn: (N, R) bool, which tokens of the answers the policy has drawn; None without tools, where it has all.
        used: (N, 3) int64, turns, calls of tools and failed calls of each answer; None without tools.
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
        self.drawn = torch.zeros(count, most, dtype=torch.bool) if section.tools else None
        self.used = torch.zeros(count, 3, dtype=torch.int64) if section.tools else None
        self.old, self.reference, self.values, self.advantages, self.returns, self.weights = (
            torch.zeros(count, most) for _ in range(6)
        )

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
            if self.drawn is not None and self.used is not None:
                self.drawn[row, : len(answer.tokens)] = torch.tensor(answer.drawn or [True] * len(answer.tokens))
                self.used[row] = torch.tensor(
                    [len(answer.turns), len(answer.used), sum(one.failed for one in answer.used)]
                )

    def tokens_of_answers(self, has_reference: bool) -> Iterator[dict[str, Any]]:
        """What `kept_answers.TOKEN_COLUMNS` name, of each answer."""
        for row, (size, length) in enumerate(zip(self.sizes.tolist(), self.lengths.tolist(), strict=True)):
            yield {
                "prompt_ids": self.ids[row, :size].tolist(),
                "answer_ids": self.ids[row, size : size + length].tolist(),
                "logps": self.old[row, :length].tolist(),
                "reference_logps": self.reference[row, :length].tolist() if has_reference else None,
                "advantages": self.advantages[row, :length].tolist(),
                **({} if self.drawn is None else {"drawn": self.drawn[row, :length].tolist()}),
            }

    @property
    def mask(self) -> Tensor:
        """(N, R) bool, which are tokens of answers that the policy has drawn: what is learned from."""
        within = torch.arange(self.old.shape[1]) < self.lengths[:, None]
        return within if self.drawn is None else within & self.drawn

    def part(self, rows: np.ndarray) -> Part:
        """Some of the answers, padded to the longest of them."""
        chosen = torch.from_numpy(rows)
        sizes, lengths = self.sizes[chosen], self.lengths[chosen]
        longest = int((sizes + lengths).max())
        t = min(self.ids.shape[1], -(-longest // PAD_MULTIPLE) * PAD_MULTIPLE)
        places = torch.arange(int(lengths.max()))
        mask = self.mask[chosen, : len(places)]
        # Logits at a position are of the token behind it.
        columns = torch.where(mask, sizes[:, None] - 1 + places, 0)
        ids = self.ids[chosen, :t].long()
        tokens = torch.where(mask, ids.gather(1, columns + 1), 0)
        return Part(ids, columns, mask, tokens)

    def of(self, rows: np.ndarray, width: int, device: torch.device, *names: str) -> list[Tensor]:
        """Columns of some answers, (n, width) each, on a device."""
        chosen = torch.from_numpy(rows)
        return [getattr(self, name)[chosen, :width].to(device, non_blocking=True) for name in names]


def take_earlier_batches(folder: Path, checkpoint: Path, updates_per_batch: int) -> None:
    """Copy the batches that the training of a checkpoint has learned from up to it, unless they are there.

    Raises:
        FileNotFoundError: they are not in the stage's folder that the checkpoint lies in.
    """
    if not checkpoint.name.startswith(PREFIX) or not is_complete(checkpoint):
        return  # The loop refuses it with the reason.
    stage = checkpoint.parents[2]
    for batch in range(-(-int(read_json(checkpoint / MARKER)["step"]) // updates_per_batch)):
        if (folder / batch_name(batch)).exists():
            continue
        answers = read_batch([stage / "data", stage / "work"], batch, with_tokens=True)
        if answers is None:
            raise FileNotFoundError(
                f"rl.continue_from: the answers that the training of {checkpoint} learned from are "
                f"not in {stage}; name the checkpoint where that training has saved it"
            )
        keep_batch(folder, batch, answers, list(answers[0]["rewards"]), "used" in answers[0])
