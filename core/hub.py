"""The Hugging Face Hub: models and data sets at a commit, by huggingface_hub.

`hf://NAME@COMMIT` is a model, which is downloaded into huggingface_hub's cache;
`hf://datasets/NAME@COMMIT` is a data set, whose files are read over the network. The
token is huggingface_hub's own (`HF_TOKEN`), and so is offline work (`HF_HUB_OFFLINE`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from fsspec import register_implementation
from huggingface_hub import (
    HfApi,
    HfFileSystem,
    get_cached_repo_tree,
    parse_hf_uri,
    snapshot_download,
)
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
)

from gristmill.core.object_stores import Failing, T, log, retry_seconds
from gristmill.mixtures.hub_paths import is_at_commit

MODEL_FILES = (".json", ".jinja", ".model", ".safetensors", ".txt")
"""Endings of the files of a model's folder that are downloaded and listed; repositories
hold the same weights in other formats too.
"""


class HubFiles(HfFileSystem):
    """huggingface_hub's file system, which waits for rate limits wherever it lists and
    reads, but not where it looks up a revision.
    """

    def resolve_path(self, path: str, revision: str | None = None) -> Any:
        """Split a path into its repository, revision and file, after any rate limit."""
        return _wait(path, partial(super().resolve_path, path, revision))


register_implementation(HubFiles.protocol, HubFiles, clobber=True)


def _wait(location: str, request: Callable[[], T]) -> T:
    """Repeat a request to the Hub while its rate limit refuses it (429).

    Raises:
        gristmill.core.object_stores.StoreUnavailableError: the retry time is used up.
    """
    failing = Failing(
        location,
        retry_seconds(),
        "looked up",
        "wait, or set HF_TOKEN: the Hub lets its users ask more often",
    )
    while True:
        try:
            return request()
        except HfHubHTTPError as error:
            if error.response.status_code != 429:
                raise
            pause = failing.failed(error, log.warning)
            after = error.response.headers.get("Retry-After", "")
        time.sleep(max(pause, float(after) if after.isdigit() else 0.0))


@cache
def at_commit(location: str) -> str:
    """Location with the commit that its branch or tag points to now; without a
    revision, that of the default branch.

    Raises:
        OSError: the Hub has no such name or revision, or does not answer.
    """
    if is_at_commit(location):
        return location
    name = parse_hf_uri(location)
    info = _wait(
        location,
        partial(
            HfApi().repo_info, name.id, repo_type=name.type, revision=name.revision
        ),
    )
    return replace(name, revision=info.sha).to_uri().replace("://models/", "://")


@cache
def snapshot(location: str) -> Path:
    """Local copy of a model or data set, or of the file or folder in it that a location
    names; it is downloaded if huggingface_hub's cache lacks it.

    Raises:
        OSError: the Hub has no such name or does not answer, and the cache lacks it.
    """
    name = parse_hf_uri(location)
    pattern = name.path_in_repo.replace("**/", "*")
    endings = MODEL_FILES if name.type == "model" else ("",)
    download = partial(
        snapshot_download,
        name.id,
        repo_type=name.type,
        allow_patterns=[pattern, f"{pattern}/*"]
        if pattern
        else [f"*{ending}" for ending in endings],
        revision=name.revision,
    )
    try:
        # Only with the listing in the cache is it known whether a snapshot is whole.
        get_cached_repo_tree(name.id, repo_type=name.type, revision=name.revision)
        folder = download(local_files_only=True)
    except (CachedRepoTreeNotFoundError, LocalEntryNotFoundError):
        folder = download()
    return Path(folder, name.path_in_repo)
