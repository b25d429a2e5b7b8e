"""Flink through Beam's portable job service: its job server and the worker program."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gristmill.dataprep.runners.errors import MissingEngineError
from gristmill.dataprep.runners.servers import Server, job_server, start_server
from gristmill.mixtures.schema.engine import BeamEngine, EngineOptions

PROGRAM = "gristmill-worker"
"""Name of the installed program of `worker.py`."""
UNLISTED = "disable_logging_submission_environment"
"""Experiment that stops Beam from listing all installed packages for each job, which
takes a second and leaves the list in the temporary folder.
"""
OURS = ("flink_job_server_jar", "job_server_jvm_properties")
"""Options for the start of the job server, which are not passed on to Beam."""


def flink_options(address: str | None, options: EngineOptions) -> EngineOptions:
    """Options of Beam's portable runner for Flink: the job server's address and the
    worker program.

    Args:
        address: address of Flink's JobManager.
        options: the user's options. Without a `job_endpoint` a job server is started.

    Raises:
        MissingEngineError: the job server, Java, or the worker program is not on this
            machine.
        WorkerError: the job server does not start.
    """
    beam_options = {name: value for name, value in options.items() if name not in OURS}
    if "job_endpoint" not in beam_options:
        name = _server_name(address, options)
        beam_options["job_endpoint"] = job_server(
            name, _server_command(address, options)
        )
    return {
        **beam_options,
        "experiments": [*beam_options.get("experiments", ()), UNLISTED],
        **environment(beam_options),
    }


def start_run_server(engine: BeamEngine) -> Server:
    """Start the job server that the stages of a run share.

    Raises:
        MissingEngineError: the job server or Java is not on this machine.
        WorkerError: the job server does not start.
    """
    command = _server_command(engine.address, engine.options)
    return start_server(_server_name(engine.address, engine.options), command)


def program() -> Path:
    """Path of the worker program in this installation."""
    return Path(sys.executable).with_name(PROGRAM)


def environment(options: EngineOptions) -> dict[str, str]:
    """Options of the worker environment: the program of this installation, unless the
    options set another.
    """
    kind = options.get("environment_type", "PROCESS")
    if kind != "PROCESS" or "environment_config" in options:
        return {}
    if not program().exists():
        raise MissingEngineError(
            f"{program()} is not there, which does the work; install gristmill again"
        )
    return {
        "environment_type": kind,
        "environment_config": json.dumps({"command": str(program())}),
    }


def _server_name(address: str | None, options: EngineOptions) -> str:
    return f"Flink at {address} ({options.get('flink_job_server_jar')})"


def _server_command(
    address: str | None, options: EngineOptions
) -> Callable[[int, Path], Sequence[str]]:
    """Make the command of Beam's job server for Flink, which submits jobs to the
    JobManager at `address`.
    """
    jar = options.get("flink_job_server_jar")
    if jar is None or not Path(jar).is_file():
        raise MissingEngineError(
            "engine.options.flink_job_server_jar must name the jar of Beam's job "
            "server for the cluster's version of Flink "
            f"(org.apache.beam:beam-runners-flink-VERSION-job-server), not {jar!r}"
        )
    java = shutil.which("java")
    if java is None:
        raise MissingEngineError(
            "Beam's job server for Flink needs Java, which is not on this machine; "
            "install a Java of at least 11, or name a server that runs: "
            "engine.options.job_endpoint"
        )

    def command(port: int, folder: Path) -> Sequence[str]:
        return [
            java,
            *options.get("job_server_jvm_properties", ["-Xmx512m"]),
            "-jar",
            str(jar),
            f"--flink-master={address}",
            "--job-host=127.0.0.1",
            f"--job-port={port}",
            "--artifact-port=0",
            "--expansion-port=0",
            f"--artifacts-dir={folder / 'artifacts'}",
        ]

    return command
