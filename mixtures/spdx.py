"""SPDX licence expressions, the form in which licences are compared.

The grammar and the identifiers are those of
https://spdx.github.io/spdx-spec/v2.3/SPDX-license-expressions/, by license-expression.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml

from gristmill.mixtures.yaml_text import did_you_mean

UNKNOWN = "unknown"
"""Class of documents without a licence, or with one that has no identifier."""
_HOST = re.compile(r"([a-z]+:)?//|([a-z0-9-]+\.)+[a-z]{2,}/")


@cache
def _names() -> Any:
    """Names and addresses of licences; see the file."""
    return yaml.safe_load(Path(__file__).with_name("licence_names.yaml").read_text())


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
        named = (
            match.expand(name)
            for pattern, name in _names()["addresses"]
            if (match := re.search(pattern, text))
        )
        return next(filter(None, map(spdx_of, named)), None)
    if "/" in text:  # as in Cargo.toml
        text = text.replace("/", " OR ")
    else:
        for pattern, replacement in _names()["words"]:
            text = re.sub(pattern, replacement, text)
    expression = _parsed(_names()["names"].get(text, text))
    return None if expression is None else str(expression)


def expression_of(statement: str | None) -> str:
    """SPDX expression that a statement names, or `unknown`."""
    return spdx_of(statement or "") or UNKNOWN


def join(licences: Iterable[str]) -> str:
    """Expression of several licences that all apply; one alone stays as it is stated."""
    stated = set(licences)
    if len(stated) == 1:
        return stated.pop()
    names = sorted({spdx_of(each) or each for each in stated})
    return " AND ".join(f"({name})" if " OR " in name else name for name in names)


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
        name = identifier.lower()
        known = [*map(str.lower, _licensing().known_symbols)]
        family = [each for each in known if each.startswith(name.partition("-")[0])]
        hint = did_you_mean(name, family or known)
        raise ValueError(
            f"{identifier!r} is not an identifier of SPDX "
            f"(https://spdx.org/licenses){hint}"
        )
    return str(expression)
