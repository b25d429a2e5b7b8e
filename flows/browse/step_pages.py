"""The pages of trainings and of examples: the rows of each step, and the steps that
read an example.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow.compute as pc

from gristmill.dataprep.documents import read_table
from gristmill.flows.browse.addresses import (
    DOCUMENTS,
    EXAMPLES_PAGE,
    ROWS_PAGE,
    TRAINING_PAGE,
    OneDocument,
    OneStep,
    Training,
    address,
    page_links,
)
from gristmill.flows.browse.browse_elements import (
    id_span,
    numbered_links,
    tabs,
    value_text,
    values_note,
)
from gristmill.flows.browse.browsed_run import BrowsedRun, NotThereError
from gristmill.flows.pages.page_elements import (
    Button,
    Entry,
    Field,
    Form,
    Heading,
    Inline,
    Link,
    Links,
    Listing,
    Note,
    Page,
    Part,
    Section,
    Span,
    Table,
    Text,
)
from gristmill.flows.questions.find_documents import DocumentNotFoundError
from gristmill.flows.questions.trace import trace_document, trace_step
from gristmill.flows.questions.trace_tables import DocumentTrace, RowDocument
from gristmill.flows.questions.training_reads import Reading, TraceError, reading_of
from gristmill.flows.stages.registry import MIX
from gristmill.train.data.preference_rows import EXAMPLES

STEPS_ON_PAGE = 100
BEGINNING_TOKENS = 64
EXAMPLE_ID = re.compile("[0-9a-f]{32}")
MOST_SHOWN = 200
"""Documents or examples of a step."""
MEASURES = {
    "loss": "loss",
    "grad_norm": "grad norm",
    "learning_rate": "learning rate",
    "tokens_per_second": "tokens per second",
}
"""Key of a training's record -> column of its table."""


def trainings(run: BrowsedRun) -> list[str]:
    """The trainings of a run whose steps can be traced."""
    return [
        name
        for name, node in run.session.plan.items()
        if node.stage.training is not None
    ]


def _reading(run: BrowsedRun, stage: str) -> Reading:
    if stage not in trainings(run):
        raise NotThereError(
            f"{stage} trains nothing whose steps could be traced; "
            f"those that do are {', '.join(trainings(run)) or 'none'}"
        )
    return reading_of(run.session, stage)


def _records_by_step(reading: Reading) -> dict[int, dict[str, Any]]:
    """The record of each step; measurements after it stand in a line of their own."""
    records: dict[int, dict[str, Any]] = {}
    for line in reading.metrics():
        if "step" in line:
            records[line["step"]] = {**records.get(line["step"], {}), **line}
    return records


def training_page(run: BrowsedRun, query: Training) -> Page | str:
    """The progress of a training and its recorded steps; or the address of the step
    that the query names.
    """
    stage = query.stage
    if query.step is not None:
        return address(TRAINING_PAGE, stage, query.step)
    title = f"Steps of {stage}"
    parts: list[Part] = [
        tabs([(name, address(TRAINING_PAGE, name)) for name in trainings(run)], stage)
    ]
    try:
        reading = _reading(run, stage)
    except TraceError as error:
        return Page(title, parts=[*parts, Note(str(error), "warning")])
    checkpoints = ", ".join(map(str, reading.checkpoints()))
    suffix = f"; checkpoints at {checkpoints}" if checkpoints else ""
    step_form = Form(
        address(TRAINING_PAGE, stage),
        [Field("step", "step", is_number=True, is_required=True)],
        [Button("Go")],
    )
    parts += [
        Note(
            f"{reading.steps_done():,} of {reading.section.steps:,} steps are "
            f"trained{suffix}."
        ),
        step_form,
    ]
    recorded = list(_records_by_step(reading).values())
    lines = recorded[query.after : query.after + STEPS_ON_PAGE]
    if not lines:
        first = Link("step 1", address(TRAINING_PAGE, stage, 1))
        text = "No step is recorded yet; what each will read is known all the same: "
        return Page(title, parts=[*parts, Note([text, first, "."], "plain")])
    names = [
        name
        for name in MEASURES
        if any(isinstance(line.get(name), int | float) for line in lines)
    ]
    rows: list[list[Inline]] = [
        [
            Link(str(line["step"]), address(TRAINING_PAGE, stage, line["step"])),
            *(value_text(line.get(name)) for name in names),
        ]
        for line in lines
    ]
    header = ["step", *(MEASURES[name] for name in names)]
    table = Table(
        header,
        rows,
        set(range(len(header))),
        {"loss": "mean over the tokens of the step"},
    )
    links = page_links(
        len(recorded),
        query.after,
        STEPS_ON_PAGE,
        lambda after: address(TRAINING_PAGE, stage, after=after),
    )
    return Page(title, parts=[*parts, table, links])


