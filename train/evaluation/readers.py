"""A model and its tokenizer, ready to be asked tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from gristmill.mixtures.evaluation import Evaluate, Task
from gristmill.train.evaluation.answering import Reader, Result, answer_task
from gristmill.train.evaluation.tasks import Item, read_task
from gristmill.train.models.llama import Llama
from gristmill.train.objectives.chat import TOKENIZER_FILE, Chat
from gristmill.train.parallel.world import World


def open_reader(model: Llama, tokenizer_folder: Path, world: World | None = None) -> Reader:
    """A model, perhaps sharded, with the tokenizer of a folder (of the stage tokenizer, or of an export)."""
    from tokenizers import Tokenizer

    from gristmill.tokenize.encoding.tokenizer import load

    text = load(tokenizer_folder)
    tokenizer = Tokenizer.from_str((tokenizer_folder / TOKENIZER_FILE).read_text(encoding="utf-8"))

    def encode(string: str) -> list[int]:
        ids: list[int] = tokenizer.encode(string, add_special_tokens=False).ids
        return ids

    def decode(ids: Sequence[int]) -> str:
        string: str = tokenizer.decode(list(ids), skip_special_tokens=True)
        return string

    return Reader(model, encode, decode, text.eos, frozenset({text.eos}), cache(lambda: Chat(tokenizer_folder)), world)


def answer_tasks(reader: Reader, section: Evaluate, asked: Mapping[str, Sequence[Item]]) -> dict[str, Result]:
    """Task -> what came of it."""
    return {task.name: answer_task(reader, task, asked[task.name], section.seed or 0, section.resamples)
            for task in section.tasks}


class InLoopTasks:
    """Tasks that a training asks its model now and then; called on every rank together.

    Args:
        tasks: what is asked; read once.
        reader: the model in training.
        every: steps between two times; the last step always counts.
        last: that step.
    """

    def __init__(self, tasks: Sequence[Task], reader: Reader, every: int, last: int) -> None:
        self._reader, self._every, self._last = reader, every, last
        self._asked = [(task, read_task(task)) for task in tasks]

    def __call__(self, step: int) -> dict[str, dict[str, float]]:
        """Task -> metric -> value, or nothing at other steps."""
        if step != self._last and step % self._every:
            return {}
        return {task.name: {name: value["value"] for name, value in
                            answer_task(self._reader, task, items, 0, 1).summary.items()
                            if isinstance(value, dict) and value.get("value") is not None}
                for task, items in self._asked}
