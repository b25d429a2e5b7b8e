"""The workers of this machine, threads or processes: whoever is free takes the next task of a job.

Threads serve functions that let other threads run. Worker processes are forked from Python's own fork server
(`multiprocessing`), which imports what they need once for all jobs of a process (`preloaded.py`). They end with the
process that asked for them, whatever ends that, and leave Ctrl-C to it.

Each worker process has a line to the parent, over which it gets tasks and answers, and a pipe for what it prints.
A line that ends without an answer is that of a worker that died, and is seen at once. (The process pool of
`concurrent.futures` learns of it when some other worker has finished its task, and not how the worker ended.)
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from gristmill.dataprep.jobs.errors import KilledWorkerError, WorkerError
from gristmill.dataprep.processes import ONE_THREAD, end_with_parent

Element = tuple[str, Mapping[str, Any]]
"""Name and payload of a task."""
Work = Callable[[str, Mapping[str, Any]], Any]
"""Does a task."""
Pool = Callable[[Work, Sequence[Element]], Iterator[Any]]
"""Does all tasks and puts out what each returned, in any order."""

PACKAGE = "gristmill."
PRELOADED = "gristmill.dataprep.jobs.preloaded"
CLOSE_SECONDS = 5.0
"""How long a worker that has no more to do may take to end."""
TAIL_LINES = 20
"""Lines of a dead worker's output that its error shows."""


def in_turn(work: Work, elements: Sequence[Element]) -> Iterator[Any]:
    """Do the tasks in this thread, one after the other."""
    for name, payload in elements:
        yield work(name, payload)


def in_threads(workers: int, work: Work, elements: Sequence[Element]) -> Iterator[Any]:
    """Do the tasks in so many threads; an error leaves out those that have not begun."""
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(work, name, payload) for name, payload in elements]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def in_processes(workers: int, work: Work, elements: Sequence[Element]) -> Iterator[Any]:
    """Do the tasks in so many processes, which are gone afterwards.

    Raises:
        WorkerError: a worker died; the others are killed.
    """
    import cloudpickle

    start_fork_server(work)
    told = cloudpickle.dumps(work)
    started: list[Worker] = []
    try:
        started.extend(Worker(number, told) for number in range(workers))
        yield from _share_out(started, elements)
        for worker in started:
            worker.close()
    finally:
        for worker in started:
            worker.kill()


def start_fork_server(work: Work) -> None:
    """Let the fork server begin to import what workers need, unless it runs already; returns at once."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([PRELOADED, *modules_of(work)])
    multiprocessing.forkserver.ensure_running()


def modules_of(function: Any) -> Iterable[str]:
    """The modules of this package that define a function and, where it is a `partial`, the functions that it is given.

    Only of these it is known that importing them starts no thread, which a fork would lose.
    """
    if isinstance(function, partial):
        for part in (function.func, *function.args):
            yield from modules_of(part)
    elif callable(function):
        name = getattr(function, "__module__", None) or ""
        if name.startswith(PACKAGE):
            yield name


def _share_out(workers: Sequence[Worker], elements: Sequence[Element]) -> Iterator[Any]:
    """Hand each worker a task, and another whenever it answers, until all are answered."""
    left = iter(elements)
    busy: dict[Any, Worker] = {}

    def hand_out(worker: Worker) -> None:
        element = next(left, None)
        if element is not None:
            worker.tell(element)
            busy[worker.line] = worker

    for worker in workers:
        hand_out(worker)
    while busy:
        for line in wait(list(busy)):
            worker = busy.pop(line)
            answer = worker.answer()
            hand_out(worker)
            yield answer


class Worker:
    """One worker process, seen by its parent.

    Attributes:
        line: where it answers.
    """

    def __init__(self, number: int, told: bytes) -> None:
        context = multiprocessing.get_context("forkserver")
        self._number = number
        self.line, theirs = context.Pipe()
        printed, output = context.Pipe(duplex=False)
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        with theirs, output:
            self._process = context.Process(
                target=serve, args=(theirs, output, told, dict(os.environ), [os.getcwd(), *sys.path])
            )
            self._process.start()
        self._reader = threading.Thread(target=self._forward_output, args=(printed,), daemon=True)
        self._reader.start()

    def tell(self, element: Element) -> None:
        """Hand it a task. Where it is dead, that there is no answer says so."""
        try:
            self.line.send(element)
        except OSError:
            self._process.join(CLOSE_SECONDS)

    def answer(self) -> Any:
        """What the task returned, once it is there.

        Raises:
            WorkerError: the worker died.
        """
        try:
            return self.line.recv()
        except (EOFError, OSError):
            self._process.join(CLOSE_SECONDS)
            self._reader.join(timeout=1)
            is_killed = self._process.exitcode == -signal.SIGKILL
            raise (KilledWorkerError if is_killed else WorkerError)(self._describe_death()) from None

    def close(self) -> None:
        """Let it end, which has nothing to do."""
        self.line.close()
        self._process.join(CLOSE_SECONDS)
        self._reader.join(timeout=1)

    def kill(self) -> None:
        """End it at once, if it is there."""
        self._process.kill()
        self._process.join()
        self.line.close()

    def _describe_death(self) -> str:
        tail = "".join(f"\n  {line}" for line in self._tail)
        death = describe_exit(self._process.exitcode)
        return f"worker {self._number} (pid {self._process.pid}) {death}{'; it printed:' if tail else ''}{tail}"

    def _forward_output(self, printed: Connection) -> None:
        """Show what the worker prints, on standard error: standard output is for events."""
        with printed, open(printed.fileno(), encoding="utf-8", errors="replace", newline="\n", closefd=False) as stream:
            for raw in stream:
                line = raw.rstrip("\n")
                self._tail.append(line)
                sys.stderr.write(f"worker {self._number}: {line}\n")


def describe_exit(code: int | None) -> str:
    """What an exit code says, in words (negative: the signal that ended the process)."""
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    if code == -signal.SIGKILL:
        return "was killed by signal 9, most likely out of memory; fewer engine.workers need less"
    return f"was killed by signal {-code} ({signal.Signals(-code).name})"


def serve(line: Connection, output: Connection, told: bytes, environment: dict[str, str], path: list[str]) -> None:
    """What a worker process does: answer to tasks until the line ends.

    Args:
        line: to the parent.
        output: takes what is printed.
        told: the function that does a task, pickled.
        environment: of the parent when the job began.
        path: where the parent looks for modules.
    """
    import cloudpickle
    import pyarrow as pa

    server = os.getppid()
    end_with_parent(signal.SIGKILL, server)
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    output.close()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update({**dict.fromkeys(ONE_THREAD, "1"), **environment})
    sys.path[:] = path
    pa.set_cpu_count(1)
    work = cloudpickle.loads(told)
    while True:
        try:
            name, payload = line.recv()
        except EOFError:
            return
        line.send(work(name, payload))