def step_page(run: BrowsedRun, query: OneStep) -> Page:
    """The documents, examples, or prompts with their answers that a step read or will
    read.
    """
    reading = _reading(run, query.stage)
    traced = trace_step(run.session, query.step, query.stage)
    record = _records_by_step(reading).get(query.step, {})
    answers, documents = traced.answers, traced.documents
    examples = list(dict.fromkeys(traced.examples))
    reads = (
        f"{'It read' if traced.use == 'read' else 'It will read'} {len(traced.rows):,}"
    )
    if answers is not None:
        sentence = f"{reads} prompts"
    elif traced.tokens is None:
        sentence = f"{reads} rows with {len(examples):,} examples"
    else:
        sentence = (
            f"{reads} rows with {traced.tokens:,} tokens of "
            f"{len(documents):,} documents"
        )
    checkpoints = ", ".join(map(str, traced.checkpoints_after))
    sentence += f"; checkpoints at {checkpoints} know them." if checkpoints else "."
    parts: list[Part] = [
        Links(_neighbours(query, reading.section.steps)),
        Note(sentence, "plain"),
    ]
    values = [
        (name, value)
        for name, value in record.items()
        if isinstance(value, int | float) and name != "step"
    ]
    parts += [values_note(values)] if values else []
    if answers:
        parts += _prompts(answers)
    elif answers is not None:
        parts += [
            Note("Their answers are not drawn yet."),
            _examples(run, traced.examples),
        ]
    elif traced.tokens is None:
        parts.append(_examples(run, examples[:MOST_SHOWN]))
    else:
        rows = traced.rows
        parts.append(
            numbered_links(
                "rows", [(row, address(ROWS_PAGE, MIX, row)) for row in rows], len(rows)
            )
        )
        parts.append(_documents(documents[:MOST_SHOWN]))
    shown = len(documents) or (len(examples) if answers is None else 0)
    if shown > MOST_SHOWN:
        parts.append(Note(f"The first ones of {shown:,} are shown."))
    return Page(f"Step {query.step} of {query.stage}", parts=parts)


def _neighbours(query: OneStep, steps: int) -> list[Inline]:
    stage, step = query.stage, query.step
    links: list[Inline] = [Link(stage, address(TRAINING_PAGE, stage))]
    if step > 1:
        links.insert(
            0,
            Link(f"← step {step - 1}", address(TRAINING_PAGE, stage, step - 1), "prev"),
        )
    if step < steps:
        links.append(
            Link(f"step {step + 1} →", address(TRAINING_PAGE, stage, step + 1), "next")
        )
    return links


def _documents(documents: Sequence[RowDocument]) -> Table:
    """Documents of a step: tokens, source, place, measured values, and duplicates if
    any has some.
    """
    has_duplicates = any((document.cluster_size or 1) > 1 for document in documents)
    rows = []
    for document in documents:
        measured = [
            f"{name} {value_text(value)}" for name, value in document.quality.items()
        ]
        measured += [document.language] if document.language else []
        link = Link(document.address, address(DOCUMENTS, document.id))
        row: list[Inline] = [
            f"{document.tokens:,}",
            document.source,
            link,
            " ".join(measured),
        ]
        if has_duplicates:
            size = document.cluster_size or 1
            row.append(f"{size:,}" if size > 1 else "")
        rows.append(row)
    header = [
        "tokens",
        "source",
        "document",
        "measured",
        *(["duplicates"] if has_duplicates else []),
    ]
    meanings = {
        "tokens": "in the rows of the step",
        "measured": "by the steps that judged it",
        "duplicates": "documents of its cluster",
    }
    return Table(header, rows, {0, 4}, meanings)


def _examples(run: BrowsedRun, ids: Sequence[str]) -> Listing:
    """Examples, each with the beginning of the first of its rows."""
    beginnings = {place["id"]: place["begins"] for place in reversed(_places(run, ids))}
    entries = [
        Entry(
            Link(id_span(example), address(EXAMPLES_PAGE, example)),
            [Span(beginnings.get(example, ""))],
        )
        for example in ids
    ]
    return Listing("", entries)


def _places(run: BrowsedRun, ids: Sequence[str]) -> list[dict[str, Any]]:
    """Pieces of examples in the rows of fine-tuning: id, stage, row, tokens, and
    beginning.
    """
    places = []
    for stage in run.packed_sets():
        packed = run.packed(stage)
        if packed.has_ledger:  # documents, not examples
            continue
        pieces = packed.rows_of_documents(
            [bytes.fromhex(example) for example in ids]
        ).to_pylist()
        tokens = packed.read(
            np.array([piece["row"] for piece in pieces], dtype=np.int64)
        )
        for index, piece in enumerate(pieces):
            begin, end = (
                piece["start"],
                piece["start"] + min(piece["length"], BEGINNING_TOKENS),
            )
            places.append(
                {
                    "id": piece["id"].hex(),
                    "stage": stage,
                    "row": piece["row"],
                    "tokens": piece["length"],
                    "begins": run.tokenizer().decode(tokens[index, begin:end].tolist()),
                }
            )
    return places


