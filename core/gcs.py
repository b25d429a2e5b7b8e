"""Files in Google Cloud Storage for fsspec, with the retries of `object_stores.py`."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import partial
from inspect import unwrap
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from aiohttp import ClientTimeout
from fsspec.asyn import sync_wrapper
from gcsfs.core import GCSFileSystem  # type: ignore[import-untyped]
from gcsfs.retry import is_retriable  # type: ignore[import-untyped]
from google.auth.exceptions import TransportError

from gristmill.core.bucket_files import BLOCK_BYTES, BucketFiles
from gristmill.core.object_stores import StoreRequest

ANSWER_TIMEOUT = ClientTimeout(total=None, sock_connect=60.0, sock_read=60.0)
"""Seconds without a byte after which a request has failed: botocore's defaults."""
_OBJECT = re.compile(r"/b/([^/]+)/o(?:/|.*?[?&]name=)([^?&]+)")
"""Bucket and name in an address of the JSON API."""
_request_once = unwrap(GCSFileSystem._request)
"""gcsfs's request without the decorator that retries it six times."""


class GCSFiles(BucketFiles, GCSFileSystem):  # type: ignore[misc]
    """gcsfs with the retries of `StoreRequest`, and fewer requests.

    Buckets of rapid storage, which gcsfs opens by gRPC, are not supported.

    Args:
        options: of gcsfs.
    """

    def __init__(self, **options: Any) -> None:
        session = {"timeout": ANSWER_TIMEOUT, **options.pop("session_kwargs", {})}
        super().__init__(
            session_kwargs=session, **{"block_size": BLOCK_BYTES, **options}
        )

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        """Open a file, which reads ahead by one request."""
        settings = {"cache_type": "readahead", "concurrency": 1, **options}
        return super()._open(path, mode, **settings)

    async def _request(self, method: str, path: str, *args: str, **options: Any) -> Any:
        """Send a request until it is answered or refused.

        Raises:
            StoreUnavailableError: the retry time is used up.
        """
        url = self._format_path(path, args)
        if match := _OBJECT.search(f"{url}?name={options.get('name', '')}"):
            url = f"{self._location}/{match[1]}/{unquote(match[2])}"
        request = StoreRequest(url, method, method != "GET")
        attempt = partial(_request_once, self, method, path, *args, **options)
        return await request.send(attempt, _may_pass)

    async def _info(self, path: str, **options: Any) -> Any:
        """Description of an object, else of a prefix or bucket.

        gcsfs asks for the object and lists the prefix at once, and a listing costs
        twelve times as much. It asks for a bucket itself, which roles for objects do
        not allow.
        """
        key = self.split_path(path)[1]
        if key:
            with suppress(FileNotFoundError):
                return await self._get_object(path)
        entries = await self._do_list_objects(path, max_results=1)
        if key and not any(entries):
            raise FileNotFoundError(path)
        return {"name": path, "size": 0, "type": "directory"}

    async def _pipe_file(
        self, path: str, data: bytes, mode: str = "overwrite", **options: Any
    ) -> None:
        """Write an object by one request; gcsfs's would end at a line `--==0==`."""
        bucket, key, _ = self.split_path(path)
        await self._call(
            "POST",
            f"{self._location}/upload/storage/v1/b/{bucket}/o",
            uploadType="media",
            name=key,
            ifGenerationMatch="0" if mode == "create" else None,
            headers={"Content-Type": "application/octet-stream"},
            data=data,
        )

    async def _put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        """Upload a file; one that fits into a block by one request."""
        file = Path(lpath)
        if file.stat().st_size < BLOCK_BYTES:
            await self._pipe_file(rpath, file.read_bytes())
        else:
            await super()._put_file(lpath, rpath, **options)

    async def _rm(self, path: Any, recursive: bool = False, **options: Any) -> None:
        """Remove objects; a repeated request finds them gone."""
        with suppress(FileNotFoundError):
            await super()._rm(path, recursive, **options)

    rm = sync_wrapper(_rm)


def _may_pass(error: Exception) -> bool:
    return is_retriable(error) or isinstance(error, TimeoutError | TransportError)
