"""Keeping credentials out of what is kept: records, logs, messages.

Credentials belong into the environment or into the files of their tools. Some addresses carry them all the same
(`https://user:password@host/`, signed links of object stores); what runs may use these, what is written down is masked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
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