def _prompts(answers: Sequence[Mapping[str, Any]]) -> list[Part]:
    """The prompts of a step of reinforcement learning, each with its answers."""
    parts: list[Part] = []
    for example, group in groupby(answers, key=lambda answer: answer["id"]):
        answers_to_it = list(group)
        first = answers_to_it[0]
        link = Link(id_span(str(example)), address(EXAMPLES_PAGE, str(example)))
        parts += [Heading(link), Text([Span(first["prompt"])])]
        if first["right"] is not None:
            parts.append(Note([f"right: {first['right']}"]))
        rows = [_answer_row(answer) for answer in answers_to_it]
        meanings = {"reward": "of the answer, weighted", "tokens": "of the answer"}
        parts.append(
            Table(
                ["reward", "advantage", "tokens", "answer"], rows, {0, 1, 2}, meanings
            )
        )
    return parts


def _answer_row(answer: Mapping[str, Any]) -> list[Inline]:
    calls: list[Inline] = []
    for call in answer["used"] or []:
        calls += [
            Span(f"{call['name']} {call['arguments']}", "code"),
            f" → {call['answer']} ",
        ]
    tokens = f"{answer['tokens']:,}{'' if answer['ended'] else ', cut'}"
    return [
        value_text(answer["reward"]),
        value_text(answer["advantage"]),
        tokens,
        [*calls, answer["answer"]],
    ]


def traced_example(
    run: BrowsedRun, id_: str
) -> tuple[DocumentTrace, list[dict[str, Any]]]:
    """The trace of an example and its places in rows.

    Raises:
        DocumentNotFoundError: no example has this id.
    """
    # Before its training begins, only the rows know an example.
    traced, is_example = DocumentTrace("example", id_, "", [], []), False
    with suppress(DocumentNotFoundError, TraceError):
        traced = trace_document(run.session, id_)
        is_example = traced.kind == "example"
    places = _places(run, [traced.id]) if EXAMPLE_ID.fullmatch(traced.id) else []
    if not is_example and not places:
        raise DocumentNotFoundError(
            f"no row of fine-tuning holds an example {id_!r}, and no step has read one"
        )
    return traced, places


def example_page(run: BrowsedRun, query: OneDocument) -> Page:
    """An example: the rows that hold it, the steps that read it, and the checkpoints
    that know it.
    """
    traced, places = traced_example(run, query.id)
    example = traced.id
    note: list[Inline] = [Span(example, "code")]
    if traced.kind == "document":
        note += [
            " ",
            Link("what its preparation said of it", address(DOCUMENTS, example)),
        ]
    sections = []
    if places:
        entries = []
        for place in places:
            link = Link(
                f"row {place['row']} of {place['stage']}",
                address(ROWS_PAGE, place["stage"], place["row"]),
            )
            entries.append(
                Entry(link, [Span(place["begins"])], f"{place['tokens']:,} tokens")
            )
        sections.append(Section("Rows that hold it", [Listing("", entries)]))
    links: list[Inline] = []
    for step in traced.steps[:MOST_SHOWN]:
        link = Link(
            f"{step.stage} {step.step}", address(TRAINING_PAGE, step.stage, step.step)
        )
        links.append([link, " (to come)"] if step.use == "will read" else link)
    if len(traced.steps) > MOST_SHOWN:
        links.append(Span(f"and {len(traced.steps) - MOST_SHOWN:,} more"))
    unread = Note(
        "None is known to read it: its training has not begun, or leaves it out.",
        "plain",
    )
    steps: list[Part] = [Links(links) if links else unread]
    checkpoints = ", ".join(
        f"{saved.stage} {saved.step}" for saved in traced.checkpoints_after
    )
    steps += [Note(f"Checkpoints that know it: {checkpoints}")] if checkpoints else []
    sections.append(Section("Steps", steps))
    record = _record(run, example)
    if record is not None:
        sections.append(Section("What it was made from", [Text([Span(record)])]))
    return Page(f"Example {example[:16]}", sections, [Note(note)])


def _record(run: BrowsedRun, example: str) -> str | None:
    """The record that a preference was made from, as JSON."""
    for stage in run.packed_sets():
        path = run.folder(stage).data / EXAMPLES
        if path.exists():
            table = read_table(path, ["id", "record"])
            hits = table.filter(pc.equal(table["id"], example))["record"].to_pylist()
            if hits:
                return json.dumps(json.loads(hits[0]), indent=1, ensure_ascii=False)
    return None
