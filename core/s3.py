"""Files in S3-compatible stores for fsspec, with the retries of `object_stores.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiobotocore.session import get_session  # type: ignore[import-untyped]
from botocore.exceptions import ConnectionError as NoConnectionError  # type: ignore[import-untyped]
from botocore.exceptions import HTTPClientError, SSLError
from s3fs import S3FileSystem  # type: ignore[import-untyped]

from gristmill.core.bucket_files import BucketFiles
from gristmill.core.object_stores import StoreRequest, is_passing

READS = ("Get", "Head", "List")
"""Prefixes of the names of read-only S3 operations."""
PASSING_CODES = (
    "ConditionalRequestConflict",
    "OperationAborted",
    "RequestTimeout",
    "SlowDown",
    "XAmzContentSHA256Mismatch",
)
"""S3 error codes after which the same request may succeed, whatever the HTTP status."""
Request = Mapping[str, Any]
"""A request of botocore."""
Response = tuple[Any, Mapping[str, Any]]
"""A response of botocore, and its parsed form."""


class S3Files(BucketFiles, S3FileSystem):  # type: ignore[misc]
    """s3fs with retries by `ask_again`.

    Args:
        options: of s3fs.
    """

    # one listing; that of BucketFiles is preceded by a HEAD
    _isdir = S3FileSystem._isdir

    def __init__(self, **options: Any) -> None:
        session = get_session()
        session.register("needs-retry.s3", ask_again)
        session.register("before-call.s3", begin_request)
        # Switch off botocore's own retries: only its standard mode leaves the decision
        # to the event handler.
        once = {"retries": {"mode": "standard", "total_max_attempts": 1}}
        config = {**once, **(options.pop("config_kwargs", None) or {})}
        super().__init__(session=session, config_kwargs=config, **options)


def begin_request(model: Any, params: Request, **others: Any) -> None:
    """Handle botocore's event `before-call`.

    Args:
        model: of the S3 operation.
        params: the request; its `context` lives through all attempts.

    Raises:
        StoreUnavailableError: the store was just given up.
    """
    request = StoreRequest(
        str(params["url"]), model.name, not model.name.startswith(READS)
    )
    params["context"]["gristmill"] = request
    request.begin()


async def ask_again(
    response: Response | None,
    caught_exception: Exception | None,
    request_dict: Request,
    **others: Any,
) -> float | None:
    """Handle botocore's event `needs-retry`: 0 retries the request, after a pause; None
    does not.

    Args:
        response: HTTP response and its parsed form.
        caught_exception: raised if there is no response.
        request_dict: the request.

    Raises:
        StoreUnavailableError: the retry time is used up.
    """
    error = _passing_failure(response, caught_exception)
    request: StoreRequest = request_dict["context"]["gristmill"]
    if error is not None:
        await request.failed(error)
        return 0.0
    if response is not None:
        request.answered()
    return None


def may_pass(status: int, code: str) -> bool:
    """True if a refused request, by HTTP status and S3 error code, may succeed
    later.
    """
    return is_passing(status) or code in PASSING_CODES


def _passing_failure(
    response: Response | None, caught: Exception | None
) -> Exception | None:
    if caught is not None or response is None:
        is_transient = isinstance(
            caught, HTTPClientError | NoConnectionError
        ) and not isinstance(caught, SSLError)
        return caught if is_transient else None
    status = int(response[0].status_code)
    details = response[1].get("Error", {})
    code = details.get("Code", "")
    if not may_pass(status, code):
        return None
    return OSError(f"{status} {code} {details.get('Message', '')}")
