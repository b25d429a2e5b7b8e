"""What a training step read, which steps read a document, and where two trainings read apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.core.store import read_runs
from gristmill.dataprep.llm.lineage import descendants, parents
from gristmill.flows.questions.explain import history
from gristmill.flows.questions.find_documents import DocumentNotFoundError, committed_inputs
from gristmill.flows.questions.training_reads import (
    EXAMPLE_IDS,
    PROMPT_IDS,
    Reading,
    TraceError,
    answers_of_step,
    reading_of,
    reading_of_folder,
)
from gristmill.flows.running.session import Session, open_session
from gristmill.flows.stages.registry import MIX, PRETRAIN
from gristmill.tokenize.row_provenance import describe_documents
from gristmill.train.loop.batch_plan import extend_digest


def trace_step(session: Session, step: int, stage: str = PRETRAIN, rank: int | None = None) -> dict[str, Any]:
    """The rows and documents of a training step.

    Args:
        session: the opened manifest.
        step: counted from 1, as in the metrics.
        stage: a training whose steps can be traced.
        rank: only the rows, or the answers, of this process, of the `engine.ranks` there are.

    Raises:
        TraceError: the manifest does not train, has fewer steps or ranks, or its data is not made yet.
    """
    reading = reading_of(session, stage)
    rows, ranks = reading.rows(step), session.manifest.engine.num_ranks
    share, shares = (0, 1) if rank is None else share_of_rank(session, reading, rank)
    answers = answers_of_step(reading, step, share, shares) if session.plan[stage].stage.rows == "prompts" else None
    # As train.loop.stream.micro_batches deals them out; in reinforcement learning it deals out answers.
    rows = rows[share::shares] if answers is None else rows
    found: dict[str, Any] = {
        "stage": stage,
        "step": step,
        "use": reading.use(step, reading.steps_done()),
        "rank": rank,
        "ranks": ranks,
        "rows": rows.tolist(),
        "checkpoints_after": [one for one in reading.checkpoints() if one >= step],
    }
    if answers is not None:
        return {**found, "examples": [reading.examples[row][0] for row in rows.tolist()], "answers": answers}
    if reading.packed is None:
        packed = [(row, one) for row in rows.tolist() for one in reading.examples[row]]
        return {**found, "examples": [one for _, one in packed], "rows_of_examples": [row for row, _ in packed]}
    inputs = committed_inputs(session, session.plan)
    documents = documents_of_rows(reading, inputs, rows)
    return {**found, "tokens": sum(entry["tokens"] for entry in documents), "documents": documents}


def share_of_rank(session: Session, reading: Reading, rank: int) -> tuple[int, int]:
    """Which share of each batch a process computes, and of how many.

    Raises:
        TraceError: there is no such process.
    """
    engine = session.manifest.engine
    if not 0 <= rank < engine.num_ranks:
        raise TraceError(
            f"there is no rank {rank}: engine.ranks is {engine.num_ranks}, so ranks are 0 to {engine.num_ranks - 1}"
        )
    return engine.parallel.share_of(
        rank,
        engine.num_ranks,
        pipelined=reading.packed is not None,
        split=getattr(reading.section, "lora", None) is None,
    )


def documents_of_rows(reading: Reading, inputs: Mapping[str, Path], rows: np.ndarray) -> list[dict[str, Any]]:
    """The documents in some rows, those with the most tokens first: what is known of each, its tokens, rows, copies."""
    assert reading.packed is not None
    pieces = reading.packed.pieces(rows)
    described = describe_documents(reading.packed, inputs, set(pieces["id"].to_pylist()))
    groups = pieces.group_by("id").aggregate([("length", "sum"), ("row", "distinct"), ("copy", "distinct")])
    documents = [
        {
            **described[group["id"]],
            "tokens": group["length_sum"],
            "rows": sorted(group["row_distinct"]),
            "copies": sorted(group["copy_distinct"]),
        }
        for group in _pylist(groups)
    ]
    return sorted(documents, key=lambda entry: (-entry["tokens"], entry["id"]))


def _pylist(table: pa.Table) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def trace_document(session: Session, wanted: str) -> dict[str, Any]:
    """Everything that became of one document, or of one example of the fine-tuning stages.

    Args:
        session: the opened manifest.
        wanted: a document's id, its first digits, or its locator; or an example's id or its first digits.

    Returns:
        `kind` (document or example), `id`, `outcome` and what is known of it; `steps`: those that read it, each with
        its stage, `use` (read, or will read) and rows; `checkpoints_after`: those of these stages that know it.

    Raises:
        DocumentNotFoundError: no document or example fits, or more than one.
    """
    examples = _trace_example(session, wanted)
    if examples is not None:
        return {**examples, **_family_of(session, examples["id"])}
    found = history(session, wanted)
    mix = found.get(MIX)
    family: dict[str, Any] = {relation: found[relation] for relation in ("parents", "children") if relation in found}
    traced: dict[str, Any] = {
        "kind": "document",
        **{key: found[key] for key in ("id", "source", "locator", "shard", "row", "outcome")},
        "steps": [],
        "checkpoints_after": [],
        **family,
    }
    if mix is None:
        traced["stages"] = found["stages"]
        return traced
    traced |= {
        "use": mix["use"],
        "reason": mix["reason"],
        "tokens": mix["tokens"],
        "copies": mix["copies"],
        "rows": mix["rows"],
    }
    if mix["use"] == "trained" and PRETRAIN in session.plan:
        traced |= describe_reading(reading_of(session), mix["rows"])
    return traced


def _family_of(session: Session, example: str) -> dict[str, Any]:
    """What an example that a model has written was made from, and what was made from it."""
    inputs, own = committed_inputs(session, session.plan), bytes.fromhex(example)
    family = {"parents": parents(inputs, own), "children": descendants(inputs, [own])}
    return (
        {relation: sorted(one.hex() for one in ids) for relation, ids in family.items()} if any(family.values()) else {}
    )


def describe_reading(reading: Reading, rows: Sequence[int]) -> dict[str, Any]:
    """The steps that read some rows, and the checkpoints that were written after the first of them."""
    read, done = reading.steps_that_read(np.array(sorted(set(rows)), dtype=np.int64)), reading.steps_done()
    steps = [
        {"stage": reading.stage, "step": step, "use": reading.use(step, done), "rows": which}
        for step, which in read.items()
    ]
    first = min(read, default=None)
    after = (
        []
        if first is None
        else [{"stage": reading.stage, "step": step} for step in reading.checkpoints() if step >= first]
    )
    return {"steps": steps, "checkpoints_after": after}


def _trace_example(session: Session, wanted: str) -> dict[str, Any] | None:
    """What became of a fine-tuning example; None where no stage has one by that id."""
    found: dict[str, Any] | None = None
    for stage, node in session.plan.items():
        if node.stage.rows in (None, "documents") or not any(
            (session.folder(stage).data / ids).exists() for ids in (EXAMPLE_IDS, PROMPT_IDS)
        ):
            continue
        reading = reading_of(session, stage)
        hits = {
            one
            for row in reading.examples
            for one in row
            if one == wanted.lower() or (len(wanted) >= 4 and one.startswith(wanted.lower()))
        }
        if len(hits) > 1:
            raise DocumentNotFoundError(
                f"{len(hits)} examples of {stage} fit {wanted!r}; give more digits: {', '.join(sorted(hits)[:5])}"
            )
        if not hits:
            continue
        (example,) = hits
        rows = [row for row, ids in enumerate(reading.examples) if example in ids]
        described = describe_reading(reading, rows)
        if found is None:
            found = {"kind": "example", "id": example, "outcome": "trained", "steps": [], "checkpoints_after": []}
        found["steps"] += described["steps"]
        found["checkpoints_after"] += described["checkpoints_after"]
    return found


def other_reading(session: Session, other: str) -> Reading:
    """The pre-training that a manifest's file, or the name of a run in the session's store, stands for.

    Raises:
        TraceError: it is neither, or has not begun to train.
    """
    if Path(other).exists():
        return reading_of(open_session(other, [], session.store_option))
    runs = {folder.name: record for folder, record in read_runs(session.store)}
    if other not in runs:
        raise TraceError(
            f"{other!r} is neither a manifest nor a run of {session.store.root}; runs are "
            f"{', '.join(runs) or 'none'} (gristmill runs lists them)"
        )
    stage = runs[other]["stages"].get(PRETRAIN)
    if stage is None:
        raise TraceError(f"the run {other} does not pre-train")
    return reading_of_folder(session.store.folder(PRETRAIN, runs[other]["name"], stage["fingerprint"]))


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
    found = next(
        (step for step in range((agree or 0) + 1, end + 1) if not _same_step(ours, theirs, step, same_set)), None
    )
    return {
        "first_difference": found,
        "same_steps": last if found is None else found - 1,
        "steps": [ours.section.steps, theirs.section.steps],
        "same_set": same_set,
        "sets": [ours.fingerprint, theirs.fingerprint],
        "recorded": {"agree": agree, "differ": differ},
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
