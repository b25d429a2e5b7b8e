"""Properties that the file systems of all object stores share."""

from __future__ import annotations

from typing import Any

from fsspec.asyn import sync_wrapper

BLOCK_BYTES = 50 << 20
"""Bytes of a part of a large file, and of reading ahead: s3fs's default. A gigabyte
takes 24 to 29 requests, at 16 MiB 62 to 72, at 8 MiB over 110 (`gristmill bench
requests_parts`).
"""


class BucketFiles:
    """Mixin for fsspec's object stores that creates no folders.

    Object stores have no folders. Their libraries check for the bucket before each file
    instead, and create a missing one: a mistyped name would start a new store.
    """

    async def _makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: a file needs no folder."""

    async def _mkdir(self, path: str, **options: Any) -> None:
        """Do nothing: a file needs no folder."""

    mkdir = sync_wrapper(_mkdir)
