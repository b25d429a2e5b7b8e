"""Files in S3-compatible stores for fsspec, with the retries of `object_stores.py`."""

from __future__ import annotations

from typing import Any

from aiobotocore.session import get_session  # type: ignore[import-untyped]
from s3fs import S3FileSystem  # type: ignore[import-untyped]

from gristmill.core.object_stores import ask_again, refuse_while_resting


class S3Files(S3FileSystem):  # type: ignore[misc]
    """s3fs with retries by `ask_again`, and without creating folders.

    S3 has no folders. s3fs checks for the bucket before each file instead, and creates
    a missing one: a mistyped name would start a new store.

    Args:
        options: of s3fs.
    """

    def __init__(self, **options: Any) -> None:
        session = get_session()
        session.register("needs-retry.s3", ask_again)
        session.register("before-call.s3", refuse_while_resting)
        # Switch off botocore's own retries: only its standard mode leaves the decision
        # to the event handler.
        once = {"retries": {"mode": "standard", "total_max_attempts": 1}}
        config = {**once, **(options.pop("config_kwargs", None) or {})}
        super().__init__(session=session, config_kwargs=config, **options)

    async def _makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: a file needs no folder."""

    async def _mkdir(
        self, path: str, acl: bool = False, create_parents: bool = True, **options: Any
    ) -> None:
        """Do nothing, except for a bucket by its name."""
        if "/" not in self._strip_protocol(path).strip("/"):
            await super()._mkdir(path, acl, create_parents, **options)
