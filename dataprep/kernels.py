"""`@kernel`: compiles a function of arrays with numba, without the GIL, and keeps the machine code for the next run.

numba's own cache looks only at the file of the function that is called, not at those of the functions that it
calls: after an update it would go on running the old ones. So the folder of the cache is named after the content of
all kernel sources.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numba

MARK = "@kernel"
FOLDERS = ("dataprep", "tokenize")
"""Where there are kernels; those of the second call those of the first."""


def cache_folder() -> Path:
    """Where the machine code of this version of the kernels is kept.

    Below `NUMBA_CACHE_DIR` if that is set, otherwise below the user's cache folder (XDG base directories).
    """
    digest = hashlib.blake2b(digest_size=8)
    folders = (Path(__file__).parents[1] / name for name in FOLDERS)
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if MARK in source:
            digest.update(f"{path.parent.name}/{path.name}\n{source}\n".encode())
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    base = os.environ.get("NUMBA_CACHE_DIR") or Path(user) / "gristmill" / "numba"
    return Path(base) / digest.hexdigest()


numba.config.CACHE_DIR = str(cache_folder())
kernel = numba.njit(nogil=True, cache=True)
