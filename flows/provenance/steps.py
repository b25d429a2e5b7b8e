"""What a training step read, or will read: its rows, and the documents or examples that they hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.flows.lookup import committed_inputs
from gristmill.flows.provenance.answers import answers_of_step
from gristmill.flows.provenance.readings import Reading, TraceError, reading_of
from gristmill.flows.session import Session
from gristmill.tokenize.origins import describe_documents


def trace_step(session: Session, step: int, stage: str = "pretrain", rank: int | None = None) -> dict[str, Any]:
    """The rows and documents of a training step.

    Args:
        session: the opened manifest.
        step: counted from 1, as in the metrics.
        stage: one of readings.SECTIONS.
        rank: only the rows, or the answers, of this process, of the `engine.ranks` there are.

    Raises:
        TraceError: the manifest does not train, has fewer steps or ranks, or its data is not made yet.
    """
    reading = reading_of(session, stage)
    rows, ranks = reading.rows(step), session.manifest.engine.ranks
    share, shares = (0, 1) if rank is None else share_of_rank(session, reading, rank)
    answers = answers_of_step(reading, step, share, shares) if stage == "rl" else None
    # As train.loop.stream.micro_batches deals them out; in reinforcement learning it deals out answers.
    rows = rows[share::shares] if answers is None else rows
    found: dict[str, Any] = {
        "stage": stage, "step": step, "use": reading.use(step, reading.steps_done()), "rank": rank, "ranks": ranks,
        "rows": rows.tolist(), "checkpoints_after": [one for one in reading.checkpoints() if one >= step],
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
    if not 0 <= rank < engine.ranks:
        raise TraceError(f"there is no rank {rank}: engine.ranks is {engine.ranks}, so ranks are 0 to "
                         f"{engine.ranks - 1}")
    return engine.parallel.share_of(rank, engine.ranks, pipelined=reading.stage == "pretrain",
                                    split=getattr(reading.section, "lora", None) is None)


def documents_of_rows(reading: Reading, inputs: Mapping[str, Path], rows: np.ndarray) -> list[dict[str, Any]]:
    """The documents in some rows, those with the most tokens first: what is known of each, its tokens, rows, copies."""
    assert reading.packed is not None
    pieces = reading.packed.pieces(rows)
    described = describe_documents(reading.packed, inputs, set(pieces["id"].to_pylist()))
    groups = pieces.group_by("id").aggregate([("length", "sum"), ("row", "distinct"), ("copy", "distinct")])
    documents = [{**described[group["id"]], "tokens": group["length_sum"], "rows": sorted(group["row_distinct"]),
                  "copies": sorted(group["copy_distinct"])} for group in _pylist(groups)]
    return sorted(documents, key=lambda entry: (-entry["tokens"], entry["id"]))


def _pylist(table: pa.Table) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows
