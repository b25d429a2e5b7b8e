"""The tools that a model may call while it answers in reinforcement learning."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from gristmill.mixtures.base import NAME_PATTERN, OutsidePath, Positive, PositiveFloat, Section
from gristmill.mixtures.user_code import OwnCall, OwnCodeError, OwnFunction


class Tool(Section):
    """What all tools have in common."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)] | None = None
    """What the model calls it; its kind if absent, or its function. No two may have the same."""


class CalculatorTool(Tool):
    """Works out an `expression`: numbers, `+ - * / // % **`, parentheses, sqrt, abs, round, min, max."""

    kind: Literal["calculator"]
    """Names this tool."""


class PythonTool(Tool):
    """Runs `code` in a sandbox of bubblewrap, without network, processes, or files but the standard library's, and
    answers with its output. Needs bubblewrap 0.8 and libseccomp: docs/how-to/training/tools-in-rl.md."""

    kind: Literal["python"]
    """Names this tool."""
    seconds: Annotated[int, Field(gt=0, le=600)] = 5
    """Of computing; of the clock it may take four times as many."""
    memory_mb: Annotated[int, Field(ge=64)] = 256
    """Most memory of the process, Python's own 30 MB included."""


class SearchTool(Tool):
    """Finds the documents that have the words of a `query`, by BM25, and answers the best with their texts."""

    kind: Literal["search"]
    """Names this tool."""
    path: OutsidePath | None = None
    """JSON lines or Parquet with `text`, and perhaps `title`; the documents that the run has kept if absent."""
    top: Positive = 3
    """Documents of an answer."""
    characters: Positive = 600
    """Of each document's text, around the first word that was looked for."""


class OwnTool(Tool, OwnCall):
    """A function of your own: `use: ./tools.py:weather`, in place of a kind. Its arguments are the tool's, the first
    paragraph of its docstring says what it does, and what it returns is the answer, as text or JSON; what it raises is
    the tool's error."""

    kind: Literal["own"] = "own"
    """Need not be given beside `use`."""
    time_limit_seconds: PositiveFloat = 30.0
    """For one call; what takes longer is answered with an error. Native code is seen when it returns."""

    def check_code(self, code: OwnFunction) -> None:
        """See that it says what it does, as far as its source is at hand; see `OwnPlace.check_code`."""
        definition = code.definition()
        if definition is not None and not ast.get_docstring(definition):
            raise OwnCodeError(
                f"{code.place}: {code.name} has no docstring, from which the model knows what the tool does; write one"
            )


KINDS = ("calculator", "python", "search")


def written_tool(value: Any) -> Any:
    """A tool that is written as its name, as `{python: {seconds: 5}}` or with `use`, with its kind."""
    if isinstance(value, str):
        return {"kind": value}
    if isinstance(value, Mapping) and "kind" not in value:
        if "use" in value:
            return {"kind": "own", **value}
        named = [key for key in value if key in KINDS]
        if len(named) == 1 and isinstance(value[named[0]], Mapping | None):
            rest = {key: inner for key, inner in value.items() if key != named[0]}
            return {"kind": named[0], **(value[named[0]] or {}), **rest}
    return value


AnyTool = Annotated[
    Annotated[CalculatorTool | PythonTool | SearchTool | OwnTool, Field(discriminator="kind")],
    BeforeValidator(written_tool),
]


def name_of_tool(tool: Tool) -> str:
    """What the model calls a tool."""
    if tool.name is None and isinstance(tool, OwnTool):
        return tool.use.called
    return tool.name or str(tool.kind)  # type: ignore[attr-defined]
