"""Runs that start at once: forked from a process that has imported all modules.

A stage of the tiny manifest works for a fraction of a second, and imports for several.
Here every process of a run is a process as usual, with its own number, session, output
and environment, and signals end it as usual; but instead of `python -m MODULE` it is
forked from its parent and runs MODULE. Every other program (fastText's training, whose
memory must be zero at its start) is started as usual.

`python -m benchmarks.chaos.warm SOCKET` is the fork server; `start` is its client.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import thread as futures
from contextlib import suppress
from functools import cache, partial
from typing import Any, NoReturn

from benchmarks.chaos.fuse import VARIABLE, hold, lay
from benchmarks.checkout import ROOT
from gristmill.core.processes import STAGE_ENVIRONMENT
from gristmill.flows.running.fork_server import Forked, ForkServer, Server
from gristmill.flows.stages.registry import STAGES

FLOW = "gristmill.flows.cli.main"
FORKED = (
    FLOW,
    "gristmill.flows.running.execute",
    "gristmill.flows.running.stage_server",
    "gristmill.train.torchrun",
    "gristmill.train.worker_main",
)
"""Modules that a run starts as `python -m MODULE`."""
IMPORTED = (
    *FORKED,
    "gristmill.flows.cli.launch",
    "gristmill.flows.report.terminal_summary",
    "gristmill.dataprep.runners.tasks",
    "apache_beam.runners.portability.fn_api_runner",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "transformers",
    "tokenizers",
    "safetensors.torch",
    "datasketch",
    "fasttext",
    "pandas",
    "pyarrow.dataset",
    "scipy.sparse",
    "scipy.stats",
)
"""Modules that the server imports besides the stages, if they are installed."""
PARENT = "GRISTMILL_PARENT"
"""Variable with the parent of a stage's process, with which it ends."""
CALLER = "GRISTMILL_WARM_CALLER"
"""Variable with the process whose folder and standard streams a command takes."""
Request = Mapping[str, Any]


def start(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    output: int,
    caller: int | None = None,
) -> Forked:
    """Start a command of gristmill in a session of its own.

    Args:
        arguments: of the command.
        environment: its environment variables.
        output: descriptor of its output.
        caller: running process whose folder and standard streams it takes, instead of
            this one's folder and `output`.
    """
    if caller is not None:
        environment = {**environment, CALLER: str(caller)}
    return start_module(FLOW, arguments, environment, output)


def start_module(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], output: int
) -> Forked:
    """Start one of FORKED in a session of its own, as `python -m` would; its output
    goes to a descriptor.
    """
    return _server().start(
        environment, [], output, [sys.executable, "-m", module, *arguments]
    )


@cache
def _server() -> ForkServer:
    server = ForkServer(
        __name__, {**STAGE_ENVIRONMENT, "PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)}
    )
    atexit.register(server.close)
    return server


def main(argv: list[str]) -> None:
    """Import, and fork runs on request, until the socket is closed whose descriptor is
    the only argument.
    """
    (descriptor,) = argv
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # before other modules import them
    subprocess.Popen = Popen  # type: ignore[misc]
    os.execv = partial(_execute, os.execv)  # type: ignore[assignment,arg-type]
    from gristmill.core.processes import without_collection
    from gristmill.dataprep.runners.runner import import_beam

    with without_collection(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_beam()
        for name in (
            *IMPORTED,
            *(stage.module for stage in STAGES.values()),
        ):
            with suppress(ImportError):
                importlib.import_module(name)
        _prepare_numba()
    gc.freeze()
    with socket.socket(fileno=int(descriptor)) as requests:
        Server(requests, _become_flow).serve()


def _prepare_numba() -> None:
    """Let numba import the modules that it needs to load kernels."""
    from numba.core.registry import cpu_target

    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()


class Popen(subprocess.Popen[Any]):
    """Process that is forked and runs its module if its command is one of a run."""

    def __init__(self, args: Any, *more: Any, **options: Any) -> None:
        if _module_of(args) is not None:
            # called between fork and exec, and never returns
            options["preexec_fn"] = partial(
                become, args, options.get("env"), options.get("pass_fds", ())
            )
        super().__init__(args, *more, **options)


def become(
    command: Sequence[str],
    environment: Mapping[str, str] | None,
    kept: Collection[int] = (),
) -> NoReturn:
    """Continue as `python -m MODULE ...` in a forked process, to its end.

    Args:
        command: interpreter, options, `-m`, module and arguments.
        environment: its environment variables; those of the caller if None.
        kept: descriptors above 2 that stay open.
    """
    code = 1
    try:
        _forget_parent(kept)
        if environment is not None:
            variables = dict(environment)
            os.environ.clear()
            os.environ.update(variables)
        hold()
        option = command.index("-m")
        sys.argv = list(command[option + 1 :])
        is_unbuffered = "-u" in command[:option] or bool(
            os.environ.get("PYTHONUNBUFFERED")
        )
        for stream, number in (("stdout", 1), ("stderr", 2)):
            setattr(
                sys,
                stream,
                io.TextIOWrapper(
                    io.FileIO(number, "w", closefd=False),
                    errors="backslashreplace",
                    line_buffering=True,
                    write_through=is_unbuffered,
                ),
            )
        warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
        runpy.run_module(command[option + 1], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException:  # noqa: BLE001 - an exception that left here would make a second parent
        traceback.print_exc()
    finally:
        # as the interpreter at its end, and multiprocessing at that of its forks
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become_flow(request: Request) -> NoReturn:
    os.setsid()
    os.chdir(request["folder"])
    sys.path[:] = request["path"]
    os.environ.clear()
    os.environ.update(request["environment"])
    if PARENT in os.environ:
        os.environ[PARENT] = str(os.getppid())  # not the client
    if caller := os.environ.pop(CALLER, None):
        os.chdir(os.readlink(f"/proc/{caller}/cwd"))
        for number, mode in enumerate((os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)):
            os.dup2(os.open(f"/proc/{caller}/fd/{number}", mode), number)
    if VARIABLE in os.environ:
        lay()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    become(request["command"], None)


def _execute(
    real: Callable[[str, Sequence[str]], None], path: str, command: Sequence[str]
) -> None:
    """Replacement of `os.execv`: run another module in the same process."""
    if _module_of(command) is None:
        real(path, command)
    become(command, None)


def _module_of(command: Any) -> str | None:
    """Return the module of a command, if it is one of FORKED."""
    if (
        isinstance(command, str | bytes)
        or not command
        or command[0] != sys.executable
        or "-m" not in command
    ):
        return None
    module = command[command.index("-m") + 1]
    return module if module in FORKED else None


def _forget_parent(kept: Collection[int]) -> None:
    """Drop signal handlers, open descriptors, threads and exit handlers, as an `exec`
    does.

    A descriptor's number stays in use, for /dev/null: objects of the parent that still
    refer to it cannot close another file.
    """
    atexit._clear()
    futures._threads_queues.clear()  # type: ignore[attr-defined]
    gc.freeze()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(
                number,
                signal.default_int_handler
                if number == signal.SIGINT
                else signal.SIG_DFL,
            )
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python at its start
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if (
            descriptor > 2
            and descriptor != nothing
            and descriptor not in kept
            and _is_open(descriptor)
        ):
            os.dup2(nothing, descriptor, inheritable=False)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
