"""Rows and documents of a training step, and steps that read a document."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gristmill.dataprep.documents import Inputs
from gristmill.dataprep.llm.lineage import descendants, parents
from gristmill.flows.questions.explain import history
from gristmill.flows.questions.find_documents import (
    DocumentNotFoundError,
    committed_inputs,
)
from gristmill.flows.questions.trace_tables import (
    CheckpointStep,
    DocumentTrace,
    RowDocument,
    StepReads,
    StepTrace,
)
from gristmill.flows.questions.training_reads import (
    ID_LISTS,
    Reading,
    answers_of_step,
    reading_of,
)
from gristmill.flows.running.session import Session
from gristmill.flows.stages.registry import PRETRAIN
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.row_provenance import describe_documents


def trace_step(session: Session, step: int, stage: str = PRETRAIN) -> StepTrace:
    """Return the rows and documents of a training step.

    Args:
        session: the opened manifest.
        step: counted from 1, as in the metrics.
        stage: a training stage.

    Raises:
        TraceError: the manifest does not train, has fewer steps, or its data does not
            exist yet.
    """
    reading = reading_of(session, stage)
    rows = reading.rows(step)
    trace = StepTrace(
        stage,
        step,
        reading.use(step, reading.steps_done()),
        rows.tolist(),
        [saved for saved in reading.checkpoints() if saved >= step],
    )
    if reading.packed is not None:
        documents = documents_of_rows(reading.packed, committed_inputs(session), rows)
        tokens = sum(document.tokens for document in documents)
        return replace(trace, tokens=tokens, documents=documents)
    packed = [(row, id_) for row in trace.rows for id_ in reading.examples[row]]
    examples = [id_ for _, id_ in packed]
    if session.plan[stage].stage.row_kind == "prompts":
        answers = answers_of_step(reading, step)
        return replace(trace, examples=examples, answers=answers)
    return replace(
        trace, examples=examples, rows_of_examples=[row for row, _ in packed]
    )


def documents_of_rows(
    packed: PackedSet, inputs: Inputs, rows: np.ndarray
) -> list[RowDocument]:
    """Describe the documents in some rows, most tokens first."""
    pieces = packed.pieces(rows)
    origins = describe_documents(packed, inputs, set(pieces["id"].to_pylist()))
    groups = pieces.group_by("id").aggregate(
        [("length", "sum"), ("row", "distinct"), ("copy", "distinct")]
    )
    documents = [
        RowDocument(
            **origins[group["id"]],
            tokens=group["length_sum"],
            rows=sorted(group["row_distinct"]),
            copies=sorted(group["copy_distinct"]),
        )
        for group in groups.to_pylist()
    ]
    return sorted(documents, key=lambda document: (-document.tokens, document.id))


def trace_document(session: Session, query: str) -> DocumentTrace:
    """Trace one document, or one example of the fine-tuning stages, through training.

    Args:
        session: the opened manifest.
        query: a document's id, its first digits, or its locator; or an example's id or
            its first digits.

    Raises:
        DocumentNotFoundError: no document or example matches, or several do.
    """
    example = _trace_example(session, query)
    if example is not None:
        return example
    document = history(session, query)
    mix = document.mix
    steps, checkpoints = list[StepReads](), list[CheckpointStep]()
    if mix is not None and mix.use == "trained" and PRETRAIN in session.plan:
        steps, checkpoints = describe_reading(reading_of(session), mix.rows)
    trace = DocumentTrace(
        "document",
        document.id,
        document.outcome,
        steps,
        checkpoints,
        document.source,
        document.locator,
        document.shard,
        document.row,
        parents=document.parents,
        children=document.children,
    )
    if mix is None:
        return replace(trace, stages=document.stages)
    fields = ("use", "reason", "tokens", "copies", "rows")
    return replace(trace, **{name: getattr(mix, name) for name in fields})


def describe_reading(
    reading: Reading, rows: Sequence[int]
) -> tuple[list[StepReads], list[CheckpointStep]]:
    """Return the steps that read some rows, and the checkpoints written after the first
    of them.
    """
    rows_by_step = reading.steps_that_read(np.array(sorted(set(rows)), dtype=np.int64))
    if not rows_by_step:
        return [], []
    done, stage = reading.steps_done(), reading.stage
    steps = [
        StepReads(stage, step, reading.use(step, done), rows_read)
        for step, rows_read in rows_by_step.items()
    ]
    first = min(rows_by_step)
    return steps, [
        CheckpointStep(stage, step) for step in reading.checkpoints() if step >= first
    ]


def _trace_example(session: Session, query: str) -> DocumentTrace | None:
    """Trace a fine-tuning example; None if no stage has one with that id."""
    prefix = query.lower()
    if len(prefix) < 4:
        return None
    readings = [
        reading_of(session, stage)
        for stage, node in session.plan.items()
        if node.stage.row_kind not in (None, "documents")
        and any((session.folder(stage).data / name).exists() for name in ID_LISTS)
    ]
    examples = {
        id_
        for reading in readings
        for id_ in itertools.chain.from_iterable(reading.examples)
        if id_.startswith(prefix)
    }
    if not examples:
        return None
    if len(examples) > 1:
        raise DocumentNotFoundError(
            f"{len(examples)} examples fit {query!r}; give more digits: "
            f"{', '.join(sorted(examples)[:5])}"
        )
    (example,) = examples
    trace = DocumentTrace("example", example, "trained", [], [])
    for reading in readings:
        rows = [row for row, ids in enumerate(reading.examples) if example in ids]
        steps, checkpoints = describe_reading(reading, rows)
        trace.steps.extend(steps)
        trace.checkpoints_after.extend(checkpoints)
    inputs, id_bytes = committed_inputs(session), bytes.fromhex(example)
    return replace(
        trace,
        parents=sorted(id_.hex() for id_ in parents(inputs, id_bytes)),
        children=sorted(id_.hex() for id_ in descendants(inputs, [id_bytes])),
    )
