"""Deployments in Prefect's UI, and the process that runs triggered flows.

Each manifest has deployments with its own stages; one deployment per flow takes any
manifest.
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

from gristmill.flows.prefect.flow import gristmill, gristmill_stage
from gristmill.flows.prefect.server_settings import prefect_folder
from gristmill.flows.stages.plan import present_stages
from gristmill.mixtures.loader import ManifestError, load_manifest

TAG = "gristmill"
ANY = "any-manifest"
"""Name part of deployments that take the path of a manifest."""
PREFIXES = {"gristmill": "", "gristmill-stage": "stage-of-"}
"""Prefixes of deployment names by flow, for narrow pages that do not show the flow."""
LOCK = "gristmill-serving.lock"
MOST_MANIFESTS = 20
_MANIFEST = re.compile(r"^sources\s*:", re.MULTILINE)


class ManifestOnOffer:
    """A manifest with separate deployments.

    Args:
        path: file of the manifest.

    Raises:
        gristmill.mixtures.loader.ManifestError: the manifest is invalid.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.stages = present_stages(load_manifest(str(path), []))
        self.name = deployment_name(path)


def deployment_name(path: Path) -> str:
    """Name of a manifest's deployments: its relative path without characters that
    Prefect forbids.
    """
    folder = Path.cwd()
    if path.is_absolute() and path.is_relative_to(folder):
        path = path.relative_to(folder)
    return re.sub(r"[^\w.-]+", "-", str(path.with_suffix(""))).strip("-")


def find_manifests(folder: Path) -> Iterator[Path]:
    """Yield the manifests of a folder and its direct subfolders, the first
    `MOST_MANIFESTS` by name.

    Skips other files, and warns about invalid manifests.
    """
    files = [*sorted(folder.glob("*.y*ml")), *sorted(folder.glob("[!.]*/*.y*ml"))]
    yaml_files = (
        file.relative_to(folder) for file in files if file.suffix in (".yaml", ".yml")
    )
    manifests = (
        file
        for file in yaml_files
        if _MANIFEST.search((folder / file).read_text(errors="replace"))
    )
    for path in islice(manifests, MOST_MANIFESTS):
        try:
            load_manifest(str(folder / path), [])
        except ManifestError as error:
            print(
                f"{path} gets no deployments of its own: {str(error).splitlines()[0]}",
                flush=True,
            )
            continue
        yield path


def make_deployments(manifests: Sequence[ManifestOnOffer]) -> list[Any]:
    """Deployments for `gristmill up` and `gristmill serve`: of each manifest, and of
    each flow for any other.
    """
    deployments = [
        _deployment(flow, manifest, f"{verb} {manifest.path}.")
        for manifest in manifests
        for flow, verb in ((gristmill, "Run"), (gristmill_stage, "Run one stage of"))
    ]
    return [*deployments, _deployment(gristmill), _deployment(gristmill_stage)]


def _deployment(
    flow: Any, manifest: ManifestOnOffer | None = None, description: str | None = None
) -> Any:
    """Deployment with the choices of a manifest in its form, where only fields that may
    be empty are marked as optional.

    Prefect's form marks all fields outside the schema's `required` as optional; the
    required ones have the deployment's defaults, so nobody has to fill them in.
    """
    name = PREFIXES[flow.name] + (ANY if manifest is None else manifest.name)
    deployment = flow.to_deployment(name, tags=[TAG], description=description)
    # the only way to customise the form (3.8.8)
    schema = deployment._parameter_openapi_schema
    properties = schema.properties
    if manifest is not None:
        properties["manifest"] |= {
            "enum": [str(manifest.path)],
            "default": str(manifest.path),
        }
        if "until" in properties:
            properties["until"] |= {
                "enum": manifest.stages,
                "default": manifest.stages[-1],
            }
            properties["force"]["items"] |= {"enum": manifest.stages}
        if "stage" in properties:
            properties["stage"] |= {"enum": manifest.stages}
    schema.required = [
        name
        for name, field in properties.items()
        if field.get("default", "none") not in ("", [], ())
    ]
    deployment.parameters = {
        name: properties[name]["default"]
        for name in schema.required
        if "default" in properties[name]
    }
    return deployment


def run_triggered(deployments: Sequence[Any], limit: int) -> None:
    """Register deployments and run triggered flows until SIGTERM or SIGINT.

    Args:
        deployments: from `make_deployments`.
        limit: maximum number of concurrent flow runs.
    """
    # A background process of a shell ignores SIGINT, and its children inherit that.
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
    """Prefect's runner, with orderly shutdown; keeps deployments active while another
    process serves them.

    Args:
        lock: file that every serving process of this user has locked (shared).
        limit: maximum number of concurrent flow runs.
    """

    def __init__(self, lock: IO[str], limit: int) -> None:
        super().__init__(limit=limit)
        self._lock = lock

    def handle_sigterm(self, *_: Any, **__: Any) -> None:
        """Shut down as on SIGINT: Prefect's handler creates a coroutine that is never
        awaited (3.8.8).
        """
        signal.raise_signal(signal.SIGINT)

    async def __aexit__(self, *exc_info: Any) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.pause_on_shutdown = True
        except BlockingIOError:  # another process serves the deployments
            self.pause_on_shutdown = False
        await super().__aexit__(*exc_info)
