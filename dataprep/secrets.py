"""Keeping credentials out of what is kept: records, logs, messages.

Credentials belong into the environment or into the files of their tools. Some addresses carry them all the same
(`https://user:password@host/`, signed links of object stores); what runs may use these, what is written down is masked.
A stage's process reads its description from a file, and what is masked there from its environment.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MASK = "***"
VARIABLE = "GRISTMILL_SECRETS"
"""Holds, for a stage's process and its children, what the file that describes the stage lacks."""
_KEY = r"(?:passwd|password|secret|signature|credential|(?:api|access|account|secret|private)[_-]?key)s?"
_TOKEN = r"(?:auth|access|security|session|bearer|api|hf)[_-]?token"
"""Only these: `eot_token` and `special_tokens` are no secrets of a language model."""
_USER = re.compile(r"(?<=://)[^/\s@'\"]+:[^/\s@'\"]*(?=@)")
_QUERY = re.compile(rf"([?&;](?:[\w.-]*(?:{_KEY}|token)|sig|key)=)[^&;\s'\"#]+", re.IGNORECASE)
"""Signed links: X-Amz-Signature, X-Amz-Credential, X-Amz-Security-Token (S3), X-Goog-Signature (GCS), sig (Azure)."""
_NAME = re.compile(rf"(?:^|[._-])(?:{_KEY}|{_TOKEN})$|(?:^|\.)token$", re.IGNORECASE)


def mask_text(text: str) -> str:
    """A text whose addresses keep neither passwords nor keys."""
    if "://" not in text:
        return text
    return _QUERY.sub(rf"\1{MASK}", _USER.sub(MASK, text))


def mask_addresses(value: Any) -> Any:
    """A copy of what JSON can hold, in which every text is masked; unlike `mask_secrets` it looks at no key."""
    if isinstance(value, Mapping):
        return {key: mask_addresses(inner) for key, inner in value.items()}
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
    key, equals, _ = value.partition("=")
    if equals and _NAME.search(key) and not re.search(r"[\s/?&]", key):
        return f"{key}={MASK}"
    return mask_text(value)


def split_secrets(value: Any) -> tuple[Any, str | None]:
    """What may be written down of a value, and the rest, as `restore_secrets` finds it in `VARIABLE`; None for nothing.

    Args:
        value: what JSON can hold.
    """
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
