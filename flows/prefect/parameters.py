"""Parameters of the flows: schema of the form in the browser, and protection of
credentials.

Prefect builds the form from their JSON Schema. Checks beyond a schema are done by the
manifest's validation as soon as the run starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Annotated
from uuid import UUID

from pydantic import Field, WithJsonSchema

from gristmill.core.secrets import mask_secrets, mask_text
from gristmill.flows.stages.registry import STAGES

StageName = Annotated[str, WithJsonSchema({"type": "string", "enum": list(STAGES)})]
"""Name of a stage or step: a form offers the stages in order, and those of its
manifest.
"""

FilePath = Annotated[str, Field(min_length=1)]
"""Path on the machine that runs the flow."""

Setting = Annotated[str, Field(pattern=r"^[^=\s]+=")]
"""`key.path=value`; replaces a setting of the manifest."""

DeploymentName = Annotated[str, Field(pattern=r"^([^/\s]+/[^/\s]+)?$")]
"""`flow/deployment`, or empty."""

MOST_NAME_CHARS = 120
"""Maximum characters of a run's name: one line in Prefect's pages."""


class SecretParameterError(ValueError):
    """A parameter with a credential; the message does not repeat it."""


class RefusedError(ValueError):
    """A rejected manifest, source or parameter; the message contains no credential."""


def run_name(manifest: str, overrides: Sequence[str] = ()) -> str:
    """Name of a run: the manifest's without its folder, and the overrides (`train:
    pretrain.steps=3000`).
    """
    name = PurePosixPath(manifest.partition("recipe:")[2] or manifest).stem or manifest
    settings = ", ".join(overrides)
    full = mask_text(f"{name}: {settings}" if settings else name)
    return full if len(full) <= MOST_NAME_CHARS else f"{full[: MOST_NAME_CHARS - 1]}…"


def refuse_secrets(overrides: Sequence[str], store: str) -> None:
    """Reject parameters with credentials, and mask them in the current flow run's
    record.

    Raises:
        SecretParameterError: a parameter contains a credential.
    """
    names = []
    if mask_secrets(list(overrides)) != list(overrides):
        names.append("overrides")
    if mask_secrets(store) != store:
        names.append("store")
    if not names:
        return
    forget_secrets()
    raise SecretParameterError(
        f"{' and '.join(names)}: this contains a credential, and Prefect shows "
        "parameters to everyone who can open this page; it is masked now. Write it "
        "into the manifest's file, or into the environment of the machine that runs "
        "the flow, and change it if others may have seen it. Nothing was run"
    )


def forget_secrets() -> None:
    """Mask credentials in the parameters recorded for the current flow run."""
    from prefect.client.orchestration import get_client
    from prefect.runtime import flow_run

    run = UUID(str(flow_run.id))
    with get_client(sync_client=True) as client:
        client.update_flow_run(
            run, parameters=mask_secrets(client.read_flow_run(run).parameters)
        )


def without_secrets(error: Exception) -> Exception:
    """Return the error itself, or one with a masked message if its message contains a
    credential.
    """
    masked = mask_text(str(error))
    return error if masked == str(error) else RefusedError(masked)
