"""`python -m gristmill.train.torchrun ...`: torchrun, whose servers listen on the loopback address alone.

torchrun's ranks find each other by key-value stores, which listen on all addresses of the machine, ask nobody who they
are, and hold pickles that torchrun loads (torch 2.13, elastic/rendezvous/dynamic_rendezvous.py): whoever reached the
port could run code. Trainings of several machines are started by torchrun itself, in a network that must be one's own.
"""

from __future__ import annotations

import socket
from typing import Any

import torch.distributed as dist

LOOPBACK = "127.0.0.1"


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


def main() -> None:
    """Run torchrun on the command line's arguments."""
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend
    from torch.distributed.run import main as torchrun

    for module in (dist, c10d_rendezvous_backend):
        module.TCPStore = LoopbackStore  # type: ignore[attr-defined]
    torchrun()


if __name__ == "__main__":
    main()
