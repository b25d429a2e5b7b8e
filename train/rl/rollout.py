"""Batch of answers with all inputs of its updates, as tensors for checkpoints.

A training killed between two updates of a batch resumes with the same answers, as the
policy that sampled them no longer exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gristmill.core.files import read_json
from gristmill.mixtures.schema.rl import Rl
from gristmill.train.checkpoint import MARKER, is_complete
from gristmill.train.data.conversation_tokens import padded_length
from gristmill.train.loop.prefetch import TensorBatch
from gristmill.train.models.tensor_files import Tensors
from gristmill.train.rl.policy_gradient import (
    group_advantages,
    groups_without_variance,
    teacher_advantages,
    token_weights,
)
from gristmill.train.rl.rollout_tables import (
    TokenColumns,
    batch_name,
    keep_batch,
    read_batch,
)
from gristmill.train.rl.tools.tool_call import Used

NO_BATCH = -1
"""Number of the batch before the first one."""


@dataclass(frozen=True)
class Generated:
    """A sampled answer.

    Attributes:
        tokens: ids, including the stop token; of several turns including the text
            between them.
        ended: True with a stop token, False if truncated.
        drawn: True for sampled ids; the others are answers of tools and the template's
            text around them. All are sampled if absent.
        used: calls of tools with their answers, in order.
    """

    tokens: list[int]
    ended: bool
    drawn: tuple[bool, ...] | None = None
    used: tuple[Used, ...] = ()

    @property
    def turns(self) -> list[list[int]]:
        """Ids of each turn of the assistant; turns are separated by ids not sampled."""
        if self.drawn is None:
            return [self.tokens]
        return [
            [token for token, _ in turn]
            for drawn, turn in groupby(
                zip(self.tokens, self.drawn, strict=True), key=lambda pair: pair[1]
            )
            if drawn
        ]

    @property
    def num_drawn(self) -> int:
        """Number of tokens sampled from the policy."""
        return len(self.tokens) if self.drawn is None else sum(self.drawn)


@dataclass(frozen=True)
class Part(TensorBatch):
    """Some answers, padded; n rows, t tokens of prompt and answer, r of the longest
    answer.

    Attributes:
        ids: (n, t) prompt and answer, right-padded.
        columns: (n, r) position of the hidden state that predicts each token of the
            answer.
        mask: (n, r) bool, the tokens sampled from the policy.
        tokens: (n, r) the answer.
    """

    ids: Tensor
    columns: Tensor
    mask: Tensor
    tokens: Tensor

    def predicting(self, hidden: Tensor) -> Tensor:
        """Hidden states (m, d), of (n, t, d), that predict the m sampled tokens, row by
        row.
        """
        rows, _ = self.mask.nonzero(as_tuple=True)
        return hidden[rows, self.columns[self.mask]]


class Rollouts:
    """Current answers, on the CPU and equal on every rank; N answers of at most R
    tokens.

    Args:
        section: number and length of answers.
        length: most tokens of prompt and answer.
        pad: the padding id.

    Attributes:
        batch: () int64, number of the batch of prompts, from 0; NO_BATCH before the
            first.
        prompts: (N,) int64, numbers of training prompts.
        rewards: (N, k) float32 of each reward, without its weight.
        totals: (N,) float32, weighted sums of the rewards.
        drawn: (N, R) bool, the sampled tokens of the answers; None without tools: all
            tokens.
        used: (N, 3) int64, turns, calls of tools and failed calls of each answer; None
            without tools.
        old, reference: (N, R) float32, log-probabilities of the tokens under the
            sampling policy and under the reference.
        advantages: (N, R) float32.
        weights: (N, R) float32, see `policy_gradient.token_weights`.
        flat: (N,) bool, True if the group has equal rewards.
    """

    def __init__(self, section: Rl, length: int, pad: int) -> None:
        count = section.rollouts_per_batch
        max_tokens = section.max_new_tokens
        self._pad = pad
        self.batch = torch.tensor(NO_BATCH)
        self.prompts, self.sizes, self.lengths = (
            torch.zeros(count, dtype=torch.int64) for _ in range(3)
        )
        self.ids = torch.full((count, length), pad, dtype=torch.int32)
        self.ended, self.flat = (torch.zeros(count, dtype=torch.bool) for _ in range(2))
        self.rewards = torch.zeros(count, len(section.rewards))
        self.totals = torch.zeros(count)
        self.drawn = (
            torch.zeros(count, max_tokens, dtype=torch.bool) if section.tools else None
        )
        self.used = torch.zeros(count, 3, dtype=torch.int64) if section.tools else None
        self.old, self.reference, self.advantages, self.weights = (
            torch.zeros(count, max_tokens) for _ in range(4)
        )

    def tensors(self) -> Tensors:
        """State for a checkpoint, loaded in place."""
        return {
            name: value
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }

    def put(
        self,
        prompts: np.ndarray,
        prompt_ids: Sequence[Sequence[int]],
        answers: Sequence[Generated],
    ) -> None:
        """Store the answers of a new batch and reset all values of the last one.

        Args:
            prompts: (N,) their numbers.
            prompt_ids: the tokens of each.
            answers: one per prompt.
        """
        for name, value in self.tensors().items():
            value.fill_(self._pad if name == "ids" else 0)
        self.prompts.copy_(torch.from_numpy(prompts))
        for row, (prompt, answer) in enumerate(zip(prompt_ids, answers, strict=True)):
            self.sizes[row] = len(prompt)
            self.lengths[row] = len(answer.tokens)
            self.ids[row, : len(prompt) + len(answer.tokens)] = torch.tensor(
                [*prompt, *answer.tokens]
            )
            self.ended[row] = answer.ended
            if self.drawn is not None and self.used is not None:
                self.drawn[row, : len(answer.tokens)] = torch.tensor(
                    answer.drawn or [True] * len(answer.tokens)
                )
                self.used[row] = torch.tensor(
                    [
                        len(answer.turns),
                        len(answer.used),
                        sum(call.failed for call in answer.used),
                    ]
                )

    def weigh(self, section: Rl) -> None:
        """Set the advantages of rewarded answers, and the weights of their tokens."""
        mask = self.mask
        self.flat.copy_(groups_without_variance(self.totals, section.group_size))
        if section.algorithm == "grpo":
            advantages = group_advantages(
                self.totals, section.group_size, section.advantage_scale
            )
            self.advantages.copy_(advantages[:, None] * mask)
        else:
            self.advantages.copy_(teacher_advantages(self.old, self.reference, mask))
        counted = mask & self.ended[:, None] if section.mask_truncated else mask
        for weights, of_step in zip(
            self.weights.split(section.global_batch_size),
            counted.split(section.global_batch_size),
            strict=True,
        ):
            weights.copy_(
                token_weights(of_step, section.normalisation, section.max_new_tokens)
            )

    def tokens_of_answers(self, has_reference: bool) -> Iterator[TokenColumns]:
        """Inputs to recompute the losses of each answer from."""
        for row, (size, length) in enumerate(
            zip(self.sizes.tolist(), self.lengths.tolist(), strict=True)
        ):
            columns: TokenColumns = {
                "prompt_ids": self.ids[row, :size].tolist(),
                "answer_ids": self.ids[row, size : size + length].tolist(),
                "logps": self.old[row, :length].tolist(),
                "reference_logps": self.reference[row, :length].tolist()
                if has_reference
                else None,
                "advantages": self.advantages[row, :length].tolist(),
            }
            if self.drawn is not None:
                columns["drawn"] = self.drawn[row, :length].tolist()
            yield columns

    @property
    def mask(self) -> Tensor:
        """(N, R) bool: tokens of answers sampled from the policy, which are trained
        on.
        """
        within = torch.arange(self.old.shape[1]) < self.lengths[:, None]
        return within if self.drawn is None else within & self.drawn

    def part(self, rows: np.ndarray) -> Part:
        """Some answers, padded to the longest of them."""
        chosen = torch.from_numpy(rows)
        sizes = self.sizes[chosen]
        lengths = self.lengths[chosen]
        t = padded_length(int((sizes + lengths).max()), self.ids.shape[1])
        places = torch.arange(int(lengths.max()))
        mask = self.mask[chosen, : len(places)]
        # Logits at a position predict the next token.
        columns = torch.where(mask, sizes[:, None] - 1 + places, 0)
        ids = self.ids[chosen, :t].long()
        return Part(
            ids, columns, mask, torch.where(mask, ids.gather(1, columns + 1), 0)
        )

    def of(
        self, rows: np.ndarray, width: int, device: torch.device, *names: str
    ) -> list[Tensor]:
        """Columns of some answers, (n, width) each, on a device."""
        chosen = torch.from_numpy(rows)
        return [
            getattr(self, name)[chosen, :width].to(device, non_blocking=True)
            for name in names
        ]


def take_earlier_batches(
    folder: Path, checkpoint: Path, updates_per_batch: int
) -> None:
    """Copy the batches used by the training of a checkpoint, unless they exist.

    Raises:
        FileNotFoundError: the checkpoint's stage folder does not have them.
    """
    if not is_complete(checkpoint):
        return  # The loop rejects it with the reason.
    stage = checkpoint.parents[2]
    for batch in range(
        -(-int(read_json(checkpoint / MARKER)["step"]) // updates_per_batch)
    ):
        if (folder / batch_name(batch)).exists():
            continue
        answers = read_batch([stage / "data", stage / "work"], batch, with_tokens=True)
        if answers is None:
            raise FileNotFoundError(
                f"rl.continue_from: the answers that the training of {checkpoint} "
                "learned from are "
                f"not in {stage}; name the checkpoint where that training has saved it"
            )
        keep_batch(folder, batch, answers)
