"""The stages `sft_prepare` and `dpo_prepare`: examples as documents, through the stages that prepare documents.

Output:

    documents/<view>/part-*.parquet    the examples as documents, once for every text that a step judges (`prepare.py`);
                                       the same rows in all of them
    records/part-*.parquet             the examples themselves, row by row: `id`, `set`, `record` (JSON)
    <step>/                            what each step writes of documents: annotations, clusters, matches
    refused.jsonl                      the records that are not examples
    prepared.json                      the steps in their order, and counts per set

A document is called by the id of its example; where two records are equal, the second has an id of its own.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from gristmill.dataprep.asking.judge_pairs import pair_text
from gristmill.dataprep.context import Context
from gristmill.dataprep.counts import ConservationError
from gristmill.dataprep.documents import DOCUMENT_SCHEMA, ID_BYTES, write_table
from gristmill.dataprep.examples.conversations import said
from gristmill.dataprep.examples.kept_examples import (
    DOCUMENTS,
    PREPARED,
    QUARANTINED,
    RECORDS,
    RECORDS_SCHEMA,
    set_names,
    write_quarantined,
)
from gristmill.dataprep.examples.read_examples import Example, ExamplesError, ExampleSet, Kind, made_path, read_set
from gristmill.dataprep.files import write_json
from gristmill.dataprep.reading.records import metadata_json
from gristmill.mixtures.posttraining import Instructions, PreferencePairs
from gristmill.mixtures.prepare import ExampleStep

PAIRS = "judge_pairs"
"""The step that compares the answers of pairs, and the view of them that it reads."""
BOTH = "-of-both"
"""Ends the names of views of pairs that hold the rejected answer, too."""


def view_of(step: ExampleStep, kind: Kind) -> str:
    """The name of what a step judges: `answer` or `conversation`, of pairs also of both answers, or `judge_pairs`."""
    if step.stage == PAIRS:
        return PAIRS
    return step.judged + (BOTH if kind == "dpo" and step.stage == "dedup" else "")


def view_text(view: str, example: Mapping[str, Any]) -> str:
    """An example as one text: its messages, or those of the assistant's answers, with blank lines between.

    Args:
        view: as from `view_of`.
        example: `messages` of instructions; `prompt`, `chosen` and `rejected` of pairs; `prompt`, `completion` and
            `label` of single answers.
    """
    if view == PAIRS:
        asked = _text(example["prompt"])
        return (
            pair_text(asked, _text(example["chosen"]), _text(example["rejected"]))
            if "chosen" in example
            else (json.dumps({"prompt": asked}))
        )
    both = view.endswith(BOTH)
    if view.removesuffix(BOTH) == "answer":
        text = _text([message for message in _answers(example, both) if message["role"] == "assistant"])
    else:
        text = _text([*example.get("prompt", []), *_answers(example, both)])
    # The same answer with the other label is not a duplicate.
    return f"{text}\n\n{'desirable' if example['label'] else 'undesirable'}" if both and "label" in example else text


def _answers(example: Mapping[str, Any], both: bool) -> Sequence[Mapping[str, Any]]:
    if "chosen" in example:
        return [*example["chosen"], *(example["rejected"] if both else [])]
    answers: Sequence[Mapping[str, Any]] = example["completion" if "label" in example else "messages"]
    return answers


def _text(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(part for message in messages for part in said(message))


STAGES = {
    "filter": "gristmill.dataprep.filtering.filter",
    "dedup": "gristmill.dataprep.duplicates.dedup",
    "langid": "gristmill.dataprep.judges.langid",
    "decontaminate": "gristmill.dataprep.passages.decontaminate",
    "annotate": "gristmill.dataprep.own.annotate",
    PAIRS: "gristmill.dataprep.asking.judge_pairs",
}
SHARD_BYTES = 16_000_000
"""Records of a shard, at the least of them one."""
SHOWN_REASONS = 3


def run(inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context) -> dict[str, Any]:
    """Read all sets, and run the steps over them.

    Args:
        inputs: the sets that the manifest makes.
        config: `kind` (sft or dpo), `data` (the sets) and `prepare` (the steps) of that section.
        out: see above.
        context: where to run.

    Returns:
        `sets`: per set `name`, `path`, `records`, `refused` (with reasons), `beyond_limit`, `dropped` (rule -> number),
        `quarantined` and `kept`; `steps`: per step its `stage`, what it `judges`, and its own summary.

    Raises:
        ExamplesError: too many records of a set are quarantined, a step names no set, or nothing of a set is left.
        ConservationError: records were lost or counted twice.
    """
    kind: Kind = config["kind"]
    section = Instructions if kind == "sft" else PreferencePairs
    data = [section.model_validate(item) for item in config["data"]]
    steps = [
        ExampleStep.model_validate({key: value for key, value in step.items() if value is not None})
        for step in config["prepare"]
    ]
    names = set_names([one.path for one in data])
    check_sources(kind, steps, names)
    read = [read_set(made_path(one.path, inputs), kind, one.format, one.limit, one.max_quarantined) for one in data]
    write_quarantined(out / QUARANTINED, ((name, found.quarantined) for name, found in zip(names, read, strict=True)))
    views = [view_of(step, kind) for step in steps]
    write_documents(out, dict(zip(names, read, strict=True)), sorted(set(views)))
    summaries = list(run_steps(steps, views, out, context))
    sets = [
        {"name": name, "path": one.path, **found.counts(), **_gone(name, summaries, len(found.examples))}
        for name, one, found in zip(names, data, read, strict=True)
    ]
    for one in sets:
        check_set(kind, one)
    described = [{"stage": step.stage, "judges": view} for step, view in zip(steps, views, strict=True)]
    write_json(out / PREPARED, {"steps": described, "sets": sets})
    return {"sets": sets, "steps": [{**one, **summary} for one, summary in zip(described, summaries, strict=True)]}


def check_sources(kind: Kind, steps: Sequence[ExampleStep], names: Sequence[str]) -> None:
    """Raise ExamplesError where a step judges a set that is not there."""
    for number, step in enumerate(steps):
        rule_sources = step.filter.rule_sources.values() if step.filter is not None else ()
        asked = [*(step.config.sources or ()), *(name for of_set in rule_sources for name in of_set)]
        unknown = [name for name in asked if name not in names]
        if unknown:
            raise ExamplesError(
                f"{kind}.prepare[{number}].{step.stage}: there is no set {unknown[0]!r} (sets, by "
                f"their files: {', '.join(names)})"
            )


def write_documents(out: Path, sets: Mapping[str, ExampleSet], views: Sequence[str]) -> None:
    """Write the examples of all sets as documents, and their records beside them; rows by set and id."""
    seen: dict[str, int] = {}
    for number, rows in enumerate(_shards(sets)):
        ids = [_document_id(example["id"], seen) for _, _, example, _ in rows]
        shard = f"part-{number:05d}.parquet"
        columns = {
            "id": pa.array(ids, pa.binary(ID_BYTES)),
            "source": [name for name, *_ in rows],
            "locator": [place for _, place, _, _ in rows],
        }
        metadata = [
            metadata_json({key: value for key, value in (("example", example["id"]), ("url", url)) if value})
            for _, _, example, url in rows
        ]
        for view in views:
            texts = [view_text(view, example) for _, _, example, _ in rows]
            write_table(
                out / DOCUMENTS / view / shard,
                pa.table({**columns, "text": texts, "metadata": metadata}).cast(DOCUMENT_SCHEMA),
            )
        write_table(
            out / RECORDS / shard,
            pa.table(
                {
                    "id": columns["id"],
                    "set": columns["source"],
                    "record": [json.dumps(example, ensure_ascii=False) for _, _, example, _ in rows],
                }
            ).cast(RECORDS_SCHEMA),
        )


Row = tuple[str, str, Example, str | None]
"""Set, place, example, URL."""


def _shards(sets: Mapping[str, ExampleSet]) -> Iterator[list[Row]]:
    rows: list[Row] = []
    held = 0
    for name, found in sets.items():
        for example, origin in zip(found.examples, found.origins, strict=True):
            rows.append((name, origin.place, example, origin.url))
            held += len(json.dumps(example))
            if held >= SHARD_BYTES:
                yield rows
                rows, held = [], 0
    if rows:
        yield rows


def _document_id(example: str, seen: dict[str, int]) -> bytes:
    """The example's own id where it comes for the first time, else a hash of it and of how often it came before."""
    before = seen.get(example, 0)
    seen[example] = before + 1
    return (
        bytes.fromhex(example)
        if not before
        else hashlib.blake2b(f"{example}/{before}".encode(), digest_size=ID_BYTES).digest()
    )


