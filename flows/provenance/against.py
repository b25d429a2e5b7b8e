"""Did two trainings see the same data, and if not, from which step on: by what they recorded, and by their orders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gristmill.flows.provenance.readings import Reading, TraceError, reading_of, reading_of_folder
from gristmill.flows.session import Session, open_session
from gristmill.flows.store import read_runs
from gristmill.train.loop.stream import extend_digest


def other_reading(session: Session, other: str) -> Reading:
    """The pre-training that a manifest's file, or the name of a run in the session's store, stands for.

    Raises:
        TraceError: it is neither, or has not begun to train.
    """
    if Path(other).exists():
        return reading_of(open_session(other, [], session.store_option))
    runs = {folder.name: record for folder, record in read_runs(session.store)}
    if other not in runs:
        raise TraceError(f"{other!r} is neither a manifest nor a run of {session.store.root}; runs are "
                         f"{', '.join(runs) or 'none'} (gristmill runs lists them)")
    stage = runs[other]["stages"].get("pretrain")
    if stage is None:
        raise TraceError(f"the run {other} does not pre-train")
    return reading_of_folder(session.store.folder("pretrain", runs[other]["name"], stage["fingerprint"]))


def compare_readings(ours: Reading, theirs: Reading) -> dict[str, Any]:
    """From which step on two pre-trainings read other tokens.

    Their recorded digests, which speak of content, narrow it down to the steps between two records; in there rows are
    compared: by number where both read the same set, else token by token.

    Returns:
        `first_difference` (a step, or None where all steps that both have are the same), `same_steps`, `steps` (of
        each), `same_set`, `recorded` (the last step at which the records agree, and the first at which they differ),
        `attested` (of each: whether its newest record is what its order gives; None where it has none).
    """
    assert ours.packed is not None
    assert theirs.packed is not None
    last = min(ours.section.steps, theirs.section.steps)
    records = [_digests(reading) for reading in (ours, theirs)]
    common = sorted(records[0].keys() & records[1].keys())
    agree = max((step for step in common if records[0][step] == records[1][step]), default=None)
    differ = min((step for step in common if records[0][step] != records[1][step]), default=None)
    same_set = ours.fingerprint == theirs.fingerprint
    # Digests of different sets differ from the beginning, whatever the rows hold: they narrow nothing down.
    end = last if differ is None or not same_set else differ
    found = next((step for step in range((agree or 0) + 1, end + 1) if not _same_step(ours, theirs, step, same_set)),
                 None)
    return {
        "first_difference": found, "same_steps": last if found is None else found - 1,
        "steps": [ours.section.steps, theirs.section.steps], "same_set": same_set,
        "sets": [ours.fingerprint, theirs.fingerprint], "recorded": {"agree": agree, "differ": differ},
        "attested": [_is_attested(reading, record) for reading, record in zip((ours, theirs), records, strict=True)],
    }


def _digests(reading: Reading) -> dict[int, str]:
    return {line["step"]: line["rows_digest"] for line in reading.metrics() if "rows_digest" in line}


def _same_step(ours: Reading, theirs: Reading, step: int, same_set: bool) -> bool:
    mine, others = ours.rows(step), theirs.rows(step)
    if same_set or len(mine) != len(others):
        return np.array_equal(mine, others)
    assert ours.packed is not None
    assert theirs.packed is not None
    return np.array_equal(ours.packed.read(mine), theirs.packed.read(others))


def _is_attested(reading: Reading, record: dict[int, str]) -> bool | None:
    """Whether the newest recorded digest is what the set and the order give."""
    if not record:
        return None
    newest = max(record)
    digest = reading.fingerprint or ""
    for step in range(1, newest + 1):
        digest = extend_digest(digest, reading.rows(step))
    return digest == record[newest]
