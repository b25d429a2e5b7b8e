"""`python -m gristmill.train.torchrun ...`: torchrun, whose ranks on one machine
rendezvous through files.

torchrun's key-value stores listen on all addresses of the machine without
authentication, and hold pickles that torchrun loads (torch 2.13,
elastic/rendezvous/dynamic_rendezvous.py): anyone who reaches the port could run code.
With torchrun's own options one machine needs no store: its rendezvous is a file, and so
is the ranks' (`distributed/process_groups.py`), in a private folder of the user.
Trainings on several hosts (`distributed/rendezvous.py`) are started by torchrun itself,
in a network that must be private. If such a training is in an object store, other hosts
than the leader first make a local folder for it (`store_sync.py`).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gristmill.core.files import as_path
from gristmill.core.object_stores import asked_for
from gristmill.core.secrets import mask_text
from gristmill.core.stage_context import print_failure
from gristmill.train.distributed.process_groups import STORE_FILE
from gristmill.train.distributed.rendezvous import (
    HostsError,
    report_change,
    use_network,
)
from gristmill.train.store_sync import SAYING_SECONDS, followed, work_on


@contextmanager
def files_of_one_machine() -> Iterator[list[str]]:
    """Yield torchrun's options for a private rendezvous; the ranks get theirs from the
    environment.
    """
    with tempfile.TemporaryDirectory(prefix="gristmill-ranks-") as folder:
        os.environ[STORE_FILE] = str(Path(folder, "ranks"))
        # torchrun would open a store for the ranks, which have one.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        yield [
            "--rdzv-backend=c10d",
            "--rdzv-conf=store_type=file",
            f"--rdzv-endpoint={Path(folder, 'torchrun')}",
            "--local-addr=127.0.0.1",
        ]


def killed(rank: int, number: int) -> str:
    """Message about a rank that was ended by a signal."""
    if number == signal.SIGKILL:
        return (
            f"rank {rank} was killed (most likely out of memory: lower "
            "micro_batch_size or engine.ranks; the "
            "training resumes from its last checkpoint)"
        )
    return f"rank {rank} was ended by signal {number} ({signal.Signals(number).name})"


def run(options: list[str]) -> None:
    """Run torchrun, and report killed ranks, which cannot do so themselves.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a rank has
            failed.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(options)
    except SignalException as asked:  # its ranks have ended; a traceback is useless
        sys.exit(128 + asked.sigval)
    except ChildFailedError as error:
        is_on_hosts = option(options, "nnodes", "1") != "1"
        for rank, failure in sorted(error.failures.items()):
            if is_on_hosts and failure.exitcode == -signal.SIGABRT:
                # NCCL aborts ranks that wait for a lost host.
                report_change(followed(Path(options[-1])), killed(rank, signal.SIGABRT))
            # SIGTERM: sent by torchrun to the remaining ranks
            elif failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
                print_failure(
                    killed(rank, -failure.exitcode),
                    is_killed=failure.exitcode == -signal.SIGKILL,
                )
        raise


def option(options: list[str], name: str, absent: str) -> str:
    """Value of one of torchrun's options, written as `--name=value`."""
    return next(
        (
            argument.partition("=")[2]
            for argument in options
            if argument.startswith(f"--{name}=")
        ),
        absent,
    )


def run_on_hosts(options: list[str]) -> None:
    """Run torchrun's part on one of several hosts, and report failed rendezvous in a
    sentence.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.rendezvous import (
        RendezvousError,
        RendezvousTimeoutError,
    )

    from gristmill.train.distributed.elastic_rendezvous import register

    nodes = option(options, "nnodes", "1")
    register(Path(options[-1]))
    endpoint = option(options, "rdzv-endpoint", "")
    try:
        run([f"--local-addr={use_network(endpoint)}", *options])
    except HostsError as error:
        print_failure(str(error))
        sys.exit(1)
    except RendezvousTimeoutError:
        print_failure(
            f"not all of {nodes} hosts came to {endpoint} in time "
            "(engine.network.join_seconds); run the same command on each of them, or "
            "lower engine.nodes or engine.min_nodes",
            is_consequence=True,
        )
        sys.exit(1)
    except (RendezvousError, DistError) as error:
        # A rank that failed before has reported its error.
        print_failure(
            f"the host that leads, at {endpoint}, is not reached: "
            f"{str(error).partition(chr(10))[0] or type(error).__name__}",
            True,
        )
        sys.exit(1)


def fetched(location: str) -> str:
    """Local folder for a training led by another host; exits if it cannot be made."""
    folder = as_path(location)
    try:
        return str(work_on(folder, leads=False))
    except OSError as error:
        with asked_for(SAYING_SECONDS), suppress(OSError):
            report_change(folder, mask_text(f"{socket.gethostname()}: {error}"))
        sys.exit(1)


def main() -> None:
    """Run torchrun with the command line's arguments, the last of which is the
    training's folder.
    """
    *torchrun_options, location = sys.argv[1:]
    if option(torchrun_options, "nnodes", "1") != "1":
        run_on_hosts([*torchrun_options, fetched(location)])
        return
    with files_of_one_machine() as options:
        run([*options, *torchrun_options, location])


if __name__ == "__main__":
    main()
