"""The deployments in Prefect's UI, and the process that runs what is triggered there.

A deployment per manifest offers that manifest's own stages; one of each flow takes any manifest.
"""

from __future__ import annotations

import asyncio
import fcntl
import re
import signal
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

from prefect.runner import Runner

from gristmill.flows.orchestration.server_settings import prefect_folder
from gristmill.flows.pipeline import gristmill, gristmill_stage
from gristmill.flows.stages.plan import present_stages
from gristmill.flows.sweeps.sweep_flow import gristmill_sweep
from gristmill.mixtures.load import ManifestError, load_manifest

TAG = "gristmill"
ANY = "any-manifest"
"""In the names of the deployments that take the path of a manifest."""
PREFIXES = {"gristmill": "", "gristmill-stage": "stage-of-", "gristmill-sweep": "sweep-of-"}
"""What the names of a flow's deployments begin with: pages show them without the flow where they are narrow."""
LOCK = "gristmill-serving.lock"
MOST_MANIFESTS = 20
_MANIFEST = re.compile(r"^sources\s*:", re.MULTILINE)


class ManifestOnOffer:
    """A manifest that has deployments of its own.

    Args:
        path: of its file.

    Raises:
        gristmill.mixtures.load.ManifestError: it is wrong.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.stages = present_stages(load_manifest(str(path), []))
        self.name = deployment_name(path)


def deployment_name(path: Path) -> str:
    """The name of a manifest's deployments: its path from here, without what Prefect's names may not hold."""
    here = path.relative_to(Path.cwd()) if path.is_absolute() and path.is_relative_to(Path.cwd()) else path
    return re.sub(r"[^\w.-]+", "-", str(here.with_suffix(""))).strip("-")


def find_manifests(folder: Path) -> Iterator[Path]:
    """The manifests of a folder and of the folders right below it, the first `MOST_MANIFESTS` in the order of names.

    What is not a manifest is passed over, and of a wrong one it warns.
    """
    files = (
        path.relative_to(folder)
        for pattern in ("*.y*ml", "[!.]*/*.y*ml")
        for path in sorted(folder.glob(pattern))
        if path.suffix in (".yaml", ".yml")
    )
    for path in islice(
        (file for file in files if _MANIFEST.search((folder / file).read_text(errors="replace"))), MOST_MANIFESTS
    ):
        try:
            load_manifest(str(folder / path), [])
        except ManifestError as error:
            print(f"{path} gets no deployments of its own: {str(error).splitlines()[0]}", flush=True)
            continue
        yield path


def make_deployments(manifests: Sequence[ManifestOnOffer] = ()) -> list[Any]:
    """What `gristmill up` and `gristmill serve` offer: deployments of each manifest, and of each flow for any other."""
    own = [
        _with_form(_deployment(flow, manifest.name, f"{what} {manifest.path}."), manifest)
        for manifest in manifests
        for flow, what in ((gristmill, "Run"), (gristmill_stage, "Run one stage of"))
    ]
    return [*own, *(_with_form(_deployment(flow, ANY), None) for flow in (gristmill, gristmill_stage, gristmill_sweep))]


def _deployment(flow: Any, manifest: str, description: str | None = None) -> Any:
    return flow.to_deployment(PREFIXES[flow.name] + manifest, tags=[TAG], description=description)


def _with_form(deployment: Any, manifest: ManifestOnOffer | None) -> Any:
    """Let a deployment's form offer what a manifest has, and call optional only what may be left empty.

    Prefect's form calls optional whatever its schema does not require; what is required here has a value already, the
    deployment's own, so that nobody has to give it.
    """
    schema = deployment._parameter_openapi_schema  # the only way to a form of one's own (3.8.8)
    properties = schema.properties
    if manifest is not None:
        properties["manifest"] |= {"enum": [str(manifest.path)], "default": str(manifest.path)}
        if "until" in properties:
            properties["until"] |= {"enum": manifest.stages, "default": manifest.stages[-1]}
            properties["force"]["items"] |= {"enum": manifest.stages}
        if "stage" in properties:
            properties["stage"] |= {"enum": manifest.stages}
    schema.required = [name for name, one in properties.items() if one.get("default", "none") not in ("", [], ())]
    deployment.parameters = {
        name: properties[name]["default"] for name in schema.required if "default" in properties[name]
    }
    return deployment


def run_triggered(deployments: Sequence[Any], limit: int) -> None:
    """Register deployments and run what is triggered, until SIGTERM or SIGINT.

    Args:
        deployments: as `make_deployments` makes them.
        limit: flow runs at the same time.
    """
    # A parent in the background of a shell ignores it, and this process too, until that is changed.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    path = prefect_folder() / LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        runner = DeploymentRunner(lock, limit)
        for deployment in deployments:
            runner.add_deployment(deployment)
        try:
            asyncio.run(runner.start())
        except KeyboardInterrupt:
            return


class DeploymentRunner(Runner):
    """Prefect's runner, which ends in order, and leaves the deployments on while another process serves them.

    Args:
        lock: a file that every serving process of this user has locked, shared.
        limit: flow runs at the same time.
    """

    def __init__(self, lock: IO[str], limit: int) -> None:
        super().__init__(limit=limit)
        self._lock = lock

    def handle_sigterm(self, *_: Any, **__: Any) -> None:
        """End like at SIGINT: Prefect's own way makes a coroutine that nobody awaits (3.8.8)."""
        signal.raise_signal(signal.SIGINT)

    async def __aexit__(self, *exc_info: Any) -> None:
        self.pause_on_shutdown = _is_last(self._lock)
        await super().__aexit__(*exc_info)


def _is_last(lock: IO[str]) -> bool:
    """Whether no other process has the file locked."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
