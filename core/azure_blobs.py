"""Files in Azure Blob Storage for fsspec, with the retries of `object_stores.py`."""

from __future__ import annotations

from typing import Any

from adlfs import AzureBlobFileSystem  # type: ignore[import-untyped]
from azure.core.exceptions import ServiceRequestError, ServiceResponseError
from azure.storage.blob.aio import BlobServiceClient, ExponentialRetry

from gristmill.core.bucket_files import BLOCK_BYTES, BucketFiles
from gristmill.core.object_stores import StoreRequest, is_passing


class Retries(ExponentialRetry):
    """Retry policy of Azure's client that leaves the decision to `StoreRequest`."""

    async def send(self, request: Any) -> Any:  # type: ignore[override]
        """Send a request until it is answered or refused.

        Raises:
            StoreUnavailableError: the retry time is used up.
        """
        settings = self.configure_retries(request)
        http = request.http_request

        async def attempt() -> Any:
            if settings["body_position"] is not None:
                http.body.seek(settings["body_position"])
            response = await self.next.send(request)  # type: ignore[misc]
            answer = response.http_response
            if is_passing(answer.status_code):
                code = answer.headers.get("x-ms-error-code", answer.reason)
                raise ServiceResponseError(f"{answer.status_code} {code}")
            if http.method == "PUT" and answer.status_code == 404:
                raise FileNotFoundError(f"there is no container for {http.url}")
            answer.location_mode = settings["mode"]
            return response

        writes = http.method not in ("GET", "HEAD")
        return await StoreRequest(http.url, http.method, writes).send(
            attempt,
            lambda error: isinstance(error, ServiceRequestError | ServiceResponseError),
        )


class AzureFiles(BucketFiles, AzureBlobFileSystem):  # type: ignore[misc]
    """adlfs with the retries of `Retries`, and fewer requests."""

    def do_connect(self) -> None:
        """Connect as adlfs does, with other retries and larger requests.

        fsspec reads ahead by a block more than it was asked for.
        """
        super().do_connect()
        client: BlobServiceClient = self.service_client  # type: ignore[has-type]
        self.service_client = BlobServiceClient(
            client.url,
            client.credential,
            retry_policy=Retries(),
            max_single_get_size=2 * BLOCK_BYTES,
            max_chunk_get_size=2 * BLOCK_BYTES,
            max_single_put_size=BLOCK_BYTES,
            max_block_size=BLOCK_BYTES,
        )

    async def _ls(self, path: str, detail: bool = False, **options: Any) -> list[Any]:
        """Entries of a folder, in one listing.

        adlfs lists all that begins with the folder's name, and then each match.
        """
        container, key, _ = self.split_path(path)
        async with self.service_client.get_container_client(container) as client:
            prefix = f"{key.rstrip('/')}/" if key else ""
            listed = client.walk_blobs(prefix, include=["metadata"])
            entries = await self._details([entry async for entry in listed])
        entries = entries or [await self._info(path)]
        return entries if detail else [entry["name"] for entry in entries]
