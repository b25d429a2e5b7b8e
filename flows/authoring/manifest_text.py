"""Edit keys in the text of a manifest, preserving comments and layout everywhere
else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from gristmill.mixtures.hub_paths import HUB
from gristmill.mixtures.yaml_text import compose_yaml, parse_yaml

Key = tuple[str, ...]
LONGEST_LINE = 1 << 30


class ManifestTextError(ValueError):
    """The key cannot be set in the text as written."""


def set_keys(text: str, values: Mapping[Key, Any]) -> str:
    """Set keys in the text of a manifest.

    An existing key gets the new value. A missing key becomes the first of its section,
    and a missing section is appended to the text. Values are written in YAML's flow
    style. The result is parsed again and compared.

    Args:
        text: a valid manifest.
        values: path of the key -> JSON value.

    Raises:
        ManifestTextError: the section is not a mapping, or uses anchors, so the result
            would have another meaning.
    """
    expected = _unshared(parse_yaml(text))
    for key, value in values.items():
        text = _set_key(text, key, value)
        section = expected
        for part in key[:-1]:
            section = section.setdefault(part, {})
        section[key[-1]] = value
    if parse_yaml(text) != expected:
        raise ManifestTextError(
            f"{', '.join('.'.join(key) for key in values)} cannot be set in this "
            "manifest's text "
            "(does it use anchors?); write the keys out where they belong"
        )
    return text


def _set_key(text: str, key: Key, value: Any) -> str:
    node: Any = compose_yaml(text)
    for depth, part in enumerate(key):
        if not isinstance(node, yaml.MappingNode):
            raise ManifestTextError(
                f"{'.'.join(key[:depth])} is not a mapping, so "
                f"{'.'.join(key)} cannot be set"
            )
        child = next((inner for name, inner in node.value if name.value == part), None)
        if child is None:
            break
        node = child
    else:
        begin, end = node.start_mark.index, node.end_mark.index
        # A block ends where the next key begins; the space between them is not part of
        # the value.
        old = text[begin:end]
        return text[:begin] + flow_text(value) + old[len(old.rstrip()) :] + text[end:]
    for part in reversed(key[depth + 1 :]):
        value = {part: value}
    entry = f"{key[depth]}: {flow_text(value)}"
    begin = node.start_mark.index
    if node.flow_style:
        separator = ", " if node.value else ""
        return f"{text[: begin + 1]}{entry}{separator}{text[begin + 1 :]}"
    if depth == 0:
        return f"{text.rstrip()}\n\n{entry}\n"
    return f"{text[:begin]}{entry}\n{' ' * node.start_mark.column}{text[begin:]}"


def lock_revisions(text: str) -> str:
    """Put the commits that branches and tags of the Hugging Face Hub point to now in
    their place in the text of a manifest.

    Raises:
        OSError: the Hub has no such name or revision, or does not answer.
    """
    from gristmill.core.hub import at_commit

    for token in reversed(list(yaml.scan(text))):
        if isinstance(token, yaml.ScalarToken) and token.value.startswith(HUB):
            begin, end = token.start_mark.index, token.end_mark.index
            value = text[begin:end].replace(token.value, at_commit(token.value))
            text = text[:begin] + value + text[end:]
    return text


def flow_text(value: Any) -> str:
    """Format a value on one line, quoted as needed inside braces."""
    listed = yaml.safe_dump(
        [value],
        default_flow_style=True,
        width=LONGEST_LINE,
        allow_unicode=True,
        sort_keys=False,
    )
    return listed.strip()[1:-1]


def _unshared(value: Any) -> Any:
    """Copy a value so that aliases of an anchor become independent copies."""
    if isinstance(value, dict):
        return {name: _unshared(inner) for name, inner in value.items()}
    return [_unshared(inner) for inner in value] if isinstance(value, list) else value