def run_steps(
    steps: Sequence[ExampleStep], views: Sequence[str], out: Path, context: Context
) -> Iterator[dict[str, Any]]:
    """Run every step over what those before it kept; yields their summaries."""
    before: dict[str, Path] = {}
    for step, view in zip(steps, views, strict=True):
        work = context.work / step.stage
        work.mkdir(parents=True, exist_ok=True)
        stage = importlib.import_module(STAGES[step.stage])
        yield stage.run(
            {"ingest": out / DOCUMENTS / view, **before},
            step.config.model_dump(mode="json"),
            out / step.stage,
            replace(context, work=work, stage=f"{context.stage}: {step.stage}"),
        )
        before[step.stage] = out / step.stage


def _gone(name: str, summaries: Sequence[Mapping[str, Any]], read: int) -> dict[str, Any]:
    """Of a set's examples: how many each rule dropped, how many raised an error, how many are left."""
    counts = [summary["counts"]["sources"].get(name, {}) for summary in summaries]
    return {
        "dropped": {rule: number for one in counts for rule, number in one.get("dropped", {}).items()},
        "quarantined": sum(one.get("quarantined", 0) for one in counts),
        "kept": counts[-1].get("kept", 0) if counts else read,
    }


def check_set(kind: Kind, found: Mapping[str, Any]) -> None:
    """See that every record of a set is accounted for, and that something is left.

    Raises:
        ConservationError: records were lost or counted twice.
        ExamplesError: nothing is left.
    """
    dropped = sum(found["dropped"].values())
    accounted = found["refused"] + found["beyond_limit"] + dropped + found["quarantined"] + found["kept"]
    if accounted != found["records"]:
        raise ConservationError(
            f"{kind}_prepare: {found['path']}: {found['records']} records were read but "
            f"{accounted} are accounted for; nothing was committed"
        )
    if not found["kept"]:
        worst = sorted(found["dropped"].items(), key=lambda item: (-item[1], item[0]))[:SHOWN_REASONS]
        reasons = ", ".join(f"{rule} {number}" for rule, number in worst)
        raise ExamplesError(
            f"{found['path']}: {kind}.prepare leaves none of its {found['records']} records: "
            f"{reasons}; loosen these rules, or remove the set"
        )
