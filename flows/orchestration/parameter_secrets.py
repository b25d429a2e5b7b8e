"""Credentials among the parameters of a flow run, which Prefect keeps as they are, for everybody who sees its UI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from gristmill.dataprep.secrets import mask_secrets, mask_text


class SecretParameterError(ValueError):
    """A parameter holds a credential; the message does not repeat it."""


class RefusedError(ValueError):
    """A manifest or a source was refused by a sentence that held a credential, which this one does not."""


def refuse_secrets(parameters: Mapping[str, Any]) -> None:
    """Refuse to run with parameters that hold credentials, and mask them in the current flow run's record.

    Raises:
        SecretParameterError: they do.
    """
    names = [name for name, value in parameters.items() if mask_secrets(value) != value]
    if not names:
        return
    forget_secrets()
    raise SecretParameterError(
        f"{' and '.join(names)}: this holds a credential, and Prefect shows parameters to everybody who sees this "
        "page; it is masked there now. Write it into the manifest's file, or into the environment of the machine "
        "that runs the flow, and change it if others may have seen it. Nothing was run")


def forget_secrets() -> None:
    """Mask what the record of the current flow run says of its parameters."""
    from prefect.client.orchestration import get_client
    from prefect.runtime import flow_run

    run = UUID(str(flow_run.id))
    with get_client(sync_client=True) as client:
        client.update_flow_run(run, parameters=mask_secrets(client.read_flow_run(run).parameters))


def without_secrets(error: Exception) -> Exception:
    """The error, or where its sentence holds a credential, one that tells the same without it."""
    told = mask_text(str(error))
    return error if told == str(error) else RefusedError(told)
