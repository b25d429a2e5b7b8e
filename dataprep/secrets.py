"""Keeping credentials out of what is kept or shown: records, logs, messages, tables, pages.

Credentials belong into the environment or into the files of their tools. Some addresses carry them all the same
(`https://user:password@host/`, signed links of object stores); what runs may use these, what is written down is masked.
A stage's process reads its description from a file, and what is masked there from its environment.

Two ways lead to a credential: its place in an address or behind a key, and its own text. A library repeats parts of an
address as it likes (`Invalid bucket name "KEY:SECRET@bucket"`), so that what a manifest, a setting or a store's address
has told (`remember_secrets`) is masked wherever it appears.
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
"""Holds, for a stage's process and its children, what the file that describes the stage lacks."""
SHORTEST_ALONE = 8
"""Characters: a shorter password is masked in its place only, since it may be an ordinary word elsewhere."""
_KEY = (
    r"(?:pass|passwd|password|passphrase|passcode|pwd|secret|signature|credential|auth|authorization|"
    r"(?:api|access|account|secret|private|auth)[_-]?key|connection[_-]?string)s?"
)
_TOKEN = r"(?:auth|access|security|session|bearer|refresh|id|api|hf)[_-]?token"
"""Only these: `eot_token` and `special_tokens` are not secrets of a language model."""
_COLON, _SLASHES = "(?::|%3A)", "(?:://|%3A%2F%2F)"
_USER = re.compile(
    rf"{_SLASHES}(?P<found>"
    # Up to the last @ of the host's part, since a password may hold one itself.
    rf"(?:(?!%3A|%40|%2F)[^/\s@:'\"])*{_COLON}(?:(?!%2F)[^/\s'\"])*(?=@|%40)"
    # Keys of object stores may hold a slash; a port is not a password.
    r"|[^/\s@:'\"\[]*:(?!\d{1,5}/)[^\s@'\"]*(?=@)"
    # What stands alone is a name (abfs://container@account), unless it is as long as an access token of the web.
    r"|(?<=https://)[^/\s@:'\"]{20,}(?=@)|(?<=http://)[^/\s@:'\"]{20,}(?=@))",
    re.IGNORECASE,
)
_QUERY = re.compile(
    rf"(?:[?&;#]|%3F|%26)(?:(?:[\w.\[\]-]|%5B|%5D)*?(?:{_KEY}|token|jwt|sessionid)(?:\]|%5D)?|sig|key|code|sid|sas)"
    r"(?:=|%3D)(?P<found>(?:(?!%26)[^&;\s'\"#])+)",
    re.IGNORECASE,
)
"""Signed links: X-Amz-Signature, X-Amz-Credential, X-Amz-Security-Token (S3), X-Goog-Signature (GCS), sig (Azure)."""
_NAME = re.compile(rf"(?:^|[._-])(?:{_KEY}|{_TOKEN})$|(?:^|\.)token$", re.IGNORECASE)
_HOOK = re.compile(r"(?:^|\.)notify$")
"""Key of a URL whose path is the credential, as those of chat services' webhooks are."""
_HOOK_PATH = re.compile(r"(https?://[^/\s]+/)\S+", re.IGNORECASE)
_known: set[str] = set()


def mask_text(text: str) -> str:
    """A text whose addresses keep neither passwords nor keys, and that holds nothing which is remembered as secret."""
    if "://" in text or "%3a%2f%2f" in text.lower():
        for pattern in (_USER, _QUERY):
            text = pattern.sub(_without, text)
    return mask_known(text)


def mask_known(text: str) -> str:
    """A text that holds nothing which is remembered as secret; addresses that others wrote stay as they are."""
    secrets = _known | _told_as_secret(os.environ.get(VARIABLE, "[]"))
    return _any_of(frozenset(secrets)).sub(MASK, text) if secrets else text


@lru_cache
def _any_of(secrets: frozenset[str]) -> re.Pattern[str]:
    """Matches the longest first; libraries write hosts and buckets in small letters."""
    return re.compile("|".join(map(re.escape, sorted(secrets, key=len, reverse=True))), re.IGNORECASE)


def _without(match: re.Match[str]) -> str:
    return match[0][: match.start("found") - match.start()] + MASK


def remember_secrets(value: Any) -> None:
    """Mask from now on, wherever this process prints or writes it, what a value's addresses and keys hold as secret.

    Args:
        value: what JSON can hold: a manifest, settings, the address of a store.
    """
    for _, original in _hidden(value, mask_secrets(value), ()):
        _known.update(_secrets_in(original))


@lru_cache
def _told_as_secret(told: str) -> frozenset[str]:
    """The credentials in what a stage's processes were told beside its description."""
    return frozenset(secret for _, original in json.loads(told) for secret in _secrets_in(original))


def _secrets_in(original: str) -> Iterator[str]:
    """Yield the credentials in a text that masking has changed, and the parts in which libraries repeat them."""
    users = [form for match in _USER.finditer(original) for form in (match["found"], unquote(match["found"]))]
    values = [match["found"] for match in _QUERY.finditer(original)]
    parts = values or ([] if users else [original.partition("=")[2] or original])
    for user in users:
        name, _, password = user.partition(":")
        # A library that cuts an address at its slashes repeats a piece of the key; a name may be a token.
        parts += [user, name, password, *user.split("/"), *password.split("/")]
    yield from (form for part in parts for form in (part, unquote(part)) if len(form) >= SHORTEST_ALONE)


class MaskedStream:
    """A text stream to a person, in which nothing is printed that is remembered as secret."""

    def __init__(self, stream: TextIO, addresses: bool = False) -> None:
        """Take a stream; `addresses`: mask those of others too, where no text of a document is printed."""
        self._stream, self._mask = stream, mask_text if addresses else mask_known

    def write(self, text: str) -> int:
        """Write, masked."""
        self._stream.write(self._mask(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def mask_addresses(value: Any) -> Any:
    """A copy of what JSON can hold, in which every text is masked, keys too; unlike `mask_secrets` no key has a say."""
    if isinstance(value, Mapping):
        return {mask_text(key) if isinstance(key, str) else key: mask_addresses(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [mask_addresses(inner) for inner in value]
    return mask_text(value) if isinstance(value, str) else value


def mask_secrets(value: Any, name: str = "") -> Any:
    """A copy of what JSON can hold, in which texts are masked, and whole values whose key says that they are secret.

    `a.password=x`, as a setting is given on the command line, is masked behind the equals sign.
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
    """What may be written down of a value, and the rest, as `restore_secrets` finds it in `VARIABLE`; None for nothing.

    The rest is remembered, since the process that gets it prints into this one's output.

    Args:
        value: what JSON can hold.
    """
    remember_secrets(value)
    masked = mask_secrets(value)
    hidden = list(_hidden(value, masked, ()))
    return masked, json.dumps(hidden) if hidden else None


def restore_secrets(masked: Any) -> Any:
    """A value as it was before `split_secrets`, in a process that was told the rest; changed in place."""
    for path, original in json.loads(os.environ.get(VARIABLE, "[]")):
        at = masked
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = original
    return masked


def _hidden(value: Any, masked: Any, at: Sequence[str | int]) -> Iterator[tuple[list[str | int], Any]]:
    """Yield every text that masking has changed, behind the way there."""
    if isinstance(value, Mapping):
        for key in value:
            yield from _hidden(value[key], masked[key], (*at, str(key)))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _hidden(inner, masked[index], (*at, index))
    elif value != masked:
        yield list(at), value
