"""Models are asked about documents, shard by shard: many requests at a time, and what comes of a shard is written once
all its answers are there.

Memory: the texts of HELD_SHARDS shards, and the answers of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Protocol, TypeVar

from gristmill.dataprep.asking.client import Asking
from gristmill.dataprep.asking.prompting import Answer, Request
from gristmill.dataprep.context import Context
from gristmill.dataprep.documents import judged_rows, read_shard
from gristmill.dataprep.jobs.engine import Done, Task, finish_task, read_records
from gristmill.dataprep.own.own_documents import JudgedColumns
from gristmill.mixtures.steps.asked_model import AskedModel

HELD_SHARDS = 2


class ShardRequests(Protocol):
    """What a shard asks."""

    @property
    def requests(self) -> Iterator[Request]:
        """In their order."""


Of = TypeVar("Of", bound=ShardRequests)


@dataclass(frozen=True)
class ShardPrompts:
    """What a shard's documents are asked about.

    Attributes:
        read: the shard.
        prompts: the requests about judged documents, in their order, or why there is none.
    """

    read: JudgedColumns
    prompts: Sequence[Request | str]

    @property
    def requests(self) -> Iterator[Request]:
        """Those that there are."""
        return (one for one in self.prompts if isinstance(one, Request))


def ask_shards(
    models: Sequence[AskedModel],
    shards: Sequence[str],
    read: Callable[[str], Of],
    use: Callable[[str, Of, Sequence[Sequence[Answer]]], object],
    context: Context,
    total: int | None = None,
) -> list[dict[str, Any]]:
    """Ask every model what every shard asks.

    Args:
        models: who is asked.
        shards: names; nobody is reached where there are none.
        read: what a shard asks; it may be called again for a shard.
        use: called shard by shard with what it asks and, per model, the answers to that.
        context: where answers are kept, and who is told how far it is.
        total: how many requests there are, where that is known.

    Returns:
        per model what asking came to.

    Raises:
        AskingError: answers cannot be had, or the budget is spent; all that were given are kept.
    """
    if not shards:
        return []
    held = lru_cache(HELD_SHARDS)(read)
    with ExitStack() as opened:
        asking = [opened.enter_context(Asking(model, context, total)) for model in models]
        streams = [one.answers(request for shard in shards for request in held(shard).requests) for one in asking]
        for shard in shards:
            of_shard = held(shard)
            number = sum(1 for _ in of_shard.requests)
            use(shard, of_shard, [list(islice(stream, number)) for stream in streams])
        return [one.tally.as_json(one.model) for one in asking]


def ask_tasks(
    job: str,
    tasks: Sequence[Task],
    models: Sequence[AskedModel],
    read: Callable[[str], Of],
    write: Callable[[Task, Of, Sequence[Sequence[Answer]]], Done],
    context: Context,
    count: Callable[[Sequence[str]], int],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Ask about the shards that no attempt has finished yet, and write each of them.

    Args:
        job: name of the job within its stage; the records of finished shards are kept in `context.work/job`.
        tasks: one for each shard.
        models, read: see `ask_shards`.
        write: commits the files of a shard.
        context: where to run.
        count: how many requests some shards are about; called where something is left to ask.

    Returns:
        the results of all tasks, in their order; per model what this attempt asked.

    Raises:
        AskingError: see `ask_shards`; shards that were written stay.
    """
    records = context.work / job
    records.mkdir(parents=True, exist_ok=True)
    names = [task.name for task in tasks]
    pending = {
        task.name: task for task, found in zip(tasks, read_records(records, names), strict=True) if found is None
    }

    def use(shard: str, of_shard: Of, answers: Sequence[Sequence[Answer]]) -> None:
        finish_task(pending[shard], lambda task: write(task, of_shard, answers), records)

    asked = ask_shards(models, list(pending), read, use, context, count(list(pending)) if pending else 0)
    return [found for found in read_records(records, names) if found is not None], asked


def count_judged(inputs: Mapping[str, Any], sources: Sequence[str] | None, shards: Sequence[str]) -> int:
    """How many documents of some shards are judged."""
    number = 0
    for shard in shards:
        read = read_shard(inputs, shard, ["id", "source"])
        number += len(judged_rows(read.documents, read.rows, sources))
    return number


def with_problems(prompts: Sequence[Request | str], answers: Sequence[Answer]) -> list[Answer]:
    """An answer per prompt; to one that could not be asked why."""
    waiting = iter(answers)
    return [next(waiting) if isinstance(one, Request) else Answer("", error=one) for one in prompts]
