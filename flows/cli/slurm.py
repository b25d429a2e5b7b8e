"""The command `slurm`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from typer import Option, echo

from gristmill.flows.cli.application import (
    ManifestArgument,
    SetOption,
    StoreOption,
    UntilOption,
    app,
    fail,
    open_or_exit,
)


@app.command()
def slurm(
    manifest: ManifestArgument,
    array: Annotated[
        int,
        Option(metavar="N", help="Tasks in the job array of each data stage.", min=1),
    ] = 16,
    cores: Annotated[
        int,
        Option(
            metavar="N",
            help="Cores of each task, and of each host of a training.",
            min=1,
        ),
    ] = 8,
    hosts: Annotated[
        int, Option(metavar="N", help="Hosts of each training.", min=1)
    ] = 1,
    gpus: Annotated[
        int,
        Option(
            metavar="N",
            help="GPUs of each host; if 0, training runs engine.ranks processes on "
            "CPU cores.",
            min=0,
        ),
    ] = 0,
    time: Annotated[
        str, Option(metavar="HH:MM:SS", help="Time limit of each job.")
    ] = "24:00:00",
    sbatch: Annotated[
        list[str] | None,
        Option(
            metavar="OPTION",
            help="An option of sbatch for all jobs, as in --sbatch=--partition=long; "
            "may be given several times.",
        ),
    ] = None,
    until: UntilOption = None,
    out: Annotated[Path, Option(metavar="DIR", help="Folder for the scripts.")] = Path(
        "slurm"
    ),
    set_: SetOption = None,
    store: StoreOption = None,
) -> None:
    """Write Slurm batch scripts for a manifest, one per stage, and a script that
    submits them.
    """
    from gristmill.flows.running.slurm import Allotment, scripts_of, write_scripts

    store_location = store or os.environ.get("GRISTMILL_STORE")
    if store_location is None:
        fail("give a store at a path that all hosts share: --store /shared/store")
    if "://" not in store_location:
        store_location = os.path.abspath(store_location)
    file = os.path.abspath(manifest)
    session = open_or_exit(file, set_, store_location, until=until, exactly=True)
    trains = [name for name, node in session.plan.items() if node.stage.torchrun]
    ranks = session.manifest.engine.num_ranks
    if trains and hosts > 1 and not gpus and (ranks % hosts or ranks == 1):
        fail(
            f"--hosts {hosts} cannot share {ranks} processes (engine.ranks) evenly: "
            "give a multiple, or --gpus"
        )
    folder = Path(os.path.abspath(out))
    allotment = Allotment(array, cores, hosts, gpus, time, sbatch or ())
    write_scripts(scripts_of(session, allotment, folder), folder)
    echo(
        f"{len(session.plan)} jobs are in {out}; submit them with: {out / 'submit.sh'}"
    )
