"""Masking of credentials in everything that is stored or shown: records, logs,
messages, tables, pages.

Credentials belong in the environment or in the files of their tools, but some addresses
carry them (`https://user:password@host/`, signed links of object stores). Running code
may use these; written output is masked. A stage's process reads its description from a
file, and the masked values from its environment.

A credential is recognised by its place in an address or after a key, and by its own
text: libraries repeat parts of an address (`Invalid bucket name "KEY:SECRET@bucket"`),
so credentials of a manifest, a setting or a store's address (`remember_secrets`) are
masked wherever they appear.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TextIO
from urllib.parse import unquote

MASK = "***"
VARIABLE = "GRISTMILL_SECRETS"
"""Environment variable with the credentials masked in a stage's description, for its
process and its children.
"""
SHORTEST_ALONE = 8
"""Characters: a shorter password is masked only in its place, since it may be an
ordinary word elsewhere.
"""
_KEY = (
    r"(?:pass|passwd|password|passphrase|passcode|pwd|secret|signature|credential|auth|authorization|"
    r"(?:api|access|account|secret|private|auth)[_-]?key|connection[_-]?string)s?"
)
_TOKEN = r"(?:auth|access|security|session|bearer|refresh|id|api|hf)[_-]?token"
"""Only these tokens: `eot_token` and `special_tokens` of a language model are not
secret.
"""
_COLON, _SLASHES = "(?::|%3A)", "(?:://|%3A%2F%2F)"
_USER = re.compile(
    rf"{_SLASHES}(?P<found>"
    # Up to the last @ of the authority, since a password may contain @.
    rf"(?:(?!%3A|%40|%2F)[^/\s@:'\"])*{_COLON}(?:(?!%2F)[^/\s'\"])*(?=@|%40)"
    # Keys of object stores may contain a slash; a port is not a password.
    r"|[^/\s@:'\"\[]*:(?!\d{1,5}/)[^\s@'\"]*(?=@)"
    # A part without a colon is a name (abfs://container@account), unless it is as long
    # as an access token.
    r"|(?<=https://)[^/\s@:'\"]{20,}(?=@)|(?<=http://)[^/\s@:'\"]{20,}(?=@))",
    re.IGNORECASE,
)
_QUERY = re.compile(
    rf"(?:[?&;#]|%3F|%26)(?:(?:[\w.\[\]-]|%5B|%5D)*?(?:{_KEY}|token|jwt|sessionid)(?:\]|%5D)?|sig|key|code|sid|sas)"
    r"(?:=|%3D)(?P<found>(?:(?!%26)[^&;\s'\"#])+)",
    re.IGNORECASE,
)
"""Signed links: X-Amz-Signature, X-Amz-Credential, X-Amz-Security-Token (S3),
X-Goog-Signature (GCS), sig (Azure).
"""
_NAME = re.compile(rf"(?:^|[._-])(?:{_KEY}|{_TOKEN})$|(?:^|\.)token$", re.IGNORECASE)
_HOOK = re.compile(r"(?:^|\.)notify$")
"""Key of a URL whose path is the credential, as in webhooks of chat services."""
_HOOK_PATH = re.compile(r"(https?://[^/\s]+/)\S+", re.IGNORECASE)
_known: set[str] = set()


def mask_text(text: str) -> str:
    """Mask passwords and keys in the addresses of a text, and all remembered
    secrets.
    """
    if "://" in text or "%3a%2f%2f" in text.lower():
        for pattern in (_USER, _QUERY):
            text = pattern.sub(
                lambda match: match[0][: match.start("found") - match.start()] + MASK,
                text,
            )
    return mask_known(text)


def mask_known(text: str) -> str:
    """Mask all remembered secrets in a text; other addresses stay unchanged."""
    variable = os.environ.get(VARIABLE, "[]")
    pattern = _secrets_pattern(frozenset(_known), variable)
    return text if pattern is None else pattern.sub(MASK, text)


@lru_cache
def _secrets_pattern(known: frozenset[str], variable: str) -> re.Pattern[str] | None:
    """Pattern of the remembered secrets and those of VARIABLE, longest first;
    case-insensitive, as libraries lower-case hosts and buckets.
    """
    secrets = known.union(
        *(_secrets_in(original) for _, original in json.loads(variable))
    )
    if not secrets:
        return None
    return re.compile(
        "|".join(map(re.escape, sorted(secrets, key=len, reverse=True))), re.IGNORECASE
    )


def remember_secrets(value: Any) -> None:
    """Mask the credentials in a value's addresses and keys from now on, wherever this
    process writes them.

    Args:
        value: JSON: a manifest, settings, the address of a store.
    """
    for _, original in _hidden(value, mask_secrets(value), ()):
        _known.update(_secrets_in(original))


def _secrets_in(original: str) -> Iterator[str]:
    """Yield the credentials in an unmasked text, and the parts of them that libraries
    repeat.
    """
    users = [
        form
        for match in _USER.finditer(original)
        for form in (match["found"], unquote(match["found"]))
    ]
    parts = [match["found"] for match in _QUERY.finditer(original)]
    if not parts and not users:
        parts = [original.partition("=")[2] or original]
    for user in users:
        name, _, password = user.partition(":")
        # Libraries that split an address at slashes repeat pieces of the key; a name
        # may be a token.
        parts += [user, name, password, *user.split("/"), *password.split("/")]
    yield from (
        form
        for part in parts
        for form in (part, unquote(part))
        if len(form) >= SHORTEST_ALONE
    )


class MaskedStream:
    """A text stream that masks remembered secrets."""

    def __init__(self, stream: TextIO, addresses: bool = False) -> None:
        """Wrap a stream; `addresses` also masks all other addresses, for streams
        without document text.
        """
        self._stream, self._mask = stream, mask_text if addresses else mask_known

    def write(self, text: str) -> int:
        """Write masked text."""
        self._stream.write(self._mask(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def mask_addresses(value: Any) -> Any:
    """Copy of a JSON value with all texts masked, including keys; unlike in
    `mask_secrets`, keys have no effect.
    """
    if isinstance(value, Mapping):
        return {
            mask_text(key) if isinstance(key, str) else key: mask_addresses(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [mask_addresses(inner) for inner in value]
    return mask_text(value) if isinstance(value, str) else value


def mask_secrets(value: Any, name: str = "") -> Any:
    """Copy of a JSON value with masked texts; a value with a secret key is masked
    entirely.

    The command-line form `a.password=x` is masked after the equals sign.
    """
    if isinstance(value, Mapping):
        return {key: mask_secrets(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [mask_secrets(inner, name) for inner in value]
    if not isinstance(value, str):
        return value
    if _NAME.search(name):
        return MASK
    if _HOOK.search(name):
        return mask_text(_without_path(value))
    key, equals, setting = value.partition("=")
    if equals and _HOOK.search(key):
        return mask_text(f"{key}={_without_path(setting)}")
    if equals and _NAME.search(key) and not re.search(r"[\s/?&]", key):
        return f"{key}={MASK}"
    return mask_text(value)


def _without_path(hook: str) -> str:
    return _HOOK_PATH.sub(rf"\1{MASK}", hook)


def split_secrets(value: Any) -> tuple[Any, str | None]:
    """Split a value into its masked copy, and JSON with the masked parts for `VARIABLE`
    (None if there are none).

    The secrets are remembered too, since the output of the child process passes through
    this one.

    Args:
        value: JSON.
    """
    remember_secrets(value)
    masked = mask_secrets(value)
    hidden = list(_hidden(value, masked, ()))
    return masked, json.dumps(hidden) if hidden else None


def restore_secrets(masked: Any) -> Any:
    """Restore a value masked by `split_secrets` from `VARIABLE`, in place."""
    for path, original in json.loads(os.environ.get(VARIABLE, "[]")):
        parent = masked
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = original
    return masked


def _hidden(
    value: Any, masked: Any, path: Sequence[str | int]
) -> Iterator[tuple[list[str | int], Any]]:
    """Yield the path and the original of every masked text."""
    if isinstance(value, Mapping):
        for key in value:
            yield from _hidden(value[key], masked[key], (*path, str(key)))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _hidden(inner, masked[index], (*path, index))
    elif value != masked:
        yield list(path), value
