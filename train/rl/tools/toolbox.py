"""Tools of a training: descriptions for the model, and answers; errors are answers
too.
"""

from __future__ import annotations

import inspect
import json
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from gristmill.dataprep.examples.conversations import Tool as ToolDescription
from gristmill.dataprep.user_functions import call_own, load_function
from gristmill.mixtures.objectives.rl_tools import (
    OwnTool,
    PythonTool,
    Tool,
)
from gristmill.mixtures.user_code import OwnCodeError, name_of
from gristmill.train.rl.tools.call_format import Call
from gristmill.train.rl.tools.sandbox import check_sandbox, run_python
from gristmill.train.rl.tools.tool_call import Used

JSON_TYPES: Mapping[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}
ERROR = "error: "
"""Prefix of an answer that is an error."""


class ToolError(ValueError):
    """A tool that is not available, or an error in its use that the model reads."""


@dataclass(frozen=True)
class _Ready:
    """A tool: its description for the model and its function; `beside`: True if calls
    may run in parallel.
    """

    description: ToolDescription
    answer: Callable[..., str]
    beside: bool = False


class Toolbox:
    """Answers calls.

    Args:
        tools: of the section.

    Raises:
        ToolError: a function has no docstring.
        OwnCodeError: a function of the user's cannot be loaded.
        gristmill.train.rl.tools.sandbox.SandboxError: this machine has no
            sandbox for Python.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools: dict[str, _Ready] = {}
        for tool in tools:
            name = name_of(tool)
            if isinstance(tool, PythonTool):
                check_sandbox()
                code = {"type": "string", "description": "The program"}
                description = _described(
                    name,
                    "Runs a Python program and returns what it prints.",
                    {"code": code},
                    ["code"],
                )
                ready = _Ready(description, partial(_run_python, tool), beside=True)
            elif isinstance(tool, OwnTool):
                ready = _own(name, tool)
            else:
                raise TypeError(f"rl.tools: {name} is not a tool: {tool!r}")
            self._tools[name] = ready

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tools."""
        return tuple(self._tools)

    def descriptions(self, names: Sequence[str]) -> list[ToolDescription]:
        """Descriptions of some tools for a prompt, in OpenAI's form."""
        return [self._tools[name].description for name in names]

    def answer(
        self, turn: int, calls: Sequence[tuple[Call, Sequence[str]]]
    ) -> list[Used]:
        """Answer calls, each with its allowed names; programs run in parallel."""
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            futures = [
                pool.submit(self._answer, call, offered)
                if call.name in self._tools and self._tools[call.name].beside
                else None
                for call, offered in calls
            ]
            answers = [
                self._answer(*call_args) if running is None else running.result()
                for call_args, running in zip(calls, futures, strict=True)
            ]
        return [
            Used(
                turn,
                call.name,
                json.dumps(call.arguments, ensure_ascii=False, sort_keys=True),
                text,
                failed,
            )
            for (call, _), (text, failed) in zip(calls, answers, strict=True)
        ]

    def _answer(self, call: Call, offered: Sequence[str]) -> tuple[str, bool]:
        try:
            if call.problem:
                raise ToolError(call.problem)
            if call.name not in offered:
                raise ToolError(
                    f"there is no tool {call.name!r}; there are {', '.join(offered)}"
                )
            tool = self._tools[call.name]
            parameters = tool.description["function"]["parameters"]
            names = parameters["properties"]
            required = parameters["required"]
            missing = [name for name in required if name not in call.arguments]
            unknown = [name for name in call.arguments if name not in names]
            if missing or unknown:
                raise ToolError(
                    f"{call.name} takes {', '.join(names)}; "
                    + (
                        f"{missing[0]!r} is missing"
                        if missing
                        else f"it has no {unknown[0]!r}"
                    )
                )
            return tool.answer(**call.arguments), False
        except ToolError as error:
            return f"{ERROR}{error}", True


def _described(
    name: str,
    summary: str,
    properties: Mapping[str, Mapping[str, str]],
    required: Sequence[str],
) -> ToolDescription:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": summary,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": required,
            },
        },
    }


def _run_python(tool: PythonTool, code: Any) -> str:
    if not isinstance(code, str):
        raise ToolError(f"{code!r} is no text")
    result = run_python(code, tool)
    if not result.succeeded:
        raise ToolError(result.output or "it ended with an error and printed nothing")
    return result.output or "it printed nothing"


def _own(name: str, tool: OwnTool) -> _Ready:
    function = load_function(tool.use)
    summary = (inspect.getdoc(function) or "").partition("\n\n")[0].strip()
    if not summary:
        raise ToolError(
            f"rl.tools: {tool.use.place}: {name} has no docstring, from which the "
            "model knows what it does"
        )
    arguments_by_name = {
        key: parameter
        for key, parameter in inspect.signature(function).parameters.items()
        if key not in tool.options
    }
    if any(
        parameter.kind
        in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY)
        for parameter in arguments_by_name.values()
    ):
        raise ToolError(
            f"rl.tools: {tool.use.place}: {name} must take its arguments by name, "
            "each with a name of its own"
        )
    hints = typing.get_type_hints(function)
    properties = {
        key: {
            "type": JSON_TYPES.get(
                typing.get_origin(hints.get(key)) or hints.get(key), "string"
            )
        }
        for key in arguments_by_name
    }
    required = [
        key
        for key, parameter in arguments_by_name.items()
        if parameter.default is parameter.empty
    ]

    def answer(**arguments: Any) -> str:
        try:
            returned = call_own(tool, function, **arguments, **tool.options)
        except OwnCodeError as error:
            cause = error.__cause__ or error
            raise ToolError(f"{type(cause).__name__}: {cause}") from error
        if isinstance(returned, str):
            return returned
        try:
            return json.dumps(returned, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise ToolError(
                f"what it returned is neither text nor JSON: {type(returned).__name__}"
            ) from error

    return _Ready(
        _described(name, " ".join(summary.split()), properties, required), answer
    )
