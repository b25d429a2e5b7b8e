"""Slurm scripts for a manifest: a job for each stage, each after the previous one.

A stage with parallel work is an array whose tasks all run the same command: they share
the work through the store (`dataprep/runners/multi_host.py`), not by task number, so any
of them may start late, be killed, or be submitted again. A training is a job of one or
several nodes. A job starts whatever the result of the previous one (`afterany`), and
completes its work.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gristmill.flows.running.session import Session, program

MINUTES_TO_STOP = 2
"""Time before a training's limit at which it gets SIGTERM to write a checkpoint."""


@dataclass(frozen=True)
class Allotment:
    """Resources of the jobs.

    Attributes:
        array: tasks of each array.
        cores: cores of each task of an array, and of each host of a training.
        hosts: hosts of a training.
        gpus: GPUs per host of a training; if 0, it runs `engine.ranks` processes on
            cores.
        time: time limit of each job, in Slurm's format.
        options: options of sbatch for every job, as in `--partition=long`.
    """

    array: int
    cores: int = 8
    hosts: int = 1
    gpus: int = 0
    time: str = "24:00:00"
    options: Sequence[str] = ()


def scripts_of(session: Session, allotment: Allotment, folder: Path) -> dict[str, str]:
    """Scripts by name, in the order of the stages; `submit.sh` submits them all.

    Args:
        folder: absolute path of the scripts and of the jobs' output. The jobs run in
            the current folder.
    """
    scripts = {}
    for number, (name, node) in enumerate(session.plan.items(), 1):
        if node.stage.torchrun:
            text = _training_script(session, name, allotment, folder)
        else:
            tasks = allotment.array if node.uses_workers else 1
            lines = ["--nodes=1", "--ntasks=1", f"--output={folder}/%x-%j.log"]
            if tasks > 1:
                lines[2:] = [
                    f"--array=0-{tasks - 1}",
                    f"--output={folder}/%x-%A_%a.log",
                ]
            # Overrides the number of processes of a training, which need not be a
            # multiple of the tasks.
            settings = [
                f"engine.nodes={tasks}",
                f"engine.workers={allotment.cores}",
                "engine.ranks=1",
                "engine.min_nodes=null",
            ]
            command = _command(session, name, *settings)
            text = f"{_head(session, name, allotment, lines)}exec {command}\n"
        scripts[f"{number:02d}-{name}.sbatch"] = text
    first, *later = map(shlex.quote, scripts)
    after = 'sbatch --parsable --dependency="afterany:${job%%;*}"'
    submit = [
        "#!/bin/bash",
        "# Submits every stage, each after the previous one; committed stages are "
        "skipped.",
        "set -eu",
        'cd "$(dirname "$0")"',
        f"job=$(sbatch --parsable {first})",
        *(f"job=$({after} {name})" for name in later),
        'echo "the last job is ${job%%;*}"\n',
    ]
    return {**scripts, "submit.sh": "\n".join(submit)}


def write_scripts(scripts: dict[str, str], folder: Path) -> None:
    """Write scripts to a folder, replacing earlier ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("[0-9][0-9]-*.sbatch"):
        old.unlink()
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def _command(session: Session, stage: str, *settings: str) -> str:
    options = []
    for setting in settings:
        options += ["--set", setting]
    command = session.command("run", "--until", stage, "--no-ui", *options)
    # independent of a job's environment
    executable = Path(sys.executable).with_name("gristmill")
    if not executable.exists():
        return command
    return shlex.quote(str(executable)) + command.removeprefix(shlex.quote(program()))


def _head(
    session: Session, stage: str, allotment: Allotment, lines: Sequence[str]
) -> str:
    options = [
        f"--job-name={session.manifest.name}-{stage}",
        f"--cpus-per-task={allotment.cores}",
        f"--time={allotment.time}",
        f"--chdir={Path.cwd()}",
        *lines,
        "--requeue",
        "--open-mode=append",
        *allotment.options,
    ]
    return "\n".join(
        [
            "#!/bin/bash",
            f"# Stage {stage}, written by `gristmill slurm`. To complete its work, "
            "submit this file",
            "# again, or any task of its array.",
            *(f"#SBATCH {option}" for option in options),
            "set -u",
            "",
        ]
    )


def _training_script(
    session: Session, stage: str, allotment: Allotment, folder: Path
) -> str:
    hosts = allotment.hosts
    ranks = hosts * allotment.gpus or session.manifest.engine.num_ranks
    lines = [
        f"--nodes={hosts}",
        "--ntasks-per-node=1",
        f"--output={folder}/%x-%j.log",
        f"--signal=B:TERM@{60 * MINUTES_TO_STOP}",
    ]
    if allotment.gpus:
        lines.append(f"--gpus-per-node={allotment.gpus}")
    settings = [
        f"engine.nodes={hosts}",
        f"engine.ranks={ranks}",
        f"engine.workers={max(allotment.cores, ranks)}",
        # Slurm ends and requeues a job that loses a node.
        "engine.min_nodes=null",
    ]
    start = (
        f"srun --ntasks-per-node=1 --cpus-per-task={allotment.cores} "
        "--kill-on-bad-exit=1 "
        if hosts > 1
        else ""
    )
    return f"""{_head(session, stage, allotment, lines)}
{start}{_command(session, stage, *settings)} &
run=$!
stopped=
trap 'stopped=1; kill -TERM "$run"' TERM
wait "$run"
code=$?
# The first `wait` ends when the signal comes, the second one when the checkpoint is written: the next attempt resumes.
if [ -n "$stopped" ]; then
    wait "$run"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$code"
"""
