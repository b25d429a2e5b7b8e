"""Rows and documents of a training step, steps that read a document, and the first
difference of two trainings.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.core.store import read_runs
from gristmill.dataprep.llm.lineage import descendants, parents
from gristmill.flows.questions.explain import history
from gristmill.flows.questions.find_documents import (
    DocumentNotFoundError,
    committed_inputs,
)
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


def trace_step(
    session: Session, step: int, stage: str = PRETRAIN, rank: int | None = None
) -> dict[str, Any]:
    """Return the rows and documents of a training step.

    Args:
        session: the opened manifest.
        step: counted from 1, as in the metrics.
        stage: a training stage.
        rank: restrict to the rows, or the answers, of this rank; all ranks if None.

    Raises:
        TraceError: the manifest does not train, has fewer steps or ranks, or its data
            does not exist yet.
    """
    reading = reading_of(session, stage)
    rows, ranks = reading.rows(step), session.manifest.engine.num_ranks
    rank_share, num_shares = (
        (0, 1) if rank is None else share_of_rank(session, reading, rank)
    )
    answers = (
        answers_of_step(reading, step, rank_share, num_shares)
        if session.plan[stage].stage.row_kind == "prompts"
        else None
    )
    # Same split as train.loop.stream.micro_batches, which splits answers in
    # reinforcement learning.
    rows = rows[rank_share::num_shares] if answers is None else rows
    trace: dict[str, Any] = {
        "stage": stage,
        "step": step,
        "use": reading.use(step, reading.steps_done()),
        "rank": rank,
        "ranks": ranks,
        "rows": rows.tolist(),
        "checkpoints_after": [
            example for example in reading.checkpoints() if example >= step
        ],
    }
    if answers is not None:
        return {
            **trace,
            "examples": [reading.examples[row][0] for row in rows.tolist()],
            "answers": answers,
        }
    if reading.packed is None:
        packed = [
            (row, example) for row in rows.tolist() for example in reading.examples[row]
        ]
        return {
            **trace,
            "examples": [example for _, example in packed],
            "rows_of_examples": [row for row, _ in packed],
        }
    inputs = committed_inputs(session, session.plan)
    documents = documents_of_rows(reading, inputs, rows)
    return {
        **trace,
        "tokens": sum(entry["tokens"] for entry in documents),
        "documents": documents,
    }


def share_of_rank(session: Session, reading: Reading, rank: int) -> tuple[int, int]:
    """Return (share, number of shares): the share of each batch that a rank computes.

    Raises:
        TraceError: the rank does not exist.
    """
    engine = session.manifest.engine
    if not 0 <= rank < engine.num_ranks:
        raise TraceError(
            f"there is no rank {rank}: engine.ranks is {engine.num_ranks}, so ranks "
            f"are 0 to {engine.num_ranks - 1}"
        )
    return engine.parallel.share_of(
        rank,
        engine.num_ranks,
        pipelined=reading.packed is not None,
        split=getattr(reading.section, "lora", None) is None,
    )


def documents_of_rows(
    reading: Reading, inputs: Mapping[str, Path], rows: np.ndarray
) -> list[dict[str, Any]]:
    """Describe the documents in some rows with their tokens, rows and copies, most
    tokens first.
    """
    assert reading.packed is not None
    pieces = reading.packed.pieces(rows)
    described = describe_documents(
        reading.packed, inputs, set(pieces["id"].to_pylist())
    )
    groups = pieces.group_by("id").aggregate(
        [("length", "sum"), ("row", "distinct"), ("copy", "distinct")]
    )
    documents = [
        {
            **described[group["id"]],
            "tokens": group["length_sum"],
            "rows": sorted(group["row_distinct"]),
            "copies": sorted(group["copy_distinct"]),
        }
        for group in groups.to_pylist()
    ]
    return sorted(documents, key=lambda entry: (-entry["tokens"], entry["id"]))


def trace_document(session: Session, query: str) -> dict[str, Any]:
    """Trace one document, or one example of the fine-tuning stages, through training.

    Args:
        session: the opened manifest.
        query: a document's id, its first digits, or its locator; or an example's id or
            its first digits.

    Returns:
        `kind` (document or example), `id`, `outcome` and its description; `steps` that
        read it, each with its stage, `use` (read, or will read) and rows;
        `checkpoints_after`: checkpoints whose training read it.

    Raises:
        DocumentNotFoundError: no document or example matches, or several do.
    """
    example = _trace_example(session, query)
    if example is not None:
        inputs = committed_inputs(session, session.plan)
        id_ = bytes.fromhex(example["id"])
        family = {
            "parents": parents(inputs, id_),
            "children": descendants(inputs, [id_]),
        }
        if any(family.values()):
            for relation, relatives in family.items():
                example[relation] = sorted(relative.hex() for relative in relatives)
        return example
    document = history(session, query)
    traced: dict[str, Any] = {
        "kind": "document",
        **{
            key: document[key]
            for key in ("id", "source", "locator", "shard", "row", "outcome")
        },
        "steps": [],
        "checkpoints_after": [],
    }
    for relation in ("parents", "children"):
        if relation in document:
            traced[relation] = document[relation]
    mix = document.get(MIX)
    if mix is None:
        traced["stages"] = document["stages"]
        return traced
    traced |= {key: mix[key] for key in ("use", "reason", "tokens", "copies", "rows")}
    if mix["use"] == "trained" and PRETRAIN in session.plan:
        traced |= describe_reading(reading_of(session), mix["rows"])
    return traced


def describe_reading(reading: Reading, rows: Sequence[int]) -> dict[str, Any]:
    """Return the steps that read some rows, and the checkpoints written after the first
    of them.
    """
    rows_by_step = reading.steps_that_read(np.array(sorted(set(rows)), dtype=np.int64))
    done = reading.steps_done()
    stage = reading.stage
    steps = [
        {
            "stage": stage,
            "step": step,
            "use": reading.use(step, done),
            "rows": rows_read,
        }
        for step, rows_read in rows_by_step.items()
    ]
    checkpoints = []
    if rows_by_step:
        first = min(rows_by_step)
        checkpoints = [
            {"stage": stage, "step": step}
            for step in reading.checkpoints()
            if step >= first
        ]
    return {"steps": steps, "checkpoints_after": checkpoints}


def _trace_example(session: Session, query: str) -> dict[str, Any] | None:
    """Trace a fine-tuning example; None if no stage has one with that id."""
    prefix = query.lower()
    trace: dict[str, Any] | None = None
    for stage, node in session.plan.items():
        if node.stage.row_kind in (None, "documents"):
            continue
        data = session.folder(stage).data
        if not any((data / name).exists() for name in (EXAMPLE_IDS, PROMPT_IDS)):
            continue
        reading = reading_of(session, stage)
        ids = set(itertools.chain.from_iterable(reading.examples))
        hits = {
            id_
            for id_ in ids
            if id_ == prefix or (len(prefix) >= 4 and id_.startswith(prefix))
        }
        if len(hits) > 1:
            raise DocumentNotFoundError(
                f"{len(hits)} examples of {stage} fit {query!r}; give more digits: "
                f"{', '.join(sorted(hits)[:5])}"
            )
        if not hits:
            continue
        (example,) = hits
        rows = [
            row for row, row_ids in enumerate(reading.examples) if example in row_ids
        ]
        described = describe_reading(reading, rows)
        if trace is None:
            trace = {
                "kind": "example",
                "id": example,
                "outcome": "trained",
                "steps": [],
                "checkpoints_after": [],
            }
        trace["steps"] += described["steps"]
        trace["checkpoints_after"] += described["checkpoints_after"]
    return trace


def other_reading(session: Session, name: str) -> Reading:
    """Return the pre-training of a manifest file, or of a run in the session's store.

    Raises:
        TraceError: no such manifest or run exists, or its training has not started.
    """
    if Path(name).exists():
        return reading_of(open_session(name, [], session.store_option))
    runs = {folder.name: record for folder, record in read_runs(session.store)}
    if name not in runs:
        raise TraceError(
            f"{name!r} is neither a manifest nor a run of {session.store.root}; runs "
            f"are {', '.join(runs) or 'none'} (gristmill runs lists them)"
        )
    stage = runs[name]["stages"].get(PRETRAIN)
    if stage is None:
        raise TraceError(f"the run {name} does not pre-train")
    return reading_of_folder(
        session.store.folder(PRETRAIN, runs[name]["name"], stage["fingerprint"])
    )


def compare_readings(ours: Reading, theirs: Reading) -> dict[str, Any]:
    """Find the first step at which two pre-trainings read different tokens.

    The recorded digests of contents narrow the search to the steps between two records;
    there, rows are compared: by number if both read the same set, else token by token.

    Returns:
        `first_difference` (a step, or None if all common steps are equal),
        `same_steps`, `steps` (of each), `same_set`, `recorded` (the last step at which
        the records agree, and the first at which they differ), `attested` (of each:
        True if its newest record matches its order, None without a record).
    """
    our_digests = _digests(ours)
    their_digests = _digests(theirs)
    common = our_digests.keys() & their_digests.keys()
    equal = {step for step in common if our_digests[step] == their_digests[step]}
    agree = max(equal, default=None)
    differ = min(common - equal, default=None)
    same_set = ours.fingerprint == theirs.fingerprint
    last = min(ours.section.steps, theirs.section.steps)
    # Digests of different sets always differ, whatever the rows hold, and do not narrow
    # the search.
    end = last if differ is None or not same_set else differ
    first_difference = None
    for step in range((agree or 0) + 1, end + 1):
        if not _same_step(ours, theirs, step, same_set):
            first_difference = step
            break
    return {
        "first_difference": first_difference,
        "same_steps": last if first_difference is None else first_difference - 1,
        "steps": [ours.section.steps, theirs.section.steps],
        "same_set": same_set,
        "sets": [ours.fingerprint, theirs.fingerprint],
        "recorded": {"agree": agree, "differ": differ},
        "attested": [
            _is_attested(ours, our_digests),
            _is_attested(theirs, their_digests),
        ],
    }


def _digests(reading: Reading) -> dict[int, str]:
    return {
        line["step"]: line["rows_digest"]
        for line in reading.metrics()
        if "rows_digest" in line
    }


def _same_step(ours: Reading, theirs: Reading, step: int, same_set: bool) -> bool:
    our_rows, their_rows = ours.rows(step), theirs.rows(step)
    if same_set or len(our_rows) != len(their_rows):
        return np.array_equal(our_rows, their_rows)
    assert ours.packed is not None
    assert theirs.packed is not None
    return np.array_equal(ours.packed.read(our_rows), theirs.packed.read(their_rows))


def _is_attested(reading: Reading, record: dict[int, str]) -> bool | None:
    """Return True if the newest recorded digest matches the set and the order, None
    without a record.
    """
    if not record:
        return None
    newest = max(record)
    digest = reading.fingerprint or ""
    for step in range(1, newest + 1):
        digest = extend_digest(digest, reading.rows(step))
    return digest == record[newest]
