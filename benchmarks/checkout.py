"""The repository's folder, and that of public test data."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""`python -m benchmarks...` is started in this folder, since benchmarks are not part of
the installed package.
"""


def data_folder() -> Path:
    """Return the folder that GRISTMILL_BENCH_DATA names, otherwise `shared/data` beside
    the repository.
    """
    return Path(
        os.environ.get("GRISTMILL_BENCH_DATA") or ROOT.parent / "shared" / "data"
    )
