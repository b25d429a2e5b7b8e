"""Where the public test data lies that some benchmarks need."""

from __future__ import annotations

import os
from pathlib import Path


def data_folder() -> Path:
    """The folder that GRISTMILL_BENCH_DATA names, otherwise `shared/data` beside the repository."""
    default = Path(__file__).resolve().parents[3] / "shared" / "data"
    return Path(os.environ.get("GRISTMILL_BENCH_DATA") or default)
