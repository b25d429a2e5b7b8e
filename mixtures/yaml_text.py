"""Reading YAML that somebody else may have written: plain values only, and no more of them than anybody writes."""

from __future__ import annotations

from typing import Any

import yaml

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
            raise YamlLimitError(problem="a value contains itself; write out what is meant",
                                 problem_mark=node.start_mark)
        return known
    counted[id(node)] = None
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        parts = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        parts = node.value
    elif node.tag.endswith((":int", ":float")) and len(node.value) > MOST_DIGITS:
        raise YamlLimitError(problem=f"a number of {len(node.value)} digits; {MOST_DIGITS} are the most",
                             problem_mark=node.start_mark)
    total = 1 + sum(_count(part, counted) for part in parts)
    if total > MOST_VALUES:
        raise YamlLimitError(problem=f"with its aliases written out this has more than {MOST_VALUES} values; "
                                     "write fewer", problem_mark=node.start_mark)
    counted[id(node)] = total
    return total


def _too_deep() -> YamlLimitError:
    return YamlLimitError(problem="values are nested too deeply; no setting needs more than ten levels")
