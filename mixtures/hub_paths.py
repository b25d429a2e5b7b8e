"""Paths of the Hugging Face Hub: `hf://NAME@COMMIT` for a model and
`hf://datasets/NAME@COMMIT` for a data set, each with `/` and a file, folder or glob.
"""

from __future__ import annotations

import re

HUB = "hf://"
_COMMIT = "@[0-9a-f]{40}"


def is_hub_model(path: str) -> bool:
    """True for a model, or a file or folder of one."""
    return path.startswith(HUB) and not path.startswith(f"{HUB}datasets/")


def is_at_commit(path: str) -> bool:
    """True if the revision is a commit, from which results can be repeated."""
    pattern = rf"{HUB}(datasets/)?[^/@]+/[^/@]+{_COMMIT}(/.*)?"
    return re.fullmatch(pattern, path) is not None


def without_commit(path: str) -> str:
    """Path without its commit, for names that people read."""
    return re.sub(_COMMIT, "", path)
