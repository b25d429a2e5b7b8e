"""The flows' parameters: what the form in the browser offers and checks, and how credentials stay out of them.

Prefect makes the form from their JSON Schema. What no schema can say, the manifest's own validation says as soon as
the run starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from gristmill.dataprep.secrets import mask_secrets, mask_text
from gristmill.flows.stages.registry import STAGES
from gristmill.mixtures.yaml_text import parse_yaml

StageName = Annotated[str, WithJsonSchema({"type": "string", "enum": list(STAGES)})]
"""A stage, or a step's own name: a form offers the stages in their order, and that of a manifest its own."""

FilePath = Annotated[str, Field(min_length=1)]
"""A path as the machine that runs the flow sees it."""

Setting = Annotated[str, Field(pattern=r"^[^=\s]+=")]
"""`key.path=value`; replaces a setting of the manifest."""

DeploymentName = Annotated[str, Field(pattern=r"^([^/\s]+/[^/\s]+)?$")]
"""`flow/deployment`, or nothing."""

MOST_NAME_CHARS = 120
"""Of the name of a run: what a row of Prefect's pages shows on one line."""
Count = Annotated[int, Field(ge=1)]
"""At least 1."""


class ProxyModel(BaseModel):
    """The small model that a sweep trains on every mixture."""

    model_config = ConfigDict(extra="forbid")

    layers: int = Field(default=2, ge=1, description="At least 1.")
    width: int = Field(default=128, ge=1, description="Of the residual stream; a multiple of the heads.")
    heads: int = Field(default=4, ge=1, description="Of the attention.")
    more: tuple[Setting, ...] = Field(default=(), description="Other keys of pretrain.model, such as qk_norm=true")

    @classmethod
    def of(cls, keys: Mapping[str, Any]) -> ProxyModel:
        """The form's values for keys of `pretrain.model`."""
        own = {name: value for name, value in keys.items() if name in ("layers", "width", "heads")}
        return cls(**own, more=tuple(f"{name}={json.dumps(value)}" for name, value in keys.items() if name not in own))

    def as_keys(self) -> dict[str, Any]:
        """The keys of `pretrain.model` that the form's values stand for.

        Not called `keys`: Prefect makes a dictionary of every parameter, and would take that for a mapping's.
        """
        parts = (setting.partition("=") for setting in self.more)
        return {
            "layers": self.layers,
            "width": self.width,
            "heads": self.heads,
            **{name: parse_yaml(value) for name, _, value in parts},
        }


class SourceShare(BaseModel):
    """How much one source counts in the mean that a sweep makes small."""

    model_config = ConfigDict(extra="forbid")

    source: str = Field(min_length=1, description="A source of the manifest, by its name.")
    share: float = Field(default=1.0, ge=0.0, description="At least 0; shares are divided by their sum.")


class SecretParameterError(ValueError):
    """A parameter holds a credential; the message does not repeat it."""


class RefusedError(ValueError):
    """A manifest, a source or a parameter is refused; the sentence holds no credential."""


def run_name(manifest: str, overrides: Sequence[str] = ()) -> str:
    """The name of a run: the manifest's, without its folder, and the overrides (`train: pretrain.steps=3000`)."""
    name = PurePosixPath(manifest.partition("recipe:")[2] or manifest).stem or manifest
    settings = ", ".join(overrides)
    full = mask_text(f"{name}: {settings}" if settings else name)
    return full if len(full) <= MOST_NAME_CHARS else f"{full[: MOST_NAME_CHARS - 1]}…"


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
        "that runs the flow, and change it if others may have seen it. Nothing was run"
    )


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
