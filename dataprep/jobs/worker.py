"""The fork server's inside: `python -m gristmill.dataprep.jobs.worker SOCKET`, which `fork_server.py` starts.

A worker is Beam's own SDK worker with one thread for Arrow, which ends with the process that asked for it, whatever
ends that, and leaves Ctrl-C to it. The server itself runs no thread of Python and opens no gRPC channel: both would be
lost or broken in its forks. (Of native threads it has the one of Arrow's jemalloc, which is made to be forked.)
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from gristmill.dataprep.jobs.runner import import_beam, quieten_beam, without_collection
from gristmill.dataprep.processes import end_with_parent

PRELOADED = ("apache_beam.runners.worker.sdk_worker_main", "gristmill.dataprep.jobs.engine",
             "gristmill.dataprep.jobs.task_dofn", "gristmill.dataprep.text.kernels")  # fmt: skip
"""What every worker needs besides Beam itself."""


def main(argv: list[str]) -> None:
    """Fork workers as the parent asks for them, until it closes the socket whose descriptor is the only argument."""
    (descriptor,) = argv
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
    with without_collection():
        import_beam()
        quieten_beam()
        for name in PRELOADED:
            importlib.import_module(name)
    gc.freeze()  # what is imported stays: a worker that looks for garbage in it would copy all of its memory
    with socket.socket(fileno=int(descriptor)) as requests:
        Server(requests, work).serve()


class Server:
    """Forks workers, tells what becomes of them, and ends those whose line was closed.

    Args:
        requests: the socket that is shared with the parent.
        work: what a worker does with its request.
    """

    def __init__(self, requests: socket.socket, work: Callable[[dict[str, Any]], None]) -> None:
        self._requests, self._work = requests, work
        self._workers: dict[int, socket.socket] = {}
        self._woken, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        """Serve until the parent is gone; the workers go with it."""
        self._wake.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # any handler: it makes Python write to `_wake`
        for source in (self._requests, self._woken):
            self._selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    self._woken.recv(4096)
                    self._tell_who_ended()
                elif key.fileobj is not self._requests:
                    self._kill_worker_of(key.fileobj)
                elif not self._answer_request():
                    return

    def _answer_request(self) -> bool:
        _, descriptors, _, _ = socket.recv_fds(self._requests, 1, 2)
        if not descriptors:
            for pid in self._workers:
                os.kill(pid, signal.SIGKILL)
            return False
        line, output = socket.socket(fileno=descriptors[0]), descriptors[1]
        with line.makefile("rb") as stream:
            content = stream.readline()
        if not content.endswith(b"\n"):
            return True  # the parent ended meanwhile, which is the next thing to be seen
        self._fork(line, output, json.loads(content))
        os.close(output)
        return True

    def _fork(self, line: socket.socket, output: int, request: dict[str, Any]) -> None:
        with without_collection():
            for name in request["modules"]:
                importlib.import_module(name)
        server, pid = os.getpid(), os.fork()
        if not pid:
            self._become_worker(server, line, output, request)
        self._workers[pid] = line
        self._selector.register(line, selectors.EVENT_READ)
        _tell(line, pid)

    def _become_worker(self, server: int, line: socket.socket, output: int, request: dict[str, Any]) -> NoReturn:
        code = 1
        try:
            end_with_parent(signal.SIGKILL, server)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            for end in (self._requests, self._woken, self._wake, line, *self._workers.values()):
                end.close()
            for stream in (1, 2):
                os.dup2(output, stream)
            os.close(output)
            self._work(request)
            code = 0
        except BaseException:  # noqa: BLE001 - nothing may leave here, or there would be two servers
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _kill_worker_of(self, line: Any) -> None:
        pid = next((pid for pid, own in self._workers.items() if own is line), None)
        if pid is not None:  # else it has just ended by itself
            self._selector.unregister(line)
            os.kill(pid, signal.SIGKILL)

    def _tell_who_ended(self) -> None:
        for pid in list(self._workers):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with self._workers.pop(pid) as line:
                    _tell(line, os.waitstatus_to_exitcode(status))
                    with suppress(KeyError):  # it was killed
                        self._selector.unregister(line)


def _tell(line: socket.socket, number: int) -> None:
    with suppress(OSError):  # nobody listens any more
        line.sendall(b"%d\n" % number)


def work(request: dict[str, Any]) -> None:
    """Serve the bundles of a job until it closes the connection.

    Args:
        request: `environment`, `folder` and `path` (where modules are looked for) of the process that asked for it.
    """
    import pyarrow as pa
    from apache_beam.runners.worker import sdk_worker_main

    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[:] = request["path"]
    pa.set_cpu_count(1)
    _, harness, _ = sdk_worker_main.create_harness(os.environ)
    harness.run()


if __name__ == "__main__":
    main(sys.argv[1:])
