"""The pages of trainings and of examples: what each step reads, and which steps read an example."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow.compute as pc

from gristmill.dataprep.documents import read_table
from gristmill.flows.browse.addresses import DOCUMENTS, OneDocument, OneStep, Training, address
from gristmill.flows.browse.browsed_run import BrowsedRun, NotThereError
from gristmill.flows.browse.row_pages import EXAMPLES_PAGE, ROWS_PAGE, TRAINING_PAGE
from gristmill.flows.questions.find_documents import DocumentNotFoundError
from gristmill.flows.questions.trace import trace_document, trace_step
from gristmill.flows.questions.training_reads import Reading, TraceError, reading_of
from gristmill.flows.stages.registry import MIX
from gristmill.train.data.preference_rows import EXAMPLES

STEPS_ON_PAGE = 100
BEGINNING_TOKENS = 64
EXAMPLE_ID = re.compile("[0-9a-f]{32}")
MOST_SHOWN = 200
"""Documents or examples of a step."""


def trainings(run: BrowsedRun) -> list[str]:
    """The trainings of a run whose steps can be traced."""
    return [name for name, node in run.session.plan.items() if node.stage.trained is not None]


def _reading(run: BrowsedRun, stage: str) -> Reading:
    if stage not in trainings(run):
        raise NotThereError(
            f"{stage} trains nothing whose steps could be traced; "
            f"those that do are {', '.join(trainings(run)) or 'none'}"
        )
    return reading_of(run.session, stage)


def _by_step(reading: Reading) -> dict[int, dict[str, Any]]:
    """What is recorded of each step: what was measured after it stands in a line of its own."""
    found: dict[int, dict[str, Any]] = {}
    for line in reading.metrics():
        if "step" in line:
            found[line["step"]] = {**found.get(line["step"], {}), **line}
    return found


def training_page(run: BrowsedRun, asked: Training) -> dict[str, Any] | str:
    """A training: how far it is, and the steps that it has recorded; or the address of the step that is asked for."""
    if asked.step is not None:
        return address(TRAINING_PAGE, asked.stage, asked.step)
    tabs = [(name, address(TRAINING_PAGE, name)) for name in trainings(run)]
    try:
        reading = _reading(run, asked.stage)
    except TraceError as error:
        return {"stage": asked.stage, "trainings": tabs, "said": str(error)}
    recorded = list(_by_step(reading).values())
    lines = recorded[asked.after : asked.after + STEPS_ON_PAGE]
    # Names of columns, in the order in which the record has them, of what is one number.
    names = [
        name
        for name in ("loss", "grad_norm", "learning_rate", "tokens_per_second")
        if any(isinstance(line.get(name), int | float) for line in lines)
    ]
    return {
        "stage": asked.stage,
        "trainings": tabs,
        "said": None,
        "steps": reading.section.steps,
        "done": reading.steps_done(),
        "checkpoints": reading.checkpoints(),
        "names": names,
        "total": len(recorded),
        "lines": [
            {
                "step": line["step"],
                "link": address(TRAINING_PAGE, asked.stage, line["step"]),
                "values": [line.get(name) for name in names],
            }
            for line in lines
        ],
        "before": address(TRAINING_PAGE, asked.stage, after=max(0, asked.after - STEPS_ON_PAGE) or None)
        if asked.after
        else None,
        "next": address(TRAINING_PAGE, asked.stage, after=asked.after + STEPS_ON_PAGE)
        if asked.after + STEPS_ON_PAGE < len(recorded)
        else None,
    }


def step_page(run: BrowsedRun, asked: OneStep) -> dict[str, Any]:
    """What a step read, or will: documents of rows, examples, or prompts with their answers."""
    reading = _reading(run, asked.stage)
    found = trace_step(run.session, asked.step, asked.stage)
    line = _by_step(reading).get(asked.step, {})
    page = {
        "stage": asked.stage,
        "step": asked.step,
        "steps": reading.section.steps,
        "use": found["use"],
        "recorded": {name: value for name, value in line.items() if isinstance(value, int | float) and name != "step"},
        "checkpoints": found["checkpoints_after"],
        "rows": len(found["rows"]),
        "documents": None,
        "examples": None,
        "answers": None,
        "row_links": [],
        "cut": None,
        "before": address(TRAINING_PAGE, asked.stage, asked.step - 1) if asked.step > 1 else None,
        "next": address(TRAINING_PAGE, asked.stage, asked.step + 1) if asked.step < reading.section.steps else None,
    }
    if "answers" in found:
        return {
            **page,
            "answers": _answers(found["answers"]),
            "examples": None if found["answers"] else _examples(run, found["examples"]),
        }
    if "examples" in found:
        shown = list(dict.fromkeys(found["examples"]))
        return {
            **page,
            "examples": _examples(run, shown[:MOST_SHOWN]),
            "cut": len(shown) if len(shown) > MOST_SHOWN else None,
        }
    documents = [_document(one) for one in found["documents"][:MOST_SHOWN]]
    return {
        **page,
        "documents": documents,
        "has_duplicates": any(one["alike"] for one in documents),
        "tokens": found["tokens"],
        "cut": len(found["documents"]) if len(found["documents"]) > MOST_SHOWN else None,
        "row_links": [(row, address(ROWS_PAGE, MIX, row)) for row in found["rows"]],
    }


def _document(found: Mapping[str, Any]) -> dict[str, Any]:
    """A line about a document: where it is from, how it was judged, and where it can be seen."""
    size = found.get("cluster_size")
    return {
        **found,
        "link": address(DOCUMENTS, found["id"]),
        "place": found.get("url", found["locator"]),
        "scores": found.get("quality", {}),
        "alike": size if size and size > 1 else None,
        "language": found.get("language"),
    }


def _examples(run: BrowsedRun, ids: Sequence[str]) -> list[dict[str, Any]]:
    """Examples, each with the beginning of what the first of its rows holds of it."""
    places = {place["id"]: place for place in reversed(_places(run, ids))}
    return [
        {"id": one, "link": address(EXAMPLES_PAGE, one), "text": places[one]["begins"] if one in places else ""}
        for one in ids
    ]


def _places(run: BrowsedRun, ids: Sequence[str]) -> list[dict[str, Any]]:
    """The pieces of examples in the rows of fine-tuning: stage, row, tokens, and how each begins."""
    found = []
    for stage in run.packed_sets():
        packed = run.packed(stage)
        if packed.has_ledger:  # documents, not examples
            continue
        pieces = packed.rows_of_documents([bytes.fromhex(one) for one in ids]).to_pylist()
        tokens = packed.read(np.array([piece["row"] for piece in pieces], dtype=np.int64))
        for place, piece in enumerate(pieces):
            begin, end = piece["start"], piece["start"] + min(piece["length"], BEGINNING_TOKENS)
            found.append(
                {
                    "id": piece["id"].hex(),
                    "stage": stage,
                    "row": piece["row"],
                    "tokens": piece["length"],
                    "link": address(ROWS_PAGE, stage, piece["row"]),
                    "begins": run.tokenizer().decode(tokens[place, begin:end].tolist()),
                }
            )
    return found


def _answers(answers: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The prompts of a step of reinforcement learning, each with its answers."""
    return [
        {
            "id": example,
            "link": address(EXAMPLES_PAGE, example),
            "prompt": listed[0]["prompt"],
            "right": listed[0]["right"],
            "answers": listed,
        }
        for example, of_one in groupby(answers, key=lambda one: one["id"])
        if (listed := list(of_one))
    ]


