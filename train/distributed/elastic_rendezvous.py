"""torchrun's c10d rendezvous for hosts that may be lost and come back.

Two things differ from torchrun's own. The leading host, which writes the files of the
training, has the first ranks; c10d sorts hosts by address. And a host that comes late
waits until the training stops at a checkpoint (`loop/step.py`); torchrun's agents would
each restart their ranks at a moment of their own.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from gristmill.train.distributed.rendezvous import BACKEND, waiting_file

LEADING_RANK = "leading_rank"
"""Key of the leading host's rank among the hosts in the rendezvous' store."""


class ElasticRendezvous(DynamicRendezvousHandler):
    """Rendezvous of the hosts of one attempt.

    Attributes:
        waiting: on the leading host, the file that is created when a host waits to
            join; otherwise None.
    """

    waiting: Path | None

    def get_backend(self) -> str:
        """Name in torchrun's registry."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other hosts; the leading host becomes the first."""
        info = super().next_rendezvous()
        store, size = info.store, info.world_size
        if self.waiting is not None:
            store.set(LEADING_RANK, str(info.rank))
        rank = (info.rank - int(store.get(LEADING_RANK))) % size
        return RendezvousInfo(store, rank, size, info.bootstrap_store_info)  # type: ignore[arg-type]

    def num_nodes_waiting(self) -> int:
        """0, so that no agent restarts its ranks; those of the leading host look at the
        file.
        """
        if self.waiting is not None and super().num_nodes_waiting():
            self.waiting.parent.mkdir(parents=True, exist_ok=True)
            self.waiting.touch()
        return 0


def register(folder: Path) -> None:
    """Make the rendezvous known to torchrun, for the training of a local folder."""

    def create(parameters: RendezvousParameters) -> ElasticRendezvous:
        backend, store = create_backend(parameters)
        join, last_call = (
            timedelta(seconds=int(parameters.get(f"{key}_timeout")))
            for key in ("join", "last_call")
        )
        rendezvous = ElasticRendezvous.from_backend(
            parameters.run_id,
            store,
            backend,
            parameters.min_nodes,
            parameters.max_nodes,
            parameters.local_addr,
            RendezvousTimeout(join, last_call),
        )
        waiting = waiting_file(folder / "work", parameters.run_id)
        rendezvous.waiting = waiting if parameters.get_as_bool("is_host") else None
        return rendezvous

    rendezvous_handler_registry.register(BACKEND, create)
