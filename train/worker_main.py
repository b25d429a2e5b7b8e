"""Entry point of every rank: `python -m gristmill.train.torchrun ... -m
gristmill.train.worker_main STAGE_DIR`.

STAGE_DIR/stage.json describes the stage and its inputs; the output goes to
STAGE_DIR/data, the summary to STAGE_DIR/work/result.json, or the error to
STAGE_DIR/work/error.json. Only rank 0 reports. On SIGTERM the training finishes its
step, saves a checkpoint and exits with 143.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

from gristmill.core.files import as_path, read_json, write_json
from gristmill.core.object_stores import asked_for, warn_by
from gristmill.core.processes import end_with_parent, measure_cost
from gristmill.core.secrets import mask_addresses, mask_text, restore_secrets
from gristmill.core.stage_context import (
    Context,
    Lineage,
    Mirroring,
    StageDescription,
    input_fingerprints,
    print_event,
    print_failure,
    print_warning,
    read_inputs,
)
from gristmill.mixtures.schema.engine import Engine
from gristmill.train import store_sync
from gristmill.train.distributed import rendezvous
from gristmill.train.distributed.compiling import resolve_compile
from gristmill.train.loop.stopping import (
    EXIT_TERMINATED,
    StoppedError,
    stop_on_sigterm,
    stop_requested,
)

EXIT_FAILED = 1
LOST_CONNECTION = (
    "gloo/transport",
    "NCCL",
    "Connection closed by peer",
    "Connection reset by peer",
)
"""Texts in a rank's error after another rank has ended."""


def main(argv: list[str] | None = None) -> int:
    """Run the stage of a folder as one rank; returns the exit code."""
    (location,) = sys.argv[1:] if argv is None else argv
    # torchrun starts its ranks in sessions of their own, which signals to its group do
    # not reach.
    end_with_parent(signal.SIGKILL)
    stop_on_sigterm()
    warn_by(print_warning)
    # Waiting threads yield their core instead of spinning: equally fast on an idle
    # machine, and several times faster on a busy one. OpenMP reads this when torch is
    # imported, which no module does before this line.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Growing segments in place avoids fragmentation of a GPU's memory.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    folder = as_path(location)
    try:
        return run_and_report(folder)
    except Exception as error:  # noqa: BLE001 - any error of a stage is recorded, and ends this process
        traceback.print_exc()
        with asked_for(store_sync.SAYING_SECONDS):
            write_error(store_sync.followed(folder), error)
        return EXIT_FAILED


def run_and_report(folder: Path) -> int:
    """Run the stage and write its result into the folder and its mirror; returns the
    exit code.
    """
    description: StageDescription = restore_secrets(read_json(folder / "stage.json"))
    engine = Engine.model_validate(description["engine"])
    if rendezvous.hosts_of(engine) > 1:
        os.environ[rendezvous.TIMEOUT] = str(engine.network.timeout_seconds)
        rendezvous.note_arrival(store_sync.followed(folder) / "work")
    is_first = os.environ["RANK"] == "0"
    mirror = store_sync.mirror_of(folder, engine.stream, print_warning)
    try:
        summary = run_stage(folder, description, engine, is_first, mirror)
    except StoppedError as error:
        if not stop_requested() and rendezvous.hosts_of(engine) > 1:
            rendezvous.report_change(
                store_sync.followed(folder),
                f"another host was asked to stop, or waits to join: {error}; run it "
                "again to resume",
            )
        print(f"gristmill: {error}; the rerun continues there", file=sys.stderr)
        return EXIT_TERMINATED
    if is_first:
        write_json(
            folder / "work" / "cost.json",
            measure_cost(workers=1, processes=int(os.environ["WORLD_SIZE"])),
        )
        if mirror is not None:
            mirror.send("data", "work")
        write_json(folder / "work" / "result.json", mask_addresses(summary))
        if mirror is not None:
            mirror.send("work")
    elif mirror is not None:
        # all other files of use are the first rank's
        mirror.add(folder / "work" / "profile")
    if mirror is not None:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def write_error(folder: Path, error: Exception) -> None:
    """Write the error's message for the process that started the training.

    If one rank fails, the others lose their connections to it; their errors do not
    replace its cause.
    """
    import torch
    import torch.distributed as dist

    message = mask_text(str(error)).strip() or type(error).__name__
    if (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or "DefaultCPUAllocator" in message
    ):
        message = (
            message.rstrip(".")
            + "; lower micro_batch_size: the training resumes from its last checkpoint"
        )
    is_consequence = isinstance(error, dist.DistError) or any(
        mark in message for mark in LOST_CONNECTION
    )
    path = folder / "work" / "error.json"
    try:
        if is_consequence:
            if rendezvous.has_several_hosts():
                message = rendezvous.why_lost(folder / "work", message)
            rendezvous.report_change(folder, message)
        else:
            print_failure(message)
            write_json(path, {"type": type(error).__name__, "message": message})
    except OSError as trouble:
        # A full disk, perhaps; the parent process is informed.
        print(f"gristmill: {path} cannot be written: {trouble}", file=sys.stderr)


def run_stage(
    folder: Path,
    description: StageDescription,
    engine: Engine,
    is_first: bool,
    mirror: store_sync.Mirror | None = None,
) -> Mapping[str, object]:
    """Call the stage's function on this rank and return its summary; `mirror` receives
    its checkpoints.
    """
    stage = description["stage"]
    compute = resolve_compile(
        engine.compute, engine.parallel, stage, description["config"]
    )
    context = Context(
        work=folder / "work",
        stage=stage,
        training=engine.model_copy(update={"compute": compute}),
        lineage=Lineage(
            annotations={
                name: as_path(path)
                for name, path in description.get("origins", {}).items()
            },
            start_models={
                name: fingerprint
                for name, fingerprint in input_fingerprints(
                    description.get("input_fingerprints", ())
                ).items()
                if name in description.get("trained", ())
            },
        ),
        mirroring=Mirroring(
            mirror, store_sync.VARIABLE in os.environ and rendezvous.has_several_hosts()
        ),
        emit=print_event if is_first else lambda event: None,
    )
    context.work.mkdir(parents=True, exist_ok=True)
    warn_of_idle_gpus(context)
    module, _, function = description["run"].partition(":")
    run = getattr(importlib.import_module(module), function)
    return run(
        read_inputs(description), description["config"], folder / "data", context
    )


def warn_of_idle_gpus(context: Context) -> None:
    """Warn about GPUs that no process of this training uses."""
    import torch

    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.is_available() and (gpus := torch.cuda.device_count()) > ranks:
        context.warn(
            f"{context.stage}: this machine has {gpus} GPUs, and engine.ranks is "
            f"{ranks}: set it to {gpus}, "
            "or name those to be used in CUDA_VISIBLE_DEVICES"
        )


if __name__ == "__main__":
    # os._exit: after an error other ranks may hang in a collective, which a normal exit
    # would wait for.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
