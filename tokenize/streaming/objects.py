"""Reading parts of the objects of a folder in a store, whatever the store does meanwhile."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, BinaryIO

from gristmill.tokenize.streaming.patience import Patience, WrongContentError

PART_BYTES = 8 << 20
"""Of one request when a whole object is read: large enough for a store's full rate, small enough to ask again."""


class Objects:
    """The objects of one folder.

    Args:
        folder: the `upath.UPath` of an fsspec URL.
        patience: with the store.
        timeout_seconds: a request that takes longer has failed. It holds for the stores that fsspec reads
            asynchronously (S3, Google Cloud Storage, Azure, HTTP); the others have time limits of their own.
    """

    def __init__(self, folder: Any, patience: Patience, timeout_seconds: float) -> None:
        from fsspec.asyn import AsyncFileSystem

        self._folder = folder
        self._patience = patience
        is_async = isinstance(self._folder.fs, AsyncFileSystem)
        self._timeout = {"timeout": timeout_seconds} if is_async else {}

    def read(self, name: str, start: int, end: int, check: Callable[[bytes], None] = lambda content: None) -> bytes:
        """Bytes [start, end) of an object; `check` raises where they are wrong, and they are asked for again."""
        path = self._folder / name

        def attempt() -> bytes:
            content: bytes = path.fs.cat_file(path.path, start=start, end=end, **self._timeout)
            if len(content) != end - start:
                raise WrongContentError(f"{len(content)} bytes came instead of {end - start}")
            check(content)
            return content

        return self._patience.ask(f"bytes {start} to {end} of {path}", attempt)

    def size(self, name: str) -> int:
        """Bytes of an object."""
        path = self._folder / name
        return self._patience.ask(str(path), lambda: int(path.fs.info(path.path, **self._timeout)["size"]))

    def copy(self, name: str, size: int, sha256: str, sink: BinaryIO) -> None:
        """Copy a whole object into a local file, which holds the right bytes when this returns."""

        def attempt() -> None:
            sink.seek(0)
            digest = hashlib.sha256()
            for start in range(0, size, PART_BYTES):
                part = self.read(name, start, min(start + PART_BYTES, size))
                digest.update(part)
                sink.write(part)
            if digest.hexdigest() != sha256:
                raise WrongContentError(f"SHA-256 is {digest.hexdigest()}, not {sha256}")

        self._patience.ask(str(self._folder / name), attempt)
