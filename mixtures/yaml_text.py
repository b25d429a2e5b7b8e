"""YAML as people write it: plain values of limited size and depth, with sentences on
mistakes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from gristmill.mixtures.base import NAME_PATTERN

MOST_VALUES = 200_000
"""Largest number of values in a text, with aliases expanded: about a hundred times our
longest manifest. Nested aliases expand to any number of values (CWE-776), and code that
walks over the values walks over all of them.
"""


FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*(\n|\Z)", re.DOTALL)
MOST_DIGITS = 100
"""Most digits of a number: no setting needs more, and Python does not parse integers of
more than 4,300 (CVE-2020-10735).
"""


class YamlLimitError(yaml.MarkedYAMLError):
    """Well-formed YAML that exceeds the limits of size or depth."""


def parse_yaml(text: str) -> Any:
    """Return the values of a text of one document.

    Raises:
        yaml.YAMLError: it is not YAML, names a Python type (CWE-502), or is a
            YamlLimitError.
    """
    node = compose_yaml(text)
    return None if node is None else yaml.SafeLoader("").construct_document(node)


def compose_yaml(text: str) -> yaml.Node | None:
    """Return the nodes of a text of one document, which know their lines; None if it is
    empty.

    Raises:
        yaml.YAMLError: it is not YAML, or is a YamlLimitError.
    """
    try:
        node: yaml.Node | None = yaml.SafeLoader(text).get_single_node()
        if node is not None:
            _count(node, {})
    except RecursionError as error:
        raise YamlLimitError(
            problem="values are nested too deeply; settings need at most ten levels"
        ) from error
    return node


def _count(node: yaml.Node, counts: dict[int, int | None]) -> int:
    """Return the number of values that a node stands for. `counts`: of earlier nodes;
    None inside the node itself.
    """
    if id(node) in counts:
        total = counts[id(node)]
        if total is None:
            raise YamlLimitError(
                problem="a value contains itself; write it out",
                problem_mark=node.start_mark,
            )
        return total
    counts[id(node)] = None
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        parts = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        parts = node.value
    elif node.tag.endswith((":int", ":float")) and len(node.value) > MOST_DIGITS:
        raise YamlLimitError(
            problem=f"a number of {len(node.value)} digits; at most {MOST_DIGITS} "
            "are allowed",
            problem_mark=node.start_mark,
        )
    total = 1 + sum(_count(part, counts) for part in parts)
    if total > MOST_VALUES:
        raise YamlLimitError(
            problem=f"this has more than {MOST_VALUES} values with its aliases "
            "expanded; write fewer",
            problem_mark=node.start_mark,
        )
    counts[id(node)] = total
    return total


KINDS = {
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
    "extra_forbidden": "unknown key",
}
"""pydantic's type of a wrong value -> the error in the words of YAML."""
PLAINLY = (
    (
        "expected <block end>",
        "this line begins in another column than the keys beside it; indent them alike",
    ),
    (
        "mapping values are not allowed here",
        "a colon in the wrong place; give the line above its own colon, indent this "
        "one like its neighbours, or quote a value that has one",
    ),
    ("found character '\\t'", "a tab indents this line; use blanks"),
    (
        "found unexpected end of stream",
        "a quote or bracket is opened and never closed; close it",
    ),
)
"""Beginnings of YAML's own messages for the most frequent mistakes -> messages that say
what to do.
"""


class YamlFileError(ValueError):
    """A file that cannot be read as YAML, with the file, the line if known, and what to
    do.
    """


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `, did you mean 'steps'?` if a known name is similar, else an empty
    text.
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {near[0]!r}?" if near else ""


def unknown_name(name: object, known: Iterable[object], lead: str = "there are") -> str:
    """Return `'stepz', did you mean 'steps'? there are steps, tasks` for a name that is
    none of the known ones.
    """
    names = list(map(str, known))
    hint = did_you_mean(str(name), names) or ";"
    return f"{name!r}{hint} {lead} {', '.join(names) or 'none'}"


def join_first(entries: Sequence[object], most: int = 8) -> str:
    """Join the first entries: `3, 5 and 12 more`."""
    listing = ", ".join(map(str, entries[:most]))
    num_hidden = len(entries) - most
    return f"{listing} and {num_hidden:,} more" if num_hidden > 0 else listing


def front_matter(markdown: str) -> dict[str, Any]:
    """Return the values at the top of a Markdown file, such as a card of the Hugging
    Face Hub; empty if it has none.

    Raises:
        yaml.YAMLError: see `parse_yaml`.
    """
    header = FRONT_MATTER.match(markdown)
    values = parse_yaml(header[1]) if header else None
    return values if isinstance(values, dict) else {}


def read_yaml(path: Path) -> Any:
    """Read a file as safe YAML: plain values, never objects.

    Raises:
        YamlFileError: the file does not exist, or is not YAML.
    """
    try:
        return parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise YamlFileError(f"{path}: {why_unreadable(error)}") from error
    except yaml.YAMLError as error:
        line, problem = why_invalid(error)
        raise YamlFileError(f"{path}:{line}: not valid YAML: {problem}") from error


def why_unreadable(error: OSError | UnicodeDecodeError) -> str:
    """Return the reason why a text file cannot be read, and what to do, without its
    name.
    """
    if isinstance(error, UnicodeDecodeError):
        return (
            f"it is not UTF-8 text (byte {error.start + 1} is "
            f"0x{error.object[error.start]:02x}); save it as UTF-8"
        )
    if isinstance(error, FileNotFoundError):
        return "there is no such file; correct the path"
    if isinstance(error, IsADirectoryError):
        return "it is a folder; name a file in it"
    if isinstance(error, NotADirectoryError):
        return "a part of that path is a file, not a folder; correct the path"
    if isinstance(error, PermissionError):
        return "this user may not read it; correct its permissions"
    return f"it cannot be read: {error.strerror or error}"


def why_invalid(error: yaml.YAMLError) -> tuple[int, str]:
    """Return the 1-based line at which a text stops being YAML, and the problem there,
    on one line.
    """
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    for yaml_words, plain_words in PLAINLY:
        if problem.startswith(yaml_words):
            problem = plain_words
    return (mark.line + 1 if mark is not None else 1), problem


def problems_of(error: ValidationError) -> str:
    """Return all problems of a file's content on one line: `key: problem; key:
    problem`.
    """
    return "; ".join(
        f"{'.'.join(map(str, problem['loc'])) or 'the file'}: {in_words(problem)}"
        for problem in error.errors()
    )


def in_words(problem: Any) -> str:
    """Return one of pydantic's `errors()` as a text without terms of Python."""
    if (
        problem["type"] == "string_pattern_mismatch"
        and problem["ctx"]["pattern"] == NAME_PATTERN
    ):
        return (
            "a name is made of letters, digits, `_`, `.` and `-`, and begins with "
            "a letter or digit"
        )
    text = (
        problem["msg"].removeprefix("Value error, ").partition(", unable to parse")[0]
    )
    message = KINDS.get(problem["type"], text)
    value = problem.get("input")
    if message == "must be a mapping" and value is None and problem["loc"]:
        message += "; indent its keys beneath it"
    elif message == "must be a list" and isinstance(value, dict):
        message += "; begin each entry with `- `"
    return message[:1].lower() + message[1:]