def example_page(run: BrowsedRun, asked: OneDocument) -> dict[str, Any]:
    """An example: the rows that hold it, the steps that read it, and the checkpoints that know it.

    Raises:
        DocumentNotFoundError: none has this id.
    """
    try:
        found = trace_document(run.session, asked.id)
    except (DocumentNotFoundError, TraceError):  # its training has not begun, so that only the rows know it
        found = {"kind": "", "id": asked.id, "steps": [], "checkpoints_after": []}
    example = found["id"]
    places = _places(run, [example]) if EXAMPLE_ID.fullmatch(example) else []
    if found["kind"] != "example" and not places:
        raise DocumentNotFoundError(f"no row of fine-tuning holds an example {asked.id!r}, and no step has read one")
    steps = [{**step, "link": address(TRAINING_PAGE, step["stage"], step["step"])} for step in found["steps"]]
    return {
        "id": example,
        "steps": steps[:MOST_SHOWN],
        "number_of_steps": len(steps),
        "checkpoints": found["checkpoints_after"],
        "places": places,
        "record": _record(run, example),
        "judged": address(DOCUMENTS, example) if found["kind"] == "document" else None,
    }


def _record(run: BrowsedRun, example: str) -> str | None:
    """What a preference was made from, as JSON."""
    for stage in run.packed_sets():
        path = run.folder(stage).data / EXAMPLES
        if path.exists():
            table = read_table(path, ["id", "record"])
            hits = table.filter(pc.equal(table["id"], example))["record"].to_pylist()
            if hits:
                return json.dumps(json.loads(hits[0]), indent=1, ensure_ascii=False)
    return None
