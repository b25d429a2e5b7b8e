"""Prompts of reinforcement learning: reading, encoding, held-out prompts, and the order
of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gristmill.dataprep.documents import Inputs
from gristmill.dataprep.examples.conversations import Example
from gristmill.dataprep.examples.kept_examples import UsableSet
from gristmill.dataprep.examples.read_examples import (
    RecordCounts,
    made_path,
    read_set,
)
from gristmill.dataprep.rewards.answer_checks import check_answers
from gristmill.mixtures.schema.rl import AnswerReward, Prompts, Rl, columns_of
from gristmill.train.data.conversation_tokens import (
    Chat,
    EncodingCounts,
    NothingToTrainError,
    SetErrors,
    check_encoded,
    encode_examples,
)
from gristmill.train.data.pairs import is_held_out
from gristmill.train.loop.batch_plan import RowOrder
from gristmill.train.loop.objective import JsonObject
from gristmill.train.rl.multi_turn import Dialogue


@dataclass(frozen=True)
class Prompt:
    """A prompt to answer.

    Attributes:
        example: source record.
        ids: of the conversation, up to the assistant's turn.
        offered: names of the tools described in the prompt.
    """

    example: Example
    ids: tuple[int, ...]
    offered: tuple[str, ...] = ()

    @property
    def answer(self) -> str | None:
        """Right answer, if known."""
        return self.example.get("answer")


@dataclass(frozen=True)
class PromptSet:
    """Outcome of a set of prompts.

    Attributes:
        path: of the set.
        records: outcome of its records.
        encoding: numbers of prompts that are not usable.
        used: usable prompts that no earlier set has.
        repeated: other usable prompts.
    """

    path: str
    records: RecordCounts
    encoding: EncodingCounts
    used: int
    repeated: int

    def summary(self) -> JsonObject:
        """Counts for the summary of the stage."""
        return {
            "path": self.path,
            **vars(self.records),
            **vars(self.encoding),
            "used": self.used,
            "repeated": self.repeated,
        }


def read_prompts(
    data: Sequence[Prompts],
    rewards: Sequence[AnswerReward],
    chat: Chat,
    longest: int,
    inputs: Inputs | None = None,
    dialogue: Dialogue | None = None,
) -> tuple[list[Prompt], list[PromptSet]]:
    """Read and encode all sets of prompts, in order.

    Args:
        data: the sets.
        rewards: rewards, which may need right answers.
        chat: tokenizer and template.
        longest: most tokens of a prompt.
        inputs: of the stage, including sets made by the run.
        dialogue: tools to call, with their format.

    Returns:
        the usable prompts without duplicates, and the outcome of each set.

    Raises:
        NothingToTrainError: a set has no usable prompt.
        gristmill.dataprep.rewards.answer_checks.NoAnswerError: a prompt lacks the
            answer that a reward compares with.
    """
    prompts_by_id: dict[str, Prompt] = {}
    sets = []
    errors = SetErrors()
    for prompt_set in data:
        where = f"rl data {prompt_set.path}"
        read = read_set(
            made_path(prompt_set.path, inputs or {}),
            "prompts",
            prompt_set.format,
            prompt_set.limit,
            prompt_set.max_quarantined,
            prompt_set.answer,
            columns_of(rewards),
        )
        check_answers(where, read.examples, rewards, prompt_set.answer)

        def encode(example: Example) -> Sequence[Prompt]:
            if dialogue is None:
                tokens = chat.encode(example["prompt"], True, example.get("tools", ()))
                prompt = Prompt(example, tuple(tokens.ids.tolist()))
            else:
                ids, offered = dialogue.encode(example)
                prompt = Prompt(example, tuple(ids), offered)
            return [] if len(prompt.ids) > longest else [prompt]

        encoded = encode_examples(read.examples, encode)
        counts = read.counts()
        with errors.noted():
            check_encoded(
                where,
                encoded,
                UsableSet(read.examples, read.quarantined, counts, read.places()),
                prompt_set.max_quarantined,
                f"prompts has at most {longest} tokens",
                "raise rl.sequence_length, lower rl.max_new_tokens",
            )
        fresh = {
            prompt.example["id"]: prompt
            for prompt in encoded.used
            if prompt.example["id"] not in prompts_by_id
        }
        prompts_by_id |= fresh
        sets.append(
            PromptSet(
                prompt_set.path,
                counts,
                encoded.counts,
                used=len(fresh),
                repeated=len(encoded.used) - len(fresh),
            )
        )
    errors.raise_all()
    return list(prompts_by_id.values()), sets


def split(
    prompts: Sequence[Prompt], share: float, limit: int, seed: int
) -> tuple[list[Prompt], list[Prompt]]:
    """Split prompts into training and held-out ones, by a hash of seed and prompt; at
    most `limit` held out.

    Raises:
        NothingToTrainError: all prompts are held out.
    """
    held_out: list[Prompt] = []
    training: list[Prompt] = []
    for prompt in prompts:
        is_out = is_held_out(prompt.example["prompt"], share, seed)
        (held_out if is_out else training).append(prompt)
    if not training:
        raise NothingToTrainError(
            f"rl: all {len(prompts)} prompts are held out; lower rl.holdout "
            f"({share}) or add prompts"
        )
    return training, sorted(held_out, key=lambda prompt: prompt.example["id"])[:limit]


@dataclass(frozen=True)
class PromptPlan:
    """Distribution of a batch's prompts to its steps, epoch after epoch.

    Attributes:
        prompts_per_step: prompts per step, each with a full group of answers.
        steps_per_batch, epochs_per_batch: see the section `rl`.
    """

    prompts_per_step: int
    steps_per_batch: int
    epochs_per_batch: int

    def positions(self, step: int) -> tuple[int, int]:
        """First position of a step (counted from 0) in the order of the prompts, and
        the number of positions.
        """
        batch, within = divmod(step, self.steps_per_batch * self.epochs_per_batch)
        return (
            batch * self.steps_per_batch + within % self.steps_per_batch
        ) * self.prompts_per_step, self.prompts_per_step

    def rows(self, order: RowOrder, step: int) -> np.ndarray:
        """Numbers of the prompts (int64) of a step."""
        return order.span(*self.positions(step))

    def steps_of(self, positions: np.ndarray) -> np.ndarray:
        """Steps that train on some positions, counted from 0, int64, (epochs, n): the
        inverse of `positions`.
        """
        batch, within = np.divmod(
            positions // self.prompts_per_step, self.steps_per_batch
        )
        epochs = np.arange(self.epochs_per_batch, dtype=np.int64)[:, None]
        return (batch * self.epochs_per_batch + epochs) * self.steps_per_batch + within

    def end(self, steps: int) -> int:
        """Number of positions used by `steps` steps, rounded up to full batches."""
        batches = -(-steps // (self.steps_per_batch * self.epochs_per_batch))
        return batches * self.steps_per_batch * self.prompts_per_step


def prompt_plan_of(section: Rl) -> PromptPlan:
    """Plan of a section."""
    return PromptPlan(
        section.global_batch_size // section.group_size,
        section.steps_per_batch,
        section.epochs_per_batch,
    )
