"""The pages of trainings and of examples: the rows of each step, and the steps that
read an example.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby

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
    neighbours,
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
    page_of,
    table,
)
from gristmill.flows.questions.find_documents import DocumentNotFoundError
from gristmill.flows.questions.trace import trace_document, trace_step
from gristmill.flows.questions.trace_tables import DocumentTrace, RowDocument
from gristmill.flows.questions.training_reads import Reading, TraceError, reading_of
from gristmill.flows.stages.registry import MIX
from gristmill.train.data.preference_rows import EXAMPLES
from gristmill.train.reinforcement.rollout_tables import AnswerRow

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


@dataclass(frozen=True)
class ExamplePlace:
    """A piece of an example in a row of fine-tuning, and the beginning of its text."""

    id: str
    stage: str
    row: int
    tokens: int
    beginning: str


def _records_by_step(reading: Reading) -> dict[int, dict[str, object]]:
    """The record of each step; measurements after it stand in a line of their own."""
    records: dict[int, dict[str, object]] = {}
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
    stages = [(name, address(TRAINING_PAGE, name)) for name in trainings(run)]
    try:
        reading = _reading(run, stage)
    except TraceError as error:
        return page_of(title, tabs(stages, stage), Note(str(error), "warning"))
    checkpoints = ", ".join(map(str, reading.checkpoints()))
    suffix = f"; checkpoints at {checkpoints}" if checkpoints else ""
    steps = f"{reading.steps_done():,} of {reading.section.steps:,} steps"
    step = Field("step", "step", is_number=True, is_required=True)
    recorded = _records_by_step(reading)
    lines = list(recorded.items())[query.after : query.after + STEPS_ON_PAGE]
    names = [
        name
        for name in MEASURES
        if any(isinstance(line.get(name), int | float) for _, line in lines)
    ]
    rows = [
        [
            Link(str(number), address(TRAINING_PAGE, stage, number)),
            *(value_text(line.get(name)) for name in names),
        ]
        for number, line in lines
    ]
    columns = dict.fromkeys(["step", *(MEASURES[name] for name in names)], ">")
    meanings = {"loss": "mean over the tokens of the step"}
    first = Link("step 1", address(TRAINING_PAGE, stage, 1))
    nothing = "No step is recorded yet; what each will read is known all the same: "
    return page_of(
        title,
        tabs(stages, stage),
        Note(f"{steps} are trained{suffix}."),
        Form(address(TRAINING_PAGE, stage), [step], [Button("Go")]),
        table(columns, rows, meanings)
        if rows
        else Note([nothing, first, "."], "plain"),
        page_links(
            len(recorded),
            query.after,
            STEPS_ON_PAGE,
            lambda after: address(TRAINING_PAGE, stage, after=after),
        ),
    )


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
        neighbours(
            "step",
            query.step,
            range(1, reading.section.steps + 1),
            Link(query.stage, address(TRAINING_PAGE, query.stage)),
            lambda step: address(TRAINING_PAGE, query.stage, step),
        ),
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


def _documents(documents: Sequence[RowDocument]) -> Table:
    """Documents of a step: tokens, source, place, measured values, and duplicates if
    any has some.
    """
    sizes = [document.cluster_size or 1 for document in documents]
    has_duplicates = max(sizes, default=1) > 1
    rows = []
    for document, size in zip(documents, sizes, strict=True):
        measured = [
            f"{name} {value_text(value)}" for name, value in document.quality.items()
        ]
        measured += [document.language] if document.language else []
        link = Link(document.address, address(DOCUMENTS, document.id))
        row = [document.tokens, document.source, link, " ".join(measured)]
        rows.append([*row, *([size if size > 1 else None] if has_duplicates else [])])
    columns = {"tokens": ",", "source": "", "document": "", "measured": ""}
    columns |= {"duplicates": ","} if has_duplicates else {}
    meanings = {
        "tokens": "in the rows of the step",
        "measured": "by the steps that judged it",
        "duplicates": "documents of its cluster",
    }
    return table(columns, rows, meanings)


def _examples(run: BrowsedRun, ids: Sequence[str]) -> Listing:
    """Examples, each with the beginning of the first of its rows."""
    beginnings = {place.id: place.beginning for place in reversed(_places(run, ids))}
    entries = [
        Entry(
            Link(id_span(example), address(EXAMPLES_PAGE, example)),
            [Span(beginnings.get(example, ""))],
        )
        for example in ids
    ]
    return Listing("", entries)


def _places(run: BrowsedRun, ids: Sequence[str]) -> list[ExamplePlace]:
    places = []
    keys = [bytes.fromhex(example) for example in ids]
    for stage in run.packed_sets():
        packed = run.packed(stage)
        if packed.has_ledger:  # documents, not examples
            continue
        pieces = packed.rows_of_documents(keys)
        tokens = packed.read(pieces["row"].to_numpy().astype(np.int64))
        for ids_of_row, piece in zip(tokens, pieces.to_pylist(), strict=True):
            end = piece["start"] + min(piece["length"], BEGINNING_TOKENS)
            text = run.tokenizer().decode(ids_of_row[piece["start"] : end].tolist())
            id_, length = piece["id"].hex(), piece["length"]
            places.append(ExamplePlace(id_, stage, piece["row"], length, text))
    return places


def _prompts(answers: Sequence[AnswerRow]) -> list[Part]:
    """The prompts of a step of reinforcement learning, each with its answers."""
    parts: list[Part] = []
    for example, group in groupby(answers, key=lambda answer: answer["id"]):
        answers_to_it = list(group)
        first = answers_to_it[0]
        link = Link(id_span(example), address(EXAMPLES_PAGE, example))
        parts += [Heading(link), Text([Span(first["prompt"])])]
        if first["right"] is not None:
            parts.append(Note([f"right: {first['right']}"]))
        rows = [_answer_row(answer) for answer in answers_to_it]
        columns = {"reward": ">", "advantage": ">", "tokens": ">", "answer": ""}
        meanings = {"reward": "of the answer, weighted", "tokens": "of the answer"}
        parts.append(table(columns, rows, meanings))
    return parts


def _answer_row(answer: AnswerRow) -> list[object]:
    calls: list[Inline] = []
    for call in answer["used"] or []:
        name = Span(f"{call['name']} {call['arguments']}", "code")
        calls += [name, f" → {call['answer']} "]
    return [
        value_text(answer["reward"]),
        value_text(answer["advantage"]),
        f"{answer['tokens']:,}{'' if answer['ended'] else ', cut'}",
        [*calls, answer["answer"]],
    ]


def traced_example(
    run: BrowsedRun, id_: str
) -> tuple[DocumentTrace, list[ExamplePlace]]:
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
            row = address(ROWS_PAGE, place.stage, place.row)
            link = Link(f"row {place.row} of {place.stage}", row)
            tokens = f"{place.tokens:,} tokens"
            entries.append(Entry(link, [Span(place.beginning)], tokens))
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
            records = read_table(path, ["id", "record"])
            is_hit = pc.equal(records["id"], example)
            hits = records.filter(is_hit)["record"].to_pylist()
            if hits:
                return json.dumps(json.loads(hits[0]), indent=1, ensure_ascii=False)
    return None
