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


class BlockFiles(BucketFiles):
    """Mixin of stores whose files are read and written in blocks, as s3fs does."""

    kinds: tuple[type, type]
    """Classes of files opened for reading and for writing."""

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        **options: Any,
    ) -> Any:
        """Open a file, which reads ahead by one request."""
        settings = {"cache_type": "readahead", "concurrency": 1, **options}
        kind = self.kinds[mode == "wb"]
        return kind(self, path, mode, block_size or BLOCK_BYTES, **settings)


class WrittenFile:
    """Mixin for files opened for writing: one that fits into a block takes one request."""

    def _initiate_upload(self) -> None:
        """Begin an upload of several blocks."""
        if self.tell() >= self.blocksize:  # type: ignore[attr-defined]
            super()._initiate_upload()  # type: ignore[misc]

    def _upload_chunk(self, final: bool = False) -> Any:
        """Write a block; the last one completes the file."""
        if self.tell() >= self.blocksize:  # type: ignore[attr-defined]
            return super()._upload_chunk(final)  # type: ignore[misc]
        self.fs.pipe_file(self.path, self.buffer.getvalue())  # type: ignore[attr-defined]
        return True
