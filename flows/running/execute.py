"""Process of one stage: `python -m gristmill.flows.running.execute STAGE_DIR`. The
folder is the complete interface.

`stage.json` describes the work; the files go to `data/`, state across attempts to
`work/`. The result is `work/result.json`, or `work/error.json` after a failure. A batch
system would run exactly this command. Only credentials of addresses are not in the
folder: they are in the environment.
"""

from __future__ import annotations

import importlib
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import cast

from gristmill.core.files import (
    as_path,
    is_local,
    json_object,
    read_json,
    write_json,
)
from gristmill.core.object_stores import warn_by
from gristmill.core.processes import end_with_parent, in_environment, measure_cost
from gristmill.core.secrets import mask_addresses, mask_text, restore_secrets
from gristmill.core.stage_context import (
    Context,
    StageDescription,
    print_event,
    print_failure,
    print_warning,
    read_inputs,
)
from gristmill.dataprep.runners.errors import KilledWorkerError
from gristmill.dataprep.runners.ship_files import through
from gristmill.mixtures.schema.engine import Engine

EXIT_FAILED = 1
ANSWERS = "answers"
"""Folder of a store with the answers of models, which outputs of all fingerprints
share.
"""

IN_FORK = "GRISTMILL_TRAIN_IN_FORK"
"""Environment variable of forks that train as one process."""


def main(argv: list[str] | None = None) -> int:
    """Run the stage of a folder, and return the exit code."""
    (location,) = sys.argv[1:] if argv is None else argv
    folder = as_path(location)
    warn_by(print_warning)
    parent = os.environ.get("GRISTMILL_PARENT")
    end_with_parent(signal.SIGTERM, None if parent is None else int(parent))
    description = restore_secrets(read_json(folder / "stage.json"))
    for name in ("result.json", "error.json", "cost.json"):
        (folder / "work" / name).unlink(missing_ok=True)
    if description["launch"] == "torchrun":
        if IN_FORK in os.environ and is_local(folder):
            return train_alone(folder)
        return launch_training(folder, Engine.model_validate(description["engine"]))
    try:
        summary = run_stage(folder, description)
    except Exception as error:  # noqa: BLE001 - any error of a stage is recorded, and ends this process
        traceback.print_exc()
        write_error(folder, error)
        return EXIT_FAILED
    write_json(
        folder / "work" / "cost.json", measure_cost(description["engine"]["workers"])
    )
    write_json(folder / "work" / "result.json", mask_addresses(summary))
    return 0


def train_alone(folder: Path) -> int:
    """Run a training as its only rank in this process, which has imported torch."""
    import torch

    from gristmill.train import worker_main
    from gristmill.train.torchrun import files_of_one_machine

    # torch has read the variable of the server, which has one thread.
    threads = os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))
    torch.set_num_threads(int(threads))
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with files_of_one_machine(), in_environment(ranks):
        return worker_main.main([str(folder)])


def launch_training(folder: Path, engine: Engine) -> int:
    """Replace this process with torchrun; return the exit code if that fails.

    A training in an object store works in a local folder (see
    train.store_sync). With several hosts, this one is the leader; the
    others wait in `follow_leader.py` until the leader has fetched its inputs.
    """
    from gristmill.train.distributed.rendezvous import hosts_of, lead
    from gristmill.train.store_sync import work_on

    try:
        local_folder = work_on(folder)
        if hosts_of(engine) > 1:
            rendezvous = lead(folder, engine)
            if engine.network.interface:
                name_interface(engine.network.interface)
            follower_command = shlex.join(rendezvous.command(folder, leads=False))
            print_event(
                {
                    "event": "warning",
                    "message": (
                        f"waiting at {rendezvous.endpoint} for {rendezvous.nodes - 1} "
                        f"more of {rendezvous.nodes} hosts, at least "
                        f"{rendezvous.least_nodes - 1}; start the same gristmill "
                        f"command on them, or {follower_command}"
                    ),
                }
            )
            command = rendezvous.command(local_folder, leads=True)
        else:
            command = torchrun_command(local_folder, engine.num_ranks)
        os.execvp(command[0], command)
    except Exception as error:  # noqa: BLE001 - any error of the store is recorded, and ends this process
        traceback.print_exc()
        write_error(folder, error)
        return EXIT_FAILED


def name_interface(interface: str) -> None:
    """Set the network interface of gloo and NCCL."""
    os.environ.update(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=interface)


def run_stage(folder: Path, description: StageDescription) -> Mapping[str, object]:
    """Call the stage's function in this process and return its summary as JSON."""
    module, _, function = description["run"].partition(":")
    context = Context(
        work=folder / "work",
        stage=description["stage"],
        beam=Engine.model_validate(description["engine"]),
        answers=folder.parent.parent / ANSWERS,
    )
    run = getattr(importlib.import_module(module), function)
    inputs, out = read_inputs(description), folder / "data"
    with through(None if context.beam.runner == "local" else folder.parent.parent):
        result = run(inputs, description["config"], out, context)
        summary: Mapping[str, object] = (
            json_object(result)
            if is_dataclass(result) and not isinstance(result, type)
            else result
        )
        intended = description.get("intended_losses")
        if intended is None:
            return summary
        from gristmill.dataprep.conservation import Counts
        from gristmill.dataprep.count_losses import count_losses

        counts = cast(Counts, summary["counts"])
        losses = count_losses(inputs, out, intended, counts, context)
    return {**summary, "group_losses": [asdict(loss) for loss in losses]}


def write_error(folder: Path, error: BaseException) -> None:
    """Write the error's message for the process that started this one."""
    cause = error
    while type(cause).__name__ == "RuntimeError" and cause.__cause__ is not None:
        cause = cause.__cause__
    message = mask_text(str(cause)).strip() or type(cause).__name__
    print_failure(message, is_killed=isinstance(cause, KilledWorkerError))
    path = folder / "work" / "error.json"
    try:
        write_json(path, {"type": type(cause).__name__, "message": message})
    except OSError as trouble:
        # A full disk, perhaps; the parent process is informed.
        print(f"gristmill: {path} cannot be written: {trouble}", file=sys.stderr)


def torchrun_command(folder: Path, ranks: int) -> list[str]:
    """Command that runs a training stage on `ranks` processes of this machine."""
    return [
        sys.executable,
        "-m",
        "gristmill.train.torchrun",
        "--nnodes=1",
        f"--nproc-per-node={ranks}",
        "-m",
        "gristmill.train.worker_main",
        str(folder),
    ]


if __name__ == "__main__":
    sys.exit(main())
