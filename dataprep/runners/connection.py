"""Interface of the connections to Ray, Dask and Spark, whose own Python interfaces run
jobs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from gristmill.dataprep.runners.pool import Element

INSTALL = "is not installed; install it with: pip install 'gristmill[engines]'"
GroupWork = Callable[[Sequence[Element]], Iterable[tuple[int, bytes]]]
"""Function that runs the tasks of an element and yields the data to shuffle."""
Receive = Callable[[int, Iterable[bytes]], None]
"""Function that receives the data shuffled to one number."""


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
    """

    process: int
    send: bytes
    receive: bytes | None
    groups: Sequence[Sequence[Element]]
    gpu: bool
    seconds: float | None


class Connection(ABC):
    """Connection of this process to a cluster."""

    @staticmethod
    @abstractmethod
    def sender(work: GroupWork) -> Callable[..., Any]:
        """Function by which workers run elements."""

    @staticmethod
    @abstractmethod
    def receiver(receive: Receive) -> Callable[..., Any]:
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
