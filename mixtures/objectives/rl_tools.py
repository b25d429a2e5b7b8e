"""Tools that a model may call while it answers in reinforcement learning."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from gristmill.mixtures.base import (
    Name,
    PositiveFloat,
    Section,
)
from gristmill.mixtures.user_code import OwnCall, OwnCodeError, OwnFunction


class Tool(Section):
    """Settings of every tool."""

    name: Name | None = None
    """Name of the tool for the model; its kind, or its function, if absent. Names must
    be distinct.
    """


class PythonTool(Tool):
    """Runs `code` in a bubblewrap sandbox without network, other processes, or files
    except the standard library's, and returns its output. Needs bubblewrap 0.8 and
    libseccomp: docs/how-to/training/tools-in-rl.md.
    """

    kind: Literal["python"]
    """Selects this tool."""
    seconds: Annotated[int, Field(gt=0, le=600)] = 5
    """Limit of processor time in seconds; the limit of wall-clock time is four times as
    long.
    """
    memory_mb: Annotated[int, Field(ge=64)] = 256
    """Memory limit of the process in MB, including the 30 MB of Python itself."""


class OwnTool(Tool, OwnCall):
    """A function of your own: `use: ./tools.py:weather` instead of a kind. Its
    parameters are the tool's, the first paragraph of its docstring is the tool's
    description, and its return value is the answer, as text or JSON; an exception
    becomes the tool's error.
    """

    kind: Literal["own"] = "own"
    """May be left out beside `use`."""
    time_limit_seconds: PositiveFloat = 30.0
    """Time limit per call; a call that takes longer is answered with an error. Native
    code is only stopped when it returns.
    """

    def check_code(self, code: OwnFunction) -> None:
        """Check that the function has a docstring, if its source is available; see
        `OwnPlace.check_code`.
        """
        definition = code.definition()
        if definition is not None and not ast.get_docstring(definition):
            raise OwnCodeError(
                f"{code.place}: {code.name} has no docstring, from which the model "
                "learns what the tool does; write one"
            )


def written_tool(value: Any) -> Any:
    """Return a tool with its kind, from its name, from `{python: {seconds: 5}}` or from
    `use`.
    """
    if isinstance(value, str):
        return {"kind": value}
    if isinstance(value, Mapping) and "kind" not in value:
        if "use" in value:
            return {"kind": "own", **value}
        if "python" in value and isinstance(value["python"], Mapping | None):
            other_settings = {
                key: setting for key, setting in value.items() if key != "python"
            }
            return {"kind": "python", **(value["python"] or {}), **other_settings}
    return value


AnyTool = Annotated[
    Annotated[PythonTool | OwnTool, Field(discriminator="kind")],
    BeforeValidator(written_tool),
]
