"""The pairs that preference optimisation held out, as a file that the stage `evaluate` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.dataprep.files import atomic_write

HOLDOUT = "holdout.jsonl"


def write_holdout(path: Path, records: Sequence[Mapping[str, Any]], reference: np.ndarray, length: int) -> None:
    """Write the held-out pairs as JSON lines.

    Each has `reference_chosen` and `reference_rejected`, and the `sequence_length` that its conversations were cut to.
    """
    with atomic_write(path) as sink:
        for pair, (chosen, rejected) in zip(records, reference.tolist(), strict=True):
            line = {**pair, "reference_chosen": chosen, "reference_rejected": rejected,
                    "sequence_length": length}
            sink.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
