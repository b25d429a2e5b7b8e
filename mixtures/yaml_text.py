"""YAML that people write: plain values only, no more than anybody writes, and sentences on what is wrong in one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from gristmill.mixtures.base import NAME_PATTERN

MOST_VALUES = 200_000
"""Of one text, with what its aliases stand for written out: some hundred times our longest manifest. Aliases of aliases
stand for any number (CWE-776), and whoever walks over the values walks over all of them."""


MOST_DIGITS = 100
"""Of a number: no setting needs more, and Python reads no whole number of more than 4,300 (CVE-2020-10735)."""


class YamlLimitError(yaml.MarkedYAMLError):
    """YAML that is well formed, and larger or deeper than it may be."""


def parse_yaml(text: str) -> Any:
    """The values of a text of one document.

    Raises:
        yaml.YAMLError: it is no YAML, names a type of Python (CWE-502), or is a YamlLimitError.
    """
    loader = yaml.SafeLoader(text)
    try:
        node = _checked(loader)
        return None if node is None else loader.construct_document(node)
    except RecursionError as error:
        raise _too_deep() from error
    finally:
        loader.dispose()


def compose_yaml(text: str) -> yaml.Node | None:
    """The nodes of a text of one document, which know their lines; None if there is nothing in it.

    Raises:
        yaml.YAMLError: it is no YAML, or is a YamlLimitError.
    """
    loader = yaml.SafeLoader(text)
    try:
        return _checked(loader)
    except RecursionError as error:
        raise _too_deep() from error
    finally:
        loader.dispose()


def _checked(loader: yaml.SafeLoader) -> yaml.Node | None:
    node: yaml.Node | None = loader.get_single_node()
    if node is not None:
        _count(node, {})
    return node


def _count(node: yaml.Node, counted: dict[int, int | None]) -> int:
    """How many values a node stands for. `counted`: of the nodes seen before; None while it is among its own values."""
    if id(node) in counted:
        known = counted[id(node)]
        if known is None:
            raise YamlLimitError(
                problem="a value contains itself; write out what is meant", problem_mark=node.start_mark
            )
        return known
    counted[id(node)] = None
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        parts = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        parts = node.value
    elif node.tag.endswith((":int", ":float")) and len(node.value) > MOST_DIGITS:
        raise YamlLimitError(
            problem=f"a number of {len(node.value)} digits; {MOST_DIGITS} are the most", problem_mark=node.start_mark
        )
    total = 1 + sum(_count(part, counted) for part in parts)
    if total > MOST_VALUES:
        raise YamlLimitError(
            problem=f"with its aliases written out this has more than {MOST_VALUES} values; write fewer",
            problem_mark=node.start_mark,
        )
    counted[id(node)] = total
    return total


def _too_deep() -> YamlLimitError:
    return YamlLimitError(problem="values are nested too deeply; no setting needs more than ten levels")


KINDS = {
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
    "extra_forbidden": "unknown key",
}
"""What pydantic calls a wrong kind of value -> the same in words of YAML."""
PLAINLY = (
    (
        "expected <block end>",
        "this line begins in another column than the keys that it stands beside; indent them alike",
    ),
    (
        "mapping values are not allowed here",
        "a colon where none may be; give the line above its own colon, indent this "
        "one as its neighbours, or quote a value that has one",
    ),
    ("found character '\\t'", "a tab indents this line; use blanks"),
    ("found unexpected end of stream", "a quote or bracket is opened and never closed; close it"),
)
"""How YAML's own words for the commonest mistakes begin -> the same in words that say what to do."""


class YamlFileError(ValueError):
    """A file that cannot be read as YAML, with the file, the line where there is one, and what to do."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`, did you mean 'steps'?` where one of the known names is near, else nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {near[0]!r}?" if near else ""


def read_yaml(path: Path) -> Any:
    """Read a file with safe YAML: plain values, never objects.

    Raises:
        YamlFileError: there is no such file, or it is no YAML.
    """
    try:
        return parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise YamlFileError(f"{path}: {why_unreadable(error)}") from error
    except yaml.YAMLError as error:
        line, what = why_invalid(error)
        raise YamlFileError(f"{path}:{line}: not valid YAML: {what}") from error


def why_unreadable(error: OSError | UnicodeDecodeError) -> str:
    """Why a text file cannot be read, and what to do, without its name."""
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 text (byte {error.start + 1} is 0x{error.object[error.start]:02x}); save it as UTF-8"
    if isinstance(error, FileNotFoundError):
        return "there is no such file; correct the path"
    if isinstance(error, IsADirectoryError):
        return "it is a folder; name a file in it"
    if isinstance(error, NotADirectoryError):
        return "a part of that path is a file, not a folder; correct the path"
    if isinstance(error, PermissionError):
        return "it may not be read by this user; correct its permissions"
    return f"it cannot be read: {error.strerror or error}"


def why_invalid(error: yaml.YAMLError) -> tuple[int, str]:
    """The 1-based line at which a text stops being YAML, and what is wrong there, on one line."""
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or " ".join(str(error).split())
    what = next((plainly for said, plainly in PLAINLY if what.startswith(said)), what)
    return (mark.line + 1 if mark is not None else 1), what


def problems_of(error: ValidationError) -> str:
    """All that is wrong with a file's content, on one line: `key: what; key: what`."""
    return "; ".join(f"{'.'.join(map(str, one['loc'])) or 'the file'}: {in_words(one)}" for one in error.errors())


def in_words(problem: Any) -> str:
    """What one of pydantic's `errors()` says of a value, without the words that only a programmer of Python knows."""
    if problem["type"] == "string_pattern_mismatch" and problem["ctx"]["pattern"] == NAME_PATTERN:
        return "a name is made of letters, digits, `_`, `.` and `-`, and begins with a letter or digit"
    said = problem["msg"].removeprefix("Value error, ").partition(", unable to parse")[0]
    message, value = KINDS.get(problem["type"], said), problem.get("input")
    if message == "must be a mapping" and value is None and problem["loc"]:
        message += "; indent its keys beneath it"
    elif message == "must be a list" and isinstance(value, dict):
        message += "; begin each entry with `- `"
    return message[:1].lower() + message[1:]
