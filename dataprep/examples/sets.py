"""Sets of examples: what they are called, and the records of them that nobody can use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from gristmill.dataprep.files import atomic_write
from gristmill.dataprep.reading.examples import Refused

REFUSED = "refused.jsonl"
"""Of a stage's output: the records that are no examples, a line each with set, place and reason."""


def set_names(paths: Sequence[str], reserved: Sequence[str] = ()) -> list[str]:
    """What sets are called: by the name of their file or folder, numbered where two are equal.

    Args:
        paths: of the sets, as the manifest has them.
        reserved: names that no set may have.
    """
    names: list[str] = []
    for path in paths:
        last = PurePosixPath(path.rstrip("/:")).name
        stem = re.sub(r"[^A-Za-z0-9_-]+", "-", last.split(".")[0]).strip("-") or "set"
        taken = [name for name in (*names, *reserved)
                 if name == stem or re.fullmatch(rf"{re.escape(stem)}-\d+", name)]
        names.append(f"{stem}-{len(taken) + 1}" if taken else stem)
    return names


def write_refused(path: Path, refused: Iterable[tuple[str, Sequence[Refused]]]) -> None:
    """Write the refused records of all sets, given as (name of the set, its refused records)."""
    with atomic_write(path) as sink:
        for of_set, records in refused:
            for one in records:
                line = {"set": of_set, "place": one.place, "reason": one.reason}
                sink.write(json.dumps(line, ensure_ascii=False, sort_keys=True).encode() + b"\n")
