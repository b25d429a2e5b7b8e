"""Sets of examples: what they are called, and the records of them that nobody can use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from gristmill.dataprep.counts import ConservationError
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


def check_records(where: str, counts: Mapping[str, Any]) -> None:
    """Raise ConservationError unless every record of a set is refused, beyond the limit, dropped or used.

    Args:
        where: stage and set.
        counts: `records`, `refused`, `beyond_limit`, `unrenderable`, `dropped` (too long), `used`; of a prepared set
            also `prepared_dropped` (rule -> number) and `quarantined`.
    """
    before = sum(counts.get("prepared_dropped", {}).values()) + counts.get("quarantined", 0)
    parts = ("refused", "beyond_limit", "unrenderable", "dropped", "used")
    accounted = before + sum(counts[part] for part in parts)
    if accounted != counts["records"]:
        raise ConservationError(f"{where}: {counts['records']} records were read but {accounted} are accounted for "
                                f"({', '.join(f'{part} {counts[part]}' for part in parts)}, dropped before {before}); "
                                "nothing was committed")


def write_refused(path: Path, refused: Iterable[tuple[str, Sequence[Refused]]]) -> None:
    """Write the refused records of all sets, given as (name of the set, its refused records)."""
    with atomic_write(path) as sink:
        for of_set, records in refused:
            for one in records:
                line = {"set": of_set, "place": one.place, "reason": one.reason}
                sink.write(json.dumps(line, ensure_ascii=False, sort_keys=True).encode() + b"\n")
