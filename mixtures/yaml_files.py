"""YAML files that people write, and sentences on why one cannot be read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from gristmill.mixtures.section import NAME_PATTERN
from gristmill.mixtures.yaml_text import parse_yaml

KINDS = {
    "tuple_type": "must be a list", "list_type": "must be a list", "dict_type": "must be a mapping",
    "model_type": "must be a mapping", "model_attributes_type": "must be a mapping", "extra_forbidden": "unknown key",
}
"""What pydantic calls a wrong kind of value -> the same in words of YAML."""


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
        return f"it is no UTF-8 text (byte {error.start + 1} is 0x{error.object[error.start]:02x}); save it as UTF-8"
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
    return (mark.line + 1 if mark is not None else 1), what


def problems_of(error: ValidationError) -> str:
    """All that is wrong with a file's content, on one line: `key: what; key: what`."""
    return "; ".join(f"{'.'.join(map(str, one['loc'])) or 'the file'}: {in_words(one)}" for one in error.errors())


def in_words(problem: Any) -> str:
    """What one of pydantic's `errors()` says of a value, without the words that only a programmer of Python knows."""
    if problem["type"] == "string_pattern_mismatch" and problem["ctx"]["pattern"] == NAME_PATTERN:
        return "a name is made of letters, digits, `_`, `.` and `-`, and begins with a letter or digit"
    said = problem["msg"].removeprefix("Value error, ").partition(", unable to parse")[0]
    message = KINDS.get(problem["type"], said)
    return message[:1].lower() + message[1:]
