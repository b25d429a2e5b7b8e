"""Work of a host on a stage led by another host, if several hosts run a manifest
together (`engine.nodes`).

All hosts run the same command in the same store. The host with the stage's lease is the
leader. The others wait for the end of the stage, and meanwhile run `python -m
gristmill.flows.running.follow_leader STAGE_DIR INTERFACE`: it joins every attempt at a
training as one of its hosts, or does tasks of another stage's jobs, until its parent
ends it. All its instructions are in the folder.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from gristmill.core.files import as_path, read_json
from gristmill.core.processes import end_with_parent
from gristmill.flows.running.execute import name_interface
from gristmill.mixtures.schema.engine import Engine
from gristmill.train.distributed.rendezvous import hosts_of, read_rendezvous

MODULE = "gristmill.flows.running.follow_leader"
LOOK_SECONDS = 0.5
"""Polling interval."""


def main(argv: list[str] | None = None) -> int:
    """Work on the stage of a folder until this process is ended."""
    location, interface = sys.argv[1:] if argv is None else argv
    end_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    folder = as_path(location)
    while not (folder / "stage.json").exists():
        time.sleep(LOOK_SECONDS)
    description = read_json(folder / "stage.json")
    engine = Engine.model_validate(description["engine"])
    if description["launch"] != "torchrun":
        from gristmill.dataprep.runners.tasks import take_part

        take_part(folder / "work", engine.workers)
    elif hosts_of(engine) > 1:
        if interface:
            name_interface(interface)
        join_trainings(folder)
    return 0


def join_trainings(folder: Path) -> None:
    """Join every attempt at a training that another host leads; a new attempt ends the
    work on the previous one.

    A training that goes on with fewer hosts (`engine.min_nodes`) is joined again and
    again: the network of this host may come back.
    """
    joined: str | None = None
    while True:
        rendezvous = read_rendezvous(folder)
        if rendezvous is None or rendezvous.name == joined:
            time.sleep(LOOK_SECONDS)
            continue
        if rendezvous.least_nodes == rendezvous.nodes:
            joined = rendezvous.name
        print(
            f"{socket.gethostname()} joins the training that {rendezvous.host} leads "
            f"at {rendezvous.endpoint}",
            flush=True,
        )
        training = subprocess.Popen(rendezvous.command(folder, leads=False))
        try:
            while training.poll() is None and read_rendezvous(folder) == rendezvous:
                time.sleep(LOOK_SECONDS)
            # The leading host has ended an attempt before it offers the next one.
            training.kill()
        finally:
            training.terminate()
            training.wait()  # it may be writing a checkpoint
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
