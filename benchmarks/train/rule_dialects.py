"""`gristmill bench results`: Gopher's rules in five dialects, and deduplication, judged
by the models that they train.

The manifest has gristmill's defaults (Gopher's rules in DCLM's dialect, exact and near
duplicates dropped); the arms replace the dialect, or leave out a step. The text is what
the demo reads: docstrings of NumPy and SciPy, of which some documents are held out, and
code of the standard library. Arms and rule were committed before the first run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import gristmill
from benchmarks.measuring import Row
from benchmarks.train.planted import BUDGET, result_rows
from gristmill.core.files import write_text
from gristmill.core.processes import ONE_THREAD, in_environment
from gristmill.dataprep.filters.gopher import DIALECTS

OURS = "dclm"
"""Default dialect, that of the manifest."""
RULES = ("gopher_quality", "gopher_repetition")
MANIFEST: dict[str, Any] = {
    "name": "dialects",
    "seed": 1,
    "sources": {
        "docstrings": {"path": "python-docstrings://", "weight": 0.7},
        "code": {"path": "python-stdlib://", "weight": 0.3},
    },
    "prepare": [{"filter": {"rules": list(RULES)}}, {"dedup": {}}],
    "tokenizer": {"vocab_size": 2048},
    "mix": {"tokens": 1_000_000, "sequence_length": 256},
    "engine": {"runner": "local", "workers": 1},
}


def rows() -> Iterator[Row]:
    """Compare all dialects, no deduplication, and no rules."""
    with (
        tempfile.TemporaryDirectory(prefix="gristmill-dialects-") as name,
        in_environment(dict.fromkeys(ONE_THREAD, "1")),
    ):
        manifest = Path(name, "dialects.yaml")
        write_text(manifest, yaml.safe_dump(MANIFEST, sort_keys=False))
        settings = {
            **BUDGET,
            "arms": arms(),
            "decide": {"target": {"docstrings": 1}},
        }
        results = gristmill.ablate(
            manifest, settings, store=Path(name, "store"), progress=False
        )
        yield from result_rows(f"dialects, {OURS} against", results)


def arms() -> dict[str, Any]:
    """Return an arm for each other dialect, and two that leave out a step."""
    dialects: dict[str, Any] = {
        dialect: {"set": {f"filter.{rule}.dialect": dialect for rule in RULES}}
        for dialect in DIALECTS
        if dialect != OURS
    }
    return {
        **dialects,
        "no-dedup": {"without": ["dedup"]},
        "no-filter": {"without": ["filter"]},
    }
