"""SPDX licence expressions, the form in which licences are compared.

The grammar and the identifiers are those of
https://spdx.github.io/spdx-spec/v2.3/SPDX-license-expressions/, by license-expression.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from difflib import get_close_matches
from functools import cache, lru_cache
from typing import Any

UNKNOWN = "unknown"
"""Class of documents without a licence, or with one that has no identifier."""
_WORDS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\(.*?\)", " "),
        (r"creative commons", "cc"),
        (r"attribution", "by"),
        (r"share ?-?alike", "sa"),
        (r"non-?commercial", "nc"),
        (r"no ?-?deriv(ative)?s?( works)?", "nd"),
        (r"gnu affero general public", "agpl"),
        (r"gnu (lesser|library) general public", "lgpl"),
        (r"gnu general public", "gpl"),
        (r"mozilla public", "mpl"),
        (r"\b(the|licen[cs]ed?|version|v(?=\d)|international|software)\b", " "),
        (r"[^a-z0-9.+]+", "-"),
        (r"(?<=gpl)-?v?(?=\d)", "-"),
        (r"-(\d)(?=$|-or-|\+)", r"-\1.0"),
    )
)
"""Replacements, in order, that make an identifier of a licence's name."""
_NAMES = {
    "cc0": "CC0-1.0",
    "cc0-1.0-universal": "CC0-1.0",
    "public-domain": "LicenseRef-scancode-public-domain",
    "publicdomain": "LicenseRef-scancode-public-domain",
    "pddl": "PDDL-1.0",
    "odbl": "ODbL-1.0",
    "odc-odbl": "ODbL-1.0",
    "odc-by": "ODC-By-1.0",
    "odc-pddl": "PDDL-1.0",
    "unlicense": "Unlicense",
}
"""Names without a version of licences that have one version only."""
_CREATIVE_COMMONS = re.compile(
    r"creativecommons\.org/(licenses|publicdomain)/([a-z0-9+-]+)"
    r"(?:/(\d\.\d))?(?:/([a-z]{2,3})(?![a-z0-9.]))?"
)
_HOST = re.compile(r"([a-z]+:)?//|([a-z0-9-]+\.)+[a-z]{2,}/")
_ADDRESSES = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"(?:spdx|opensource)\.org/licen[cs]es?/([a-z0-9.+-]+?)(?:\.html|/|$)", "{}"),
        (r"apache\.org/licenses/license-(\d\.\d)", "apache-{}"),
        (r"opendatacommons\.org/licenses/([a-z]+)", "odc-{}"),
        (r"gnu\.org/(?:licenses|copyleft)/(?:[a-z-]+/)?([al]?gpl-\d\.\d)", "{}"),
        (r"gnu\.org/(?:licenses|copyleft)/(?:[a-z-]+/)?fdl-(\d\.\d)", "gfdl-{}"),
    )
)
"""Addresses of licences, and the names that they stand for."""


@cache
def _licensing() -> Any:
    from license_expression import get_spdx_licensing

    return get_spdx_licensing()


@lru_cache(maxsize=10_000)
def spdx_of(statement: str) -> str | None:
    """SPDX expression that a statement names; None if it names no licence clearly.

    Args:
        statement: an expression, an identifier, the usual name of a licence with its
            version, or its address.
    """
    text = " ".join(statement.split())
    if (expression := _parsed(text)) is not None:
        return str(expression)
    text = text.lower()
    if _HOST.match(text):
        text = _name_at(text)
    elif "/" in text:  # as in Cargo.toml
        expression = _parsed(text.replace("/", " OR "))
        return None if expression is None else str(expression)
    for pattern, replacement in _WORDS:
        text = pattern.sub(replacement, text)
    text = text.strip("-.")
    expression = _parsed(_NAMES.get(text, text))
    return None if expression is None else str(expression)


def _parsed(text: str) -> Any:
    """Parsed expression of known identifiers and `LicenseRef-...`, or None."""
    from license_expression import ExpressionError, ExpressionParseError

    try:
        expression = _licensing().parse(text)
        unknown = _licensing().unknown_license_keys(expression)
    except (ExpressionError, ExpressionParseError):
        return None
    is_known = all(key.lower().startswith("licenseref-") for key in unknown)
    return expression if is_known else None


def _name_at(address: str) -> str:
    """Name of the licence at an address in lower case; empty if it is not known."""
    if match := _CREATIVE_COMMONS.search(address):
        kind, name, version, port = match.groups()
        if kind == "publicdomain":
            name = {"zero": "cc0", "mark": "cc-pdm"}.get(name, "")
            return f"{name}-{version}" if name else ""
        if name == "publicdomain":
            return "cc-pddc"
        plain = f"cc-{name}-{version}"
        # SPDX lists some of the ports to a jurisdiction.
        ported = f"{plain}-{port}"
        return ported if port and _parsed(ported) is not None else plain
    for pattern, name in _ADDRESSES:
        if match := pattern.search(address):
            return name.format(match[1])
    return ""


def is_allowed(expression: str, identifiers: Collection[str]) -> bool:
    """True if a document under an SPDX expression may be used by somebody who accepts
    some licences: one side of every OR, and both sides of every AND.
    """
    licensing = _licensing()

    def holds(node: Any) -> bool:
        if isinstance(node, licensing.OR):
            return any(map(holds, node.args))
        if isinstance(node, licensing.AND):
            return all(map(holds, node.args))
        return str(node) in identifiers

    return holds(licensing.parse(expression))


def check_identifier(identifier: str) -> str:
    """Spell an SPDX identifier as SPDX does.

    Raises:
        ValueError: it is not one identifier, which may be `LicenseRef-...`.
    """
    expression = _parsed(identifier)
    if expression is None or len(expression.args or ()) > 0:
        keys = {key.lower(): key for key in _licensing().known_symbols}
        near = get_close_matches(identifier.lower(), keys, 3)
        raise ValueError(
            f"{identifier!r} is not an identifier of SPDX (https://spdx.org/licenses)"
            + (f"; near: {', '.join(keys[key] for key in near)}" if near else "")
        )
    return str(expression)
