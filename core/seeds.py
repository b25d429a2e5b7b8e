"""Random choices as hashes of a seed and the chosen item: independent of processes,
clock and order.
"""

from __future__ import annotations

import hashlib
from typing import Any

from gristmill.core.files import canonical_json


def seeded_bytes(*parts: str | int, size: int) -> bytes:
    """Bytes that depend on all parts: a seed, and the item drawn with it."""
    return hashlib.blake2b(
        "/".join(map(str, parts)).encode(), digest_size=size
    ).digest()


def seeded_key(*parts: str | int, bits: int = 64) -> int:
    """`seeded_bytes` as an integer: the key of a permutation, of draws or of a
    generator.
    """
    return int.from_bytes(seeded_bytes(*parts, size=bits // 8), "little")


def content_key(seed: int, content: Any, bits: int = 64) -> int:
    """Integer that depends on a seed and on a JSON value, such as a prompt."""
    digest = hashlib.blake2b(
        canonical_json([seed, content]), digest_size=bits // 8
    ).digest()
    return int.from_bytes(digest, "little")
