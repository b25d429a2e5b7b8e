"""Pools of local workers, threads or processes; a free worker takes the next task of a
job.

Threads serve functions that release the GIL. Worker processes are forked from Python's
fork server (`multiprocessing`), which imports their modules once for all jobs of a
process (`pool_preload.py`). They end with their parent process, however it ends, and
leave Ctrl-C to it.

Each worker process has a connection to the parent for tasks and answers, and a pipe for
its output. A connection that closes without an answer reveals a dead worker
immediately. (The process pool of `concurrent.futures` notices it only when another
worker finishes a task, and does not report how the worker ended.)
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from gristmill.core.processes import ONE_THREAD, end_with_parent
from gristmill.dataprep.runners.errors import KilledWorkerError, WorkerError

Payload = Mapping[str, Any]
"""Arguments of a task's function, as JSON; a `TypedDict` beside the function names its
keys.
"""
Element = tuple[str, Payload]
"""Name and payload of a task."""
Work = Callable[[str, Payload], None]
"""Function that runs a task."""
Pool = Callable[[Work, Sequence[Element]], Iterator[None]]
"""Function that runs all tasks, in any order, and yields after each."""

Mode = Literal["memory", "threads", "processes"]
"""Kind of workers; `memory` is none."""

PACKAGE = "gristmill."
PRELOADED = "gristmill.dataprep.runners.pool_preload"
CLOSE_SECONDS = 5.0
"""Time for an idle worker to exit."""
TAIL_LINES = 20
"""Lines of a dead worker's output in its error."""


def in_turn(work: Work, elements: Sequence[Element]) -> Iterator[None]:
    """Run the tasks in this thread, one after the other."""
    for name, payload in elements:
        work(name, payload)
        yield


def in_threads(workers: int, work: Work, elements: Sequence[Element]) -> Iterator[None]:
    """Run the tasks in threads; an error cancels the tasks that have not started."""
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(work, name, payload) for name, payload in elements]
        try:
            for future in as_completed(futures):
                future.result()
                yield
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def in_processes(
    workers: int, work: Work, elements: Sequence[Element]
) -> Iterator[None]:
    """Run the tasks in worker processes, which end with the job.

    Raises:
        WorkerError: a worker died; the others are killed.
    """
    import cloudpickle

    start_fork_server(work)
    pickled_work = cloudpickle.dumps(work)
    remaining = iter(elements)
    busy: dict[Any, Worker] = {}

    def hand_out(worker: Worker) -> None:
        element = next(remaining, None)
        if element is not None:
            worker.tell(element)
            busy[worker.line] = worker

    started: list[Worker] = []
    try:
        started.extend(Worker(number, pickled_work) for number in range(workers))
        for worker in started:
            hand_out(worker)
        while busy:
            for line in wait(list(busy)):
                worker = busy.pop(line)
                worker.wait_for_answer()
                hand_out(worker)
                yield
        for worker in started:
            worker.close()
    finally:
        for worker in started:
            worker.kill()


def start_fork_server(work: Work) -> None:
    """Start the fork server, unless it is running, to import the workers' modules;
    returns immediately.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        [PRELOADED, *modules_of(work)]
    )
    multiprocessing.forkserver.ensure_running()


def modules_of(function: Any) -> Iterable[str]:
    """Modules of this package that define a function, including the functions that a
    `partial` binds.

    Only these modules are known not to start threads on import, which a fork would
    lose.
    """
    if isinstance(function, partial):
        for part in (function.func, *function.args):
            yield from modules_of(part)
    elif callable(function):
        name = getattr(function, "__module__", None) or ""
        if name.startswith(PACKAGE):
            yield name


class Worker:
    """Parent's handle of a worker process.

    Attributes:
        line: connection to the worker.
    """

    def __init__(self, number: int, pickled_work: bytes) -> None:
        context = multiprocessing.get_context("forkserver")
        self._number = number
        self.line, theirs = context.Pipe()
        printed, output = context.Pipe(duplex=False)
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        with theirs, output:
            self._process = context.Process(
                target=serve,
                args=(
                    theirs,
                    output,
                    pickled_work,
                    dict(os.environ),
                    [os.getcwd(), *sys.path],
                ),
            )
            self._process.start()
        # an interrupt may end the job before it knows this worker, which Python would
        # wait for at exit
        weakref.finalize(self, self._process.kill)
        self._reader = threading.Thread(
            target=self._forward_output, args=(printed,), daemon=True
        )
        self._reader.start()

    def tell(self, element: Element) -> None:
        """Send a task; a dead worker is detected by its missing answer."""
        try:
            self.line.send(element)
        except OSError:
            self._process.join(CLOSE_SECONDS)

    def wait_for_answer(self) -> None:
        """Wait for the end of the task.

        Raises:
            WorkerError: the worker died.
        """
        try:
            self.line.recv()
        except (EOFError, OSError):
            self._process.join(CLOSE_SECONDS)
            self._reader.join(timeout=1)
            code = self._process.exitcode
            death = f"ended with exit code {code}"
            if code == -signal.SIGKILL:
                death = (
                    "was killed by signal 9, most likely out of memory; fewer "
                    "engine.workers need less"
                )
            elif code is not None and code < 0:
                death = f"was killed by signal {-code} ({signal.Signals(-code).name})"
            tail = "".join(f"\n  {line}" for line in self._tail)
            printed = f"; it printed:{tail}" if tail else ""
            kind = KilledWorkerError if code == -signal.SIGKILL else WorkerError
            raise kind(
                f"worker {self._number} (pid {self._process.pid}) {death}{printed}"
            ) from None

    def close(self) -> None:
        """Let an idle worker exit."""
        self.line.close()
        self._process.join(CLOSE_SECONDS)
        self._reader.join(timeout=1)

    def kill(self) -> None:
        """Kill the worker if it is alive."""
        self._process.kill()
        self._process.join()
        self.line.close()

    def _forward_output(self, printed: Connection) -> None:
        """Forward the worker's output to standard error, because standard output is for
        events.
        """
        with (
            printed,
            open(
                printed.fileno(),
                encoding="utf-8",
                errors="replace",
                newline="\n",
                closefd=False,
            ) as stream,
        ):
            for raw in stream:
                line = raw.rstrip("\n")
                self._tail.append(line)
                sys.stderr.write(f"worker {self._number}: {line}\n")


def serve(
    line: Connection,
    output: Connection,
    pickled_work: bytes,
    environment: dict[str, str],
    path: list[str],
) -> None:
    """Run a worker process: answer tasks until the connection closes.

    Args:
        line: connection to the parent.
        output: receives standard output and error.
        pickled_work: pickled function that runs a task.
        environment: environment of the parent at the start of the job.
        path: module search path of the parent.
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
    work = cloudpickle.loads(pickled_work)
    while True:
        try:
            name, payload = line.recv()
        except EOFError:
            return
        work(name, payload)
        line.send(None)
