"""JSON Lines files of tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_jsonl(path: Path, records: Iterable[Any]) -> str:
    """Write a record per line, and return the path as text."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the metrics of a finished stage."""
    return read_jsonl(folder / "data" / "metrics.jsonl")
