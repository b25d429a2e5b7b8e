"""`python -m gristmill.train.torchrun ...`: torchrun, whose servers listen on the loopback address alone.

torchrun's ranks find each other by key-value stores, which listen on all addresses of the machine, ask nobody who they
are, and hold pickles that torchrun loads (torch 2.13, elastic/rendezvous/dynamic_rendezvous.py): whoever reached the
port could run code. Trainings of several machines are started by torchrun itself, in a network that must be one's own.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from gristmill.dataprep.context import print_failure

LOOPBACK = "127.0.0.1"
SECONDS_AFTER_FAILURE = 5
"""For the other ranks to tell what they saw; the steps of a training without one of its ranks are lost."""


class LoopbackStore(dist.TCPStore):  # type: ignore[name-defined,misc]
    """torch's TCPStore, whose server is given a socket that listens on the loopback address."""

    def __init__(self, host_name: str, port: int, world_size: int | None = None, is_master: bool = False,
                 **options: Any) -> None:
        if not is_master:
            super().__init__(host_name, port, world_size, False, **options)
            return
        listening = socket.create_server((LOOPBACK, port))
        # The store closes it.
        super().__init__(LOOPBACK, listening.getsockname()[1], world_size, True, **options,
                         master_listen_fd=listening.detach())


class Ranks(SubprocessContext):
    """torch's processes of ranks: where one has failed, the others, which wait for it, have little time left.

    torch (2.13) gives them 30 s, as long as for a checkpoint after a signal. A rank that was killed could tell nobody,
    so that is told here.
    """

    _ending = False

    def close(self, death_sig: signal.Signals | None = None, timeout: int | None = None) -> None:
        """End the ranks that are left; without a time, which comes with a signal alone, one of them has failed."""
        if self._failures and not self._ending:
            self._ending = True
            for rank, failure in sorted(self._failures.items()):
                if failure.exitcode < 0:
                    print_failure(killed(rank, self.nprocs, -failure.exitcode))
        super().close(death_sig, SECONDS_AFTER_FAILURE if timeout is None else timeout)


def killed(rank: int, ranks: int, number: int) -> str:
    """What is said of a rank that a signal has ended."""
    if number == signal.SIGKILL:
        return (f"rank {rank} of {ranks} was killed (most likely out of memory: lower micro_batch_size or "
                "engine.ranks; the training resumes from its last checkpoint)")
    return f"rank {rank} of {ranks} was ended by signal {number} ({signal.Signals(number).name})"


def main() -> None:
    """Run torchrun on the command line's arguments; a signal that asks it to end ends it without a traceback."""
    from torch.distributed.elastic import multiprocessing
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend
    from torch.distributed.run import main as torchrun

    multiprocessing.SubprocessContext = Ranks  # type: ignore[misc]
    if "GRISTMILL_NODES" not in os.environ:  # other nodes are to reach it
        for module in (dist, c10d_rendezvous_backend):
            module.TCPStore = LoopbackStore  # type: ignore[attr-defined]
    try:
        torchrun()
    except SignalException as asked:  # its ranks have ended: a traceback would say nothing
        sys.exit(128 + asked.sigval)


if __name__ == "__main__":
    main()
