"""Requests about documents shard by shard: many at a time, and a shard is written when
all its answers are there.

Memory: the texts of HELD_SHARDS shards, and the answers of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeVar

from gristmill.core.stage_context import Context
from gristmill.dataprep.documents import Inputs, read_shard
from gristmill.dataprep.llm.client import Asking
from gristmill.dataprep.llm.prompting import Answer, Request
from gristmill.dataprep.llm.request_counts import RequestCounts
from gristmill.dataprep.runners.tasks import (
    Done,
    Result,
    ShardTask,
    finish_task,
    read_records,
)
from gristmill.dataprep.user_code.own_documents import JudgedColumns
from gristmill.mixtures.steps.asked_model import AskedModel

HELD_SHARDS = 2


class ShardRequests(Protocol):
    """Requests of a shard."""

    @property
    def prompts(self) -> Sequence[Request | str]:
        """Requests in their order, or reasons for having none."""


Of = TypeVar("Of", bound=ShardRequests)


@dataclass(frozen=True)
class ShardPrompts:
    """Documents of a shard and the prompts about them.

    Attributes:
        read: the shard.
        prompts: per judged document its request, or the reason for having none.
    """

    read: JudgedColumns
    prompts: Sequence[Request | str]


def ask_shards(
    model: AskedModel,
    shards: Sequence[str],
    read: Callable[[str], Of],
    use: Callable[[str, Of, Sequence[Answer]], object],
    context: Context,
    total: int | None,
) -> list[RequestCounts]:
    """Send the requests of every shard to a model.

    Args:
        model: the model to ask.
        shards: names; the model is not contacted if there are none.
        read: reads the requests of a shard; may be called twice for the same shard.
        use: called per shard with its requests and an answer to each prompt; one
            without a request has its reason as the error.
        context: store of answers, and progress.
        total: number of requests, if known.

    Returns:
        counts and costs of the requests; empty without shards.

    Raises:
        AskingError: answers are unavailable, or the budget is spent; all answers
            received are stored.
    """
    if not shards:
        return []
    cached_read = lru_cache(HELD_SHARDS)(read)
    with Asking(model, context, total) as session:
        answers = session.answers(
            prompt
            for shard in shards
            for prompt in cached_read(shard).prompts
            if isinstance(prompt, Request)
        )
        for shard in shards:
            requests = cached_read(shard)
            use(shard, requests, with_problems(requests.prompts, answers))
        return [session.tally.as_json(session.model)]


def ask_tasks(
    job: str,
    tasks: Sequence[ShardTask],
    model: AskedModel,
    read: Callable[[str], Of],
    write: Callable[[ShardTask, Of, Sequence[Answer]], Done[Result]],
    context: Context,
    count: Callable[[Sequence[str]], int],
) -> tuple[list[Result], list[RequestCounts]]:
    """Ask about the shards that no attempt has finished yet, and write each of them.

    Args:
        job: name of the job within its stage; records of finished shards are in
            `context.work/job`.
        tasks: one per shard.
        model, read: see `ask_shards`.
        write: commits the files of a shard.
        context: working folder, store of answers, and progress.
        count: number of requests about some shards; called only if shards are pending.

    Returns:
        results of all tasks, in their order; counts and costs of this attempt, as of
        `ask_shards`.

    Raises:
        AskingError: see `ask_shards`; shards that are written stay.
    """
    records = context.work / job
    records.mkdir(parents=True, exist_ok=True)
    names = [task.name for task in tasks]
    finished = read_records(records, names)
    pending = {task.name: task for task in tasks if task.name not in finished}

    def use(shard: str, requests: Of, answers: Sequence[Answer]) -> None:
        finish_task(
            pending[shard], lambda task: write(task, requests, answers), records
        )

    total = count(list(pending)) if pending else 0
    tallies = ask_shards(model, list(pending), read, use, context, total)
    results = read_records(records, names)
    return [results[name] for name in names if name in results], tallies


def count_judged(
    inputs: Inputs, sources: Sequence[str] | None, shards: Sequence[str]
) -> int:
    """Number of judged documents in some shards."""
    columns = ["id", "source"]
    return sum(
        len(read_shard(inputs, name, columns, sources).judged) for name in shards
    )


def with_problems(
    prompts: Sequence[Request | str], answers: Iterator[Answer]
) -> list[Answer]:
    """Answers per prompt; a prompt that could not be filled in gets its reason as the
    error.
    """
    return [
        next(answers) if isinstance(entry, Request) else Answer("", error=entry)
        for entry in prompts
    ]


def first_error(answers: Iterable[Answer]) -> str | None:
    """Error of the first answer that has one."""
    return next((answer.error for answer in answers if answer.error is not None), None)
