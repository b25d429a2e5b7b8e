"""Where a document or an example went: which steps read it or will, and which checkpoints came after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gristmill.flows.explain import journey
from gristmill.flows.lookup import DocumentNotFoundError
from gristmill.flows.provenance.readings import EXAMPLE_IDS, PROMPT_IDS, Reading, reading_of
from gristmill.flows.session import Session

FINE_TUNING = ("sft", "reward", "dpo", "rl")


def trace_document(session: Session, wanted: str) -> dict[str, Any]:
    """Everything that became of one document, or of one example of the fine-tuning stages.

    Args:
        session: the opened manifest.
        wanted: a document's id, its first digits, or its locator; or an example's id or its first digits.

    Returns:
        `kind` (document or example), `id`, `fate` and what is known of it; `steps`: those that read it, each with its
        stage, `use` (read, or will read) and rows; `checkpoints_after`: those of these stages that know it.

    Raises:
        DocumentNotFoundError: no document or example fits, or more than one.
    """
    examples = _trace_example(session, wanted)
    if examples is not None:
        return examples
    found = journey(session, wanted)
    mix = found.get("mix")
    traced: dict[str, Any] = {
        "kind": "document", **{key: found[key] for key in ("id", "source", "locator", "shard", "row", "fate")},
        "steps": [], "checkpoints_after": [],
    }
    if mix is None:
        traced["stages"] = found["stages"]
        return traced
    traced |= {"use": mix["use"], "reason": mix["reason"], "tokens": mix["tokens"], "copies": mix["copies"],
               "rows": mix["rows"]}
    if mix["use"] == "trained" and session.manifest.pretrain is not None:
        traced |= describe_reading(reading_of(session), mix["rows"])
    return traced


def describe_reading(reading: Reading, rows: Sequence[int]) -> dict[str, Any]:
    """The steps that read some rows, and the checkpoints that were written after the first of them."""
    read, done = reading.steps_that_read(np.array(sorted(set(rows)), dtype=np.int64)), reading.steps_done()
    steps = [{"stage": reading.stage, "step": step, "use": reading.use(step, done), "rows": which}
             for step, which in read.items()]
    first = min(read, default=None)
    after = [] if first is None else [{"stage": reading.stage, "step": step}
                                      for step in reading.checkpoints() if step >= first]
    return {"steps": steps, "checkpoints_after": after}


def _trace_example(session: Session, wanted: str) -> dict[str, Any] | None:
    """What became of a fine-tuning example; None where no stage has one by that id."""
    found: dict[str, Any] | None = None
    for stage in FINE_TUNING:
        if stage not in session.plan or not any(
                (session.folder(stage).data / ids).exists() for ids in (EXAMPLE_IDS, PROMPT_IDS)):
            continue
        reading = reading_of(session, stage)
        hits = {one for row in reading.examples for one in row if one == wanted.lower() or (
            len(wanted) >= 4 and one.startswith(wanted.lower()))}
        if len(hits) > 1:
            raise DocumentNotFoundError(f"{len(hits)} examples of {stage} fit {wanted!r}; give more digits: "
                                        f"{', '.join(sorted(hits)[:5])}")
        if not hits:
            continue
        (example,) = hits
        rows = [row for row, ids in enumerate(reading.examples) if example in ids]
        described = describe_reading(reading, rows)
        if found is None:
            found = {"kind": "example", "id": example, "fate": "trained", "steps": [], "checkpoints_after": []}
        found["steps"] += described["steps"]
        found["checkpoints_after"] += described["checkpoints_after"]
    return found
