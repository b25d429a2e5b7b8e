"""The pages of trainings and of examples: the rows of each step, and the steps that
read an example.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from gristmill.dataprep.row_groups import read_matching
from gristmill.flows.browser.browsed_run import BrowsedRun
from gristmill.flows.pages.addresses import (
    DOCUMENTS,
    Address,
    Name,
    Number,
    Step,
    address,
    page_links,
)
from gristmill.flows.pages.document_elements import neighbours, tabs, values_note
from gristmill.flows.pages.page_elements import (
    Entry,
    Field,
    Form,
    Inline,
    Link,
    Listing,
    Note,
    Page,
    Section,
    Span,
    Text,
    flatten,
    page_of,
    table,
    value_text,
)
from gristmill.flows.questions.find_documents import DocumentNotFoundError
from gristmill.flows.questions.trace import trace_document, trace_step
from gristmill.flows.questions.trace_tables import DocumentTrace
from gristmill.flows.questions.training_reads import Reading, TraceError, reading_of
from gristmill.train.data.preference_rows import EXAMPLES

STEPS_ON_PAGE = 100
BEGINNING_TOKENS = 64
EXAMPLE_ID = re.compile("[0-9a-f]{32}")
MEASURES = {
    "loss": "loss",
    "grad_norm": "grad norm",
    "learning_rate": "learning rate",
    "tokens_per_second": "tokens per second",
}
"""Key of a training's record -> column of its table."""


def trainings(run: BrowsedRun) -> list[str]:
    """The trainings of a run whose steps can be traced."""
    plan = run.session.plan
    return [name for name, node in plan.items() if node.stage.training is not None]


@dataclass(frozen=True)
class ExamplePlace:
    """A piece of an example in a row of fine-tuning, and the beginning of its text."""

    id: str
    stage: str
    row: int
    tokens: int
    beginning: str


def _records_by_step(reading: Reading) -> dict[int, dict[str, object]]:
    """The record of each step; measurements after it are in a separate line."""
    records: dict[int, dict[str, object]] = {}
    for line in reading.metrics():
        if "step" in line:
            records[line["step"]] = {**records.get(line["step"], {}), **line}
    return records


def training_page(
    run: BrowsedRun, stage: Name, step: Step | None = None, after: Number = 0
) -> Page | str:
    """The progress of a training and its recorded steps; or the address of one
    `step`.
    """
    if step is not None:
        return address("training", stage, step)
    title = f"Steps of {stage}"
    stages = tabs({name: address("training", name) for name in trainings(run)}, stage)
    try:
        reading = reading_of(run.session, stage)
    except TraceError as error:
        if stage not in trainings(run):
            raise
        return page_of(title, stages, Note(str(error), "warning"))
    checkpoints = ", ".join(map(str, reading.checkpoints()))
    suffix = f"; checkpoints at {checkpoints}" if checkpoints else ""
    steps = f"{reading.steps_done():,} of {reading.section.steps:,} steps"
    field = Field("step", "step", is_number=True, is_required=True)
    recorded = _records_by_step(reading)
    lines = list(recorded.items())[after : after + STEPS_ON_PAGE]
    rows = [
        [
            Link(str(number), address("training", stage, number)),
            *(value_text(line.get(name)) for name in MEASURES),
        ]
        for number, line in lines
    ]
    columns = dict.fromkeys(["step", *MEASURES.values()], ">")
    nothing = "No step is recorded yet; what each will read is known all the same: "
    first = Link("step 1", address("training", stage, 1))
    return page_of(
        title,
        stages,
        f"{steps} are trained{suffix}.",
        Form(address("training", stage), [field], "Go"),
        table(columns, rows, {"loss": "mean over the tokens of the step"})
        if rows
        else Note([nothing, first, "."], "plain"),
        page_links(
            len(recorded),
            after,
            STEPS_ON_PAGE,
            lambda after: address("training", stage, after=after),
        ),
    )


def step_page(run: BrowsedRun, stage: Name, step: Step) -> Page:
    """The documents, examples, or prompts with their answers that a step read or will
    read.
    """
    reading = reading_of(run.session, stage)
    traced = trace_step(run.session, step, stage)
    values = [
        (name, value)
        for name, value in _records_by_step(reading).get(step, {}).items()
        if isinstance(value, int | float) and name != "step"
    ]
    places = _places(run, traced.examples)
    return page_of(
        f"Step {step} of {stage}",
        neighbours(
            "step",
            step,
            range(1, reading.section.steps + 1),
            Link(stage, address("training", stage)),
            lambda step: address("training", stage, step),
        ),
        values_note(values),
        traced.parts({place.id: place.beginning for place in reversed(places)}),
    )


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


def example_page(run: BrowsedRun, id: Address) -> Page:
    """An example: the rows that hold it, the steps that read it, and the checkpoints
    that know it.
    """
    traced, places = traced_example(run, id)
    example = traced.id
    note: list[Inline] = [Span(example, "code")]
    if traced.kind == "document":
        preparation = "what its preparation said of it"
        note += [" ", Link(preparation, address(DOCUMENTS, example))]
    entries = []
    for place in places:
        row = address("rows", place.stage, place.row)
        link = Link(f"row {place.row} of {place.stage}", row)
        tokens = f"{place.tokens:,} tokens"
        entries.append(Entry(link, [Span(place.beginning)], tokens))
    unread = "None is known to read it: its training has not begun, or leaves it out."
    steps = flatten(traced.parts() if traced.steps else [unread])
    sections = [Section("Rows that hold it", [Listing("", entries)])] if places else []
    sections.append(Section("Steps", steps))
    for stage in run.packed_sets():
        path = run.folder(stage).data / EXAMPLES
        if path.exists():
            records = read_matching(path, "id", [example], ["record"])["record"]
            for record in map(json.loads, records.to_pylist()):
                text = json.dumps(record, indent=1, ensure_ascii=False)
                sections.append(Section("What it was made from", [Text([Span(text)])]))
    return Page(f"Example {example[:16]}", sections, [Note(note)])
