"""Files that could not be read to their end, cut off or damaged in the middle: what they lost is estimated and counted.

Records that nobody read are in no ledger; a file of 2,000 that was cut to 200 would count as one bad record. So the
records that it lost are estimated, from the first of these that is known:

1. the reader's own knowledge (a table says in its footer how many rows it has);
2. its bytes: damage behind a third of them lost twice the records before it;
3. the other files of its source (for a member: the other members): it held as many records as they do in the mean, or
   as many for its bytes, whichever is more;
4. nothing: as many as were read, as if it had been cut in its middle. That exceeds every sane limit, on purpose: of a
   source that is one file which ends early, nobody knows how much is missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gristmill.dataprep.counts import add_counts

SHOWN_DAMAGED = 20
"""Damaged files that a summary lists, those that lost most first."""


@dataclass(frozen=True)
class Damaged:
    """A file, or a member of an archive, of which records are lost.

    Attributes:
        source, file: where it is.
        error: why it could not be read on.
        records: that were read of it.
        stored_bytes, read_bytes: its size, and what was read of it.
        member: whether it lies in an archive.
        lost: records that are lost; None where the reader does not know.
    """

    source: str
    file: str
    error: str
    records: int
    stored_bytes: int
    read_bytes: int
    member: bool
    lost: int | None

    @property
    def kind(self) -> str:
        """What it is compared with."""
        return "members" if self.member else "files"


def estimate_losses(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What each damaged file of a stage lost: `source`, `file`, `records` (read), `lost`, `error`; most lost first.

    Args:
        results: of the tasks, with `source`, `damaged` (Damaged as dictionaries) and `whole`: of the files that were
            read to their end, `files` and `members`, the `number`, `records` and `bytes`.
    """
    whole = add_counts({result["source"]: result["whole"]} for result in results)
    found = []
    for one in (Damaged(**entry) for result in results for entry in result["damaged"]):
        lost = lost_records(one, whole[one.source].get(one.kind, {}))
        found.append({"source": one.source, "file": one.file, "records": one.records, "lost": lost, "error": one.error})
    return sorted(found, key=lambda entry: (-entry["lost"], entry["source"], entry["file"]))


def lost_records(file: Damaged, whole: Mapping[str, int]) -> int:
    """How many records a damaged file lost, at least 1; see the module.

    Args:
        whole: `number`, `records` and `bytes` of the files of its source that were read to their end.
    """
    if file.lost is not None:
        return file.lost
    if file.records and 0 < file.read_bytes < file.stored_bytes:
        return math.ceil(file.records * (file.stored_bytes / file.read_bytes - 1))
    number, records, size = (whole.get(key, 0) for key in ("number", "records", "bytes"))
    expected = max(records / number if number else 0, file.stored_bytes * records / size if size else 0)
    return max(math.ceil(expected - file.records) if expected > file.records else file.records, 1)


def describe_loss(loss: Mapping[str, Any]) -> str:
    """One sentence about a damaged file, an entry of `estimate_losses`."""
    return (f"source {loss['source']!r}: {loss['file']} could not be read to its end: {loss['error']}; "
            f"{loss['records']:,} records of it were read, about {loss['lost']:,} are lost")
