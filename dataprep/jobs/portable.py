"""Engines behind Beam's portable job service: which job server takes a job there, and which program does the work."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gristmill.dataprep.jobs import distributions
from gristmill.dataprep.jobs.distributions import FLINK_VERSION, MissingEngineError
from gristmill.dataprep.jobs.servers import job_server

PROGRAM = "gristmill-worker"
"""What `worker.py` is called where this package is installed."""
UNLISTED = "disable_logging_submission_environment"
"""Beam lists all installed packages for each job, in a second, and leaves the list in the temporary folder."""
OURS = ("flink_version", "flink_job_server_jar", "job_server_jvm_properties", "prism_location")
"""Options that tell how the job server is started, and that it is not told itself."""


def portable_options(engine: str, address: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of Beam's portable runner: the job server's address, and the program that does the work.

    Args:
        engine: `prism` or `flink`.
        address: of a Prism that runs, or of Flink's JobManager.
        options: the user's. With a `job_endpoint` that server is taken; otherwise one is started.

    Raises:
        MissingEngineError: the job server, Java, or the worker's program is not on this machine.
        WorkerError: the job server does not start.
    """
    rest = {name: value for name, value in options.items() if name not in OURS}
    if engine == "prism" and address is None and "job_endpoint" not in rest:
        check_program(rest)
    if "job_endpoint" not in rest:
        start = {"prism": _start_prism, "flink": _start_flink}[engine]
        rest["job_endpoint"] = address if engine == "prism" and address else start(address, options)
    return {**rest, "experiments": [*rest.get("experiments", ()), UNLISTED], **environment(rest)}


def program() -> Path:
    """Where the program that does the work is in this installation."""
    return Path(sys.executable).with_name(PROGRAM)


def environment(options: Mapping[str, Any]) -> dict[str, Any]:
    """What does the work: this installation's own program, unless the options name something."""
    kind = options.get("environment_type", "PROCESS")
    if kind != "PROCESS" or "environment_config" in options:
        return {}
    if not program().exists():
        raise MissingEngineError(f"{program()} is not there, which does the work; install gristmill again")
    return {"environment_type": kind, "environment_config": json.dumps({"command": str(program())})}


def check_program(options: Mapping[str, Any]) -> None:
    """Raise MissingEngineError where the program that the options name is not on this machine.

    A Prism that is started here starts it here; without it no worker ever comes, and Prism does not say why.
    """
    if options.get("environment_type") != "PROCESS" or "environment_config" not in options:
        return
    try:
        command = json.loads(options["environment_config"])["command"]
    except (ValueError, TypeError, KeyError):
        raise MissingEngineError(
            f"engine.options.environment_config is {options['environment_config']!r}; give "
            f'{{"command": "/path/{PROGRAM}"}} as JSON'
        ) from None
    if shutil.which(command) is None:
        raise MissingEngineError(
            f"engine.options.environment_config names {command}, which is no program on this "
            f"machine, nor on its PATH; give its whole path (that of this installation is "
            f"{program()}), or leave environment_config out"
        )


def _start_prism(_address: str | None, options: Mapping[str, Any]) -> str:
    binary = Path(options.get("prism_location") or distributions.find(distributions.prism()))
    _check_there(binary, "prism_location")

    def command(port: int, _folder: Path) -> Sequence[str]:
        return [str(binary), f"--job_port={port}", "--serve_http=false", "--log_kind=text", "--log_level=warn"]

    return job_server(f"prism ({binary})", command)


def _start_flink(address: str | None, options: Mapping[str, Any]) -> str:
    """Start Beam's job server for Flink; it hands jobs to the JobManager at `address`."""
    line = str(options.get("flink_version", FLINK_VERSION))
    jar = Path(options.get("flink_job_server_jar") or distributions.find(distributions.flink(line)))
    _check_there(jar, "flink_job_server_jar")
    java = shutil.which("java")
    if java is None:
        raise MissingEngineError(
            "Beam's job server for Flink needs Java, which is not on this machine; install a Java "
            "of at least 11, or name a server that runs: engine.options.job_endpoint"
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

    return job_server(f"Flink {line} at {address} ({jar})", command)


def _check_there(file: Path, option: str) -> None:
    if not file.is_file():
        raise MissingEngineError(f"there is no file {file}; correct engine.options.{option}")
