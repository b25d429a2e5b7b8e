"""Interface of the connections to Ray, Dask and Spark, whose own Python interfaces run
jobs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain
from typing import Any, ClassVar, NamedTuple

from gristmill.dataprep.runners.pool import Element
from gristmill.mixtures.schema.engine import EngineOptions

INSTALL = "is not installed; install it with: pip install 'gristmill[engines]'"
GroupWork = Callable[[Sequence[Element]], Iterable[tuple[int, bytes]]]
"""Function that runs the tasks of an element and yields the data to shuffle."""
Receive = Callable[[int, Iterable[bytes]], None]
"""Function that receives the data shuffled to one number."""
ROUNDS = 4
"""Elements of a job for each thread or slot of a cluster, at least: the last ones then
end at nearly the same time.
"""


class Job(NamedTuple):
    """A job, as it travels to the process with the connection.

    Attributes:
        process: number of the process that waits for it.
        send: pickled function of the workers (`Connection.sender`).
        receive: pickled function of the workers (`Connection.receiver`); None without a
            shuffle.
        groups: all elements.
        gpu: True if each task needs a GPU, if the cluster has some.
        seconds: time limit, or None.
        threads: of a task.
    """

    process: int
    send: bytes
    receive: bytes | None
    groups: Sequence[Sequence[Element]]
    gpu: bool
    seconds: float | None
    threads: int

    def elements(self, num_slots: int) -> list[list[Element]]:
        """Join the elements into those of tasks with several threads each.

        >>> job = Job(0, b"", None, [[(str(n), {})] for n in range(9)], False, None, 2)
        >>> [len(element) for element in job.elements(num_slots=1)]
        [9]
        >>> [len(element) for element in job.elements(num_slots=2)]
        [5, 4]
        """
        if self.threads == 1:
            return list(map(list, self.groups))
        number = len(self.groups)
        # Ray starts workers for tasks that wait, even if no CPU is free
        num_rounds = ROUNDS if num_slots > 1 else 1
        size = max(number // (num_rounds * num_slots), ROUNDS * self.threads)
        num_elements = max(-(-number // size), min(num_slots, number))
        return [
            list(chain.from_iterable(self.groups[first::num_elements]))
            for first in range(num_elements)
        ]


thread_pool = cache(ThreadPoolExecutor)
"""Threads of a worker, by their number; they keep their models and memory."""


def run_in_threads(
    threads: int, work: GroupWork, group: Sequence[Element]
) -> Iterator[tuple[int, bytes]]:
    """Run the tasks of an element in threads; yields what they yield, in their order."""
    for pairs in thread_pool(threads).map(lambda element: list(work([element])), group):
        yield from pairs


class Connection(ABC):
    """Connection of this process to a cluster."""

    cpus_option: ClassVar = ""
    """Option of the engine with the number of CPUs of a task, which runs as many
    threads.
    """

    @classmethod
    def num_threads(cls, options: EngineOptions) -> int:
        """Number of threads of a task."""
        return max(1, int(options.get(cls.cpus_option) or 1))

    @staticmethod
    @abstractmethod
    def sender(work: GroupWork) -> Callable[..., Any]:
        """Function by which workers run elements."""

    @staticmethod
    @abstractmethod
    def receiver(receive: Receive, threads: int) -> Callable[..., Any]:
        """Function by which workers receive what was shuffled."""

    @abstractmethod
    def run(self, job: Job) -> None:
        """Run a job.

        Raises:
            WorkerError: the cluster gave up.
            TimeoutError: the job exceeded its time limit.
        """

    @abstractmethod
    def cancel_jobs(self, process: int) -> None:
        """Cancel the jobs of a process."""

    @abstractmethod
    def is_alive(self) -> bool:
        """Test if it can run further jobs."""

    @abstractmethod
    def close(self) -> None:
        """Close it."""
