"""What a host does for a stage that another one leads, where several run a manifest together (`engine.nodes`).

They all run the same command in the same store. Whoever gets the stage's lease leads it; the others, which wait for its
end, start this in the meantime: `python -m gristmill.flows.running.take_part STAGE_DIR INTERFACE`. It joins every
attempt at a training as one of its hosts, and does tasks of the jobs of any other stage, until whoever started it ends
it. All that it is told lies in the folder.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from gristmill.dataprep.files import as_path, read_json
from gristmill.dataprep.processes import end_with_parent
from gristmill.flows.running.execute import name_interface
from gristmill.train.parallel.hosts import hosts_of, read_rendezvous

MODULE = "gristmill.flows.running.take_part"
LOOK_SECONDS = 0.5
"""Between two looks for something to do."""


class Waiting:
    """What a run does when it has to wait for the owner of a stage's lease.

    Attributes:
        waited: whether it had to.
    """

    def __init__(self, begin: Callable[[Mapping[str, Any]], None]) -> None:
        self.waited = False
        self._begin = begin

    def __call__(self, owner: Mapping[str, Any]) -> None:
        """Begin something to do meanwhile; called once, with who the owner is."""
        self.waited = True
        self._begin(owner)


def main(argv: list[str] | None = None) -> int:
    """Take part in the stage that a folder describes until this process is ended."""
    location, interface = sys.argv[1:] if argv is None else argv
    end_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGTERM, _end)
    folder = as_path(location)
    while not (folder / "stage.json").exists():
        time.sleep(LOOK_SECONDS)
    description = read_json(folder / "stage.json")
    engine = description["engine"]
    if description["launch"] != "torchrun":
        from gristmill.dataprep.jobs.engine import take_part

        take_part(folder / "work", engine["workers"])
    elif hosts_of(engine) > 1:
        if interface:
            name_interface(interface)
        join_trainings(folder)
    return 0


def join_trainings(folder: Path) -> None:
    """Join every attempt at a training that is led meanwhile, each once; one that another has followed is over."""
    joined: str | None = None
    while True:
        rendezvous = read_rendezvous(folder)
        if rendezvous is None or rendezvous.name == joined:
            time.sleep(LOOK_SECONDS)
            continue
        joined = rendezvous.name
        print(
            f"{socket.gethostname()} joins the training that {rendezvous.host} leads at {rendezvous.endpoint}",
            flush=True,
        )
        with _ended_with_us(subprocess.Popen(rendezvous.command(folder, leads=False))) as training:
            while training.poll() is None and read_rendezvous(folder) == rendezvous:
                time.sleep(LOOK_SECONDS)


@contextmanager
def _ended_with_us(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Asked to end, ask a process to, and wait until it has: it may be writing a checkpoint."""
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
